"""Ops of a vision tower as layers of a network. A pass holds the patches of one picture, so attention has no mask.

Layers are those that TensorRT has had since 10.8: attention is two products and a softmax, written as TensorRT's own
fused kernels want it, in BF16 with the scale in the queries. So scores and their shares are rounded to BF16, which the
reference does not do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edge_dflash.backends.tensorrt.net import Net
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Bias, DenseOp, Fold, FrameAttend, GeluErf, GeluTanh, LayerNorm
from edge_dflash.weights.formats import Array, WideWeight, bf16_to_f32

TowerOp = Bias | Fold | FrameAttend | GeluErf | GeluTanh | LayerNorm


def tower_op(net: Net, op: DenseOp, inputs: list[Any], wide: Callable[[str], WideWeight]) -> Any:
    """One op of a tower. ``wide`` gives a weight that is not quantized. Raises BackendError."""

    def vector(name: str) -> Any:
        return net.constant(_values(wide(name)).reshape(1, -1), "FLOAT")

    x = inputs[0]
    match op:
        case Bias():
            return net.cast(net.elementwise(net.cast(x, "FLOAT"), vector(op.weight), "SUM"), "BF16")
        case LayerNorm():
            return layer_norm(net, x, vector(op.weight), vector(op.bias), op.eps)
        case GeluTanh():
            return net.cast(net.gelu(net.cast(x, "FLOAT"), "GELU_TANH"), "BF16")
        case GeluErf():
            return net.cast(net.gelu(net.cast(x, "FLOAT"), "GELU_ERF"), "BF16")
        case Fold():
            return net.shaped(x, (-1, op.count * net.columns(x)))
        case FrameAttend():
            return frame_attend(net, op, x, inputs[1], inputs[2])
        case _:
            raise BackendError(f"{op.output}: {type(op).__name__} is no op of a tower")


def layer_norm(net: Net, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """w (x - mean) / sqrt(variance + eps) + b in FP32; ``weight`` and ``bias`` [1, columns]."""
    wide = net.cast(x, "FLOAT")
    away = net.elementwise(wide, net.reduce(wide, "AVG", keep=True), "SUB")
    variance = net.reduce(net.elementwise(away, away, "PROD"), "AVG", keep=True)
    root = net.unary(net.elementwise(variance, net.constant(np.full((1, 1), eps, np.float32), "FLOAT"), "SUM"), "SQRT")
    normed = net.elementwise(net.elementwise(away, net.unary(root, "RECIP"), "PROD"), weight, "PROD")
    return net.cast(net.elementwise(normed, bias, "SUM"), "BF16")


def position_rows(net: Net, corners: Any, shares: Any, table: Any) -> Any:
    """Sum over t of shares [rows, t] times rows ``corners`` [rows, t] of the table, in FP32."""
    taken = net.cast(net.gather_rows(table, corners), "FLOAT")  # [rows, 4, H]
    weighted = net.elementwise(taken, net.shaped(shares, (-1, net.columns(shares), 1)), "PROD")
    return net.cast(net.reduce(weighted, "SUM", keep=False), "BF16")


def frame_attend(net: Net, op: FrameAttend, qkv: Any, cosine: Any, sine: Any) -> Any:
    """Every row attends to all rows of the pass."""
    heads, dim = op.heads, op.head_dim
    parts = net.shaped(qkv, (-1, 3 * heads, dim), (1, 0, 2))  # [3 heads, rows, D]
    turning, v = net.split_columns(parts, (2 * heads, heads), axis=0)
    turning = _turned(net, turning, dim, cosine, sine)
    q, k = net.split_columns(turning, (heads, heads), axis=0)
    q = net.elementwise(q, net.constant(np.full((1, 1, 1), op.scale, np.float32), "FLOAT"), "PROD")
    scores = net.times_transposed(net.cast(q, "BF16"), net.cast(k, "BF16"))  # [heads, rows, rows]
    attended = net.times(net.softmax(scores), v)
    return net.turned(attended, (1, 0, 2), (-1, heads * dim))


def _turned(net: Net, x: Any, dim: int, cosine: Any, sine: Any) -> Any:
    """Dims j and j + D / 2 of x [n, rows, D] turned by the angle of column j, in FP32."""
    half = dim // 2
    cosine, sine = (net.shaped(table, (1, -1, half)) for table in (cosine, sine))
    low, high = net.split_columns(net.cast(x, "FLOAT"), (half, half), axis=2)

    left, right = (net.elementwise(part, cosine, "PROD") for part in (low, high))
    first = net.elementwise(left, net.elementwise(high, sine, "PROD"), "SUB")
    return net.concat([first, net.elementwise(right, net.elementwise(low, sine, "PROD"), "SUM")], axis=2)


def _values(weight: WideWeight) -> Array:
    """A wide weight as float32."""
    return bf16_to_f32(weight.data) if weight.data.dtype == np.uint16 else weight.data
