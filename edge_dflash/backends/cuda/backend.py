"""The Backend protocol on our CUDA kernels: one sequence, optimistic state, one CUDA graph a pass.

The host keeps a copy of the control block (length, pending rows, anchor) and writes it to the device only when the
two differ, so that cycle after cycle runs as one graph launch and one small read-back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.graphs import REPEATS, Capture, Graphs, NativeRows, StepTime, host_memory, profile_cycle
from edge_dflash.backends.cuda.loading import Dense, Launches, Loaded, load
from edge_dflash.backends.cuda.sample import Chooser
from edge_dflash.backends.cuda.small import Result
from edge_dflash.backends.cuda.states import Sizes, read_states, write_states
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.backends.host import host_cycle
from edge_dflash.decode.backend import Asked, Cycle, PairShape, Precision, Snapshot, check_lane
from edge_dflash.decode.sampling import Sampling, choose
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec


def check_ids(shape: PairShape, ids: Sequence[int]) -> None:
    """Raise BackendError for an id that no row of the embedding belongs to; ``ids`` has at least one."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= shape.vocab_size:
        odd = low if low < 0 else high
        raise BackendError(f"token id {odd} is outside the vocabulary of {shape.vocab_size}")


def check_prompt(shape: PairShape, length: int, ids: Sequence[int]) -> None:
    """Raise BackendError unless ``ids``, at least one, can be appended behind ``length`` rows."""
    if not ids or length + len(ids) > shape.max_context:
        raise BackendError(
            f"cannot prefill {len(ids)} tokens at {length}: the context holds {shape.max_context} tokens"
        )
    check_ids(shape, ids)


def check_room(shape: PairShape, length: int, rows: int) -> None:
    """Raise BackendError unless ``rows`` rows fit behind ``length``."""
    if length + rows > shape.max_context:
        raise BackendError(f"rows {length}..{length + rows - 1} do not fit the context of {shape.max_context} tokens")


@dataclass(frozen=True)
class _Control:
    """What the control block says, or has to say."""

    length: int = 0
    pending: int = 0  # rows of the tape that are committed but not in the recurrent states
    anchor: int = 0


