"""The Backend protocol on our CUDA kernels: optimistic state, one CUDA graph a pass.

The host keeps a copy of the control blocks (length, pending rows, anchor, lane) and writes them to the device only when
the two differ, so that cycle after cycle runs as one graph launch and one small read-back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from edge_dflash.backends.cuda.cycle import DeviceCycle
from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.graphs import Graphs, HostBuffers
from edge_dflash.backends.cuda.honoured import check_honoured, check_programs
from edge_dflash.backends.cuda.kernels.cycle import SlotWords
from edge_dflash.backends.cuda.kernels.sample import Chooser
from edge_dflash.backends.cuda.loading import Launches, load
from edge_dflash.backends.cuda.rows import HostWalk, NativeRows, WalkedRows
from edge_dflash.backends.cuda.slots import Lane, Slots
from edge_dflash.backends.cuda.states import Sizes, copy_states, read_states, write_states
from edge_dflash.backends.cuda.tower import Eyes
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.decode.backend import Asked, Cycle, Outcome, Precision, Snapshot, no_drafter, replaced
from edge_dflash.decode.cycle import host_cycle, outcome_of
from edge_dflash.decode.sampling import GREEDY
from edge_dflash.decode.shape import PairShape, check_lane, lane_steps
from edge_dflash.decode.tree import Parents, check_chain, check_commit
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec
from edge_dflash.pictures.pictured import Picture, Seen, Sight


class NativeBackend:
    """A pair on a GPU. See :class:`edge_dflash.decode.backend.Backend`; :meth:`cycles` is its fast path.

    By the number ``passes``, rows notice that they were replaced.
    """

    def __init__(
        self,
        spec: PairSpec,
        weights: NativeWeights,
        precision: Precision,
        *,
        cubin: Callable[[str], bytes],
        max_context: int,
        prefill_chunk: int = 512,
        lanes: int = 1,
        dense: Launches | None = None,
    ) -> None:
        """Load the pair; ``cubin`` gives a compilation unit's cubin for this device, ``dense`` computes the dense ops.

        Raises BackendError for what the kernels do not take, and when the pair does not fit into memory.
        """
        self._shape = PairShape.of(spec, max_context, prefill_chunk, lanes)
        self._dense = dense = dense or Launches(weights, cubin)
        rows, block = self._shape.verify_rows, spec.block_size
        fit = dense.most_rows // max(rows, block)  # slots of a pass
        widths = [1, *(count for count in lane_steps(lanes) if 1 < count <= fit)]
        sizes = Sizes(rows, prefill_chunk, max_context, lanes, block, widths[-1])
        programs, vision = pair_programs(spec), spec.target.vision
        check_programs(programs)
        if vision:
            check_honoured(vision)
        layout = dense.lay_out(programs, precision, sizes)
        if vision and programs.see:
            tower = dense.lay_out_tower(vision, programs.see, self._shape.usable_context)
            layout = replace(layout, tower=tower)
        self.gpu = Gpu()
        try:
            self.loaded = load(self.gpu, layout, dense, weights, cubin)
            self.host, buffers = HostBuffers(self.gpu, self.loaded), self.loaded.common.buffers
            rotary = self.loaded.common.states.rotary
            self._eyes = Eyes(self.gpu, self.loaded.tower, rotary, buffers.images, layout.vocabulary)
            sampler, walker = self.loaded.common.kernels.sampler, self.loaded.common.kernels.walker
            self.chooser = Chooser(self.gpu, sampler, buffers.sampling, buffers.logits, sizes.of_pass("propose"))
            captured = self.gpu, self.loaded, self.host, self.chooser, spec.mask_token_id or 0
            self.graphs = {count: Graphs(*captured, count) for count in widths}  # by the slots of a pass
            self.slots = Slots(self.loaded.common.kernels.cycle, buffers.control, widths[-1])
            self._walk = HostWalk(self.gpu, walker, self.chooser, buffers, layout.first_draft) if walker else None
            self.passes = 0
            self._lanes = [Lane(SlotWords(lane)) for lane in range(lanes)]
            self._warm_up()
        except BaseException:
            self.close()
            raise

    def _warm_up(self) -> None:
        """Launch every graph once, from empty lanes, so that no first cycle pays for loading code; then empty them."""
        self.host.ids[:] = 0
        for lane in range(self._shape.lanes):
            self.reset(lane)
        for count, graphs in self.graphs.items():
            self.host.count(*[(1, 0.0)] * count)
            for slot in range(count):
                self.chooser.write(GREEDY, 0, [None], slot=slot)
            for graph in graphs.every():
                self.slots.invalidate(range(count))
                self.slots.put([SlotWords(lane, rows=1) for lane in range(count)])
                graph.launch()
            for chooser in (self.chooser, *((self._walk,) if self._walk else ())):
                chooser.choose(GREEDY, 0, [None], 0, count - 1)
        self.slots.invalidate(range(count := max(self.graphs)))
        self.host.count(*[(self._shape.verify_rows, 0.0)] * count)
        for lane in range(self._shape.lanes):
            self.reset(lane)
        self.gpu.synchronize()

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
        return self.lane(lane).words.length

    def reset(self, lane: int = 0) -> None:
        """Forget the sequence."""
        check_lane(self._shape, lane)
        self.gpu.enter()
        self.loaded.common.states.zero(self.gpu.fill, lane)
        self._become(SlotWords(lane))

    def see(self, picture: Picture) -> Seen:
        """Run the tower; the rows come to the host."""
        self.gpu.enter()
        return self._eyes.see(picture)

    def prefill(self, ids: Sequence[int], lane: int = 0, sight: Sight | None = None) -> NativeRows:
        """Append and commit ids chunk by chunk; logits of the last row."""
        length, most = self.length(lane), self._shape.max_context
        if not ids or length + len(ids) > most:
            raise BackendError(f"cannot prefill {len(ids)} tokens at {length}: the context holds {most} tokens")
        self.check_ids(ids)
        at, chunk = self._begin(lane), self._shape.prefill_chunk
        if sight is not None:
            self._eyes.place(lane, length, sight)
            at.delta = sight.delta
        for first in range(0, len(ids), chunk):
            part = ids[first : first + chunk]
            self.gpu.synchronize()  # the chunk before has read its ids
            self.host.ids[: len(part)] = part
            if sight is not None:
                self._eyes.fill(self.host.ids[: len(part)], first, sight)
            self.slots.put([at.words._replace(rows=len(part))])
            self.graphs[1].prefill.launch()
            self._left(at, at.words.length + len(part))
        return NativeRows(self, 1, 0, self.host.choices)

    def propose(self, anchor: int, lane: int = 0) -> NativeRows:
        """One drafter pass; row i is the draft for position length + 1 + i. Drops an open verify."""
        if not self._shape.drafts:
            raise no_drafter()
        self.begin_at(anchor, lane, self._shape.verify_rows)
        self.graphs[1].propose.launch()
        return self.proposed(0)

    def proposed(self, slot: int) -> NativeRows:
        """Drafts in a slot of the propose pass that was launched."""
        first, block = self.loaded.common.layout.first_draft, self.loaded.common.layout.sizes.of_pass("propose")
        if self._walk is not None:
            return WalkedRows(self, self._walk, first, self.host.drafts, slot)
        return NativeRows(self, self._shape.drafts, first, self.host.drafts, slot, block)

    def verify(self, ids: Sequence[int], lane: int = 0, parents: Parents | None = None) -> NativeRows:
        """Run rows at length, length + 1, ... without committing them."""
        check_chain(parents, "native")
        if not 1 <= len(ids) <= self._shape.verify_rows:
            raise BackendError(f"verify takes 1 to {self._shape.verify_rows} rows, not {len(ids)}")
        self.check_ids(ids)
        self._check_room(lane, len(ids))
        at = self._begin(lane)
        self.gpu.synchronize()
        self.host.ids[: len(ids)] = ids
        self.host.ids[len(ids) : self.graphs[1].verify.most(len(ids))] = ids[-1]
        self.slots.put([at.words])
        self.graphs[1].verify.of(len(ids)).launch()
        self._left(at, at.words.length)
        at.verified = len(ids)
        return NativeRows(self, len(ids), 0, self.host.choices)

    def cycle(self, asked: Asked) -> Cycle:
        """See Backend."""
        (outcome,) = self.cycles([asked])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def cycles(self, asked: Sequence[Asked]) -> list[Outcome]:
        """See Backend. Those of relaxed acceptance are the host's, one by one."""
        if len({one.lane for one in asked}) < len(asked):
            raise BackendError(f"lanes {[one.lane for one in asked]} are asked for together; each can be once")
        for one in asked:
            self.check_ids([one.anchor])
            self._check_room(one.lane, self._shape.verify_rows if one.drafting or one.known else 1)
        widest, found = max(self.graphs), dict[int, Outcome]()  # by lane
        joint = [one for one in asked if not _tolerant(one)]
        parts = [joint[first : first + widest] for first in range(0, len(joint), widest)]
        for part in (*parts, *([one] for one in asked if _tolerant(one))):
            found = {lane: one.on_host() if isinstance(one, Cycle) else one for lane, one in found.items()}
            outcomes = [self._host_cycle(part[0])] if _tolerant(part[0]) else DeviceCycle(self, part).run()
            found |= zip((one.lane for one in part), outcomes, strict=True)
        return [found[one.lane] for one in asked]

    def _host_cycle(self, asked: Asked) -> Outcome:
        outcome = outcome_of(partial(host_cycle, self, asked))
        if isinstance(outcome, BaseException):
            self.lane(asked.lane).verified = None  # nothing of it can be committed
        return outcome

    def copy(self, source: int, target: int) -> None:
        """Copies on the device; see Backend."""
        check_lane(self._shape, target)
        self.flush(source)
        if source != target:
            self._begin(target)
            at, length = self._lanes[source], self.length(source)
            copy_states(self.gpu, self.loaded.common.states, source, target, length)
            self._become(SlotWords(target, length), at.delta)

    def commit(self, rows: int, lane: int = 0, path: Sequence[int] | None = None) -> None:
        """Make the first ``rows`` rows of the last verify or cycle real, as the host has the lane.

        The device has committed all that a cycle found; with fewer ``rows``, the next pass's control block says so.
        """
        at = self.lane(lane)
        check_commit(rows, at.verified, path)
        at.words, at.verified = at.words._replace(length=at.words.length + rows, pending=rows), None

    def flush(self, lane: int = 0) -> None:
        """Replay pending rows into the recurrent state."""
        at = self._begin(lane)
        if at.words.pending:
            self.slots.put([at.words])
            self.graphs[1].flush.launch()
            self._left(at, at.words.length)
        self.gpu.synchronize()

    def snapshot(self, lane: int = 0) -> Snapshot:
        """Flush, then copy the state of both models."""
        self.flush(lane)
        length = self.length(lane)
        arrays = read_states(self.gpu, self.loaded.common.states, lane, length)
        return Snapshot(length, arrays, self._lanes[lane].delta)

    def restore(self, snapshot: Snapshot, lane: int = 0) -> None:
        """Replace the state by a snapshot of the same pair and precision."""
        check_lane(self._shape, lane)
        if snapshot.length > (most := self._shape.max_context):
            raise BackendError(f"the snapshot holds {snapshot.length} tokens, the context only {most}")
        self._begin(lane)
        write_states(self.gpu, self.loaded.common.states, lane, snapshot)
        self._become(SlotWords(lane, snapshot.length), snapshot.delta)

    def close(self) -> None:
        """Free the device. Closing twice does no harm."""
        self._dense.close()
        self.gpu.close()

    def enter(self, number: int) -> None:
        """Use the rows of pass ``number``. Raises BackendError when a later one has replaced them."""
        if number != self.passes:
            raise replaced()
        self.gpu.enter()

    def lane(self, lane: int) -> Lane:
        """The host's side of a lane."""
        check_lane(self._shape, lane)
        return self._lanes[lane]

    def _begin(self, lane: int) -> Lane:
        """A new pass of a lane: what lay open there is dropped."""
        at = self.lane(lane)
        self.gpu.enter()
        self.passes += 1
        at.verified = None
        return at

    def begin_at(self, anchor: int, lane: int, rows: int) -> None:
        """A new pass that drafts from ``anchor``, with room for ``rows``."""
        self.check_ids([anchor])
        self._check_room(lane, rows)
        at = self._begin(lane)
        at.words = at.words._replace(anchor=anchor)
        self.slots.put([at.words])

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise BackendError for an id that no row of the embedding belongs to."""
        for token in (min(ids), max(ids)):
            if not 0 <= token < self._shape.vocab_size:
                raise BackendError(f"token id {token} is outside the vocabulary of {self._shape.vocab_size}")

    def _check_room(self, lane: int, rows: int) -> None:
        """Raise BackendError unless ``rows`` rows fit behind the committed ones."""
        length, most = self.length(lane), self._shape.max_context
        if length + rows > most:
            raise BackendError(f"rows {length}..{length + rows - 1} do not fit the context of {most} tokens")

    def _become(self, words: SlotWords, delta: int = 0) -> None:
        """What the host has of a lane, whose state was replaced."""
        self._lanes[words.lane] = Lane(words, delta=delta)
        self._eyes.shift(words.lane, words.length, delta)

    def _left(self, at: Lane, length: int) -> None:
        """What the pass of slot 0 that was just launched leaves of a lane: pending rows were replayed."""
        at.words = at.words._replace(length=length, pending=0)
        self.slots.note(0, at.words)


def _tolerant(asked: Asked) -> bool:
    """Whether drafts may stand beside other choices."""
    return asked.steering is not None and asked.steering.tolerant
