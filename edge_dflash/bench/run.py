"""A whole benchmark of a loaded pair, in order: what is asked, what is measured, what comes out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from operator import ne
from typing import TYPE_CHECKING

from edge_dflash.bench import result
from edge_dflash.bench.device import Device, StepTime, force, memory, on_device, profile
from edge_dflash.bench.lanes import company, load
from edge_dflash.bench.measure import ROUNDS, Decodings, Meter, lent, mean_cycle
from edge_dflash.bench.provenance import ClockSample, describe
from edge_dflash.bench.workload import Form, Say, Subject, Workload, reached, tiled
from edge_dflash.decode.backend import Backend, Rows
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.drafts import measure
from edge_dflash.decode.tree import Parents
from edge_dflash.errors import ContextError

if TYPE_CHECKING:  # importing it needs CUDA's bindings
    from edge_dflash.backends.cuda.backend import NativeBackend


def run(subject: Subject, device: Device, work: Workload, say: Say) -> result.BenchResult:
    """Measure a loaded subject."""
    planner, shape, costs = subject.planner, subject.planner.shape, subject.costs
    on_gpu = on_device(planner.backend)
    work = fitted(work, planner.backend, say)
    meter = Meter(planner, costs, device.bandwidth)
    if on_gpu and (pattern := work.pattern(shape.verify_rows)) is not None:
        force(on_gpu, pattern)
    allocations = on_gpu.gpu.allocations if on_gpu else 0
    first = meter.cycles(subject.prompts[0], 1)
    say("timing plain decoding")
    plain, _ = meter.decode(subject.prompts, work.tokens, speculative=False)
    say("timing speculative decoding")
    decodings, formed = decode_all(meter, subject, work)
    chosen = _chosen(meter, subject, work, say) if work.acceptance else None
    say("timing the parts of a cycle")
    sample = ClockSample()
    prompt = tiled(subject.filler, work.context)
    cycle = meter.device_cycle(prompt, sample) if on_gpu else mean_cycle(decodings.cycles)
    machine = {**describe(), **device.description, "clocks": sample.result()}
    prefills = tuple(_prefill(meter, subject, tokens, device, say) for tokens in work.prefill)
    say("timing cycles by the drafts that they verify")
    drafts_ms = {str(drafts): 1e3 * seconds for drafts, seconds in measure(planner.backend).items()}
    steps = _by_drafts(meter, subject, work, say)
    contexts = tuple(_context(meter, subject, context, say) for context in work.contexts)
    held = memory(on_gpu, device.free_bytes, allocations) if on_gpu else None
    coldest = first.prefill_seconds * 1e3, first.cycles[0].seconds * 1e3
    floor = costs.verify(len(subject.prompts[0]) + work.tokens // 2, 1, 1).total if costs else None
    return result.BenchResult(
        pair=subject.title,
        backend=subject.kind,
        weights=subject.weights,
        kv=subject.kv,
        block_size=shape.block_size,
        context=work.context,
        forced_accept_length=work.accept_length,
        machine=machine,
        read_bandwidth=device.bandwidth,
        matmul_rate=device.matmul_rate,
        matmul_by=device.matmul_by,
        prompts=subject.source,
        plain=plain,
        plain_floor_ms=result.PassTime.of(0, floor, device.bandwidth).floor_ms,
        speculative=decodings.planned,
        schema=formed,
        raw=decodings.raw,
        cycle=cycle,
        cold=result.Cold(subject.load_seconds, len(subject.prompts[0]), *coldest, decodings.raw.ms),
        prefill=prefills,
        contexts=contexts,
        drafts_ms=drafts_ms,
        memory=held,
        profile=_profile(on_gpu, prompt, say) if on_gpu and work.profile else (),
        forced_acceptance=work.acceptance,
        routing_correlation=work.correlation,
        chosen=chosen,
        by_drafts=steps,
        lanes=tuple(load(subject, device, work, lanes, say) for lanes in work.lanes),
        company=company(subject, work, say) if max(work.lanes, default=1) > 1 else None,
    )


def decode_all(meter: Meter, subject: Subject, work: Workload) -> tuple[Decodings, result.Formed | None]:
    """Speculative decoding of the subject's prompts: by plans, by plans under its schema, by raw cycles."""
    planner, form, prompt = subject.planner, subject.form, subject.prompts[0]
    rows = planner.shape.verify_rows
    budget, schema = work.budget(rows), form.schema if form else None
    for each in (None,) if schema is None else (None, schema):  # the first time compiles
        planner.plan(prompt, max_new_tokens=min(budget, 2 * rows), schema=each)
    rounds = ROUNDS if on_device(planner.backend) else 1
    found = meter.decodings(subject.prompts, budget, rounds, schema)
    if form is None or found.formed is None:
        return found, None
    replaced = _replaced_share(subject, form, budget)
    return found, result.Formed(**vars(found.formed), schema=form.what, replaced=replaced)


