"""Evaluates a TensorRT network definition in NumPy: exactly the layer types that the lowering emits, no other.

It walks the network as TensorRT holds it (layers, attributes, constants' bytes) and shares no code with the lowering,
with edge_dflash.weights or with torch. Values are float32 arrays; each layer's result is rounded to the type that the
network says its output has. Formulas: NVIDIA's TensorRT operator reference (Dequantize, DynamicQuantize) and "Working
with Quantized Types".
"""

import ctypes
import math
from dataclasses import dataclass

import numpy as np

_CLASSES = {
    "CONSTANT": "IConstantLayer",
    "CAST": "ICastLayer",
    "ELEMENTWISE": "IElementWiseLayer",
    "UNARY": "IUnaryLayer",
    "ACTIVATION": "IActivationLayer",
    "REDUCE": "IReduceLayer",
    "SOFTMAX": "ISoftMaxLayer",
    "SHUFFLE": "IShuffleLayer",
    "SELECT": "ISelectLayer",
    "CONCATENATION": "IConcatenationLayer",
    "SLICE": "ISliceLayer",
    "GATHER": "IGatherLayer",
    "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
    "DEQUANTIZE": "IDequantizeLayer",
    "DYNAMIC_QUANTIZE": "IDynamicQuantizeLayer",
}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


class NetworkError(Exception):
    """The network has no meaning: shapes, axes or types do not fit."""


@dataclass(frozen=True)
class Value:
    """A tensor: float32 values (int64 or bool where the type is), and the name of its type."""

    array: np.ndarray
    dtype: str


def run(trt, network, inputs, forced=(), constants=None):
    """Every named tensor of a network, by name, for the given inputs (arrays of values).

    ``forced`` maps tensor names to values that replace what the network computed for the layers behind, so that each
    op is judged by itself; what was computed is returned. ``constants`` keeps decoded constants for the next run of the
    same network.
    """
    values, found = {}, {}
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        array = np.asarray(inputs[tensor.name])
        if array.ndim != len(tensor.shape) or any(
            want not in (-1, have) for want, have in zip(tensor.shape, array.shape, strict=True)
        ):
            raise NetworkError(f"input {tensor.name} is {array.shape}, the network takes {tuple(tensor.shape)}")
        values[tensor.name] = _rounded(array, tensor.dtype.name, f"input {tensor.name}")
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        kind = trt.ILayer.type.__get__(layer).name  # an activation's own ``type`` is its function
        if kind not in _CLASSES:
            raise NetworkError(f"{layer.name} is a {kind}, which the lowering never makes")
        layer.__class__ = getattr(trt, _CLASSES[kind])
        if kind == "CONSTANT" and constants is not None and layer.name in constants:
            values[layer.get_output(0).name] = constants[layer.name]
            continue
        results = _LAYERS[kind](layer, [_input(layer, j, values) for j in range(layer.num_inputs)])
        for j, result in enumerate(results):
            tensor = layer.get_output(j)
            value = _rounded(result, tensor.dtype.name, layer.name)
            found[tensor.name] = value.array
            if tensor.name in forced:
                value = _rounded(np.asarray(forced[tensor.name]), tensor.dtype.name, layer.name)
            values[tensor.name] = value
            if kind == "CONSTANT" and constants is not None:
                constants[layer.name] = value
    return found


def outputs(network):
    """Names, types and shapes of a network's outputs."""
    tensors = [network.get_output(i) for i in range(network.num_outputs)]
    return {t.name: (t.dtype.name, tuple(t.shape)) for t in tensors}


def _input(layer, index, values):
    tensor = layer.get_input(index)
    return None if tensor is None else values[tensor.name]


# Types


