"""The Backend protocol on our CUDA kernels: optimistic state, one CUDA graph a pass.

The host keeps a copy of the control block (length, pending rows, anchor) and writes it to the device only when the
two differ, so that cycle after cycle runs as one graph launch and one small read-back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.graphs import Capture, HostBuffers
from edge_dflash.backends.cuda.loading import Dense, Launches, load
from edge_dflash.backends.cuda.measured import Measured
from edge_dflash.backends.cuda.memory import ControlBlock
from edge_dflash.backends.cuda.rows import HostWalk, NativeRows, WalkedRows
from edge_dflash.backends.cuda.sample import Chooser
from edge_dflash.backends.cuda.small import Result
from edge_dflash.backends.cuda.states import Lane, Sizes, read_states, write_states
from edge_dflash.backends.cuda.warming import warm_up
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.backends.host_cycle import host_cycle, host_cycles
from edge_dflash.decode.backend import Asked, Cycle, Outcome, PairShape, Precision, Snapshot, check_lane, no_drafter
from edge_dflash.decode.walk import confident
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec


class NativeBackend(Measured):
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
        self._shape = PairShape.of(spec, max_context, prefill_chunk)
        self._dense = dense = dense or Launches(weights, cubin)
        verify_rows = self._shape.verify_rows
        sizes = Sizes(verify_rows, prefill_chunk, max_context, self._shape.lanes, spec.block_size)
        layout = dense.lay_out(pair_programs(spec), precision, sizes)
        self.gpu = Gpu()
        try:
            self.loaded = load(self.gpu, layout, dense, weights, cubin)
            self._host, buffers = HostBuffers(self.gpu, self.loaded), self.loaded.common.buffers
            self.chooser = Chooser(self.gpu, self.loaded.common.kernels.sampler, buffers.sampling, buffers.logits)
            self._capture = Capture(self.gpu, self.loaded, self._host, self.chooser, spec.mask_token_id or 0)
            self.graphs = self._capture.passes()
            self._cycles = self._own_cycles = self._capture.cycles()
            walker, first = self.loaded.common.kernels.walker, layout.first_draft
            self._walk = HostWalk(self.gpu, walker, self.chooser, buffers, first) if walker else None
            self.passes = 0  # counter, by which rows notice that they were replaced
            self._lanes = [Lane() for _ in range(self._shape.lanes)]
            self.reset()
            warm_up(self)
        except BaseException:
            self.close()
            raise

    @property
    def shape(self) -> PairShape:
        """Sizes of the loaded pair."""
        return self._shape

    @property
    def budget(self) -> Mapping[str, int]:
        """Bytes of device memory by purpose."""
        return dict(self.loaded.memory.bytes)

    def length(self, lane: int = 0) -> int:
        """Number of committed rows."""
        return self._lane(lane).wanted.length

    def reset(self, lane: int = 0) -> None:
        """Forget the sequence."""
        check_lane(self._shape, lane)
        self.gpu.enter()
        self.loaded.common.states.zero(self.gpu.fill, lane)
        self._lanes[lane] = Lane()

    def prefill(self, ids: Sequence[int], lane: int = 0) -> NativeRows:
        """Append and commit ids chunk by chunk; logits of the last row."""
        length, most = self.length(lane), self._shape.max_context
        if not ids or length + len(ids) > most:
            raise BackendError(f"cannot prefill {len(ids)} tokens at {length}: the context holds {most} tokens")
        self._check_ids(ids)
        at, chunk = self._begin(lane), self._shape.prefill_chunk
        for first in range(0, len(ids), chunk):
            part = ids[first : first + chunk]
            self.gpu.synchronize()  # the chunk before has read its ids
            self._host.ids[: len(part)] = part
            self._write_control(at, rows=len(part))
            self.graphs.prefill.launch()
            at.wanted = at.known = ControlBlock(at.wanted.length + len(part), 0, at.wanted.anchor)
        return NativeRows(self, 1, 0, self._host.choices)

    def propose(self, anchor: int, lane: int = 0) -> NativeRows:
        """One drafter pass; row i is the draft for position length + 1 + i. Drops an open verify."""
        if not self._shape.drafts:
            raise no_drafter()
        self._begin_at(anchor, lane, self._shape.verify_rows)
        self.graphs.propose.launch()
        first = self.loaded.common.layout.first_draft
        if self._walk is not None:
            return WalkedRows(self, self._walk, first, self._host.drafts)
        return NativeRows(self, self._shape.drafts, first, self._host.drafts)

    def verify(self, ids: Sequence[int], lane: int = 0) -> NativeRows:
        """Run rows at length, length + 1, ... without committing them."""
        if not 1 <= len(ids) <= self._shape.verify_rows:
            raise BackendError(f"verify takes 1 to {self._shape.verify_rows} rows, not {len(ids)}")
        self._check_ids(ids)
        self._check_room(lane, len(ids))
        at = self._begin(lane)
        self.gpu.synchronize()
        self._host.ids[: len(ids)] = ids
        self._host.ids[len(ids) : self.graphs.verify.most(len(ids))] = ids[-1]
        self._write_control(at)
        self.graphs.verify.of(len(ids)).launch()
        at.wanted = at.known = ControlBlock(at.wanted.length, 0, at.wanted.anchor)  # pending rows were replayed
        at.verified = len(ids)
        return NativeRows(self, len(ids), 0, self._host.choices)

    def cycle(self, asked: Asked) -> Cycle:
        """Propose, verify, accept and commit on the device; :meth:`commit` may then keep fewer rows.

        One graph where logits and sampling alone decide (sampled where ``logits`` are asked for). Plain and steered
        cycles are a verify and its end. Only relaxed acceptance is the host's.
        """
        if asked.steering is not None and asked.steering.tolerant:
            return host_cycle(self, asked)
        if asked.steering is not None or not asked.drafting or not self._shape.drafts:
            return self._split(asked)
        lane, most = self._begin_at(asked.anchor, asked.lane, self._shape.verify_rows), self._shape.drafts
        graphs, drafts = self._cycles.greedy, most if asked.drafts is None else min(asked.drafts, most)
        if asked.sampling.temperature > 0.0 or asked.logits:
            self.chooser.prepare(asked.sampling)
            graphs = self._cycles.sampled
        self._host.count(drafts + 1, asked.threshold)
        lane.known = None  # until it is known what the device committed
        graphs.of(drafts + 1).launch()
        result = self._host.read(self._shape.verify_rows)
        return self._cycle(lane, result, asked, result.counted)

    def cycles(self, asked: Sequence[Asked]) -> list[Outcome]:
        """Lane by lane; see Backend."""
        return host_cycles(self, asked)

    def copy(self, source: int, target: int) -> None:
        """Through the host; see Backend."""
        self.restore(self.snapshot(source), target)

    def _split(self, asked: Asked) -> Cycle:
        """A cycle of separate passes, decided on the device; seconds are the host's."""
        sampling, steering, lane = asked.sampling, asked.steering, self._lane(asked.lane)
        position, began, drafts = lane.wanted.length + 1, time.perf_counter(), list[int]()
        drafting = asked.drafting and self._shape.drafts > 0
        if steering is not None and drafting:
            rows = self.propose(asked.anchor, asked.lane)
            drafts = steering.drafts(rows, position)
            if asked.threshold and isinstance(rows, WalkedRows):
                drafts = drafts[: confident(rows.confidence(), asked.threshold)]
            drafts = drafts[: asked.drafts]
        proposed = time.perf_counter()
        self.verify([asked.anchor, *drafts], asked.lane)
        masks = [None] if steering is None else steering.masks(drafts)  # while it runs
        self.chooser.write(sampling, position, masks)
        free = sampling.temperature == 0.0 and all(mask is None for mask in masks)
        lane.known = None
        (self._cycles.accept if free else self._cycles.choose).launch()
        result, propose_seconds = self._host.read(self._shape.verify_rows), proposed - began if drafting else 0.0
        timed = replace(result, propose_seconds=propose_seconds, verify_seconds=time.perf_counter() - proposed)
        return self._cycle(lane, timed, asked, len(drafts), drafts)

    def _cycle(self, lane: Lane, result: Result, asked: Asked, count: int, drafts: Sequence[int] = ()) -> Cycle:
        """Note what the device has committed; it is real when :meth:`commit` has said so."""
        tokens = result.choices[: result.accepted + 1]
        if drafts and self._cycles is not self._own_cycles:  # forced: a grammar goes on behind the drafts that stand
            tokens = (*drafts[: result.accepted], tokens[-1])
        lane.wanted = ControlBlock(lane.wanted.length, 0, lane.wanted.anchor)
        lane.known = ControlBlock(lane.wanted.length + len(tokens), len(tokens), tokens[-1])
        lane.verified = len(tokens)
        left = NativeRows(self, len(tokens), 0, self._host.choices).logits if asked.logits else None
        return Cycle(tokens, result.accepted, count, result.propose_seconds, result.verify_seconds, logits=left)

    def commit(self, rows: int, lane: int = 0) -> None:
        """Make the first ``rows`` rows of the last verify or cycle real."""
        at = self._lane(lane)
        if at.verified is None or not 0 <= rows <= at.verified:
            state = "no verify is open" if at.verified is None else f"the last verify had {at.verified} rows"
            raise BackendError(f"cannot commit {rows} rows: {state}")
        at.wanted = ControlBlock(at.wanted.length + rows, rows, at.wanted.anchor)
        at.verified = None

    def flush(self, lane: int = 0) -> None:
        """Replay pending rows into the recurrent state."""
        at = self._begin(lane)
        if at.wanted.pending:
            self._write_control(at)
            self.graphs.flush.launch()
            at.wanted = at.known = ControlBlock(at.wanted.length, 0, at.wanted.anchor)
        self.gpu.synchronize()

    def snapshot(self, lane: int = 0) -> Snapshot:
        """Flush, then copy the state of both models."""
        self.flush(lane)
        length = self.length(lane)
        return Snapshot(length, read_states(self.gpu, self.loaded.common.states, lane, length))

    def restore(self, snapshot: Snapshot, lane: int = 0) -> None:
        """Replace the state by a snapshot of the same pair and precision."""
        check_lane(self._shape, lane)
        if snapshot.length > (most := self._shape.max_context):
            raise BackendError(f"the snapshot holds {snapshot.length} tokens, the context only {most}")
        self._begin(lane)
        write_states(self.gpu, self.loaded.common.states, lane, snapshot)
        self._lanes[lane] = Lane(ControlBlock(snapshot.length))

    def close(self) -> None:
        """Free the device. Closing twice does no harm."""
        self._dense.close()
        self.gpu.close()

    def enter(self, number: int) -> None:
        """Use the rows of pass ``number``. Raises BackendError when a later one has replaced them."""
        if number != self.passes:
            raise BackendError("these rows were replaced by a later pass; read them before it")
        self.gpu.enter()

    def _lane(self, lane: int) -> Lane:
        check_lane(self._shape, lane)
        return self._lanes[lane]

    def _begin(self, lane: int) -> Lane:
        """A new pass of a lane: what lay open there is dropped."""
        at = self._lane(lane)
        self.gpu.enter()
        self.passes += 1
        at.verified = None
        return at

    def _begin_at(self, anchor: int, lane: int, rows: int) -> Lane:
        """A new pass that drafts from ``anchor``, with room for ``rows``."""
        self._check_ids([anchor])
        self._check_room(lane, rows)
        at = self._begin(lane)
        at.wanted = ControlBlock(at.wanted.length, at.wanted.pending, anchor)
        self._write_control(at)
        return at

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise BackendError for an id that no row of the embedding belongs to."""
        for token in (min(ids), max(ids)):
            if not 0 <= token < self._shape.vocab_size:
                raise BackendError(f"token id {token} is outside the vocabulary of {self._shape.vocab_size}")

    def _check_room(self, lane: int, rows: int) -> None:
        """Raise BackendError unless ``rows`` rows fit behind the committed ones."""
        length, most = self.length(lane), self._shape.max_context
        if length + rows > most:
            raise BackendError(f"rows {length}..{length + rows - 1} do not fit the context of {most} tokens")

    def _write_control(self, lane: Lane, rows: int = 0) -> None:
        """Write the host's control block to the device, if the device has another."""
        if rows or lane.known != lane.wanted:
            self.loaded.common.kernels.cycle.set(self.loaded.common.buffers.control, lane.wanted, rows)
            lane.known = lane.wanted
