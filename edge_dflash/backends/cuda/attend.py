"""Attention of one layer on the device: geometry, memory sizes and launches of kernels/attend.cu and attend_hopper.cuh.

Row r of a slot is at position length + r; ``length`` is read on the device, so that no launch depends on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from edge_dflash.backends.cuda.append import Appends
from edge_dflash.backends.cuda.memory import DevicePointer, Matrix, Words, aligned
from edge_dflash.board.archs import supports
from edge_dflash.errors import BackendError

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Kernel, Module
    from edge_dflash.backends.cuda.states import KvMemory

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

    def kernel(self, prefill: bool, several: bool = False) -> str:
        """Name of the kernel of a pass, or of a pass of several slots."""
        name = "attend_wide_prefill" if prefill else "attend_wide_slots" if several else "attend_wide_splits"
        return f"{name}_d{self.head_dim}_n{self.columns(prefill)}"

    def shared(self, prefill: bool) -> int:
        """Bytes of shared memory: queries, two tiles of probabilities, three of keys and values, and what is small."""
        n, d = self.columns(prefill), self.head_dim
        return 2 * n * d + 4 * n * _KEYS + 3 * _KEYS * d + 16 * (64 + 2 * 16) + 4 * 15 * n + 256


UNIT = "attend"
CHUNK = 64  # keys
_THREADS, _ATTEND_THREADS = 256, 128  # of prepare and combine; of attend
_BIDIRECTIONAL, _SEQUENTIAL, _GATED = 1, 2, 4
_SPLITS = ((512, 64), (2048, 128), (4096, 256), (8192, 512))  # below a position, splits of so many keys; else 1024


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
    prefill_rows: int = 0  # most rows of a prefill pass; 0: decode only
    gated: bool = False
    bidirectional: bool = False
    window: int | None = None
    kv: Literal["fp8", "bfloat16"] = "fp8"
    lanes: int = 1  # of the memory; most slots of a verify or propose pass

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
        """Bytes of K, and of V, of a lane: [Hkv, kv_rows, D]."""
        return self.kv_heads * self.kv_rows * self.head_dim * (1 if self.kv == "fp8" else 2)

    @property
    def splits(self) -> int:
        """Splits of the whole context."""
        return splits(self.kv_rows)

    def tile(self, prefill: bool) -> int:
        """Rows of a tile: 16 or 32."""
        return 16 if prefill or self.rows <= 16 else 32

    def tiles(self, prefill: bool) -> int:
        """Row tiles of a pass at most: of other passes than prefill one in each slot."""
        return -(-self.prefill_rows // 16) if prefill else self.lanes

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
                sums = 8 * tiles * self.kv_heads * results
            queries = max(queries, 2 * tiles * self.kv_heads * max(rows, wide) * self.head_dim)
            partial = max(partial, 4 * tiles * self.kv_heads * results * self.head_dim)
        return aligned(queries), aligned(partial), aligned(sums)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch buffer; layers may share one, sized for the largest."""
        return sum(self.scratch)


@dataclass(frozen=True)
class AttendTensors:
    """What a pass reads and writes, BF16."""

    q: Matrix  # [R, Hq*D] or, gated, [R, Hq*2*D]
    k: Matrix  # [R, Hkv*D]
    v: Matrix  # [R, Hkv*D]
    out: Matrix  # [R, Hq*D]


@dataclass(frozen=True)
class _Form:
    """The launch of a verify or of a prefill pass."""

    kernels: list[Kernel]  # of one slot, of several
    threads: int
    shared_bytes: int
    rows: int  # most of the pass
    tile: int  # rows of a tile
    blocks: int  # over the query rows of one KV head
    splits: int
    columns: int  # query rows of a block of the warpgroup kernels; 0: another kernel


