"""Attention of one layer on the device: geometry, memory sizes and launches of kernels/attend.cu and attend_hopper.cuh.

Rows r of a pass are at positions length + r; ``length`` is read on the device, so that no launch depends on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from edge_dflash.backends.cuda.memory import NULL, DevicePointer, Matrix, aligned
from edge_dflash.board.archs import supports
from edge_dflash.errors import BackendError

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Kernel, Module


_WIDE_THREADS = 256
_KEYS = 128  # of a chunk
_BLOCKS = 128  # that a pass spreads over: one on each multiprocessor of a Hopper


@dataclass(frozen=True)
class Wide:
    """One shape: ``verify_rows`` and ``prefill_rows`` are query rows of one KV head in a tile."""

    kv_heads: int
    head_dim: int
    verify_rows: int
    prefill_rows: int
    kv_rows: int
    bidirectional: bool
    window: int  # 0: none

    def columns(self, prefill: bool) -> int:
        """Query rows of a block: the fewest blocks, then the fewest columns."""
        rows = self.prefill_rows if prefill else self.verify_rows
        return min((32, 64, 96), key=lambda columns: (-(-rows // columns), columns))

    def blocks(self, prefill: bool) -> int:
        """Blocks over the query rows of one KV head."""
        return -(-(self.prefill_rows if prefill else self.verify_rows) // self.columns(prefill))

    @property
    def most(self) -> int:
        """Splits of a KV head that one row sees at most, about; the same in verify and prefill."""
        return max(4, _BLOCKS // (self.kv_heads * self.blocks(False)))

    @cached_property
    def slots(self) -> int:
        """Splits of a KV head in one pass at most: those of one width, or of two that meet at a boundary."""
        ahead = 32  # rows of a block, and what a bidirectional one sees ahead
        boundary = _KEYS * self.most
        top = -(-min(self.kv_rows, boundary) // _KEYS) + self.bidirectional
        if 0 < self.window < boundary:  # of one width
            return min(top, -(-(self.window + 2 * ahead) // _KEYS) + 2)
        span = min(self.kv_rows, self.window or self.kv_rows)
        for step in range(1, span // boundary + 1):
            low = self.most + self.bidirectional
            top = max(top, low + -(-(step * boundary + ahead) // (_KEYS * (step + 1))))
        return top + (2 if self.window else 0)

    def kernel(self, prefill: bool) -> str:
        """Name of the kernel of a pass."""
        name = "attend_wide_prefill" if prefill else "attend_wide_splits"
        return f"{name}_d{self.head_dim}_n{self.columns(prefill)}"

    def shared(self, prefill: bool) -> int:
        """Bytes of shared memory: queries, two tiles of probabilities, three of keys and values, and what is small."""
        n, d = self.columns(prefill), self.head_dim
        return 2 * n * d + 4 * n * _KEYS + 3 * _KEYS * d + 16 * (64 + 2 * 16) + 4 * 15 * n + 256


UNIT = "attend"
CHUNK = 64  # keys
_THREADS, _ATTEND_THREADS = 256, 128  # of prepare and combine; of attend
_BIDIRECTIONAL, _SEQUENTIAL, _GATED = 1, 2, 4
_SPLITS = (
    (512, 64),
    (2048, 128),
    (4096, 256),
    (8192, 512),
)  # below this position, splits of so many keys; beyond, of 1024


def splits(keys: int) -> int:
    """Number of splits that cover positions 0..keys-1 (first_key in the kernel)."""
    count, begin = 0, 0
    for end, width in (*_SPLITS, (max(keys, 8192), 1024)):
        count += max(0, -(-(min(keys, end) - begin) // width))
        begin = end
    return count


@dataclass(frozen=True)
class AttendShape:
    """One attention layer and the passes over it."""

    heads: int
    kv_heads: int
    head_dim: int
    rope_dims: int
    eps: float
    max_context: int  # most committed rows and rows of a block together
    rows: int  # of a verify or propose pass, 1..32
    prefill_rows: int = 0  # most rows of a prefill pass; 0 when there is none
    gated: bool = False
    bidirectional: bool = False
    window: int | None = None
    kv: Literal["fp8", "bfloat16"] = "fp8"

    def __post_init__(self) -> None:
        if self.head_dim not in (64, 128, 256):
            raise BackendError(f"head_dim is {self.head_dim}; the attention kernels take 64, 128 or 256")
        if not 1 <= self.rows <= 32:
            raise BackendError(f"a block has {self.rows} rows; the attention kernels take 1 to 32")
        if self.heads % self.kv_heads or self.rope_dims % 2 or not 0 < self.rope_dims <= self.head_dim:
            raise BackendError(
                f"{self.heads} heads over {self.kv_heads} KV heads with {self.rope_dims} rotated dims of "
                f"{self.head_dim}: heads must be a multiple of KV heads, rotated dims even and at most the head's"
            )

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_rows(self) -> int:
        """Rows of K and of V: a block may reach past the last committed row."""
        return self.max_context + 32

    @property
    def kv_bytes(self) -> int:
        """Bytes of K, and of V: [Hkv, kv_rows, D]."""
        return self.kv_heads * self.kv_rows * self.head_dim * (1 if self.kv == "fp8" else 2)

    @property
    def splits(self) -> int:
        """Splits of the whole context."""
        return splits(self.kv_rows)

    def tile(self, prefill: bool) -> int:
        """Rows of a tile: 16 or 32."""
        return 16 if prefill or self.rows <= 16 else 32

    def tiles(self, prefill: bool) -> int:
        """Row tiles of a pass."""
        return -(-self.prefill_rows // 16) if prefill else 1

    def warp_tiles(self, prefill: bool) -> int:
        """MT: 16-row tiles of a block's query rows. The fewest blocks, then the fewest rows."""
        built = (2, 4) if self.head_dim < 256 else (2, 3) if self.kv == "fp8" else (2,)
        rows = self.group * self.tile(prefill)
        return min(built, key=lambda m: (-(-rows // (16 * m)), m))

    def row_blocks(self, prefill: bool) -> int:
        """Blocks over the query rows of one KV head: neighbours in the grid, which read the same keys at one time."""
        return -(-self.group * self.tile(prefill) // (16 * self.warp_tiles(prefill)))

    def shared_bytes(self, warp_tiles: int) -> int:
        """Dynamic shared memory: queries, a tile of keys and one of values as stored, probabilities, row maxima."""
        rows, width = 16 * warp_tiles, 1 if self.kv == "fp8" else 2
        tiles = 2 * CHUNK * (width * self.head_dim + 16)
        return rows * (2 * self.head_dim + 16) + tiles + rows * (2 * CHUNK + 16) + 16 * rows

    @cached_property
    def wide(self) -> Wide | None:
        """The warpgroup kernels' part, where there are such: Hopper, for this shape."""
        if self.kv != "fp8" or self.head_dim < 128:
            return None
        rows = (self.group * self.tile(prefill=False), self.group * self.tile(prefill=True))
        return Wide(self.kv_heads, self.head_dim, *rows, self.kv_rows, self.bidirectional, self.window or 0)

    @cached_property
    def scratch(self) -> tuple[int, int, int]:
        """Bytes of prepared queries, partial results and their maxima and sums; a pass needs them to itself."""
        queries = partial = sums = 0
        for prefill in (False, True) if self.prefill_rows else (False,):
            tiles, rows = self.tiles(prefill), self.group * self.tile(prefill)
            wide = self.wide.blocks(prefill) * self.wide.columns(prefill) if self.wide else 0
            results = max(16 * self.row_blocks(True) * self.warp_tiles(True), wide)
            if not prefill:
                results = max(self.splits * rows, self.wide.slots * wide if self.wide else 0)
                sums = 8 * self.kv_heads * results
            queries = max(queries, 2 * tiles * self.kv_heads * max(rows, wide) * self.head_dim)
            partial = max(partial, 4 * tiles * self.kv_heads * results * self.head_dim)
        return aligned(queries), aligned(partial), aligned(sums)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch buffer; layers may share one, sized for the largest."""
        return sum(self.scratch)


@dataclass(frozen=True)
class KvMemory:
    """K and V of one layer, the scales (multipliers) of FP8 codes, and the layer's FP32 vectors on the device.

    The scales must be 1 over BF16 keys and values.
    """

    k: DevicePointer  # [Hkv, kv_rows, D] E4M3 codes or BF16
    v: DevicePointer
    k_scale: float
    v_scale: float
    k_norm: DevicePointer  # [D] FP32: w or 1 + w
    q_norm: DevicePointer  # [D] FP32; NULL for a drafter's context
    cosine: DevicePointer  # [kv_rows, rope_dims / 2] FP32
    sine: DevicePointer


class Attention:
    """Loaded kernels for one shape. ``length`` and ``rows`` are control words in device memory."""

    def __init__(self, gpu: Gpu, module: Module, shape: AttendShape) -> None:
        self._gpu, self.shape = gpu, shape
        self._prepare = module.kernel(f"attend_prepare_{self._kv}")
        self._wide = shape.wide if supports(gpu.sm, "wgmma") else None
        self._combine = module.kernel(f"attend_{'wide_combine' if self._wide else f'combine_{self._kv}'}")
        self._attend: dict[bool, Kernel] = {}
        for prefill in (False, True):
            if self._wide:
                self._attend[prefill] = module.kernel(
                    self._wide.kernel(prefill), shared_bytes=self._wide.shared(prefill)
                )
                continue
            m = shape.warp_tiles(prefill)
            name = f"attend_{self._kv}_d{shape.head_dim}_m{m}"
            self._attend[prefill] = module.kernel(name, shared_bytes=shape.shared_bytes(m))

    @property
    def _kv(self) -> str:
        return "fp8" if self.shape.kv == "fp8" else "bf16"

    def append(self, k: Matrix, v: Matrix, memory: KvMemory, length: DevicePointer, rows: DevicePointer = NULL) -> None:
        """``kv_append``: norm, rotate and store K and V [R, Hkv*D] BF16. With ``rows`` (a prefill pass) so many."""
        self._enqueue_prepare(Matrix(NULL, 0), k, v, memory, NULL, length, rows)

    def attend(
        self,
        q: Matrix,
        k: Matrix,
        v: Matrix,
        out: Matrix,
        memory: KvMemory,
        scratch: DevicePointer,
        length: DevicePointer,
        rows: DevicePointer = NULL,
    ) -> None:
        """``attend``: q [R, Hq*D] or [R, Hq*2*D] -> out [R, Hq*D], BF16. With ``rows`` the prefill form."""
        shape, prefill = self.shape, rows != NULL
        q_bytes, partial_bytes, sum_bytes = shape.scratch
        queries = scratch.at(0, q_bytes)
        partial = scratch.at(q_bytes, partial_bytes)
        sums = scratch.at(q_bytes + partial_bytes, sum_bytes)
        self._enqueue_prepare(q, k, v, memory, queries, length, rows)
        most, wide = shape.prefill_rows if prefill else shape.rows, self._wide
        flags = _BIDIRECTIONAL * shape.bidirectional | _SEQUENTIAL * prefill | _GATED * shape.gated
        tile_log2 = shape.tile(prefill).bit_length() - 1
        window = shape.window or 0
        blocks = wide.blocks(prefill) if wide else shape.row_blocks(prefill)
        splits = wide.most if wide else shape.splits
        most_splits = (wide.most,) if wide else ()
        score_scale = memory.k_scale * shape.head_dim**-0.5 * math.log2(math.e)
        self._gpu.launch(
            self._attend[prefill],
            (shape.kv_heads * blocks, 1 if prefill else splits, shape.tiles(prefill)),
            _WIDE_THREADS if wide else _ATTEND_THREADS,
            (
                *(queries, memory.k, memory.v, partial, sums, out.pointer, q.pointer, length, rows),
                *(most, tile_log2, shape.group, shape.kv_heads, blocks, shape.kv_rows, window, flags),
                *(*most_splits, q.stride, out.stride, score_scale, memory.v_scale),
            ),
            shared_bytes=wide.shared(prefill) if wide else shape.shared_bytes(shape.warp_tiles(prefill)),
            overlap=True,
        )
        if prefill:
            return
        rules = (shape.kv_rows, window, flags, *most_splits, q.stride, out.stride, memory.v_scale)
        results = (partial, sums, out.pointer, q.pointer, length, most, tile_log2, shape.group)
        if wide:
            grid = (shape.head_dim // 128 * wide.columns(False) // 8, shape.kv_heads * blocks, 1)
            sizes: tuple[int, ...] = (wide.columns(False), blocks, shape.head_dim)
        else:
            grid = (-(-most * shape.heads * shape.head_dim // 4 // _THREADS), 1, 1)
            sizes = (shape.kv_heads, shape.head_dim)
        self._gpu.launch(self._combine, grid, _THREADS, (*results, *sizes, *rules), overlap=True)

    def _enqueue_prepare(
        self,
        q: Matrix,
        k: Matrix,
        v: Matrix,
        memory: KvMemory,
        queries: DevicePointer,
        length: DevicePointer,
        rows: DevicePointer,
    ) -> None:
        shape, prefill = self.shape, rows != NULL
        heads = 0 if q.pointer == NULL else shape.heads
        most = shape.prefill_rows if prefill else shape.rows
        self._gpu.launch(
            self._prepare,
            (-(-(heads + 2 * shape.kv_heads) // (_THREADS // 32)), most, 1),
            _THREADS,
            (
                *(q.pointer, k.pointer, v.pointer, q.stride, k.stride, v.stride, memory.q_norm, memory.k_norm),
                *(memory.cosine, memory.sine, queries, memory.k, memory.v, length, rows, most, heads),
                *(shape.kv_heads, shape.head_dim, shape.rope_dims // 2, shape.kv_rows),
                *(shape.tile(prefill).bit_length() - 1, shape.head_dim * (2 if shape.gated else 1)),
                self._wide.columns(prefill) if self._wide else 0,
                *(shape.eps, memory.k_scale, memory.v_scale),
            ),
            overlap=True,
        )