class NativeBackend:
    """A pair on a GPU. See :class:`edge_dflash.decode.backend.Backend`; :meth:`cycle` is its fast path."""

    def __init__(
        self,
        spec: PairSpec,
        weights: NativeWeights,
        precision: Precision,
        *,
        cubin: Callable[[str], bytes],
        max_context: int,
        prefill_chunk: int = 512,
        dense: Dense | None = None,
    ) -> None:
        """Load the pair; ``cubin`` gives a compilation unit's cubin for this device, ``dense`` computes the dense ops.

        Raises BackendError for what the kernels do not take, and when the pair does not fit into memory.
        """
        drafter = spec.drafter
        self._shape = PairShape(
            spec.target.vocab_size, drafter.block_size, drafter.mask_token_id, max_context, prefill_chunk
        )
        self._dense = dense = dense or Launches(weights, cubin)
        plan = dense.plan(pair_programs(spec), precision, Sizes(drafter.block_size, prefill_chunk, max_context))
        self.gpu = Gpu()
        try:
            self._loaded = load(self.gpu, plan, dense, weights, cubin)
            self._host = host_memory(self.gpu, self._loaded)
            buffers = self._loaded.buffers
            self.chooser = Chooser(self.gpu, self._loaded.kernels.sampler, buffers.sampling, buffers.logits)
            self._capture = Capture(self.gpu, self._loaded, self._host, self.chooser, drafter.mask_token_id)
            self.graphs: Graphs = self._capture.passes()
            self._cycles = self._own_cycles = self._capture.cycles()
            self.passes = 0  # counts passes, so that rows know when they were replaced
            self._wanted = _Control()  # what the next pass has to find
            self._known: _Control | None = None  # what the device has; None: nothing is known
            self._verified: int | None = None  # rows of the last verify, until they are committed
            self.reset()
            self._warm_up()
        except BaseException:
            self.close()
            raise

    @property
    def shape(self) -> PairShape:
        """Sizes of the loaded pair."""
        return self._shape

    def length(self, lane: int = 0) -> int:
        """Number of committed rows."""
        check_lane(self._shape, lane)
        return self._wanted.length

    @property
    def budget(self) -> Mapping[str, int]:
        """Bytes of device memory by purpose."""
        return dict(self._loaded.memory.bytes)

    @property
    def loaded(self) -> Loaded:
        """What is on the device."""
        return self._loaded

    def reset(self, lane: int = 0) -> None:
        """Forget the sequence."""
        check_lane(self._shape, lane)
        self.gpu.enter()
        self._loaded.states.zero(self.gpu.fill)
        self._wanted, self._known = _Control(), None
        self._verified = None

    def prefill(self, ids: Sequence[int], lane: int = 0) -> NativeRows:
        """Append and commit ids chunk by chunk; logits of the last row."""
        check_prompt(self._shape, self.length(lane), ids)
        self._begin()
        chunk = self._shape.prefill_chunk
        for first in range(0, len(ids), chunk):
            part = ids[first : first + chunk]
            self.gpu.synchronize()  # the chunk before has read its ids
            self._host.ids[: len(part)] = part
            self._write_control(rows=len(part))
            self.graphs.prefill.launch()
            self._wanted = self._known = _Control(self._wanted.length + len(part), 0, self._wanted.anchor)
        return NativeRows(self, 1, 0, self._host.choices)

    def propose(self, anchor: int, lane: int = 0) -> NativeRows:
        """One drafter pass; row i is the draft for position length + 1 + i. Drops an open verify."""
        check_ids(self._shape, [anchor])
        length = self.length(lane)
        check_room(self._shape, length, self._shape.block_size)
        self._begin()
        self._wanted = _Control(length, self._wanted.pending, anchor)
        self._write_control()
        self.graphs.propose.launch()
        return NativeRows(self, self._shape.block_size - 1, 1, self._host.drafts)

    def verify(self, ids: Sequence[int], lane: int = 0) -> NativeRows:
        """Run rows at length, length + 1, ... without committing them."""
        if not 1 <= len(ids) <= self._shape.block_size:
            raise BackendError(f"verify takes 1 to {self._shape.block_size} rows, not {len(ids)}")
        check_ids(self._shape, ids)
        check_room(self._shape, self.length(lane), len(ids))
        self._begin()
        self.gpu.synchronize()
        self._host.ids[: len(ids)] = ids
        self._host.ids[len(ids) : self._shape.block_size] = ids[-1]
        self._write_control()
        self.graphs.verify.launch()
        self._wanted = self._known = _Control(self._wanted.length, 0, self._wanted.anchor)  # pending rows were replayed
        self._verified = len(ids)
        return NativeRows(self, len(ids), 0, self._host.choices)

    def cycle(self, asked: Asked) -> Cycle:
        """Propose, verify, accept and commit on the device; :meth:`commit` may then keep fewer rows.

        One graph where logits and sampling alone decide; with ``logits``, which a greedy cycle does not write, that of
        a sampled one. Plain and steered cycles are a verify and its end: masks are
        computed while the verify runs. Only relaxed acceptance reads logits and is the host's.
        """
        if asked.steering is not None and asked.steering.tolerant:
            return host_cycle(self, asked)
        if asked.steering is not None or not asked.drafting:
            return self._split(asked)
        anchor, length = asked.anchor, self.length(asked.lane)
        check_ids(self._shape, [anchor])
        check_room(self._shape, length, self._shape.block_size)
        self._begin()
        self._wanted = _Control(self._wanted.length, self._wanted.pending, anchor)
        self._write_control()
        graph = self._cycles.greedy
        if asked.sampling.temperature > 0.0 or asked.logits:
            self.chooser.prepare(asked.sampling)
            graph = self._cycles.sampled
        self._known = None  # until it is known what it committed
        graph.launch()
        result = self._result()
        return self._cycle(result, result.propose_seconds, result.verify_seconds, asked.logits)

    def _split(self, asked: Asked) -> Cycle:
        """A cycle of separate passes, decided on the device; seconds are the host's."""
        sampling, steering, drafting = asked.sampling, asked.steering, asked.drafting
        position, began = self.length(asked.lane) + 1, time.perf_counter()
        drafts: list[int] = []
        if steering is not None and drafting:
            drafts = steering.drafts(self.propose(asked.anchor, asked.lane), position)
        proposed = time.perf_counter()
        self.verify([asked.anchor, *drafts], asked.lane)
        masks = [None] if steering is None else steering.masks(drafts)  # while it runs
        self.chooser.write(sampling, position, masks)
        free = sampling.temperature == 0.0 and all(mask is None for mask in masks)
        self._known = None
        (self._cycles.accept if free else self._cycles.choose).launch()
        result = self._result()
        return self._cycle(
            result, proposed - began if drafting else 0.0, time.perf_counter() - proposed, asked.logits, drafts
        )

    def _result(self) -> Result:
        """Wait for the end of a cycle."""
        self.gpu.synchronize()
        return Result.of(self._host.result, self._shape.block_size)

    def _cycle(
        self, result: Result, propose_seconds: float, verify_seconds: float, logits: bool, drafts: Sequence[int] = ()
    ) -> Cycle:
        """Note what the device has committed; it is real when :meth:`commit` has said so."""
        tokens = result.choices[: result.accepted + 1]
        if drafts and self._cycles is not self._own_cycles:  # forced: a grammar goes on behind the drafts that stand
            tokens = (*drafts[: result.accepted], tokens[-1])
        self._wanted = _Control(self._wanted.length, 0, self._wanted.anchor)
        self._known = _Control(self._wanted.length + len(tokens), len(tokens), tokens[-1])
        self._verified = len(tokens)
        left = NativeRows(self, len(tokens), 0, self._host.choices).logits if logits else None
        return Cycle(tokens, result.accepted, propose_seconds, verify_seconds, logits=left)

    def commit(self, rows: int, lane: int = 0) -> None:
        """Make the first ``rows`` rows of the last verify or cycle real."""
        length = self.length(lane)
        if self._verified is None or not 0 <= rows <= self._verified:
            state = "no verify is open" if self._verified is None else f"the last verify had {self._verified} rows"
            raise BackendError(f"cannot commit {rows} rows: {state}")
        self._wanted = _Control(length + rows, rows, self._wanted.anchor)
        self._verified = None

    def flush(self, lane: int = 0) -> None:
        """Replay pending rows into the recurrent state."""
        check_lane(self._shape, lane)
        self._begin()
        if self._wanted.pending:
            self._write_control()
            self.graphs.flush.launch()
            self._wanted = self._known = _Control(self._wanted.length, 0, self._wanted.anchor)
        self.gpu.synchronize()

    def snapshot(self, lane: int = 0) -> Snapshot:
        """Flush, then copy the state of both models."""
        self.flush(lane)
        length = self.length(lane)
        return Snapshot(length, read_states(self.gpu, self._loaded.states, length))

    def restore(self, snapshot: Snapshot, lane: int = 0) -> None:
        """Replace the state by a snapshot of the same pair and precision."""
        check_lane(self._shape, lane)
        if snapshot.length > self._shape.max_context:
            most = self._shape.max_context
            raise BackendError(f"the snapshot holds {snapshot.length} tokens, the context only {most}")
        self._begin()
        write_states(self.gpu, self._loaded.states, snapshot)
        self._wanted, self._known = _Control(snapshot.length), None

    def close(self) -> None:
        """Free the device. Closing twice does no harm."""
        self._dense.close()
        self.gpu.close()

    def force(self, accept: Sequence[int] | None) -> None:
        """Benchmarks: accept so many drafts a cycle, whatever the target says; None ends it. Captures graphs."""
        self.gpu.enter()
        self._cycles = self._own_cycles
        if accept is None:
            return
        if not accept or not all(0 <= n < self._shape.block_size for n in accept):
            raise BackendError(f"accept pattern {list(accept)} is not made of 0 to {self._shape.block_size - 1} drafts")
        self._cycles = self._capture.cycles(self.gpu.upload(np.array(accept, np.int32)))

    def profile(self, anchor: int = 0) -> list[StepTime]:
        """Time of each step of one cycle, on the device's clock; the steps do not overlap here.

        Captures a graph and runs REPEATS cycles from ``anchor``, of which it leaves an empty sequence.
        """
        check_ids(self._shape, [anchor])
        check_room(self._shape, self._wanted.length, REPEATS * self._shape.block_size)
        self._begin()
        self._wanted = _Control(self._wanted.length, self._wanted.pending, anchor)
        self._write_control()
        times = profile_cycle(self.gpu, self._loaded, self._capture)
        self.reset()
        return times

    def enter(self, number: int) -> None:
        """Use the rows of pass ``number``. Raises BackendError when a later one has replaced them."""
        if number != self.passes:
            raise BackendError("these rows were replaced by a later pass; read them before it")
        self.gpu.enter()

    def _begin(self) -> None:
        """A new pass: what lay open is dropped."""
        self.gpu.enter()
        self.passes += 1
        self._verified = None

    def _write_control(self, rows: int = 0) -> None:
        """Tell the device what the host knows, if it does not know it."""
        if rows or self._known != self._wanted:
            now = self._wanted
            self._loaded.kernels.cycle.set(
                self._loaded.buffers.shared.control,
                length=now.length,
                pending=now.pending,
                rows=rows,
                anchor=now.anchor,
            )
            self._known = now

    def _warm_up(self) -> None:
        """Run everything once, so that no first cycle pays for loading code."""
        if self._shape.max_context >= 3 * self._shape.block_size:
            self.prefill([0])
            self.propose(0)
            self.verify([0])
            self.commit(1)
            self.flush()
            self.cycle(Asked(0))
            self.cycle(Asked(0, Sampling(1.0, top_k=1)))
            self.cycle(Asked(0, drafting=False))
            self.cycle(Asked(0, Sampling(1.0, top_p=0.5), drafting=False))
            choose(self.verify([0]), Sampling(1.0), 0)
        self.reset()
        self.gpu.synchronize()
