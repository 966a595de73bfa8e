"""One unit -> a strongly typed network definition, op by op. Asks for the weights of one op at a time; builds nothing.

Each op has the arithmetic of the reference, with one BF16 rounding. Linears sum exact products, then scale: a quantized
matrix is dequantized with a global scale of one, which is exact in BF16, and the FP32 global scale is applied to the
product; so the result has two BF16 roundings where the reference has one. FP8 weights get a scale for each channel even
where all are one: TensorRT for RTX 1.7 multiplies such a matrix from its codes, but expands one with a single scale to
BF16 in scratch memory first. It does the same to NVFP4 weights whose input is not NVFP4 (W4A16).

W4A4 weights that multiply the same codes are stacked into one matrix, whose product is cut into theirs: they are one op
here. TensorRT for RTX 1.7 would do that itself while it builds, with the same kernels for products and quantization,
but in a way that takes three quarters of the build.

A pass of the vision tower holds the patches of one picture, so attention has no mask. It is two products and a softmax
(layers that TensorRT has had since 10.8), written as TensorRT's own fused kernels want it, in BF16 with the scale in
the queries. So scores and their shares are rounded to BF16, which the reference does not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from edge_dflash.backends.cuda.tensorrt.net import DType, Net
from edge_dflash.backends.cuda.tensorrt.units import CHOICES, LOGITS, Binding, Unit
from edge_dflash.errors import BackendError
from edge_dflash.model import ops
from edge_dflash.weights import formats
from edge_dflash.weights.safetensors import forget_pages

DTYPES: dict[str, DType] = {"bf16": "BF16", "f32": "FLOAT", "int32": "INT32"}


@dataclass
class Lowered:
    """A network and the memory that it reads its weights from, which must outlive the build."""

    unit: Unit
    net: Net

    @property
    def network(self) -> Any:
        """The network definition."""
        return self.net.network


def lower(unit: Unit, store: formats.WeightStore, trt: Any, builder: Any) -> Lowered:
    """Write a unit as a network of ``builder``. Inputs, outputs and every op's result carry their tensors' names.

    Raises BackendError naming the tensor for what TensorRT refuses or what has no lowering.
    """
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    net = Net(trt, network)
    tensors = {b.name: net.input(b.name, DTYPES[b.dtype], _shape(b)) for b in unit.inputs}
    for op in unit.ops:
        if op.output in tensors:  # made with a linear before it
            continue
        net.scope = op.output
        inputs = [tensors[name] for name in op.inputs]
        if isinstance(op, ops.Linear):
            made = _linears(net, op, unit, inputs[0], store)
        else:
            made = {op.output: _op(net, op, inputs, store)}
        for name, tensor in made.items():
            tensor.name = name
        tensors |= made
    for binding in unit.outputs:
        if binding.name == CHOICES:
            net.scope = CHOICES
            tensors[CHOICES] = argmax(net, tensors[LOGITS], net.columns(tensors[LOGITS]))
        net.output(tensors[binding.name], binding.name)
    return Lowered(unit, net)


def _linears(net: Net, op: ops.Linear, unit: Unit, x: Any, store: formats.WeightStore) -> dict[str, Any]:
    """A linear, and with it those behind it that multiply the same 4-bit activations; results by tensor."""
    weight = store.get(op.weight)
    if not isinstance(weight, formats.Nvfp4Weight) or weight.input_scale is None:
        return {op.output: linear(net, x, weight)}
    weights = {op.output: weight}
    for other in unit.ops[unit.ops.index(op) + 1 :]:
        if isinstance(other, ops.Linear) and other.inputs == op.inputs:
            found = store.get(other.weight)
            if isinstance(found, formats.Nvfp4Weight) and found.input_scale == weight.input_scale:
                weights[other.output] = found
    net.scope = "+".join(weights)
    return dict(zip(weights, nvfp4(net, x, list(weights.values())), strict=True))


def _op(net: Net, op: ops.DenseOp, inputs: list[Any], store: formats.WeightStore) -> Any:
    def vector(name: str) -> Any:
        return net.constant(_values(_wide(store, name)).reshape(1, -1), "FLOAT")

    x = inputs[0]
    match op:
        case ops.RmsNorm():
            return rms_norm(net, x, _wide(store, op.weight), op.eps, plus_one=op.plus_one)
        case ops.Add():
            return add(net, *inputs)
        case ops.SwiGlu():
            return swiglu(net, *inputs)
        case ops.Concat():
            return net.concat(inputs)
        case ops.PositionRows():
            return position_rows(net, x, inputs[1], net.constant(bf16_bits(_wide(store, op.weight).data), "BF16"))
        case ops.Bias():
            return net.cast(net.elementwise(net.cast(x, "FLOAT"), vector(op.weight), "SUM"), "BF16")
        case ops.LayerNorm():
            return layer_norm(net, x, vector(op.weight), vector(op.bias), op.eps)
        case ops.GeluTanh() | ops.GeluErf():
            form: Literal["GELU_TANH", "GELU_ERF"] = "GELU_TANH" if isinstance(op, ops.GeluTanh) else "GELU_ERF"
            return net.cast(net.activation(net.cast(x, "FLOAT"), form), "BF16")
        case ops.Fold():
            return net.shaped(x, (-1, op.count * net.columns(x)))
        case ops.FrameAttend():
            return frame_attend(net, op, x, inputs[1], inputs[2])
        case _:
            raise BackendError(f"{op.output}: {type(op).__name__} has no TensorRT lowering; run it beside the plans")


def _wide(store: formats.WeightStore, name: str) -> formats.WideWeight:
    weight = store.get(name)
    if not isinstance(weight, formats.WideWeight):
        raise BackendError(f"{name} is stored as {type(weight).__name__}, wanted BF16 or F32: keep it wide")
    return weight


def _shape(binding: Binding) -> tuple[int, ...]:
    return (-1,) if binding.columns is None else (-1, binding.columns)


def rms_norm(net: Net, x: Any, weight: formats.WideWeight, eps: float, *, plus_one: bool) -> Any:
    """w' x / sqrt(mean(x^2) + eps) in FP32; w' = w, or 1 + w."""
    factor = _values(weight)
    normed = _normed(net, net.cast(x, "FLOAT"), eps)
    factor = (np.float32(1) + factor if plus_one else factor).reshape(1, -1)
    return net.cast(net.elementwise(normed, net.constant(factor, "FLOAT"), "PROD"), "BF16")


def layer_norm(net: Net, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """w (x - mean) / sqrt(variance + eps) + b in FP32; ``weight`` and ``bias`` [1, columns]."""
    wide = net.cast(x, "FLOAT")
    away = net.elementwise(wide, net.reduce(wide, "AVG", keep=True), "SUB")
    normed = net.elementwise(_normed(net, away, eps), weight, "PROD")
    return net.cast(net.elementwise(normed, bias, "SUM"), "BF16")


def _normed(net: Net, x: Any, eps: float) -> Any:
    """x / sqrt(mean(x^2) + eps) in FP32."""
    mean = net.reduce(net.elementwise(x, x, "PROD"), "AVG", keep=True)
    root = net.unary(net.elementwise(mean, net.constant(np.full((1, 1), eps, np.float32), "FLOAT"), "SUM"), "SQRT")
    return net.elementwise(x, net.unary(root, "RECIP"), "PROD")


def add(net: Net, a: Any, b: Any) -> Any:
    """a + b."""
    return net.elementwise(a, b, "SUM")


def swiglu(net: Net, gate: Any, up: Any) -> Any:
    """silu(gate) * up in FP32."""
    gate, up = net.cast(gate, "FLOAT"), net.cast(up, "FLOAT")
    silu = net.elementwise(gate, net.activation(gate, "SIGMOID"), "PROD")
    return net.cast(net.elementwise(silu, up, "PROD"), "BF16")


def position_rows(net: Net, corners: Any, shares: Any, table: Any) -> Any:
    """Sum over t of shares [rows, t] times rows ``corners`` [rows, t] of the table, in FP32."""
    taken = net.cast(net.gather_rows(table, corners), "FLOAT")  # [rows, 4, H]
    weighted = net.elementwise(taken, net.shaped(shares, (-1, net.columns(shares), 1)), "PROD")
    return net.cast(net.reduce(weighted, "SUM", keep=False), "BF16")


def frame_attend(net: Net, op: ops.FrameAttend, qkv: Any, cosine: Any, sine: Any) -> Any:
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


def argmax(net: Net, logits: Any, columns: int) -> Any:
    """Lowest id of each row's largest logit, int32 [rows]. TopK promises no order among equals; BF16 logits tie."""
    largest = net.reduce(logits, "MAX", keep=True)
    ids = net.constant(np.arange(columns, dtype=np.int32).reshape(1, -1), "INT32")
    none = net.constant(np.full((1, 1), columns, np.int32), "INT32")
    return net.reduce(net.select(net.elementwise(logits, largest, "EQUAL"), ids, none), "MIN", keep=False)


