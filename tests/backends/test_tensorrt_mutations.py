"""Lowerings that are wrong in one thing each: the interpreter, judged by the reference, must find every one of them."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from tensorrt_support import Formatted, judge, lowered, reference, tensorrt, unit_network, units
from trt_interpreter import NetworkError, run

from edge_dflash.backends.cuda.tensorrt import lower as lowering
from edge_dflash.backends.cuda.tensorrt.net import Net
from edge_dflash.backends.cuda.tensorrt.units import CHOICES, HEAD, HEAD_INPUT
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Add, Concat, RmsNorm, SwiGlu
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WideWeight
from edge_dflash.weights.quantize import dequantize, quantize_fp8, quantize_nvfp4

pytestmark = pytest.mark.tensorrt

SQUARE = "target-004"  # begins with the output projection of an attention layer, [256, 256]
DELTA = "target-001"
CONTEXT = "target-007"  # with taps, fc and the drafter's context


@dataclass
class Store:
    """Another store, with weights changed where ``change`` gives one."""

    source: Formatted
    change: object

    def get(self, name):
        return self.change(name, self.source.get(name)) or self.source.get(name)


def weights(kind, change):
    """``change`` (weight -> weight) of every weight of a type."""

    def mutate(patch, unit, store):
        return unit, Store(store, lambda name, weight: change(weight) if isinstance(weight, kind) else None)

    return mutate


def ops(kind, change):
    """``change`` (op -> op) of every op of a type."""

    def mutate(patch, unit, store):
        return replace(unit, ops=tuple(change(op) if isinstance(op, kind) else op for op in unit.ops)), store

    return mutate


def function(where, name, make):
    """A function of a module or class replaced by ``make(original)``."""

    def mutate(patch, unit, store):
        patch.setattr(where, name, make(getattr(where, name)))
        return unit, store

    return mutate


def exchanged(a, b):
    """Two weights of equal shapes taken for each other."""

    def other(name):
        return name.replace(a, "@").replace(b, a).replace("@", b)

    def mutate(patch, unit, store):
        return unit, Store(store, lambda name, weight: store.get(other(name)) if a in name or b in name else None)

    return mutate


def transposed(weight):
    if weight.shape != (256, 256):
        return weight
    values = dequantize(weight).T.contiguous()
    if isinstance(weight, WideWeight):
        return WideWeight(weight.data.T.copy())
    return quantize_fp8(values) if isinstance(weight, Fp8Weight) else quantize_nvfp4(values)


def to_bf16(value):
    return float((np.float32(value).view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32))


def no_rows_scale(original):
    return lambda net, x, factor: original(net, x, np.ones((1, 1), np.float32))


def norm(changed):
    """rms_norm with something changed in the network methods that it calls."""
    return function(lowering, "rms_norm", lambda original: lambda net, *args, **kw: original(changed(net), *args, **kw))


class Other:
    """A Net with some methods replaced."""

    def __init__(self, net, **methods):
        self.__dict__.update(net=net, **methods)

    def __getattr__(self, name):
        return getattr(self.net, name)


def in_bf16(net):
    return Other(net, elementwise=lambda a, b, f: net.cast(net.cast(net.elementwise(a, b, f), "BF16"), "FLOAT"))


def without_sigmoid(net, gate, up):
    gate, up = net.cast(gate, "FLOAT"), net.cast(up, "FLOAT")
    return net.cast(net.elementwise(net.activation(gate, "SIGMOID"), up, "PROD"), "BF16")


def relu_like(net, gate, up):
    gate, up = net.cast(gate, "FLOAT"), net.cast(up, "FLOAT")
    return net.cast(
        net.elementwise(net.elementwise(gate, net.activation(gate, "SIGMOID"), "PROD"), gate, "PROD"), "BF16"
    )


def no_transpose(net, x, w):
    operation = net.trt.MatrixOperation
    turned = operation.NONE if tuple(w.shape) == (256, 256) else operation.TRANSPOSE
    return net.network.add_matrix_multiply(x, operation.NONE, w, turned).get_output(0)


def twos(net, *shape):
    return net.constant(np.full(shape, 0x4000, np.uint16), "BF16")


def axis(found, wrong):
    """Every dequantization along ``found`` goes along ``wrong``."""

    def make(original):
        return lambda net, codes, scale, axis=None: original(net, codes, scale, wrong if axis == found else axis)

    return function(Net, "dequantize", make)


def block_scales_of_activations_lost(original):
    def activations(net, x, input_scale):
        codes, _ = net.quantize_blocks(x, net.constant(np.full((), input_scale, np.float32), "FLOAT"))
        return net.dequantize(codes, net.ones())

    return activations


def quantized_rows(original):
    def quantize(net, x, scale):
        layer = net.network.add_dynamic_quantize(x, 0, 16, net.dtype("FP4"), net.dtype("FP8"))
        layer.set_input(1, scale)
        return layer.get_output(0), layer.get_output(1)

    return quantize


def columns_late(original):
    """Every part but the first begins a column too early."""

    def split(net, x, counts):
        firsts = [max(0, sum(counts[:i]) - 1) for i in range(len(counts))]
        layers = [net.network.add_slice(x, (f,), (n,), (1,)) for f, n in zip(firsts, counts, strict=True)]
        for layer in layers:
            layer.axes = (1,)
        return [layer.get_output(0) for layer in layers]

    return split


def rolled(array, by=1, along=0):
    return np.ascontiguousarray(np.roll(array, by, along))


NVFP4, FP8, WIDE = Nvfp4Weight, Fp8Weight, WideWeight
NIBBLES = weights(NVFP4, lambda w: replace(w, packed=(w.packed >> 4) | (w.packed << 4)))
MUTATIONS = {
    # weights as they are stored
    "nvfp4 transposed": ("w4a16", SQUARE, weights(NVFP4, transposed)),
    "fp8 transposed": ("fp8", SQUARE, weights(FP8, transposed)),
    "bf16 transposed": ("bf16", SQUARE, weights(WIDE, lambda w: transposed(w) if w.data.ndim == 2 else w)),
    "nibbles swapped": ("w4a16", DELTA, NIBBLES),
    "nibbles swapped, 4-bit activations": ("w4a4", DELTA, NIBBLES),
    "sign bits lost": ("w4a16", DELTA, weights(NVFP4, lambda w: replace(w, packed=w.packed & 0x77))),
    "a byte of codes late": ("w4a16", DELTA, weights(NVFP4, lambda w: replace(w, packed=rolled(w.packed, 1, 1)))),
    "block scales of the next block": (
        *("w4a16", DELTA),
        weights(NVFP4, lambda w: replace(w, block_scale=rolled(w.block_scale, 1, 1))),
    ),
    "block scales of the next row": (
        *("w4a16", DELTA),
        weights(NVFP4, lambda w: replace(w, block_scale=rolled(w.block_scale))),
    ),
    "global scale missing": ("w4a16", DELTA, weights(NVFP4, lambda w: replace(w, global_scale=1.0))),
    "global scale upside down": ("w4a16", HEAD, weights(NVFP4, lambda w: replace(w, global_scale=1 / w.global_scale))),
    "global scale in bf16": (
        "w4a16",
        DELTA,
        weights(NVFP4, lambda w: replace(w, global_scale=to_bf16(w.global_scale))),
    ),
    "input scale missing": ("w4a4", DELTA, weights(NVFP4, lambda w: replace(w, input_scale=None))),
    "input scale too large": ("w4a4", DELTA, weights(NVFP4, lambda w: replace(w, input_scale=1.5 * w.input_scale))),
    "input scale in bf16": ("w4a4", DELTA, weights(NVFP4, lambda w: replace(w, input_scale=to_bf16(w.input_scale)))),
    "fp8 scale missing": ("fp8", DELTA, weights(FP8, lambda w: replace(w, scale=np.ones_like(w.scale)))),
    "fp8 channel scales reversed": (
        "fp8-channel",
        DELTA,
        weights(FP8, lambda w: replace(w, scale=w.scale[::-1].copy())),
    ),
    "fp8 channel scales as one": ("fp8-channel", CONTEXT, weights(FP8, lambda w: replace(w, scale=w.scale[:1]))),
    "fp8 sign bits lost": ("fp8", DELTA, weights(FP8, lambda w: replace(w, data=w.data & 0x7F))),
    "k and v exchanged": ("w4a16", "drafter-000", exchanged("k_proj", "v_proj")),
    "gate and up weights exchanged": ("w4a16", DELTA, exchanged("gate_proj", "up_proj")),
    "gate and up weights exchanged, 4-bit activations": ("w4a4", DELTA, exchanged("gate_proj", "up_proj")),
    "a and b exchanged": ("bf16", DELTA, exchanged("in_proj_a", "in_proj_b")),
    "norms exchanged": ("bf16", DELTA, exchanged("target.layers.1.input", "target.layers.0.post_attention")),
    # ops
    "eps larger": ("bf16", DELTA, ops(RmsNorm, lambda op: replace(op, eps=1e-2))),
    "norm weight without one": ("bf16", DELTA, ops(RmsNorm, lambda op: replace(op, plus_one=False))),
    "drafter's norm weight plus one": ("bf16", "drafter-001", ops(RmsNorm, lambda op: replace(op, plus_one=True))),
    "gate and up exchanged": ("w4a16", DELTA, ops(SwiGlu, lambda op: replace(op, inputs=op.inputs[::-1]))),
    "residual twice": ("bf16", DELTA, ops(Add, lambda op: replace(op, inputs=op.inputs[:1] * 2))),
    "taps in another order": ("bf16", CONTEXT, ops(Concat, lambda op: replace(op, inputs=op.inputs[::-1]))),
    # functions of the lowering
    "residual dropped": (
        "w4a16",
        DELTA,
        function(lowering, "add", lambda original: lambda net, a, b: net.cast(b, "BF16")),
    ),
    "residual multiplied": (
        *("w4a16", DELTA),
        function(lowering, "add", lambda original: lambda net, a, b: net.elementwise(a, b, "PROD")),
    ),
    "sigmoid for silu": ("w4a16", DELTA, function(lowering, "swiglu", lambda original: without_sigmoid)),
    "up forgotten": ("w4a16", DELTA, function(lowering, "swiglu", lambda original: relu_like)),
    "norm by the largest": (
        *("bf16", DELTA),
        norm(lambda net: Other(net, reduce=lambda x, _, keep: net.reduce(x, "MAX", keep=keep))),
    ),
    "norm without square root": (
        *("bf16", DELTA),
        norm(lambda net: Other(net, unary=lambda x, f: x if f == "SQRT" else net.unary(x, f))),
    ),
    "norm multiplied by the root": (
        *("bf16", DELTA),
        norm(lambda net: Other(net, unary=lambda x, f: x if f == "RECIP" else net.unary(x, f))),
    ),
    "norm in bf16": ("bf16", DELTA, norm(in_bf16)),
    "matrix not transposed": ("w4a16", SQUARE, function(Net, "times_transposed", lambda original: no_transpose)),
    "block scales along the rows": ("w4a16", DELTA, axis(1, 0)),
    "activation scales along the rows": ("w4a4", DELTA, function(Net, "quantize_blocks", quantized_rows)),
    "channel scales along the inputs": ("fp8-channel", SQUARE, axis(0, 1)),
    "block scales dequantized by two": ("w4a16", DELTA, function(Net, "ones", lambda original: twos)),
    "scale after the product missing": ("w4a4", DELTA, function(lowering, "scaled", no_rows_scale)),
    "stacked in another order": (
        *("w4a4", "drafter-000"),
        function(lowering, "_stacked", lambda original: lambda matrices: original(matrices[::-1])),
    ),
    "columns of a stack a column early": ("w4a4", DELTA, function(Net, "split_columns", columns_late)),
    "one global scale for a stack": (
        *("w4a4", DELTA),
        function(
            lowering,
            "nvfp4",
            lambda original: (
                lambda net, x, weights: original(
                    net, x, [replace(w, global_scale=weights[0].global_scale) for w in weights]
                )
            ),
        ),
    ),
    "activation block scales missing": (
        "w4a4",
        DELTA,
        function(lowering, "activations", block_scales_of_activations_lost),
    ),
}


def findings(kind, key, unit, store):
    """What is wrong with a unit's network: ops that differ from the reference, or why it has no meaning."""
    which = "propose" if key.startswith("drafter") else "verify"
    try:
        made = lowered(unit, store)  # owns the memory of the network's constants
        return [f for f in judge(made.network, "demo", kind, which, key) if f.wrong]
    except (NetworkError, BackendError) as error:
        return [error]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_lowering_is_found(name, monkeypatch):
    kind, key, mutate = MUTATIONS[name]
    unit, store = units("demo").units[key], reference("demo", kind).store
    assert findings(kind, key, unit, store) == []
    assert findings(kind, key, *mutate(monkeypatch, unit, store))


def test_the_highest_id_among_equals_is_found(monkeypatch):
    zeros = {HEAD_INPUT: np.zeros((2, 256), np.float32)}
    trt = tensorrt()[0]
    assert list(run(trt, unit_network("demo", "w4a16", HEAD).network, zeros)[CHOICES]) == [0, 0]
    original = Net.reduce
    monkeypatch.setattr(Net, "reduce", lambda net, x, kind, keep: original(net, x, "MAX", keep=keep))
    monkeypatch.setattr(Net, "select", lambda net, c, a, b: net.network.add_select(c, a, a).get_output(0))
    wrong = lowered(units("demo").units[HEAD], reference("demo", "w4a16").store)
    assert list(run(trt, wrong.network, zeros)[CHOICES]) != [0, 0]
