"""Times a loaded pair: plans as a caller gets them, cycles called directly, prompts.

Every figure is measured, none computed from another. Works on any Backend; one on a GPU gives more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean, median

from edge_dflash.bench.device import experts_read, on_device
from edge_dflash.bench.provenance import ClockSample
from edge_dflash.bench.result import ByDrafts, CycleTimes, Decode, PassTime, Prefill
from edge_dflash.board.state import EnergyMeter
from edge_dflash.checks.footprint import Costs, Traffic
from edge_dflash.decode import backend as base
from edge_dflash.decode.backend import Asked, Backend
from edge_dflash.decode.shape import row_steps
from edge_dflash.errors import BackendError
from edge_dflash.planner import Planner
from edge_dflash.result import Plan
from edge_dflash.runner.observer import Observer
from edge_dflash.text.tokenizer import Tokenizer

CYCLES, BATCHES, WARM = 20, 5, 2  # timed cycles behind a prefill, how often, and cycles before
MOST_BATCHES = 40  # while nvidia-smi is waited for
LONG_PROMPT = 2048  # tokens from which one batch, or one run, is enough: their prefill takes most of the time
ROUNDS = 3  # plans and raw cycles take turns so often on a GPU; the middle round counts


@contextmanager
def lent(
    backend: Backend,
    tokenizer: Tokenizer | None = None,
    stop: Sequence[int] = (),
    *,
    chosen: bool = False,
    observer: Observer | None = None,
) -> Iterator[Planner]:
    """Another planner around a loaded backend, which stays its owner's when the planner's worker ends.

    ``chosen``: it chooses the number of drafts; else its cycles verify all.
    """
    planner = Planner(backend, tokenizer, stop, fallback=chosen, prompt_share=1.0, observer=observer)
    if chosen:
        planner._engine.pace.begin(backend, None)
    try:
        yield planner
    finally:
        planner._engine.close()


@dataclass(frozen=True)
class TimedCycle:
    """One cycle called directly: from the call to its commit, on the host's clock."""

    context: int  # committed tokens before it
    seconds: float
    found: base.Cycle


@dataclass(frozen=True)
class TimedRun:
    """A prompt and the cycles behind it, called directly."""

    prefill_seconds: float  # until the first token is known on the host
    cycles: list[TimedCycle]
    experts: int = 0  # that their verify passes read, all layers together


@dataclass(frozen=True)
class Decodings:
    """Speculative decoding of the same prompts in the same minutes, each way the middle one of its rounds."""

    planned: Decode  # Planner.plan
    formed: Decode | None  # Planner.plan under a schema
    raw: Decode  # backend.cycle and commit
    cycles: list[TimedCycle]  # all raw ones


