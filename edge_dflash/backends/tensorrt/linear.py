"""Linear layers of each weight format, in the arithmetic of the reference: sum of exact products, then the scale.

A quantized matrix is dequantized with a global scale of one, which is exact in BF16, and the FP32 global scale is
applied to the product; so the result has two BF16 roundings where the reference has one. FP8 weights get a scale for
each channel even where all are one: TensorRT for RTX 1.7 multiplies such a matrix from its codes, but expands one with
a single scale to BF16 in scratch memory first. It does the same to NVFP4 weights whose input is not NVFP4 (W4A16).

W4A4 weights that multiply the same codes are stacked here into one matrix, whose product is cut into theirs. TensorRT
for RTX 1.7 would do that itself while it builds, with the same kernels for products and quantization, but in a way
that takes three quarters of the build.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_dflash.backends.tensorrt.net import Net
from edge_dflash.errors import BackendError
from edge_dflash.weights.formats import BLOCK, Array, Fp8Weight, Nvfp4Weight, Weight, WideWeight
from edge_dflash.weights.safetensors import forget_pages


def linear(net: Net, x: Any, weight: Weight) -> Any:
    """x [rows, K] BF16 times the weight [N, K] transposed: [rows, N] BF16. Raises BackendError."""
    match weight:
        case WideWeight():
            _check(net, x, weight)
            return net.times_transposed(x, net.constant(bf16_bits(weight.data), "BF16"))
        case Fp8Weight():
            return fp8(net, x, weight)
        case Nvfp4Weight():
            return nvfp4(net, x, [weight])[0]


def fp8(net: Net, x: Any, weight: Fp8Weight) -> Any:
    """W8A16: scale of the tensor [1] or of each channel [N] after the product."""
    _check(net, x, weight)
    n = weight.shape[0]
    codes = net.constant(weight.data, "FP8")
    product = net.times_transposed(x, net.dequantize(codes, net.ones(n), axis=0))
    return scaled(net, product, np.asarray(weight.scale, np.float32).reshape(1, -1))


def nvfp4(net: Net, x: Any, weights: Sequence[Nvfp4Weight]) -> list[Any]:
    """x times each weight: W4A4 when they have an input scale, else W4A16. Several must have the same input scale."""
    for weight in weights:
        _check(net, x, weight)
        if weight.shape[1] % BLOCK:
            raise BackendError(
                f"{net.scope}: an NVFP4 weight with {weight.shape[1]} inputs, wanted a multiple of {BLOCK}"
            )
    rows = [weight.shape[0] for weight in weights]
    codes = net.constant(_stacked([w.packed for w in weights]), "FP4", (sum(rows), weights[0].shape[1]))
    scales = net.dequantize(net.constant(_stacked([w.block_scale for w in weights]), "FP8"), net.ones())
    matrix = net.dequantize(codes, scales, axis=1)
    factors = [np.float32(weight.global_scale) for weight in weights]
    if (input_scale := weights[0].input_scale) is not None:
        x = activations(net, x, np.float32(input_scale))
        factors = [factor * np.float32(input_scale) for factor in factors]
    products = net.split_columns(net.times_transposed(x, matrix), rows)
    return [scaled(net, p, np.full((1, 1), f, np.float32)) for p, f in zip(products, factors, strict=True)]


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


def _stacked(matrices: Sequence[Array]) -> Array:
    """Matrices below each other. A copy is made of several only, and the pages of mapped ones are given back."""
    if len(matrices) == 1:
        return matrices[0]
    whole = np.concatenate(matrices)
    for matrix in matrices:
        forget_pages(matrix)
    return whole


def _check(net: Net, x: Any, weight: Weight) -> None:
    columns = net.columns(x)
    if len(weight.shape) != 2 or weight.shape[1] != columns:
        raise BackendError(f"{net.scope}: a weight {list(weight.shape)} for {columns} inputs; it is another model's")
