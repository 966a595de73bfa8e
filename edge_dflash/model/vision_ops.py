"""Ops of a vision tower. Its rows are patches; a pass holds those of one frame, and attention is among all of them.

They are dense: nothing outlives a pass. Every op rounds its output once. Inputs of a pass that depend on the grid of
patches alone come from :mod:`edge_dflash.model.patch_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.model.ops import DenseOp, Elementwise


@dataclass(frozen=True, kw_only=True)
class Bias(DenseOp):
    """y = x + b; ``weight`` b [columns]."""

    weight: str

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`~edge_dflash.model.ops.Op`."""
        return (self.weight,)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(DenseOp):
    """y = w (x - mean) / sqrt(variance + eps) + b in FP32, mean and variance over the columns."""

    weight: str
    bias: str
    eps: float

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`~edge_dflash.model.ops.Op`."""
        return (self.weight, self.bias)


@dataclass(frozen=True, kw_only=True)
class GeluTanh(Elementwise):
    """y = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) in FP32."""


@dataclass(frozen=True, kw_only=True)
class GeluErf(Elementwise):
    """y = x / 2 (1 + erf(x / sqrt(2))) in FP32."""


@dataclass(frozen=True, kw_only=True)
class PositionRows(DenseOp):
    """Inputs (corners [rows, 4] int32, shares [rows, 4] float32): y = sum over t of shares[r, t] E[corners[r, t]].

    ``weight`` E [positions^2, H] is the table of position embeddings. FP32, summed from t = 0 on.
    """

    weight: str

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`~edge_dflash.model.ops.Op`."""
        return (self.weight,)


@dataclass(frozen=True, kw_only=True)
class FrameAttend(DenseOp):
    """Inputs (qkv [rows, 3 * heads * D], cos, sin [rows, D / 2] float32): every row attends to all rows of the pass.

    Columns of qkv: all heads of q, then of k, then of v. q and k are turned in FP32, dims j and j + D / 2 by the angle
    of column j, and rounded; softmax over q k / sqrt(D) in FP32. Output [rows, heads * D].
    """

    heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, kw_only=True)
class Fold(DenseOp):
    """``count`` rows that follow each other become one, side by side: [rows, C] -> [rows / count, count * C]."""

    count: int

    def rows(self, rows: int) -> int:
        """See :class:`~edge_dflash.model.ops.Op`."""
        return rows // self.count
