"""The fewest bytes that a pass of a gated delta layer moves, for benchmarks of its kernels."""

from __future__ import annotations

from edge_dflash.backends.cuda.kernels.delta import TAPS, DeltaShape


def pass_bytes(shape: DeltaShape, pending: int, rows: int, *, commits: bool = False) -> int:
    """S in and out, tape in and out, own rows in and out, convolution and norm."""
    writes = 1 if pending or commits else 0
    values = 2 * shape.value_heads * shape.value_dim
    tape_row = 2 * shape.conv_channels + 8 * shape.value_heads
    own = rows * (2 * shape.conv_channels + 2 * values + 4 * shape.value_heads + (0 if commits else tape_row))
    vectors = 4 * (TAPS * shape.conv_channels + 2 * shape.value_heads + shape.value_dim)
    return (1 + writes) * shape.state_bytes + pending * tape_row + own + 2 * shape.conv_bytes + vectors
