"""Device memory of sequences: K and V, gated delta states and tapes; and copies of a lane's on the host.

Every array has all lanes, one behind the other. Rows past the committed length are garbage; resetting a sequence zeroes
the recurrent states only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.kernels.attend import AttendShape, KvMemory
from edge_dflash.backends.cuda.kernels.delta import DeltaLayer, DeltaShape
from edge_dflash.backends.cuda.kernels.source import find
from edge_dflash.backends.cuda.memory import Allocator, Array, DevicePointer
from edge_dflash.backends.cuda.rotary import RotaryTables
from edge_dflash.decode.backend import Precision, Snapshot
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Attend, GatedDelta, KvAppend
from edge_dflash.model.program import PairPrograms
from edge_dflash.model.specs import RopeSpec

_Shape = TypeVar("_Shape", AttendShape, DeltaShape)


@dataclass(frozen=True)
class Sizes:
    """What passes there are, and over how many sequences."""

    rows: int  # of a verify pass: the anchor and K drafts
    prefill_rows: int  # most rows of a prefill pass
    max_context: int
    lanes: int = 1
    block: int = 0  # B, of a propose pass; 0: as many as of a verify pass
    slots: int = 1  # lanes that a verify or propose pass runs at once, at most

    @property
    def most_rows(self) -> int:
        """Most rows of a verify or propose pass, of all slots."""
        return self.slots * max(self.rows, self.block)

    def of_pass(self, name: str) -> int:
        """Most rows of the pass "prefill", "verify" or "propose"; of the last two in a slot."""
        return {"prefill": self.prefill_rows, "propose": self.block or self.rows}.get(name, self.rows)


class States:
    """K and V, and gated delta layers, by the state's name."""

    def __init__(
        self,
        programs: PairPrograms,
        precision: Precision,
        sizes: Sizes,
        vector: Callable[[str], Array],
        kv_scale: Callable[[str], tuple[float, float]],
        memory: Allocator,
    ) -> None:
        self._precision, self._sizes, self._memory, self._vector = precision, sizes, memory, vector
        self._rotary: dict[RopeSpec, RotaryTables] = {}
        self.norms: dict[tuple[str, bool], DevicePointer] = {}
        self.shapes: dict[str, AttendShape] = {}
        self.kv: dict[str, KvMemory] = {}
        self.delta_shapes: dict[str, DeltaShape] = {}
        self.delta: dict[str, DeltaLayer] = {}
        for op in (*programs.verify.ops, *programs.propose.ops):
            if isinstance(op, Attend):
                self._add_attention(op, kv_scale(op.state))
            elif isinstance(op, GatedDelta):
                self._add_delta(op)
        orphans = [op.state for op in programs.verify.ops if isinstance(op, KvAppend) and op.state not in self.kv]
        if orphans:
            raise BackendError(f"{orphans[0]} is appended to and never read")

    def norm(self, name: str, *, plus_one: bool) -> DevicePointer:
        """A norm's or a convolution's weight as FP32 on the device: w or 1 + w."""
        key = (name, plus_one)
        if key not in self.norms:
            self.norms[key] = self._memory.put("vectors", self._vector(name) + np.float32(plus_one))
        return self.norms[key]

    @property
    def attention_scratch(self) -> int:
        """Bytes that the attention layers share."""
        return max((shape.scratch_bytes for shape in self.shapes.values()), default=0)

    @property
    def delta_scratch(self) -> tuple[int, int]:
        """Bytes of scratch and of counters that the gated delta layers share."""
        shapes = self.delta_shapes.values()
        return max((s.scratch_bytes for s in shapes), default=0), max((s.counter_bytes for s in shapes), default=0)

    @property
    def rotary(self) -> Sequence[RotaryTables]:
        """Rotary tables."""
        return tuple(self._rotary.values())

    def zero(self, fill: Callable[[DevicePointer], None], lane: int) -> None:
        """Empty a lane's recurrent states."""
        for _, part, _ in _recurrent(self, lane):
            fill(part)

    def _add_attention(self, op: Attend, scales: tuple[float, float]) -> None:
        kv = self._precision.kv
        if kv == "float32":
            raise BackendError("kv is 'float32'; the native backend stores fp8 or bfloat16")
        shape = _shape(AttendShape, self._sizes, op, rope_dims=op.rope.dims, kv=kv)
        if (tables := self._rotary.get(op.rope)) is None:
            tables = self._rotary[op.rope] = RotaryTables(op.rope, shape.kv_rows, shape.lanes, self._memory)
        k_scale, v_scale = scales if kv == "fp8" else (1.0, 1.0)
        self.shapes[op.state] = shape
        self.kv[op.state] = KvMemory(
            k=self._memory.take("kv", shape.lanes * shape.kv_bytes),
            v=self._memory.take("kv", shape.lanes * shape.kv_bytes),
            k_scale=k_scale,
            v_scale=v_scale,
            k_norm=self.norm(op.k_norm, plus_one=op.plus_one),
            q_norm=self.norm(op.q_norm, plus_one=op.plus_one),
            cosine=tables.cosine,
            sine=tables.sine,
            turn_rows=tables.rows,
        )

    def _add_delta(self, op: GatedDelta) -> None:
        shape = _shape(DeltaShape, self._sizes, op)
        tape_u, tape_gates = shape.tape_bytes
        memory, lanes = self._memory, shape.lanes
        self.delta_shapes[op.state] = shape
        self.delta[op.state] = DeltaLayer(
            state=memory.take("gated delta states", lanes * shape.state_bytes),
            history=memory.take("gated delta states", lanes * shape.conv_bytes),
            tape_u=memory.take("tapes", lanes * tape_u),
            tape_g=memory.take("tapes", lanes * tape_gates),
            tape_beta=memory.take("tapes", lanes * tape_gates),
            conv=memory.put("vectors", shape.packed_conv(self._vector(op.conv))),
            a_log=memory.put("vectors", self._vector(op.a_log)),
            dt_bias=memory.put("vectors", self._vector(op.dt_bias)),
            norm=self.norm(op.norm, plus_one=False),
        )


