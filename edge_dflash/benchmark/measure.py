"""Times a loaded backend: decoding through the loop, cycles on the device's clock, prompts, memory.

Every figure is measured, none computed from another. Works on any Backend; one on a GPU gives more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING, Protocol, cast

from edge_dflash.backends.base import Backend
from edge_dflash.benchmark.machine import ClockSample
from edge_dflash.benchmark.result import Cycle, Decode, Memory, Part, Prefill
from edge_dflash.benchmark.traffic import Costs
from edge_dflash.errors import BackendError, RequestError
from edge_dflash.spec.loop import DecodeOptions, Step, stream

if TYPE_CHECKING:  # importing them needs CUDA's bindings
    from edge_dflash.backends.native.driver import Gpu
    from edge_dflash.backends.native.profile import StepTime

CYCLES, BATCHES, WARM = 20, 5, 2  # timed cycles behind a prefill, how often, and cycles before
MOST_BATCHES = 40  # while nvidia-smi is waited for
LONG_PROMPT = 2048  # tokens from which one batch, or one run, is enough: their prefill takes most of the time
_LONGEST_PERIOD = 100  # cycles of an accept pattern


class DeviceBackend(Backend, Protocol):
    """A backend whose cycle is one graph on a GPU."""

    @property
    def gpu(self) -> Gpu:
        """The device."""
        ...

    @property
    def budget(self) -> Mapping[str, int]:
        """Bytes by purpose."""
        ...

    def force(self, accept: Sequence[int] | None) -> None:
        """Accept so many drafts in the cycles to come, over and over, whatever the target chose; None: no more."""
        ...

    def profile(self, anchor: int = 0) -> Sequence[StepTime]:
        """Time of each step of one cycle, on the device's clock."""
        ...


def on_device(backend: Backend) -> DeviceBackend | None:
    """The backend, if it is one on a GPU."""
    return cast("DeviceBackend", backend) if hasattr(backend, "gpu") else None


def accept_pattern(accept_length: float, block: int) -> tuple[int, ...]:
    """Accepted drafts of each cycle, so that the mean of committed tokens (drafts + 1) is ``accept_length``.

    Only the two nearest lengths occur, evenly mixed; the mean is exact to 0.005. Raises RequestError outside 1..block.
    """
    if not 1 <= accept_length <= block:
        raise RequestError(f"accept length {accept_length:g} is outside 1..{block}, the block size; give one inside")
    periods = range(1, _LONGEST_PERIOD + 1)
    period = next(n for n in periods if abs(round(n * accept_length) / n - accept_length) <= 0.005)
    ends = [round(i * round(period * accept_length) / period) for i in range(period + 1)]
    return tuple(b - a - 1 for a, b in pairwise(ends))


@dataclass
class Meter:
    """Measures one backend. ``bandwidth`` and ``costs`` are None where floors are not known."""

    backend: Backend
    costs: Costs | None
    bandwidth: float | None

    def steps(self, prompt: Sequence[int], tokens: int, *, speculative: bool) -> list[Step]:
        """A whole generation, from an empty sequence; its first step is the prefill."""
        self.backend.reset()
        options = DecodeOptions(max_new_tokens=tokens)
        return list(stream(self.backend, prompt, options, speculative=speculative))

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int, *, speculative: bool) -> tuple[Decode, list[Step]]:
        """Tokens a second after the first token, wall clock around the loop; and the steps behind it."""
        seconds, found = 0.0, list[Step]()
        for prompt in prompts:
            self.backend.reset()
            steps = stream(self.backend, prompt, DecodeOptions(max_new_tokens=tokens), speculative=speculative)
            next(steps)
            began = time.perf_counter()
            found += list(steps)
            seconds += time.perf_counter() - began
        committed = sum(len(step.tokens) for step in found)
        if not committed:
            raise BackendError("no prompt led to a second token, so nothing was timed; give more tokens with --tokens")
        return Decode(committed / seconds, committed / len(found), len(found), seconds / len(found) * 1e3), found

    def loop_cycle(self, steps: Sequence[Step], context: int) -> Cycle:
        """A cycle by the host's clock: all that is known of a backend without graphs."""
        propose, verify = mean(s.propose_seconds for s in steps), mean(s.verify_seconds for s in steps)
        whole = Part.of(propose + verify, None, None)
        return Cycle(context, whole, Part.of(propose, None, None), Part.of(verify, None, None), None, None)

    def device_cycle(self, device: DeviceBackend, prompt: Sequence[int], sample: ClockSample | None = None) -> Cycle:
        """A steady cycle behind ``prompt``: from call to committed tokens, its passes by the device's clock.

        Medians over batches of cycles, each behind a prefill of its own; batches go on until ``sample`` has its answer.
        """
        whole, propose, verify = list[float](), list[float](), list[float]()
        contexts, lengths, batch = list[int](), list[int](), 0
        wanted = BATCHES if len(prompt) < LONG_PROMPT else 1
        while batch < wanted or (sample is not None and sample.pending and batch < MOST_BATCHES):
            batch += 1
            device.reset()
            anchor = device.prefill(prompt).argmax()[0]
            for index in range(WARM + CYCLES):
                at, began = device.length, time.perf_counter()
                cycle = device.cycle(anchor)
                device.commit(len(cycle.tokens))
                seconds, anchor = time.perf_counter() - began, cycle.tokens[-1]
                if index >= WARM:
                    whole.append(seconds)
                    propose.append(cycle.propose_seconds)
                    verify.append(cycle.verify_seconds)
                    contexts.append(at)
                    lengths.append(len(cycle.tokens))
        context, pending = round(mean(contexts)), round(mean(lengths))
        draft = self.costs.propose(context) if self.costs else None
        check = self.costs.verify(context, pending) if self.costs else None
        both = draft.total + check.total if draft and check else None
        return Cycle(
            context,
            Part.of(median(whole), both, self.bandwidth),
            Part.of(median(propose), draft.total if draft else None, self.bandwidth),
            Part.of(median(verify), check.total if check else None, self.bandwidth),
            draft,
            check,
        )

    def prefill(self, prompt: Sequence[int], matmul_rate: float | None) -> Prefill:
        """A prompt until its first token is known on the host: the best of three behind a first one, of one if long."""
        seconds = list[float]()
        while len(seconds) < (2 if seconds and seconds[0] > 1 else 4):
            self.backend.reset()
            began = time.perf_counter()
            self.backend.prefill(prompt).argmax()
            seconds.append(time.perf_counter() - began)
        best = min(seconds[1:])
        rate = self.costs.prefill_operations(len(prompt)) / best if self.costs else None
        return Prefill(len(prompt), best * 1e3, rate, rate / matmul_rate if rate and matmul_rate else None)


def memory(device: DeviceBackend, free_before: int, allocations: int) -> Memory:
    """Memory of a loaded backend; ``allocations`` is their count when loading had ended."""
    device.gpu.enter()
    free, total = device.gpu.free_bytes()
    return Memory(
        dict(device.budget), device.gpu.allocated_bytes, free_before - free, total, device.gpu.allocations - allocations
    )
