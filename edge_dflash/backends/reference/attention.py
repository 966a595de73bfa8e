"""KV memory and attention in torch: append, masks, softmax over fixed tiles of absolute positions.

Keys are read in tiles of KEY_TILE absolute positions and partial sums are added in position order, so the result of
a row does not depend on how many keys lie behind the last one it may see.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from edge_dflash.backends.reference.dense import ROW_TILE, pointwise, rms_norm, sigmoid
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Attend, KvAppend
from edge_dflash.model.program import KvState
from edge_dflash.model.specs import RopeSpec
from edge_dflash.weights.e4m3 import from_e4m3, to_e4m3

KEY_TILE = 64  # absolute positions
Table = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of rows, [..., rows, dims / 2] each


class KvMemory:
    """K and V rows [capacity, Hkv, D] of one layer, as stored (FP8 codes, BF16 or FP32)."""

    def __init__(self, state: KvState, capacity: int, precision: Precision, scales: tuple[float, float]) -> None:
        dtype = {"fp8": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32}[precision.kv]
        rows = -(-capacity // KEY_TILE) * KEY_TILE
        self._scales = scales
        self._fp8 = precision.kv == "fp8"
        self.capacity = capacity
        self.stored = tuple(torch.zeros(rows, state.kv_heads, state.head_dim, dtype=dtype) for _ in scales)

    def append(self, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Overwrite rows start, start + 1, ... with k, v [rows, Hkv, D] float32."""
        stop = start + k.shape[0]
        if stop > self.capacity:
            raise BackendError(f"KV rows {start}..{stop - 1} do not fit the context of {self.capacity} tokens")
        for stored, x, scale in zip(self.stored, (k, v), self._scales, strict=True):
            stored[start:stop] = to_e4m3(x, scale) if self._fp8 else x.to(stored.dtype)

    def read(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V rows 0..rows-1 as float32, as later passes will see them."""
        k, v = (
            from_e4m3(stored[:rows], scale) if self._fp8 else stored[:rows].float()
            for stored, scale in zip(self.stored, self._scales, strict=True)
        )
        return k, v


def rope_table(rope: RopeSpec, capacity: int) -> Table:
    """Cosine and sine [capacity, dims / 2] float32; YaRN blending after arXiv 2309.00071 when the spec has scaling."""
    dims = rope.dims
    frequency = 1.0 / rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    factor = 1.0
    if rope.scaling is not None:
        yarn = rope.scaling
        low, high = yarn.ramp(rope.theta, dims)
        ramp = ((torch.arange(dims // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequency = frequency * (1 - ramp) + frequency / yarn.factor * ramp
        given = yarn.attention_factor
        factor = (0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0) if given is None else given
    angles = torch.arange(capacity, dtype=torch.float32)[:, None] * frequency[None, :]
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` dims of x [..., rows, heads, D] by angles [..., rows, dims / 2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def turned(op: KvAppend | Attend, x: torch.Tensor, norm: torch.Tensor, table: Table) -> torch.Tensor:
    """Queries or keys x [..., rows, heads * D], normed and rotated: [..., rows, heads, D]."""
    x = torch.unflatten(x, -1, (-1, op.head_dim))
    return rotate(rms_norm(x, norm, op.eps, plus_one=op.plus_one), *table)


def visible(
    rule: tuple[bool, int | None], queries: torch.Tensor, keys: torch.Tensor, there: torch.Tensor
) -> torch.Tensor:
    """Mask [..., R, S] of the keys ``there`` that rows see: positions are ``queries`` [..., R] and ``keys`` [..., S].

    ``rule``: of an Attend, whether it is bidirectional, and its window.
    """
    bidirectional, window = rule
    distance = queries[..., None] - keys[..., None, :]
    if not bidirectional:
        there = there & (distance >= 0)
    return there if window is None else there & (distance.abs() < window)


def store_context(
    op: KvAppend | Attend,
    k: torch.Tensor,
    v: torch.Tensor,
    k_norm: torch.Tensor,
    table: Table,
    memory: KvMemory,
    start: int,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate K, store the first ``rows`` rows of K and V; returns the rows before they were rounded."""
    k, v = turned(op, k, k_norm, table)[:rows], torch.unflatten(v, -1, (-1, op.head_dim))[:rows]
    memory.append(start, k, v)
    return k, v


def attend(
    op: Attend, q: torch.Tensor, q_norm: torch.Tensor, table: Table, memory: KvMemory, start: int, rows: int
) -> torch.Tensor:
    """Attention of q [R, Hq*D or Hq*2*D] over the stored keys 0..start+rows-1. Returns [R, Hq*D] float32."""
    gate = None
    if op.gated:  # per head: D query values, then D gate values
        both = q.view(-1, op.heads, 2, op.head_dim)
        q, gate = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
    q = turned(op, q, q_norm, table)
    keys = start + rows
    k, v = memory.read(-(-keys // KEY_TILE) * KEY_TILE)
    tiles = []
    for first in range(0, q.shape[0], ROW_TILE):
        mask = _mask((op.bidirectional, op.window), start + first, rows - first, keys, k.shape[0]).to(q.device)
        tiles.append(_tile(q[first : first + ROW_TILE], k, v, mask))
    out = torch.cat(tiles).flatten(1)
    return out if gate is None else out * sigmoid(gate)


@lru_cache(maxsize=4)  # the layers of a pass have few
def _mask(rule: tuple[bool, int | None], position: int, rows: int, keys: int, padded_keys: int) -> torch.Tensor:
    """Mask [ROW_TILE, padded_keys]; padding rows see what the last valid row sees, so that they stay finite."""
    row, places = torch.arange(ROW_TILE).clamp(max=max(rows - 1, 0)), torch.arange(padded_keys)
    return visible(rule, position + row, places, (places < keys).expand(ROW_TILE, padded_keys))


def _tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Softmax attention of ROW_TILE rows q [16, Hq, D] over k, v [n * KEY_TILE, Hkv, D] -> [16, Hq, D]."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    group, tiles = heads // kv_heads, k.shape[0] // KEY_TILE
    keys = k.view(tiles, KEY_TILE, kv_heads, dim).permute(2, 0, 3, 1).reshape(-1, dim, KEY_TILE)
    values = v.view(tiles, KEY_TILE, kv_heads, dim).permute(2, 0, 1, 3).reshape(-1, KEY_TILE, dim)
    query = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, 1, group * rows, dim)
    query = query.expand(-1, tiles, -1, -1).reshape(-1, group * rows, dim)
    mask = visible.view(1, 1, rows, tiles, KEY_TILE).permute(0, 3, 1, 2, 4)  # [1, tiles, 1, rows, KEY_TILE]
    scores = torch.bmm(query, keys).view(kv_heads, tiles, group, rows, KEY_TILE) * dim**-0.5
    scores = scores.masked_fill(~mask, -math.inf)
    largest = scores.amax(dim=(1, 4), keepdim=True)  # over every visible key: a maximum has no order
    p = pointwise(torch.exp, scores - largest)
    partial = torch.bmm(p.view(-1, group * rows, KEY_TILE), values).view(kv_heads, tiles, group, rows, dim)
    weight = p.sum(-1, keepdim=True)
    out, total = partial[:, 0], weight[:, 0]
    for tile in range(1, tiles):  # fixed order; a tile that the row does not see adds exact zeros
        out = out + partial[:, tile]
        total = total + weight[:, tile]
    return (out / total).permute(2, 0, 1, 3).reshape(rows, heads, dim)