def _shape(kind: type[_Shape], *records: object, **values: Any) -> _Shape:
    """A shape, each field from ``values`` or from the first of ``records`` that has it."""
    return kind(**{each.name: find(each.name, records, values) for each in fields(kind)})


def read_states(gpu: Gpu, states: States, lane: int, length: int) -> dict[str, Array]:
    """Copies of everything that ``length`` committed rows left; nothing may be pending."""
    arrays: dict[str, Array] = {}
    for name, pointer, kv_rows, empty in _kv(states, lane, length):
        rows = [gpu.read(pointer.at(*part), empty.shape[::2], empty.dtype) for part in _heads(empty, kv_rows)]
        arrays[name] = np.ascontiguousarray(np.stack(rows, axis=1)) if rows else empty
    for name, pointer, empty in _recurrent(states, lane):
        arrays[name] = gpu.read(pointer, empty.shape, empty.dtype)
    return arrays


def write_states(gpu: Gpu, states: States, lane: int, snapshot: Snapshot) -> None:
    """Put a snapshot's arrays back. Raises BackendError, before anything is written, when it is of another pair."""
    length = snapshot.length
    wanted = {name: empty for name, _, _, empty in _kv(states, lane, length)}
    wanted |= {name: empty for name, _, empty in _recurrent(states, lane)}
    snapshot.check_like(wanted)
    for name, pointer, kv_rows, empty in _kv(states, lane, length):
        for head, part in enumerate(_heads(empty, kv_rows)):
            gpu.write(pointer.at(*part), np.ascontiguousarray(snapshot.arrays[name][:, head]))
    for name, pointer, _ in _recurrent(states, lane):
        gpu.write(pointer, np.ascontiguousarray(snapshot.arrays[name]))


def copy_states(gpu: Gpu, states: States, source: int, target: int, length: int) -> None:
    """Enqueue copies of everything that ``length`` committed rows left; nothing may be pending."""
    pairs = zip(_kv(states, source, length), _kv(states, target, length), strict=True)
    for (_, ours, kv_rows, empty), (_, theirs, _, _) in pairs:
        row = empty.shape[2] * empty.itemsize
        gpu.copy(ours, theirs, empty.shape[1], kv_rows * row, length * row)
    for (_, ours, _), (_, theirs, _) in zip(_recurrent(states, source), _recurrent(states, target), strict=True):
        gpu.copy(ours, theirs, 1, ours.nbytes, ours.nbytes)


def _kv(states: States, lane: int, length: int) -> Iterator[tuple[str, DevicePointer, int, Array]]:
    """Name, memory, rows of the memory, and an array of the stored shape and type."""
    for name, memory in states.kv.items():
        shape = states.shapes[name]
        k, v = (array.at(lane * shape.kv_bytes, shape.kv_bytes) for array in (memory.k, memory.v))
        empty = np.empty((length, shape.kv_heads, shape.head_dim), np.uint8 if shape.kv == "fp8" else np.int16)
        yield f"{name}.k", k, shape.kv_rows, empty
        yield f"{name}.v", v, shape.kv_rows, empty


def _heads(array: Array, kv_rows: int) -> list[tuple[int, int]]:
    """Offset and bytes of each head's rows in memory [Hkv, kv_rows, D]."""
    length, heads, dim = array.shape
    row = dim * array.itemsize
    return [(head * kv_rows * row, length * row) for head in range(heads)] if length else []


def _recurrent(states: States, lane: int) -> Iterator[tuple[str, DevicePointer, Array]]:
    for name, layer in states.delta.items():
        s = states.delta_shapes[name]
        state = layer.state.at(lane * s.state_bytes, s.state_bytes)
        history = layer.history.at(lane * s.conv_bytes, s.conv_bytes)
        yield f"{name}.state", state, np.empty((s.value_heads, s.key_dim, s.value_dim), np.float32)
        yield f"{name}.conv", history, np.empty((s.conv_kernel - 1, s.conv_channels), np.uint16)