@dataclass
class Meter:
    """Measures one pair behind its planner. ``bandwidth`` and ``costs`` are None where floors are not known."""

    planner: Planner
    costs: Costs | None
    bandwidth: float | None  # bytes a second

    def decode(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, speculative: bool = True, schema: object = None
    ) -> tuple[Decode, list[Plan]]:
        """Plans of up to ``tokens``, and their time from the first token until the caller has the plan."""
        seconds, plans, power = 0.0, list[Plan](), EnergyMeter()
        power.begin()
        start = time.perf_counter()
        for prompt in prompts:
            began = time.perf_counter()
            plan = self.planner.plan(prompt, max_new_tokens=tokens, speculative=speculative, schema=schema)
            seconds += time.perf_counter() - began - plan.timings.first_token_seconds
            plans.append(plan)
        end = time.perf_counter()
        power.end()
        found, joules = decoded(seconds, [n for plan in plans for n in plan.accept_lengths]), power.joules(start, end)
        return found if joules is None else replace(found, joules=joules / len(plans)), plans

    def cycles(self, prompt: Sequence[int], count: int, drafts: int | None = None) -> TimedRun:
        """``count`` cycles after ``prompt``, without the planner and the loop; ``drafts``: that each verifies."""
        backend, found = self.planner.backend, list[TimedCycle]()
        backend.reset()
        began = time.perf_counter()
        anchor = backend.prefill(prompt).argmax()[0]
        prefill = time.perf_counter() - began
        read = self._experts_read()
        for _ in range(count):
            at, began = backend.length(), time.perf_counter()
            cycle = backend.cycle(Asked(anchor, drafts=drafts))
            backend.commit(len(cycle.tokens))
            found.append(TimedCycle(at, time.perf_counter() - began, cycle))
            anchor = cycle.tokens[-1]
        return TimedRun(prefill, found, self._experts_read() - read)

    def decodings(self, prompts: Sequence[Sequence[int]], tokens: int, rounds: int, schema: object = None) -> Decodings:
        """Plans free and under ``schema``, and as many raw cycles as the free ones took, in turns."""
        planned, formed, raw, cycles = list[Decode](), list[Decode](), list[Decode](), list[TimedCycle]()
        for _ in range(rounds):
            decode, plans = self.decode(prompts, tokens)
            planned.append(decode)
            runs = [self.cycles(prompt, len(p.accept_lengths)) for prompt, p in zip(prompts, plans, strict=True)]
            timed = [cycle for run in runs for cycle in run.cycles]
            kept = [n for plan in plans for n in plan.accept_lengths]  # a plan's last cycle may be cut
            raw.append(decoded(sum(cycle.seconds for cycle in timed), kept))
            cycles += timed
            if schema is not None:
                formed.append(self.decode(prompts, tokens, schema=schema)[0])
        return Decodings(_middle(planned), _middle(formed) if formed else None, _middle(raw), cycles)

    def device_cycle(self, prompt: Sequence[int], sample: ClockSample | None = None) -> CycleTimes:
        """A steady cycle behind ``prompt``: from call to committed tokens, its passes by the device's clock.

        Medians over batches of cycles, each behind its prefill; batches go on until ``sample`` has its answer.
        """
        timed, batch, experts = list[TimedCycle](), 0, 0
        wanted = BATCHES if len(prompt) < LONG_PROMPT else 1
        while batch < wanted or (sample is not None and sample.pending and batch < MOST_BATCHES):
            batch += 1
            run = self.cycles(prompt, WARM + CYCLES)
            timed, experts = timed + run.cycles[WARM:], experts + run.experts
        context = round(mean(c.context for c in timed))
        draft = self.costs.propose(context) if self.costs else None
        check = self._verify(timed, None, self._experts(experts, batch * (WARM + CYCLES)))
        both = draft.total + check.total if draft and check else None

        def part(seconds: Iterable[float], size: int | None) -> PassTime:
            return PassTime.of(median(seconds), size, self.bandwidth)

        return CycleTimes(
            context,
            part((c.seconds for c in timed), both),
            part((c.found.propose_seconds for c in timed), draft.total if draft else None),
            part((c.found.verify_seconds for c in timed), check.total if check else None),
            draft,
            check,
        )

    def by_drafts(self, prompt: Sequence[int], acceptance: Sequence[float] | None) -> tuple[ByDrafts, ...]:
        """Steady cycles after ``prompt`` by the drafts that they verify.

        ``acceptance``: share of cycles that accept at least 1, 2, ... drafts.
        """
        found = list[ByDrafts]()
        for rows in row_steps(self.planner.backend.shape.verify_rows):
            run = self.cycles(prompt, WARM + CYCLES, rows - 1)
            experts, timed = self._experts(run.experts, len(run.cycles)), run.cycles[WARM:]
            ms, verify = 1e3 * median(c.seconds for c in timed), median(c.found.verify_seconds for c in timed)
            traffic = self._verify(timed, rows, experts)
            part = PassTime.of(verify, traffic.total if traffic else None, self.bandwidth)
            tokens = None if acceptance is None else 1 + sum(acceptance[: rows - 1])
            found.append(ByDrafts(rows - 1, ms, part, experts, tokens / ms * 1e3 if tokens else None))
        return tuple(found)

    def _experts_read(self) -> int:
        """Experts that verify passes have read so far, all layers together; 0 where there are none."""
        device = on_device(self.planner.backend)
        if device is None or self.costs is None or not self.costs.expert_layers:
            return 0
        return experts_read(device)

    def _experts(self, read: int, passes: int) -> float | None:
        """Experts that a layer read in each of the ``passes``, of ``read`` in all."""
        layers = self.costs.expert_layers if self.costs else 0
        return read / passes / layers if layers else None

    def _verify(self, timed: Sequence[TimedCycle], rows: int | None, experts: float | None) -> Traffic | None:
        if self.costs is None:
            return None
        context, pending = round(mean(c.context for c in timed)), round(mean(len(c.found.tokens) for c in timed))
        return self.costs.verify(context, pending, rows, experts)

    def prefill(self, prompt: Sequence[int], matmul_rate: float | None) -> Prefill:
        """A prompt until its first token is known on the host: the best of three behind a first one, of one if long."""
        seconds = list[float]()
        while len(seconds) < (2 if seconds and seconds[0] > 1 else 4):
            seconds.append(self.cycles(prompt, 0).prefill_seconds)
        best = min(seconds[1:])
        rate = self.costs.prefill_operations(len(prompt)) / best if self.costs else None
        return Prefill(len(prompt), best * 1e3, rate, rate / matmul_rate if rate and matmul_rate else None)


def mean_cycle(timed: Sequence[TimedCycle]) -> CycleTimes:
    """The mean cycle by the host's clock: all that is known of a backend without a device."""
    rows = [(c.context, c.seconds, c.found.propose_seconds, c.found.verify_seconds) for c in timed]
    context, whole, propose, verify = (mean(column) for column in zip(*rows, strict=True))
    return CycleTimes(round(context), PassTime(whole * 1e3), PassTime(propose * 1e3), PassTime(verify * 1e3))


def decoded(seconds: float, accept_lengths: Sequence[int]) -> Decode:
    """Cycles that took ``seconds`` together. Raises BackendError without any."""
    if not accept_lengths:
        raise BackendError("no prompt led to a second token, so nothing was timed; give more tokens with --tokens")
    committed, cycles = sum(accept_lengths), len(accept_lengths)
    return Decode(committed / seconds, committed / cycles, cycles, seconds / cycles * 1e3)


def _middle(rounds: Sequence[Decode]) -> Decode:
    """The round whose cycle took the middle time."""
    return sorted(rounds, key=lambda decode: decode.ms)[len(rounds) // 2]
