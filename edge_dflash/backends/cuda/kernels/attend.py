"""Attention of one layer on the device: geometry, memory sizes and launches of kernels/attend.cu and attend_hopper.cuh.

Row r of a slot is at position length + r; ``length`` is read on the device, so that no launch depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from edge_dflash.backends.cuda.kernels.source import Signature, structure
from edge_dflash.backends.cuda.memory import DevicePointer, Matrix, Words, aligned
from edge_dflash.board.archs import supports
from edge_dflash.errors import BackendError

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Kernel, Module

UNIT = "attend"
CHUNK = 64  # keys
_THREADS, _ATTEND_THREADS, _WIDE_THREADS = 256, 128, 256  # of prepare, append and combine; of attend
_KEYS = 128  # of a chunk of the warpgroup kernels
_BLOCKS = 128  # that a pass of theirs spreads over: one on each multiprocessor of a Hopper
_LAYERS = 8  # of one append
_BIDIRECTIONAL, _SEQUENTIAL, _GATED = 1, 2, 4
_SPLITS = ((512, 64), (2048, 128), (4096, 256), (8192, 512))  # below a position, splits of so many keys; else 1024
_PREPARE, _APPEND, _ATTEND, _COMBINE = (
    Signature("attend.cu", macro) for macro in ("PREPARE", "APPEND", "ATTEND", "COMBINE")
)
_WIDE_ATTEND, _WIDE_COMBINE = (Signature("attend_hopper.cuh", macro) for macro in ("WIDE_KERNEL", "WIDE_COMBINE"))
_Appended, _Layers = structure("attend.cu", "Appended"), structure("attend.cu", "AppendedLayers")


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
class KvMemory:
    """K and V of one layer, scales (multipliers) of FP8 codes, and the layer's FP32 vectors on the device.

    The scales must be 1 over BF16 keys and values.
    """

    k: DevicePointer  # [lanes, Hkv, kv_rows, D] E4M3 codes or BF16
    v: DevicePointer
    k_scale: float
    v_scale: float
    k_norm: DevicePointer  # [D] FP32: w or 1 + w
    q_norm: DevicePointer  # [D] FP32; NULL for a drafter's context
    cosine: DevicePointer  # [kv_rows, rope_dims / 2] FP32, or one such table per lane
    sine: DevicePointer
    turn_rows: int = 0  # from a lane's table to the next one's; 0: all lanes share one


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
    most_rows: int  # of the pass
    tile_log2: int  # rows of a tile
    row_blocks: int  # over the query rows of one KV head
    splits: int
    columns: int  # query rows of a block of the warpgroup kernels; 0: another kernel


class Attention:
    """Loaded kernels for one shape."""

    def __init__(self, gpu: Gpu, module: Module, shape: AttendShape) -> None:
        self._gpu, self.shape = gpu, shape
        self._wide = shape.wide if supports(gpu.sm, "wgmma") else None
        kv = "fp8" if shape.kv == "fp8" else "bf16"
        self._prepare, self._append = (module.kernel(f"attend_{name}_{kv}") for name in ("prepare", "append"))
        names = ("attend_wide_combine", "attend_wide_combine_slots") if self._wide else (f"attend_combine_{kv}",) * 2
        self._combine = [module.kernel(name) for name in names]  # of one slot, of several
        self._forms = {prefill: self._form(module, kv, prefill) for prefill in (False, True)}
        self._sizes = {
            "dim": shape.head_dim,
            "half": shape.rope_dims // 2,
            "capacity": shape.kv_rows,
            "window": shape.window or 0,
            "q_step": (1 + shape.gated) * shape.head_dim,
            "most": self._wide.most if self._wide else 0,
        }

    def _form(self, module: Module, kv: str, prefill: bool) -> _Form:
        shape, wide = self.shape, self._wide
        if wide:
            names, shared = [wide.kernel(prefill, several) for several in (False, True)], wide.shared(prefill)
            threads, blocks, splits, columns = _WIDE_THREADS, wide.blocks(prefill), wide.most, wide.columns(prefill)
        else:
            m = shape.warp_tiles(prefill)
            names, shared = [f"attend_{kv}_d{shape.head_dim}_m{m}"] * 2, shape.shared_bytes(m)
            threads, blocks, splits, columns = _ATTEND_THREADS, shape.row_blocks(prefill), shape.splits, 0
        kernels = [module.kernel(name, shared_bytes=shared) for name in names]
        rows, tile_log2 = shape.prefill_rows if prefill else shape.rows, shape.tile(prefill).bit_length() - 1
        return _Form(kernels, threads, shared, rows, tile_log2, blocks, 1 if prefill else splits, columns)

    def attend(self, x: AttendTensors, memory: KvMemory, scratch: DevicePointer, words: Words) -> None:
        """``attend``; ``scratch`` has the shape's ``scratch_bytes``. Rows of idle slots become zeros."""
        shape, form, wide = self.shape, self._forms[words.prefill], self._wide
        rows, several = words.block or form.most_rows, words.slots > 1
        q_bytes, partial_bytes, sum_bytes = shape.scratch
        flags = _BIDIRECTIONAL * shape.bidirectional | _SEQUENTIAL * words.prefill | _GATED * shape.gated
        given = self._sizes | {
            "rows": rows,
            "flags": flags,
            "k_memory": memory.k,
            "v_memory": memory.v,
            "partial": scratch.at(q_bytes, partial_bytes),
            "partial_ml": scratch.at(q_bytes + partial_bytes, sum_bytes),
            "gate": x.q,
            "score_scale": memory.k_scale * shape.head_dim**-0.5 * math.log2(math.e),
        }
        records, queries = (x, memory, words, form, shape), scratch.at(0, q_bytes)
        heads, warps = shape.heads + 2 * shape.kv_heads, _THREADS // 32
        arguments = _PREPARE(*records, **given, q_out=queries)
        self._gpu.launch(self._prepare, (-(-heads // warps), rows, words.slots), _THREADS, arguments, overlap=True)
        rest = (1, shape.tiles(True)) if words.prefill else (form.splits, words.slots)
        if wide and not words.prefill:  # the live splits of all slots are the first blocks
            rest = (words.slots, max(1, form.splits // words.slots))
        arguments = (_WIDE_ATTEND if wide else _ATTEND)(*records, **given, q=queries)
        grid, shared = (shape.kv_heads * form.row_blocks, *rest), form.shared_bytes
        self._gpu.launch(form.kernels[several], grid, form.threads, arguments, shared_bytes=shared, overlap=True)
        if words.prefill:
            return
        grid = (-(-rows * shape.heads * shape.head_dim // 4 // _THREADS), 1, words.slots)
        if wide:
            grid = (shape.head_dim // 128 * form.columns // 8, shape.kv_heads * form.row_blocks, words.slots)
        arguments = (_WIDE_COMBINE if wide else _COMBINE)(*records, **given)
        self._gpu.launch(self._combine[several], grid, _THREADS, arguments, overlap=True)

    def append(self, layers: Sequence[tuple[Matrix, Matrix, KvMemory]], words: Words) -> None:
        """Norm, rotate and store keys and values of layers without queries, in every slot that has a lane."""
        heads, warps = 2 * self.shape.kv_heads, _THREADS // 32
        rows = words.block or self._forms[words.prefill].most_rows
        for first in range(0, len(layers), _LAYERS):
            some = layers[first : first + _LAYERS]
            parts = [_Appended.of(memory, k=k, v=v, k_memory=memory.k, v_memory=memory.v) for k, v, memory in some]
            what = _APPEND(words, self.shape, **self._sizes, layers=_Layers.of(layer=parts), count=len(some), rows=rows)
            grid = (-(-heads // warps), rows, _LAYERS * (words.slots - 1) + len(some))
            self._gpu.launch(self._append, grid, _THREADS, what, overlap=True)
