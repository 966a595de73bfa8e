"""The cycle on the device: propose, verify, accept and commit, of one lane or of several in the slots of each pass.

One graph does it all where logits and sampling alone decide. Where a lane is steered, or none drafts, the passes are
separate, and the host decides between them; the device still accepts and commits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from edge_dflash.backends.cuda.graphs import ByRows
from edge_dflash.backends.cuda.kernels.cycle import Result
from edge_dflash.backends.cuda.rows import NativeRows
from edge_dflash.backends.cuda.slots import IDLE, Lane
from edge_dflash.decode.backend import Asked, Cycle, Outcome
from edge_dflash.decode.controls import Interrupted
from edge_dflash.decode.cycle import drafted
from edge_dflash.decode.sampling import GREEDY, Packed
from edge_dflash.errors import RequestError

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.backend import NativeBackend


@dataclass
class _Part:
    """One lane of the cycle, in its slot."""

    asked: Asked
    at: Lane
    slot: int
    position: int  # of its first draft
    drafts: list[int] = field(default_factory=list)  # decided by the host
    error: BaseException | None = None  # that ended it


class DeviceCycle:
    """One cycle of lanes that fit into a pass."""

    def __init__(self, backend: NativeBackend, asked: Sequence[Asked]) -> None:
        self._backend, self._host, self._chooser = backend, backend.host, backend.chooser
        self._graphs = backend.graphs[min(slots for slots in backend.graphs if slots >= len(asked))]
        self._lanes = backend.slots.arrange([one.lane for one in asked], self._graphs.slots)  # below 0: an idle slot
        self._parts = [
            _Part(one, at := backend.lane(one.lane), self._lanes.index(one.lane), at.words.length + 1, list(one.known))
            for one in asked
        ]
        self._drafting = backend.shape.drafts > 0 and any(one.drafting for one in asked)

    def run(self) -> list[Outcome]:
        """What each lane found, or Interrupted or RequestError of its steering. Nothing of those is to be committed."""
        self._open()
        if self._drafting and all(part.asked.steering is None for part in self._parts):
            whole, rows = self._whole()
            self._invalidate()
            whole.of(rows).launch()
            results = self._host.read(rows := whole.most(rows), self._graphs.slots)
            return [self._cycle_of(part, results[part.slot], results[part.slot].counted, rows) for part in self._parts]
        began = proposed = time.perf_counter()
        if self._drafting:
            self._propose()
            proposed = time.perf_counter()
        if any(part.error is None for part in self._parts):
            rows = self._verify()
            free = self._choose()  # while it runs
        if all(part.error is not None for part in self._parts):
            return [part.error for part in self._parts if part.error is not None]
        self._invalidate()
        (self._graphs.accept if free else self._graphs.choose).of(rows).launch()
        results = self._host.read(rows, self._graphs.slots)
        ended = time.perf_counter()
        timed = [replace(r, propose_seconds=proposed - began, verify_seconds=ended - proposed) for r in results]
        return [part.error or self._cycle_of(part, timed[part.slot], len(part.drafts), rows) for part in self._parts]

    def _open(self) -> None:
        """A new pass of these lanes: what lay open there is dropped."""
        self._backend.gpu.enter()
        self._backend.passes += 1
        words = [IDLE] * len(self._lanes)
        for part in self._parts:
            at = part.at
            at.verified, at.words = None, at.words._replace(anchor=part.asked.anchor)
            words[part.slot] = at.words
        self._backend.slots.put(words)

    def _whole(self) -> tuple[ByRows, int]:
        """The graphs of a whole cycle, told how each lane chooses and how many of the rows count; those rows.

        Where one lane is sampled or wants logits, all choose by their settings.
        """
        most, count = self._backend.shape.drafts, self._graphs.slots
        counts, samplings = [(1, 0.0)] * count, [GREEDY] * count
        for part in self._parts:
            asked = part.asked
            counts[part.slot] = (1 + min(most if asked.drafts is None else asked.drafts, most), asked.threshold)
            samplings[part.slot] = asked.sampling
        by_rows = self._graphs.greedy
        if any(part.asked.sampling.temperature > 0.0 or part.asked.logits for part in self._parts):
            self._chooser.prepare(*samplings)
            by_rows = self._graphs.sampled
        self._host.count(*counts)
        return by_rows, max(rows for rows, _ in counts)

    def _propose(self) -> None:
        """The drafter's pass, and each lane's drafts."""
        self._graphs.propose.launch()
        for part in self._parts:
            if not part.asked.drafting:
                continue
            try:
                part.drafts = drafted(part.asked, self._backend.proposed(part.slot), part.position)
            except (Interrupted, RequestError) as error:
                part.error = error

    def _verify(self) -> int:
        """Enqueue the target's pass over anchor and drafts of each slot, the last id again up to the rows returned."""
        backend, verify, slots = self._backend, self._graphs.verify, self._graphs.slots
        rows = verify.most(1 + max(len(part.drafts) for part in self._parts))
        backend.passes += 1
        backend.gpu.synchronize()
        ids = self._host.ids[: slots * rows].reshape(-1, rows)
        ids[:] = 0
        for part in self._parts:
            own = [part.asked.anchor, *part.drafts]
            backend.check_ids(own)
            ids[part.slot] = own + own[-1:] * (rows - len(own))
        verify.of(rows).launch()
        for part in self._parts:
            part.at.words = part.at.words._replace(pending=0)  # they were replayed
            backend.slots.note(part.slot, part.at.words)
        return rows

    def _choose(self) -> bool:
        """Tell the device how each lane's rows choose; whether all choices are the largest logits.

        Of idle slots, and of lanes that were ended, nothing counts.
        """
        free = True
        for slot, lane in enumerate(self._lanes):
            if lane < 0:
                self._chooser.write(GREEDY, 0, [], slot=slot)
        for part in self._parts:
            masks: Sequence[Packed | None] = [None] * (len(part.drafts) + 1)
            if part.asked.steering is not None and part.error is None:
                try:
                    masks = part.asked.steering.masks(part.drafts)
                except (Interrupted, RequestError) as error:
                    part.error, masks = error, [None]
            self._chooser.write(part.asked.sampling, part.position, masks, slot=part.slot)
            free &= part.asked.sampling.temperature == 0.0 and all(mask is None for mask in masks)
        return free

    def _invalidate(self) -> None:
        """Nothing is known of the slots' control blocks, until it is known what the device committed."""
        self._backend.slots.invalidate(part.slot for part in self._parts)

    def _cycle_of(self, part: _Part, result: Result, drafts: int, rows: int) -> Cycle:
        """Note what the device has committed of a lane; it is real when the backend's ``commit`` has said so."""
        tokens, at, asked = result.choices[: result.accepted + 1], part.at, part.asked
        if self._graphs.forced and part.drafts:  # a grammar goes on behind the drafts that stand
            tokens = (*part.drafts[: result.accepted], tokens[-1])
        count, at.words = len(tokens), at.words._replace(pending=0)
        after = at.words._replace(length=at.words.length + count, pending=count, anchor=tokens[-1])
        self._backend.slots.note(part.slot, after)
        at.verified = count
        propose_seconds = result.propose_seconds if asked.drafting else 0.0
        found = Cycle(tokens, result.accepted, drafts, propose_seconds, result.verify_seconds)
        if not asked.logits:
            return found
        own = NativeRows(self._backend, count, 0, self._host.choices, part.slot, rows)
        return replace(found, logits=own.logits, logprobs=partial(own.logprobs, tokens))
