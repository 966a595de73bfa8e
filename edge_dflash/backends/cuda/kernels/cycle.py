"""The frame of a cycle on the device: what a slot is told, what a cycle gives back; launches of kernels/cycle.cu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edge_dflash.backends.cuda.kernels.source import KernelFace, Signature, structure
from edge_dflash.backends.cuda.memory import CONTROL_BYTES, NULL, Array, DevicePointer, Matrix
from edge_dflash.model.ops import Add, Elementwise, SwiGlu

UNIT = "cycle"
ELEMENTWISE: Mapping[type[Elementwise], str] = {SwiGlu: "gate_columns", Add: "add_columns"}
MOST_SLOTS = 8  # of a pass
COUNTED_WORDS = 3  # of a slot: rows asked for, threshold, rows that are sure (Counted of kernels/control.cuh)
RESULT_WORDS = 4 + 32 + 6  # accepted, drafts that counted, two unused, choices of 32 rows, three clocks of 64 bits
_THREADS = 256
_PARTS = 8  # that one launch copies
_NAMES = ("cycle_ids", "cycle_accept", "cycle_set", "copy_columns", *ELEMENTWISE.values(), "stamp")
_SIGNATURES = {name: Signature("cycle.cu", name) for name in _NAMES}
_Parts, _Blocks = structure("cycle.cu", "Parts"), structure("cycle.cu", "Blocks")


class SlotWords(NamedTuple):
    """What the control block of a slot says, or has to say."""

    lane: int  # below 0: idle
    length: int = 0  # committed rows
    pending: int = 0  # of those: rows that are not in the recurrent state
    anchor: int = 0
    rows: int = 0  # of a prefill pass


@dataclass(frozen=True)
class Result:
    """What one cycle read back."""

    accepted: int  # drafts that equal the target's choices
    counted: int  # drafts that might have been
    choices: tuple[int, ...]  # of every row
    propose_seconds: float
    verify_seconds: float

    @classmethod
    def of(cls, words: Array, rows: int) -> Result:
        """From int32 words [RESULT_WORDS]."""
        found: list[int] = words.tolist()
        propose, verify, accept = ((found[i] & 0xFFFFFFFF) | found[i + 1] << 32 for i in (36, 38, 40))
        return cls(found[0], found[1], tuple(found[4 : 4 + rows]), (verify - propose) * 1e-9, (accept - verify) * 1e-9)


class CycleKernels(KernelFace):
    """Loaded kernels. Ids, drafts, choices and control words are int32."""

    _signatures = _SIGNATURES

    def ids(
        self,
        control: DevicePointer,
        ids: DevicePointer,
        rows: int,
        *,
        mask: int = 0,
        drafts: DevicePointer = NULL,
        clock: DevicePointer = NULL,
        slots: int = 1,
        apart: int = 0,
    ) -> None:
        """Ids [slots, rows] = [anchor, drafts...] for verify, or [anchor, mask...] for propose; ``clock`` [1] uint64.

        ``apart``: from a slot's first draft to the next one's.
        """
        given = {"control": control, "drafts": drafts, "ids": ids, "rows": rows, "mask": mask, "clock": clock}
        self._launch("cycle_ids", (slots, 1, 1), 32, **given, apart=apart)

    def accept(
        self,
        drafts: DevicePointer,
        choices: DevicePointer,
        rows: int,
        control: DevicePointer,
        result: DevicePointer,
        clock: DevicePointer,
        pattern: DevicePointer = NULL,
        valid: DevicePointer = NULL,
        *,
        slots: int = 1,
        apart: int = 0,
        valid_apart: int = 0,
    ) -> None:
        """Accept drafts that equal the choices [slots, rows] and commit.

        ``result`` [slots, RESULT_WORDS] may be page-locked memory. ``pattern`` int32: accepted drafts a cycle instead.
        ``valid`` int32: how many of the rows count; null: all. ``apart``, ``valid_apart``: words from a slot's first
        draft, or count, to the next one's.
        """
        given = {"drafts": drafts, "choices": choices, "rows": rows, "control": control, "result": result}
        given |= {"clock": clock, "pattern": pattern, "patterns": pattern.nbytes // 4 if pattern.address else 0}
        self._launch("cycle_accept", (slots, 1, 1), 32, **given, valid=valid, apart=apart, valid_apart=valid_apart)

    def set(self, control: DevicePointer, slots: Mapping[int, SlotWords]) -> None:
        """Write the control words of some slots."""
        each = CONTROL_BYTES // 4
        words = [0] * (MOST_SLOTS * each)
        for slot, (lane, length, pending, anchor, rows) in slots.items():
            words[each * slot : each * slot + 5] = [length, pending, rows, anchor, lane]  # Control
        given = {"blocks": _Blocks.of(words=words), "slots": sum(1 << slot for slot in slots)}
        self._launch("cycle_set", (1, 1, 1), len(words), control=control, **given)

    def copy(self, x: Sequence[Matrix], out: Sequence[Matrix], columns: Sequence[int], rows: int) -> None:
        """out[i] = x[i]; even numbers of columns."""
        for first in range(0, len(x), _PARTS):
            source, target, widths = (every[first : first + _PARTS] for every in (x, out, columns))
            parts = _Parts.of(x=source, out=target, columns=widths)
            self._launch("copy_columns", (rows, len(source), 1), _THREADS, parts=parts)

    def elementwise(
        self, op: type[Elementwise], inputs: Sequence[Matrix], out: Matrix, rows: int, columns: int
    ) -> None:
        """Out = op(inputs)."""
        names = ("gate", "up") if op is SwiGlu else ("a", "b")
        given = dict(zip(names, inputs, strict=True))
        self._launch(ELEMENTWISE[op], (rows, 1, 1), _THREADS, **given, out=out, columns=columns)

    def stamp(self, place: DevicePointer) -> None:
        """The device's clock, in ns, into a uint64."""
        self._launch("stamp", (1, 1, 1), 1, place=place)
