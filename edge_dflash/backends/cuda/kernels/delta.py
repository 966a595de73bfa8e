"""The gated delta layer on the device: geometry, memory sizes and launches of kernels/delta.cu.

S is [Hv, Dk, Dv] FP32, value dims contiguous. A prefill pass is three kernels; verify, plain decoding and flush are
one where the device has clusters and the shape is the one built for them, the same three elsewhere. Both give the same
bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.kernels.source import Signature
from edge_dflash.backends.cuda.kernels.splits import block_shared
from edge_dflash.backends.cuda.memory import EMPTY, DevicePointer, Matrix, Words, aligned
from edge_dflash.board.archs import supports
from edge_dflash.errors import BackendError
from edge_dflash.model.program import DeltaState

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Kernel, Module

UNIT = "delta"
TAPS = 4  # longest convolution of the kernels
_PREPARE_WARPS, _PREPARE_ROWS, _NORM_ROWS = 8, 4, 4
# Of a block of the recurrence: rows at a time, threads, columns of S, parts of an output.
_STAGE, _THREADS, _COLUMNS, _PARTS = 16, 128, 16, 8
_CLUSTER, _CLUSTER_ROWS, _CLUSTER_DIM = 2, 16, 128  # blocks of a head; most rows and dims of its kernel
_CLUSTER_THREADS, _CLUSTER_SHARED = (288, 256), (98512, 70864)  # of its two kernels: see ``crowded``
_RESERVED = 1024  # bytes of shared memory that a block takes besides its own, of which one block may have all but these
_PREPARE, _RECURRENCE, _NORM, _VERIFY = (
    Signature("delta.cu", name) for name in ("delta_prepare", "RECURRENCE", "delta_norm", "delta_verify")
)


@dataclass(frozen=True)
class DeltaShape(DeltaState):
    """One gated delta layer and the passes over it."""

    eps: float
    rows: int  # of a verify pass: most rows of the tape
    prefill_rows: int = 0  # most rows of a prefill pass; 0: decode only
    lanes: int = 1  # of the memory; most slots of a verify pass

    def __post_init__(self) -> None:
        for name, dim in (("key_dim", self.key_dim), ("value_dim", self.value_dim)):
            if dim not in (32, 64, 128):
                raise BackendError(f"{name} is {dim}; the gated delta kernels take 32, 64 or 128")
        if not 2 <= self.conv_kernel <= TAPS or self.value_heads % self.key_heads:
            raise BackendError(
                f"conv_kernel is {self.conv_kernel}, value heads {self.value_heads}, key heads {self.key_heads}; "
                f"the gated delta kernels take 2 to {TAPS} taps and a multiple of key heads"
            )

    @property
    def tape_bytes(self) -> tuple[int, int]:
        """Bytes of a lane: u [rows, C] BF16, and g (and beta) [rows, Hv] FP32."""
        return 2 * self.rows * self.conv_channels, 4 * self.rows * self.value_heads

    def most_rows(self, prefill: bool) -> int:
        """Most pending and own rows of a slot, in whole stages of the recurrence."""
        return -(-(self.rows + (self.prefill_rows if prefill else self.rows)) // _STAGE) * _STAGE

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch buffer: of a prefill, or of as many slots as there are lanes. Layers may share one."""
        row = 4 * (2 * self.value_heads * self.value_dim + 2 * self.key_heads * self.key_dim + 4 * self.value_heads)
        return aligned(row * max(self.most_rows(True), self.lanes * self.most_rows(False)))

    @property
    def counter_bytes(self) -> int:
        """Bytes of the slots' arrival counters; zero them once, every pass leaves them zero. Layers may share them."""
        return 4 * self.key_heads * self.lanes

    @property
    def clusters(self) -> bool:
        """Whether a verify or flush of this shape can be one kernel, on a device that has clusters (SM90 and later)."""
        dims = (self.key_dim, self.value_dim, self.conv_kernel)
        return dims == (_CLUSTER_DIM, _CLUSTER_DIM, TAPS) and self.rows <= _CLUSTER_ROWS

    def verify_shared(self, sm: int, sm_count: int, slots: int = 1) -> int:
        """Shared memory of a verify's block."""
        nbytes = _CLUSTER_SHARED[self.crowded(sm, sm_count, slots)]
        return _spread(nbytes, self.value_heads * _CLUSTER * slots, sm, sm_count)

    def crowded(self, sm: int, sm_count: int, slots: int) -> bool:
        """Whether a verify's blocks are those of which a multiprocessor has three, not two: where it is faster."""
        share = -(-self.value_heads * _CLUSTER * slots // sm_count)
        return supports(sm, "wgmma") and slots > 1 and (share == 3 or share > 4)

    def recurrence_shared(self, sm: int, sm_count: int, slots: int = 1) -> int:
        """Shared memory of a block of the recurrence: two stages and parts of the outputs of one."""
        stage = 4 * _STAGE * 2 * self.key_dim + (_STAGE + 1) * (4 * _COLUMNS + 16)
        parts = (_STAGE + 1) * 4 * _PARTS * (_COLUMNS + 4)
        return _spread(2 * stage + parts, self.value_heads * (self.value_dim // _COLUMNS) * slots, sm, sm_count)

    def packed_conv(self, conv: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Convolution weight [C, K] as the kernels read it: [TAPS, C], leading zeros for a shorter kernel."""
        packed = np.zeros((TAPS, self.conv_channels), np.float32)
        packed[TAPS - self.conv_kernel :] = conv.reshape(self.conv_channels, self.conv_kernel).T
        return packed


def _spread(nbytes: int, blocks: int, sm: int, sm_count: int) -> int:
    """Shared memory of a block that uses ``nbytes``: so much that no multiprocessor has more blocks than its share.

    Blocks that start while another kernel ends would otherwise crowd where it ended first, at half the speed.
    """
    room, share = block_shared(sm), -(-blocks // sm_count)
    return min(max(nbytes, (room + _RESERVED) // (share + 1) - _RESERVED + 16), room)


@dataclass(frozen=True)
class DeltaLayer:
    """State of one layer, and its FP32 parameters, on the device."""

    state: DevicePointer  # S [lanes, Hv, Dk, Dv] FP32
    history: DevicePointer  # [lanes, K-1, C] BF16, oldest first
    tape_u: DevicePointer  # [lanes, rows, C] BF16
    tape_g: DevicePointer  # [lanes, rows, Hv] FP32, log decay
    tape_beta: DevicePointer  # [lanes, rows, Hv] FP32
    conv: DevicePointer  # packed_conv
    a_log: DevicePointer  # [Hv]
    dt_bias: DevicePointer  # [Hv]
    norm: DevicePointer  # [Dv]


@dataclass(frozen=True)
class DeltaTensors:
    """What a pass reads and writes: BF16, row strides multiples of 4. Empty in a flush."""

    qkv: Matrix = EMPTY  # [R, C]
    z: Matrix = EMPTY  # [R, Hv*Dv]
    a: Matrix = EMPTY  # [R, Hv]
    b: Matrix = EMPTY  # [R, Hv]
    out: Matrix = EMPTY  # [R, Hv*Dv]


@dataclass(frozen=True)
class DeltaScratch:
    """Memory that layers may share: ``scratch_bytes`` and ``counter_bytes`` of their shapes."""

    floats: DevicePointer
    counters: DevicePointer  # zero between passes


class DeltaKernels:
    """Loaded kernels for one shape.

    Between two passes of one layer at least one other kernel must run that waits before it triggers (any of Small):
    S and the tape are read before the kernel right before has ended. ``clusters`` False keeps to three kernels.
    """

    def __init__(self, gpu: Gpu, module: Module, shape: DeltaShape, *, clusters: bool = True) -> None:
        self._gpu, self.shape = gpu, shape
        self.clusters = clusters and shape.clusters and supports(gpu.sm, "clusters")
        self._prepare, self._norm = module.kernel("delta_prepare"), module.kernel("delta_norm")
        slots = range(1, shape.lanes + 1)
        self._shared = [shape.recurrence_shared(gpu.sm, gpu.sm_count, n) for n in slots]
        self._recurrence = module.kernel(f"delta_recurrence_k{shape.key_dim}", shared_bytes=max(self._shared))
        self._verify_shared = [shape.verify_shared(gpu.sm, gpu.sm_count, n) for n in slots]
        self._crowded = [shape.crowded(gpu.sm, gpu.sm_count, n) for n in slots]
        self._verify: dict[bool, Kernel] = {}  # by ``crowded``
        for crowded in set(self._crowded) if self.clusters else ():
            name = "delta_verify_crowded" if crowded else "delta_verify"
            shared = [n for n, c in zip(self._verify_shared, self._crowded, strict=True) if c == crowded]
            self._verify[crowded] = module.kernel(name, shared_bytes=max(shared))
        self._sizes = {
            "lanes": shape.lanes,
            "tape_rows": shape.rows,
            "hk": shape.key_heads,
            "hv": shape.value_heads,
            "dk": shape.key_dim,
            "dv": shape.value_dim,
            "taps": shape.conv_kernel,
            "eps": shape.eps,
        }

    def run(self, tensors: DeltaTensors, layer: DeltaLayer, scratch: DeltaScratch, words: Words) -> None:
        """One pass, which first replays pending tape rows into S. Its own rows go to the tape, or to S in prefill.

        Rows of idle slots become zeros. The caller resets ``pending`` after the last layer.
        """
        own = self.shape.prefill_rows if words.prefill else words.block or self.shape.rows
        self._run(tensors, layer, scratch, words, own)

    def flush(self, layer: DeltaLayer, scratch: DeltaScratch, words: Words) -> None:
        """Replay pending rows of slot 0 without own rows. The caller resets ``pending`` after the last layer."""
        self._run(DeltaTensors(), layer, scratch, words, 0)

    def _run(self, x: DeltaTensors, layer: DeltaLayer, scratch: DeltaScratch, words: Words, own: int) -> None:
        if words.prefill or not self._verify:
            self._three(x, layer, scratch.floats, words, own)
            return
        crowded, shared = self._crowded[words.slots - 1], self._verify_shared[words.slots - 1]
        kernel, grid = self._verify[crowded], (self.shape.value_heads, _CLUSTER, words.slots)
        what = _VERIFY(x, layer, words, **self._sizes, own=own, arrived=scratch.counters)
        self._gpu.launch(kernel, grid, _CLUSTER_THREADS[crowded], what, shared_bytes=shared, overlap=True)

    def _three(self, x: DeltaTensors, layer: DeltaLayer, scratch: DevicePointer, words: Words, own: int) -> None:
        s, warps, given = self.shape, _PREPARE_WARPS, self._sizes | {"rows": own, "scratch": scratch}
        given |= {"most_rows": s.most_rows(words.prefill), "commits": int(words.prefill)}
        heads, slots = 2 * s.key_heads + s.value_heads, words.slots
        grid = -(-heads // warps), -(-(s.rows + own) // _PREPARE_ROWS), slots
        self._gpu.launch(self._prepare, grid, warps * 32, _PREPARE(x, layer, words, **given), overlap=True)
        grid, what, shared = (s.value_heads, s.value_dim // _COLUMNS, slots), (x, layer, words), self._shared[slots - 1]
        self._gpu.launch(
            self._recurrence, grid, _THREADS, _RECURRENCE(*what, **given), shared_bytes=shared, overlap=True
        )
        if own:
            grid = -(-s.value_heads // warps), -(-own // _NORM_ROWS), slots
            self._gpu.launch(self._norm, grid, warps * 32, _NORM(x, layer, words, **given), overlap=True)