class Attention:
    """Loaded kernels for one shape."""

    def __init__(self, gpu: Gpu, module: Module, shape: AttendShape) -> None:
        self._gpu, self.shape = gpu, shape
        self._wide = shape.wide if supports(gpu.sm, "wgmma") else None
        kv = "fp8" if shape.kv == "fp8" else "bf16"
        self.append = Appends(gpu, module, shape).run
        self._prepare = module.kernel(f"attend_prepare_{kv}")
        names = ("attend_wide_combine", "attend_wide_combine_slots") if self._wide else (f"attend_combine_{kv}",) * 2
        self._combine = [module.kernel(name) for name in names]  # of one slot, of several
        self._forms = {prefill: self._form(module, kv, prefill) for prefill in (False, True)}

    def _form(self, module: Module, kv: str, prefill: bool) -> _Form:
        shape, wide = self.shape, self._wide
        rows = shape.prefill_rows if prefill else shape.rows
        if wide:
            names, shared = [wide.kernel(prefill, several) for several in (False, True)], wide.shared(prefill)
            threads, blocks, splits, columns = _WIDE_THREADS, wide.blocks(prefill), wide.most, wide.columns(prefill)
        else:
            m = shape.warp_tiles(prefill)
            names, shared = [f"attend_{kv}_d{shape.head_dim}_m{m}"] * 2, shape.shared_bytes(m)
            threads, blocks, splits, columns = _ATTEND_THREADS, shape.row_blocks(prefill), shape.splits, 0
        kernels = [module.kernel(name, shared_bytes=shared) for name in names]
        return _Form(kernels, threads, shared, rows, shape.tile(prefill), blocks, 1 if prefill else splits, columns)

    def attend(self, x: AttendTensors, memory: KvMemory, scratch: DevicePointer, words: Words) -> None:
        """``attend``; ``scratch`` has the shape's ``scratch_bytes``. Rows of idle slots become zeros."""
        shape, form = self.shape, self._forms[words.prefill]
        pass_rows = words.block or form.rows
        q_bytes, partial_bytes, sum_bytes = shape.scratch
        queries, partial = scratch.at(0, q_bytes), scratch.at(q_bytes, partial_bytes)
        sums = scratch.at(q_bytes + partial_bytes, sum_bytes)
        self._prepare_rows(x, memory, queries, words)
        flags = _BIDIRECTIONAL * shape.bidirectional | _SEQUENTIAL * words.prefill | _GATED * shape.gated
        tile_log2, window = form.tile.bit_length() - 1, shape.window or 0
        strides = (*((self._wide.most,) if self._wide else ()), x.q.stride, x.out.stride)
        score_scale = memory.k_scale * shape.head_dim**-0.5 * math.log2(math.e)
        turns = (1, shape.tiles(True)) if words.prefill else (form.splits, words.slots)
        if self._wide and not words.prefill:  # the live splits of all slots are the first blocks
            turns = (words.slots, max(1, form.splits // words.slots))
        self._gpu.launch(
            form.kernels[words.slots > 1],
            (shape.kv_heads * form.blocks, *turns),
            form.threads,
            (
                *(queries, memory.k, memory.v, partial, sums, x.out.pointer, x.q.pointer, words.control, words.rows),
                *(pass_rows, tile_log2, shape.group, shape.kv_heads, form.blocks, shape.kv_rows, window, flags),
                *(*strides, score_scale, memory.v_scale),
            ),
            shared_bytes=form.shared_bytes,
            overlap=True,
        )
        if words.prefill:
            return
        if form.columns:
            grid = (shape.head_dim // 128 * form.columns // 8, shape.kv_heads * form.blocks, words.slots)
            sizes: tuple[int, ...] = (form.columns, form.blocks, shape.head_dim)
        else:
            grid = (-(-pass_rows * shape.heads * shape.head_dim // 4 // _THREADS), 1, words.slots)
            sizes = (shape.kv_heads, shape.head_dim)
        results = (partial, sums, x.out.pointer, x.q.pointer, words.control, pass_rows, tile_log2, shape.group)
        rules = (shape.kv_rows, window, flags, *strides, memory.v_scale)
        self._gpu.launch(self._combine[words.slots > 1], grid, _THREADS, (*results, *sizes, *rules), overlap=True)

    def _prepare_rows(self, x: AttendTensors, memory: KvMemory, queries: DevicePointer, words: Words) -> None:
        """Norm, rotate and store keys and values, and prepare the queries."""
        shape, form = self.shape, self._forms[words.prefill]
        self._gpu.launch(
            self._prepare,
            (-(-(shape.heads + 2 * shape.kv_heads) // (_THREADS // 32)), words.block or form.rows, words.slots),
            _THREADS,
            (
                *(x.q.pointer, x.k.pointer, x.v.pointer, x.q.stride, x.k.stride, x.v.stride),
                *(memory.q_norm, memory.k_norm, memory.cosine, memory.sine, queries, memory.k, memory.v),
                *(words.control, words.rows, words.block or form.rows, shape.heads, shape.kv_heads, shape.head_dim),
                *(shape.rope_dims // 2, shape.kv_rows, form.tile.bit_length() - 1, (1 + shape.gated) * shape.head_dim),
                *(form.columns, shape.eps, memory.k_scale, memory.v_scale, memory.turn_rows),
            ),
            overlap=True,
        )