def fitted(work: Workload, backend: Backend, say: Say) -> Workload:
    """The work without what the loaded context cannot hold. Raises ContextError when nothing is left."""
    shape = backend.shape
    room = shape.usable_context - work.drift(shape.verify_rows)
    if room < 1:
        raise ContextError(
            f"the context of {shape.max_context} tokens is too small to time cycles in; build the bundle with "
            f"--max-context {work.rows(shape.verify_rows)}"
        )
    prefill = tuple(n for n in work.prefill if n <= shape.usable_context)
    contexts = tuple(n for n in work.contexts if n <= room)
    for tokens in (*(set(work.prefill) - set(prefill)), *(set(work.contexts) - set(contexts))):
        say(f"{tokens} tokens do not fit the context of {shape.max_context} and are left out")
    return replace(work, context=min(work.context, room), prefill=prefill, contexts=contexts)


def _chosen(meter: Meter, subject: Subject, work: Workload, say: Say) -> result.Chosen:
    """The first prompt by a planner that chooses the number of drafts; its first plan settles the number."""
    say("timing speculative decoding with drafts chosen by measurement")
    with lent(subject.planner.backend, chosen=True) as planner:
        other = replace(meter, planner=planner)
        for _ in range(2):
            found, plans = other.decode(subject.prompts[:1], work.budget(planner.shape.verify_rows))
    return result.Chosen(**vars(found), drafts=plans[0].drafting.mean, usual=plans[0].drafting.usual)


def _by_drafts(meter: Meter, subject: Subject, work: Workload, say: Say) -> tuple[result.ByDrafts, ...]:
    if work.acceptance is None and work.correlation is None:
        return ()
    say(f"timing cycles by their drafts at {work.context:,} tokens")
    shares = reached(work.acceptance, subject.planner.shape.drafts) if work.acceptance else None
    return meter.by_drafts(tiled(subject.filler, work.context), shares)


def _prefill(meter: Meter, subject: Subject, tokens: int, device: Device, say: Say) -> result.Prefill:
    say(f"timing a prompt of {tokens:,} tokens")
    return meter.prefill(tiled(subject.filler, tokens), device.matmul_rate)


def _context(meter: Meter, subject: Subject, context: int, say: Say) -> result.CycleTimes:
    say(f"timing cycles at {context:,} tokens")
    prompt = tiled(subject.filler, context)
    if on_device(subject.planner.backend):
        return meter.device_cycle(prompt)
    return mean_cycle(meter.cycles(prompt, 4).cycles)


def _profile(device: NativeBackend, prompt: Sequence[int], say: Say) -> tuple[result.StepKind, ...]:
    """Steps of a cycle by kind (layer numbers left out), the longest first."""
    say("timing every step of a cycle")
    device.reset()
    kinds: dict[str, list[StepTime]] = {}
    for step in profile(device, device.prefill(prompt).argmax()[0]):
        kinds.setdefault(re.sub(r"layers\.\d+", "layers.*", step.name), []).append(step)
    device.reset()
    found = (
        result.StepKind(kind, len(steps), 1e3 * sum(s.seconds for s in steps), sum(s.weight_bytes for s in steps))
        for kind, steps in kinds.items()
    )
    return tuple(sorted(found, key=lambda step: -step.ms))


class _Watched(Delegate):
    """A backend whose cycles are decided on the host; counts drafts that are not verified as they were drafted."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._drafted: list[int] = []
        self.verified = self.replaced = 0  # drafts

    def propose(self, anchor: int, lane: int = 0) -> Rows:
        rows = super().propose(anchor, lane)
        self._drafted = rows.argmax()
        return rows

    def verify(self, ids: Sequence[int], lane: int = 0, parents: Parents | None = None) -> Rows:
        self.verified += len(ids) - 1
        self.replaced += sum(map(ne, ids[1:], self._drafted))
        return super().verify(ids, lane, parents)


def _replaced_share(subject: Subject, form: Form, tokens: int) -> float:
    """Share of the drafts after the first prompt in whose place the grammar puts another token, refused or forced."""
    planner = subject.planner
    watched = _Watched(planner.backend)
    with lent(watched, planner.tokenizer, planner.stop_token_ids) as other:
        other.plan(subject.prompts[0], max_new_tokens=tokens, schema=form.schema)
    return watched.replaced / max(watched.verified, 1)
