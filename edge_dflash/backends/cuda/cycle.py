"""The frame of a cycle on the device, and its launches: kernels/cycle.cu."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_dflash.backends.cuda.driver import Argument, DevicePointer, Gpu, Module
from edge_dflash.backends.cuda.memory import NULL, Array, Matrix

UNIT = "cycle"
CLOCK_BYTES = 16  # of propose and of verify, ns
RESULT_WORDS = 4 + 32 + 6  # accepted, cycles, two unused, choices of up to 32 rows, three clocks of 64 bits
_THREADS = 256


@dataclass(frozen=True)
class Result:
    """What one cycle read back."""

    accepted: int  # drafts that equal the target's choices
    choices: tuple[int, ...]  # of every row
    propose_seconds: float
    verify_seconds: float

    @classmethod
    def of(cls, words: Array, rows: int) -> Result:
        """From int32 words [RESULT_WORDS]."""
        propose, verify, accept = (int(t) for t in np.ascontiguousarray(words[36:]).view(np.uint64))
        return cls(
            int(words[0]), tuple(words[4 : 4 + rows].tolist()), (verify - propose) * 1e-9, (accept - verify) * 1e-9
        )


class CycleKernels:
    """Loaded kernels. Ids, drafts, choices and control words are int32."""

    def __init__(self, gpu: Gpu, module: Module) -> None:
        self._gpu = gpu
        names = ("cycle_ids", "cycle_accept", "cycle_set", "copy_columns", "gate_columns", "add_columns", "stamp")
        self._kernels = {name: module.kernel(name) for name in names}

    def ids(
        self,
        control: DevicePointer,
        ids: DevicePointer,
        rows: int,
        *,
        mask: int = 0,
        drafts: DevicePointer = NULL,
        clock: DevicePointer = NULL,
    ) -> None:
        """Ids = [anchor, drafts...] for verify, or [anchor, mask...] for propose; ``clock`` [1] uint64."""
        self._launch("cycle_ids", 1, 32, control, drafts, ids, rows, mask, clock)

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
    ) -> None:
        """Accept drafts that equal the choices and commit; ``result`` [RESULT_WORDS].

        ``pattern`` int32: accepted drafts a cycle instead. ``valid`` int32: how many of the rows count; null: all.
        """
        forced = pattern.nbytes // 4 if pattern.address else 0
        self._launch("cycle_accept", 1, 32, drafts, choices, rows, control, result, clock, pattern, forced, valid)

    def set(self, control: DevicePointer, *, length: int, pending: int, rows: int = 0, anchor: int = 0) -> None:
        """Write the control words."""
        self._launch("cycle_set", 1, 32, control, length, pending, rows, anchor)

    def copy(self, x: Matrix, out: Matrix, rows: int, columns: int) -> None:
        """Out = x; an even number of columns."""
        self._launch("copy_columns", rows, _THREADS, x.pointer, out.pointer, columns, x.stride, out.stride)

    def gate(self, gate: Matrix, up: Matrix, out: Matrix, rows: int, columns: int) -> None:
        """``swiglu``."""
        arguments = (gate.pointer, up.pointer, out.pointer, columns, gate.stride, up.stride, out.stride)
        self._launch("gate_columns", rows, _THREADS, *arguments)

    def add(self, a: Matrix, b: Matrix, out: Matrix, rows: int, columns: int) -> None:
        """``add``."""
        arguments = (a.pointer, b.pointer, out.pointer, columns, a.stride, b.stride, out.stride)
        self._launch("add_columns", rows, _THREADS, *arguments)

    def stamp(self, place: DevicePointer) -> None:
        """The device's clock, in ns, into a uint64."""
        self._launch("stamp", 1, 1, place)

    def _launch(self, name: str, blocks: int, threads: int, *arguments: Argument) -> None:
        self._gpu.launch(self._kernels[name], (blocks, 1, 1), threads, arguments, overlap=True)
