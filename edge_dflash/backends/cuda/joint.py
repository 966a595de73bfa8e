"""Cycles of several lanes in one pass each: one graph where logits and sampling alone decide, else separate passes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.graphs import HostBuffers, JointGraphs
from edge_dflash.backends.cuda.memory import ControlBlock
from edge_dflash.backends.cuda.rows import NativeRows
from edge_dflash.backends.cuda.sample import Chooser
from edge_dflash.backends.cuda.slots import IDLE, Slots
from edge_dflash.backends.cuda.small import Result, SlotWords
from edge_dflash.backends.cuda.states import Lane
from edge_dflash.decode.backend import Asked, Confident, Cycle, Outcome, PairShape
from edge_dflash.decode.controls import Interrupted
from edge_dflash.decode.sampling import GREEDY, Packed, choose
from edge_dflash.decode.walk import confident
from edge_dflash.errors import BackendError, RequestError

Masks = Sequence[Packed | None]


@dataclass
class _Turn:
    """One lane of a joint cycle, in its slot."""

    asked: Asked
    at: Lane
    slot: int
    drafts: list[int] = field(default_factory=list)  # decided by the host
    error: BaseException | None = None  # that ended it


class Together(ABC):
    """The part of :class:`~edge_dflash.backends.cuda.backend.NativeBackend` that runs several lanes in a pass."""

    gpu: Gpu
    chooser: Chooser
    passes: int
    _shape: PairShape
    _host: HostBuffers
    _slots: Slots
    _joint: Mapping[int, JointGraphs]

    def cycles(self, asked: Sequence[Asked]) -> list[Outcome]:
        """A cycle of each of several lanes; see Backend. Those of relaxed acceptance are the host's, one by one."""
        if len({one.lane for one in asked}) < len(asked):
            raise BackendError(f"lanes {[one.lane for one in asked]} are asked for together; each can be once")
        for one in asked:
            self._check_cycle(one)
        widest = max(self._joint, default=1)
        joint = [i for i, one in enumerate(asked) if one.steering is None or not one.steering.tolerant]
        parts = [joint[first : first + widest] for first in range(0, len(joint), widest)]
        parts += [[i] for i in range(len(asked)) if i not in joint]
        found: dict[int, Outcome] = {}
        for number, part in enumerate(parts, 1):
            some = self._some([asked[i] for i in part])
            found |= zip(part, some if number == len(parts) else [_kept(one) for one in some], strict=True)
        return [found[i] for i in range(len(asked))]

    def _some(self, asked: Sequence[Asked]) -> list[Outcome]:
        """Of lanes that fit into one pass."""
        if len(asked) == 1:
            try:
                return [self.cycle(asked[0])]
            except (Interrupted, RequestError) as error:
                self._lane(asked[0].lane).verified = None  # nothing of it can be committed
                return [error]
        graphs = self._joint[min(slots for slots in self._joint if slots >= len(asked))]
        lanes = self._slots.arrange((one.lane for one in asked), graphs.capture.slots)
        turns = [_Turn(one, self._lane(one.lane), lanes.index(one.lane)) for one in asked]
        drafting = self._shape.drafts > 0 and any(one.drafting for one in asked)
        self._open(lanes, turns)
        if drafting and all(one.steering is None for one in asked):
            return self._whole(graphs, turns)
        return self._apart(graphs, turns, drafting)

    def _open(self, lanes: Sequence[int], turns: Sequence[_Turn]) -> None:
        """A new pass of these lanes: what lay open there is dropped."""
        self.gpu.enter()
        self.passes += 1
        for turn in turns:
            at = turn.at
            at.verified, at.wanted = None, ControlBlock(at.wanted.length, at.wanted.pending, turn.asked.anchor)
        words = {turn.slot: SlotWords(turn.asked.lane, turn.at.wanted) for turn in turns}
        self._slots.put([words.get(slot, IDLE) for slot in range(len(lanes))])

    def _whole(self, graphs: JointGraphs, turns: Sequence[_Turn]) -> list[Outcome]:
        """One graph; where one lane is sampled or wants logits, all choose by their settings."""
        slots, most = graphs.capture.slots, self._shape.drafts
        counts, samplings = [(1, 0.0)] * slots, [GREEDY] * slots
        for turn in turns:
            asked = turn.asked
            counts[turn.slot] = (1 + min(most if asked.drafts is None else asked.drafts, most), asked.threshold)
            samplings[turn.slot] = asked.sampling
        by_rows = graphs.cycles.greedy
        if any(turn.asked.sampling.temperature > 0.0 or turn.asked.logits for turn in turns):
            self.chooser.prepare(*samplings)
            by_rows = graphs.cycles.sampled
        self._host.count(*counts)
        rows = max(count for count, _ in counts)
        by_rows.of(rows).launch()
        self._slots.forget(turn.slot for turn in turns)
        results, block = self._host.read(by_rows.most(rows), slots), by_rows.most(rows)
        found: list[Outcome] = []
        for turn in turns:
            result = results[turn.slot]
            if not turn.asked.drafting:
                result = replace(result, propose_seconds=0.0)
            found.append(self._cycle(turn.at, result, turn.asked, result.counted, slot=turn.slot, block=block))
        return found

    def _apart(self, graphs: JointGraphs, turns: Sequence[_Turn], drafting: bool) -> list[Outcome]:
        """Separate passes, between which each lane's steering decides; seconds are the host's."""
        began = time.perf_counter()
        positions = [turn.at.wanted.length + 1 for turn in turns]
        if drafting:
            graphs.propose.launch()
            for turn, position in zip(turns, positions, strict=True):
                self._draft(turn, position)
        proposed = time.perf_counter()
        verify, slots = graphs.verify, graphs.capture.slots
        rows = verify.most(1 + max(len(turn.drafts) for turn in turns))
        self._verify(graphs, turns, rows)
        masks = self._masks(turns)  # while it runs
        for slot in range(slots):
            self.chooser.write(GREEDY, 0, [], slot=slot)  # of idle ones nothing counts
        for turn, position, own in zip(turns, positions, masks, strict=True):
            self.chooser.write(turn.asked.sampling, position, own, slot=turn.slot)
        free = all(turn.asked.sampling.temperature == 0.0 for turn in turns)
        free = free and all(mask is None for own in masks for mask in own)
        (graphs.cycles.accept if free else graphs.cycles.choose).of(rows).launch()
        self._slots.forget(turn.slot for turn in turns)
        results, found = self._host.read(rows, slots), list[Outcome]()
        for turn in turns:
            spent = proposed - began if turn.asked.drafting and drafting else 0.0
            timed = replace(results[turn.slot], propose_seconds=spent, verify_seconds=time.perf_counter() - proposed)
            count, where = len(turn.drafts), (turn.slot, rows)
            found.append(turn.error or self._cycle(turn.at, timed, turn.asked, count, turn.drafts, *where))
        return found

    def _draft(self, turn: _Turn, position: int) -> None:
        """What a lane's drafts are, behind the propose pass."""
        asked = turn.asked
        if not asked.drafting:
            return
        rows = self._proposed(turn.slot)
        try:
            drafts = (
                choose(rows, asked.sampling, position)
                if asked.steering is None
                else asked.steering.drafts(rows, position)
            )
            if asked.threshold and isinstance(rows, Confident):
                drafts = drafts[: confident(rows.confidence(), asked.threshold)]
            turn.drafts = drafts[: asked.drafts]
        except (Interrupted, RequestError) as error:
            turn.error = error

    def _verify(self, graphs: JointGraphs, turns: Sequence[_Turn], rows: int) -> None:
        """Run ``rows`` rows in each slot: the anchor, the drafts, and the last of them again."""
        self.passes += 1
        self.gpu.synchronize()
        ids = self._host.ids[: graphs.capture.slots * rows].reshape(-1, rows)
        ids[:] = 0
        for turn in turns:
            own = [turn.asked.anchor, *turn.drafts]
            self._check_ids(own)
            ids[turn.slot] = own + own[-1:] * (rows - len(own))
        graphs.verify.of(rows).launch()
        for turn in turns:  # pending rows were replayed
            turn.at.wanted = ControlBlock(turn.at.wanted.length, 0, turn.at.wanted.anchor)
            self._slots.left(turn.slot, turn.asked.lane, turn.at.wanted)

    @staticmethod
    def _masks(turns: Sequence[_Turn]) -> list[Masks]:
        """Masks of each lane's rows; one row of a lane that was ended."""
        found: list[Masks] = []
        for turn in turns:
            own: Masks = [None] * (len(turn.drafts) + 1)
            if turn.asked.steering is not None and turn.error is None:
                try:
                    own = turn.asked.steering.masks(turn.drafts)
                except (Interrupted, RequestError) as error:
                    turn.error, own = error, [None]
            found.append(own)
        return found

    @abstractmethod
    def cycle(self, asked: Asked) -> Cycle:
        """The cycle of one lane."""

    @abstractmethod
    def _lane(self, lane: int) -> Lane: ...

    @abstractmethod
    def _check_cycle(self, asked: Asked) -> None:
        """Raise BackendError for a cycle that cannot be run."""

    @abstractmethod
    def _check_ids(self, ids: Sequence[int]) -> None: ...

    @abstractmethod
    def _proposed(self, slot: int) -> NativeRows:
        """Rows of the propose pass that has just been enqueued."""

    @abstractmethod
    def _cycle(
        self,
        lane: Lane,
        result: Result,
        asked: Asked,
        count: int,
        drafts: Sequence[int] = (),
        slot: int = 0,
        block: int = 0,
    ) -> Cycle:
        """Note what the device has committed."""


def _kept(outcome: Outcome) -> Outcome:
    """A cycle whose logits stay when another pass follows."""
    if not isinstance(outcome, Cycle) or outcome.logits is None:
        return outcome
    logits, logprobs = outcome.logits(), outcome.logprobs() if outcome.logprobs else []
    return replace(outcome, logits=lambda: logits, logprobs=lambda: logprobs)