def to_bf16(x):
    """Nearest BF16, ties to even."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def to_e4m3(x):
    """Nearest E4M3 value, ties to even, saturating at +-448."""
    x = np.clip(np.asarray(x, np.float32), -448, 448)
    _, exponent = np.frexp(np.abs(x))
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, -6) - 3)  # 3 bits of mantissa; subnormals below 2^-6
    return (np.rint(x / step) * step).astype(np.float32)


def to_e2m1(x):
    """Nearest E2M1 value, ties to the even code, saturating at +-6."""
    magnitude = np.abs(x)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # argmin takes the first of equals: even codes first
    nearest = order[np.abs(magnitude[..., None] - _E2M1[order]).argmin(-1)]
    return np.copysign(_E2M1[nearest], x).astype(np.float32)


def _rounded(array, dtype, where):
    if dtype in ("INT32", "BOOL"):
        return Value(np.asarray(array), dtype)
    array = np.asarray(array, np.float32)
    match dtype:
        case "FLOAT":
            return Value(array, dtype)
        case "BF16":
            return Value(to_bf16(array), dtype)
        case "FP8" | "FP4":  # only constants and quantizations make these, already rounded
            exact = to_e4m3(array) if dtype == "FP8" else to_e2m1(array)
            if not np.array_equal(exact, array):
                raise NetworkError(f"{where} holds values that are not {dtype}")
            return Value(array, dtype)
        case _:
            raise NetworkError(f"{where} is {dtype}, which the lowering never makes")


# Layers


class _Weights(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("values", ctypes.c_void_p), ("count", ctypes.c_int64))


def _constant(layer, _):
    """Values of a constant, from the bytes that the network points to."""
    tensor = layer.get_output(0)
    shape, dtype = tuple(tensor.shape), tensor.dtype.name
    count = int(np.prod(shape, dtype=np.int64))
    bits = {"FLOAT": 32, "INT32": 32, "BF16": 16, "FP8": 8, "FP4": 4}[dtype]
    raw = np.frombuffer(_bytes(layer.weights, count, bits), np.uint8)
    match dtype:
        case "FLOAT":
            values = raw.view(np.float32)
        case "INT32":
            values = raw.view(np.int32)
        case "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "FP8":
            values = _e4m3_values()[raw]
        case "FP4":
            codes = np.stack([raw & 15, raw >> 4], -1).reshape(-1)  # low nibble first
            values = np.where(codes & 8, -_E2M1[codes & 7], _E2M1[codes & 7])
    return [values.reshape(shape)]


def _bytes(weights, count, bits):
    """The memory behind an IConstantLayer's weights. TensorRT's Python shows BF16, FP8 and FP4 weights without data."""
    if isinstance(weights, np.ndarray):
        found = weights.tobytes()
    else:  # a pybind11 object: its first word behind the Python header is the C++ object, {type, values, count}
        address = ctypes.c_void_p.from_address(id(weights) + 2 * ctypes.sizeof(ctypes.c_void_p)).value
        held = _Weights.from_address(address)
        if held.type != int(weights.dtype) or held.count != count:
            raise NetworkError(
                f"weights of type {held.type} and {held.count} values, wanted {weights.dtype} and {count}"
            )
        found = ctypes.string_at(held.values, count * bits // 8)
    if len(found) * 8 != count * bits:
        raise NetworkError(f"a constant has {len(found)} bytes, wanted {count * bits // 8}")
    return found


def _e4m3_values():
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    magnitude[[0x7F, 0xFF]] = np.nan
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


def _cast(layer, inputs):
    if layer.to_type != layer.get_output(0).dtype:
        raise NetworkError(f"{layer.name} casts to {layer.to_type} and gives {layer.get_output(0).dtype}")
    return [inputs[0].array]


def _elementwise(layer, inputs):
    a, b = inputs
    if a.dtype != b.dtype:
        raise NetworkError(f"{layer.name} takes {a.dtype} and {b.dtype}")
    functions = {"SUM": np.add, "SUB": np.subtract, "PROD": np.multiply, "EQUAL": np.equal}
    if a.array.ndim != b.array.ndim:
        raise NetworkError(f"{layer.name} takes {a.array.shape} and {b.array.shape}")
    return [functions[layer.op.name](a.array, b.array)]


def _unary(layer, inputs):
    functions = {"SQRT": np.sqrt, "RECIP": np.reciprocal}
    return [functions[layer.op.name](inputs[0].array)]


def _activation(layer, inputs):
    x = inputs[0].array
    match layer.type.name:
        case "SIGMOID":
            with np.errstate(over="ignore"):
                return [np.reciprocal(1 + np.exp(-x))]
        case "GELU_ERF":
            return [x / 2 * (1 + _erf(x / np.sqrt(2)))]
        case "GELU_TANH":
            return [x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))]
        case other:
            raise NetworkError(f"{layer.name} is a {other}")


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _softmax(layer, inputs):
    axes = [axis for axis in range(inputs[0].array.ndim) if layer.axes >> axis & 1]
    if len(axes) != 1:
        raise NetworkError(f"{layer.name} is over axes {axes}")
    away = np.exp(inputs[0].array - inputs[0].array.max(axes[0], keepdims=True))
    return [away / away.sum(axes[0], keepdims=True)]


def _shuffle(layer, inputs):
    """Transpose, reshape, transpose."""
    if len(inputs) > 1:
        raise NetworkError(f"{layer.name} is shaped by an input")
    x = inputs[0].array.transpose(tuple(layer.first_transpose)[: inputs[0].array.ndim])
    shape = tuple(x.shape[i] if size == 0 else size for i, size in enumerate(layer.reshape_dims))
    x = x.reshape(shape)
    return [x.transpose(tuple(layer.second_transpose)[: x.ndim])]


def _reduce(layer, inputs):
    functions = {"AVG": np.mean, "MAX": np.max, "MIN": np.min, "SUM": np.sum}
    axes = tuple(axis for axis in range(inputs[0].array.ndim) if layer.axes >> axis & 1)
    return [functions[layer.op.name](inputs[0].array, axis=axes, keepdims=layer.keep_dims)]


def _select(_, inputs):
    return [np.where(*(value.array for value in inputs))]


def _concatenation(layer, inputs):
    return [np.concatenate([value.array for value in inputs], layer.axis)]


def _slice(layer, inputs):
    """Elements start, start + stride, ... along each of ``axes``; all of the others."""
    array = inputs[0].array
    if layer.mode.name != "STRICT_BOUNDS" or len(inputs) > 1:
        raise NetworkError(f"{layer.name} slices in mode {layer.mode.name} by {len(inputs)} inputs")
    for axis, start, size, stride in zip(layer.axes, layer.start, layer.shape, layer.stride, strict=True):
        last = start + (size - 1) * stride
        if not (0 <= start < array.shape[axis] and 0 <= last < array.shape[axis] and stride > 0):
            raise NetworkError(f"{layer.name} takes {start} to {last} of {array.shape[axis]} along axis {axis}")
        array = np.take(array, np.arange(start, last + 1, stride), axis)
    return [array]


def _gather(layer, inputs):
    return [np.take(inputs[0].array, inputs[1].array, layer.axis)]


def _matrix_multiply(layer, inputs):
    a, b = inputs
    if a.dtype != b.dtype or a.dtype not in ("BF16", "FLOAT"):
        raise NetworkError(f"{layer.name} multiplies {a.dtype} and {b.dtype}")
    sides = ((a.array, layer.op0), (b.array, layer.op1))
    turned = [array.swapaxes(-1, -2) if op.name == "TRANSPOSE" else array for array, op in sides]
    return [turned[0] @ turned[1]]


def _dequantize(layer, inputs):
    codes, scale = inputs
    target = layer.to_type.name
    if codes.dtype not in ("FP8", "FP4") or scale.dtype != target or layer.get_output(0).dtype.name != target:
        raise NetworkError(f"{layer.name} dequantizes {codes.dtype} by {scale.dtype} to {target}")
    shape = codes.array.shape
    if scale.array.size == 1:
        return [codes.array * scale.array.reshape(())]
    if scale.array.ndim == 1:  # a scale for each channel
        if codes.dtype == "FP4" or scale.array.shape[0] != shape[layer.axis]:
            raise NetworkError(f"{layer.name}: {scale.array.shape} scales along axis {layer.axis} of {shape}")
        return [codes.array * np.expand_dims(scale.array, [i for i in range(len(shape)) if i != layer.axis])]
    blocks = scale.array.shape[layer.axis]
    rest = [(a, b) for i, (a, b) in enumerate(zip(shape, scale.array.shape, strict=True)) if i != layer.axis]
    if any(a != b for a, b in rest) or blocks * 16 != shape[layer.axis]:
        raise NetworkError(
            f"{layer.name}: scales {scale.array.shape} in blocks of 16 along axis {layer.axis} of {shape}"
        )
    return [codes.array * np.repeat(scale.array, 16, layer.axis)]


def _dynamic_quantize(layer, inputs):
    """Block scale E4M3(max|block| / 6 / s), codes E2M1(x / (block scale * s)); s is input 1."""
    x, scale = inputs
    types = (layer.to_type.name, layer.scale_type.name, layer.block_size)
    if types != ("FP4", "FP8", 16) or layer.axis != x.array.ndim - 1 or scale is None or scale.array.size != 1:
        raise NetworkError(f"{layer.name} quantizes {x.array.shape} along {layer.axis} to {types}")
    if scale.dtype not in (x.dtype, "FLOAT"):
        raise NetworkError(f"{layer.name} takes {x.dtype} and a scale of {scale.dtype}")
    blocks = x.array.reshape(*x.array.shape[:-1], -1, 16)
    s = scale.array.reshape(()).astype(np.float32)
    block_scale = to_e4m3(np.abs(blocks).max(-1) / (np.float32(6) * s))
    divisor = (block_scale * s)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(divisor == 0, 0, to_e2m1(np.where(divisor == 0, 0, blocks / divisor)))
    return [codes.reshape(x.array.shape), block_scale]


_LAYERS = {
    "CONSTANT": _constant,
    "CAST": _cast,
    "ELEMENTWISE": _elementwise,
    "UNARY": _unary,
    "ACTIVATION": _activation,
    "REDUCE": _reduce,
    "SOFTMAX": _softmax,
    "SHUFFLE": _shuffle,
    "SELECT": _select,
    "CONCATENATION": _concatenation,
    "SLICE": _slice,
    "GATHER": _gather,
    "MATRIX_MULTIPLY": _matrix_multiply,
    "DEQUANTIZE": _dequantize,
    "DYNAMIC_QUANTIZE": _dynamic_quantize,
}
