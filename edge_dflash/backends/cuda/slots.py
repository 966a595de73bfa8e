"""The lanes as the host has them, and which lane each slot of a pass works on, as the device was told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_dflash.backends.cuda.kernels.cycle import CycleKernels, SlotWords
from edge_dflash.backends.cuda.memory import DevicePointer

IDLE = SlotWords(-1)


@dataclass
class Lane:
    """The host's side of one sequence."""

    words: SlotWords  # what the next pass has to find
    verified: int | None = None  # rows of the last verify, until they are committed
    delta: int = 0  # position minus index of the tokens behind the committed ones


class Slots:
    """The control blocks. What a block says of a lane's sequence is true or not, whoever used the slot before."""

    def __init__(self, kernels: CycleKernels, control: DevicePointer, count: int) -> None:
        self._kernels, self._control = kernels, control
        self._known: list[SlotWords | None] = [None] * count  # what the device has; None: nothing is known

    def arrange(self, lanes: Iterable[int], count: int) -> list[int]:
        """The lane of each of the first ``count`` slots, below 0: idle; lanes stay where they were if they can."""
        wanted, found = list(lanes), [IDLE.lane] * count
        for slot, words in enumerate(self._known[:count]):
            if words is not None and words.lane in wanted:
                found[slot] = words.lane
                wanted.remove(words.lane)
        for lane in wanted:
            found[found.index(IDLE.lane)] = lane
        return found

    def put(self, slots: Sequence[SlotWords]) -> None:
        """Let slots 0, 1, ... have these words: one launch, if the device has others."""
        changed = {slot: words for slot, words in enumerate(slots) if words.rows or words != self._known[slot]}
        if changed:
            self._kernels.set(self._control, changed)
            for slot, words in changed.items():
                self._known[slot] = words._replace(rows=0)

    def note(self, slot: int, words: SlotWords) -> None:
        """What a pass or cycle of a lane has left in a slot."""
        self._known[slot] = words

    def invalidate(self, slots: Iterable[int]) -> None:
        """Nothing is known of these slots, until it is known what a cycle has committed."""
        for slot in slots:
            self._known[slot] = None
