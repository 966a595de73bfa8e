"""Linear layers of each weight format, in the arithmetic of the reference: sum of exact products, then the scale.

A quantized matrix is dequantized with a global scale of one, which is exact in BF16, and the FP32 global scale is
applied to the product; so the result has two BF16 roundings where the reference has one. FP8 weights get a scale for
each channel even where all are one: TensorRT for RTX 1.7 multiplies such a matrix from its codes, but expands one with
a single scale to BF16 in scratch memory first. It does the same to NVFP4 weights whose input is not NVFP4 (W4A16).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_dflash.backends.tensorrt.net import BLOCK, Net
from edge_dflash.checkpoint.weights import Array, Fp8Weight, Nvfp4Weight, Weight, WideWeight
from edge_dflash.errors import BackendError


def linear(net: Net, x: Any, weight: Weight) -> Any:
    """x [rows, K] BF16 times the weight [N, K] transposed: [rows, N] BF16. Raises BackendError."""
    columns = net.columns(x)
    if len(weight.shape) != 2 or weight.shape[1] != columns:
        raise BackendError(f"{net.scope}: a weight {list(weight.shape)} for {columns} inputs; it is another model's")
    match weight:
        case WideWeight():
            return net.times_transposed(x, net.constant(bf16_bits(weight.data), "BF16"))
        case Fp8Weight():
            return fp8(net, x, weight)
        case Nvfp4Weight():
            return nvfp4(net, x, weight)


def fp8(net: Net, x: Any, weight: Fp8Weight) -> Any:
    """W8A16: scale of the tensor [1] or of each channel [N] after the product."""
    n = weight.shape[0]
    codes = net.constant(weight.data, "FP8")
    product = net.times_transposed(x, net.dequantize(codes, net.ones(n), axis=0))
    return scaled(net, product, np.asarray(weight.scale, np.float32).reshape(1, -1))


def nvfp4(net: Net, x: Any, weight: Nvfp4Weight) -> Any:
    """W4A4 when the weight has an input scale, else W4A16."""
    n, k = weight.shape
    if k % BLOCK:
        raise BackendError(f"{net.scope}: an NVFP4 weight with {k} inputs, wanted a multiple of {BLOCK}")
    codes = net.constant(weight.packed, "FP4", (n, k))
    scales = net.dequantize(net.constant(weight.block_scale, "FP8"), net.ones())
    matrix = net.dequantize(codes, scales, axis=1)
    factor = np.float32(weight.global_scale)
    if weight.input_scale is not None:
        x = activations(net, x, np.float32(weight.input_scale))
        factor *= np.float32(weight.input_scale)
    return scaled(net, net.times_transposed(x, matrix), np.full((1, 1), factor, np.float32))


def activations(net: Net, x: Any, input_scale: np.float32) -> Any:
    """Code times block scale of dynamic NVFP4 activations, without ``input_scale``; exact in BF16."""
    codes, scales = net.quantize_blocks(x, net.constant(np.full((), input_scale, np.float32), "FLOAT"))
    return net.dequantize(codes, net.dequantize(scales, net.ones()), axis=1)


def scaled(net: Net, x: Any, factor: Array) -> Any:
    """BF16 x times FP32 factors [1, 1] or [1, N], in FP32, rounded to BF16; nothing when all are one."""
    if (factor == 1).all():
        return x
    product = net.elementwise(net.cast(x, "FLOAT"), net.constant(factor, "FLOAT"), "PROD")
    return net.cast(product, "BF16")


def bf16_bits(data: Array) -> Array:
    """BF16 bits of a wide weight; float32 is rounded to nearest, ties to even."""
    if data.dtype == np.uint16:
        return data
    bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
