"""Geometry of the warpgroup kernels of attention (kernels/attend_hopper.cuh): columns, splits, shared memory.

Knows sizes only; which layers use these kernels, and their launches, are attend.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

THREADS = 256
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
