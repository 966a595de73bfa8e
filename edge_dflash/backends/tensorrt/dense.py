"""The dense ops other than linears, each as standard layers with one BF16 rounding, like the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_dflash.backends.tensorrt.linear import bf16_bits
from edge_dflash.backends.tensorrt.net import Net
from edge_dflash.weights.formats import Array, WideWeight, bf16_to_f32


def embed(net: Net, ids: Any, weight: WideWeight) -> Any:
    """ids [rows] int32 -> rows of the table [V, H] BF16."""
    return net.gather_rows(net.constant(bf16_bits(weight.data), "BF16"), ids)


def rms_norm(net: Net, x: Any, weight: WideWeight, eps: float, *, plus_one: bool) -> Any:
    """w' x / sqrt(mean(x^2) + eps) in FP32; w' = w, or 1 + w."""
    factor = float32(weight)
    wide = net.cast(x, "FLOAT")
    mean = net.reduce(net.elementwise(wide, wide, "PROD"), "AVG", keep=True)
    root = net.unary(net.elementwise(mean, net.constant(np.full((1, 1), eps, np.float32), "FLOAT"), "SUM"), "SQRT")
    normed = net.elementwise(wide, net.unary(root, "RECIP"), "PROD")
    factor = (np.float32(1) + factor if plus_one else factor).reshape(1, -1)
    return net.cast(net.elementwise(normed, net.constant(factor, "FLOAT"), "PROD"), "BF16")


def add(net: Net, a: Any, b: Any) -> Any:
    """a + b."""
    return net.elementwise(a, b, "SUM")


def swiglu(net: Net, gate: Any, up: Any) -> Any:
    """silu(gate) * up in FP32."""
    gate, up = net.cast(gate, "FLOAT"), net.cast(up, "FLOAT")
    silu = net.elementwise(gate, net.sigmoid(gate), "PROD")
    return net.cast(net.elementwise(silu, up, "PROD"), "BF16")


def concat(net: Net, tensors: list[Any]) -> Any:
    """Columns side by side, in the order given."""
    return net.concat(tensors)


def argmax(net: Net, logits: Any, columns: int) -> Any:
    """Lowest id of each row's largest logit, int32 [rows]. TopK promises no order among equals; BF16 logits tie."""
    largest = net.reduce(logits, "MAX", keep=True)
    ids = net.constant(np.arange(columns, dtype=np.int32).reshape(1, -1), "INT32")
    none = net.constant(np.full((1, 1), columns, np.int32), "INT32")
    return net.reduce(net.select(net.elementwise(logits, largest, "EQUAL"), ids, none), "MIN", keep=False)


def float32(weight: WideWeight) -> Array:
    """Values of a wide weight."""
    return bf16_to_f32(weight.data) if weight.data.dtype == np.uint16 else weight.data