def linear(net: Net, x: Any, weight: formats.Weight) -> Any:
    """x [rows, K] BF16 times the weight [N, K] transposed: [rows, N] BF16. Raises BackendError."""
    match weight:
        case formats.WideWeight():
            _check(net, x, weight)
            return net.times_transposed(x, net.constant(bf16_bits(weight.data), "BF16"))
        case formats.Fp8Weight():  # W8A16: scale of the tensor [1] or of each channel [N] after the product
            _check(net, x, weight)
            matrix = net.dequantize(net.constant(weight.data, "FP8"), net.ones(weight.shape[0]), axis=0)
            return scaled(net, net.times_transposed(x, matrix), np.asarray(weight.scale, np.float32).reshape(1, -1))
        case formats.Nvfp4Weight():
            return nvfp4(net, x, [weight])[0]
        case _:
            raise BackendError(f"{net.scope}: {weight.format} weights have no TensorRT lowering")


def nvfp4(net: Net, x: Any, weights: Sequence[formats.Nvfp4Weight]) -> list[Any]:
    """x times each weight: W4A4 when they have an input scale, else W4A16. Several must have the same input scale."""
    for weight in weights:
        _check(net, x, weight)
        if weight.shape[1] % formats.BLOCK:
            raise BackendError(
                f"{net.scope}: an NVFP4 weight with {weight.shape[1]} inputs, wanted a multiple of {formats.BLOCK}"
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


def scaled(net: Net, x: Any, factor: formats.Array) -> Any:
    """BF16 x times FP32 factors [1, 1] or [1, N], in FP32, rounded to BF16; nothing when all are one."""
    if (factor == 1).all():
        return x
    product = net.elementwise(net.cast(x, "FLOAT"), net.constant(factor, "FLOAT"), "PROD")
    return net.cast(product, "BF16")


def bf16_bits(data: formats.Array) -> formats.Array:
    """BF16 bits of a wide weight; float32 is rounded to nearest, ties to even."""
    if data.dtype == np.uint16:
        return data
    bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _stacked(matrices: Sequence[formats.Array]) -> formats.Array:
    """Matrices below each other. A copy is made of several only, and the pages of mapped ones are given back."""
    if len(matrices) == 1:
        return matrices[0]
    whole = np.concatenate(matrices)
    for matrix in matrices:
        forget_pages(matrix)
    return whole


def _check(net: Net, x: Any, weight: formats.Weight) -> None:
    columns = net.columns(x)
    if len(weight.shape) != 2 or weight.shape[1] != columns:
        raise BackendError(f"{net.scope}: a weight {list(weight.shape)} for {columns} inputs; it is another model's")


def _values(weight: formats.WideWeight) -> formats.Array:
    """A wide weight as float32."""
    return formats.bf16_to_f32(weight.data) if weight.data.dtype == np.uint16 else weight.data
