"""What the lowering refuses, by name, and the rounding of weights that are stored wider than a plan holds them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tensorrt_arena import widened
from tensorrt_support import Formatted, lowered, tensorrt, units

from edge_dflash.backends.cuda.tensorrt.lower import bf16_bits
from edge_dflash.backends.cuda.tensorrt.net import Net
from edge_dflash.backends.cuda.tensorrt.units import HEAD
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import RmsNorm, SelectRows
from edge_dflash.weights.formats import Nvfp4Weight, WideWeight
from edge_dflash.weights.quantize import quantize_nvfp4

needs_tensorrt = pytest.mark.tensorrt


class Only:
    """A store of one weight."""

    def __init__(self, weight):
        self.weight = weight

    def get(self, name):
        return self.weight


def test_float32_weights_are_rounded_to_nearest_even():
    values = np.concatenate([np.random.default_rng(0).standard_normal(10_000), [1.00390625, 1.01171875, 0.0, -0.0]])
    values = values.astype(np.float32)
    wanted = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(widened(bf16_bits(values)), wanted)
    stored = np.arange(7, dtype=np.uint16)
    assert bf16_bits(stored) is stored


@needs_tensorrt
def test_a_quantized_norm_is_refused():
    unit = units("demo").units["target-000"]
    norm = next(op for op in unit.ops if isinstance(op, RmsNorm))
    with pytest.raises(BackendError, match=r"is stored as Nvfp4Weight, wanted BF16 or F32: keep it wide"):
        lowered(replace(unit, ops=(norm,), outputs=()), Only(quantize_nvfp4(torch.randn(16, 32))))


@needs_tensorrt
def test_an_op_without_lowering_is_refused():
    unit = units("demo").units[HEAD]
    select = SelectRows(inputs=unit.ops[0].inputs, output="logits", which="last")
    with pytest.raises(BackendError, match="logits: SelectRows has no TensorRT lowering"):
        lowered(replace(unit, ops=(select,)), Formatted("demo", "bf16"))


@needs_tensorrt
def test_blocks_that_do_not_divide_the_inputs_are_refused():
    weight = Nvfp4Weight(np.zeros((8, 12), np.uint8), np.zeros((8, 1), np.uint8), 1.0)
    unit = units("demo").units[HEAD]
    narrow = replace(unit, inputs=(replace(unit.inputs[0], columns=24),))
    with pytest.raises(BackendError, match="logits: an NVFP4 weight with 24 inputs, wanted a multiple of 16"):
        lowered(narrow, Only(weight))


@needs_tensorrt
def test_a_matrix_that_does_not_fit_is_refused_with_the_ops_name():
    with pytest.raises(BackendError, match=r"logits: a weight \[8, 24\] for 256 inputs"):
        lowered(units("demo").units[HEAD], Only(WideWeight(np.zeros((8, 24), np.uint16))))


@needs_tensorrt
def test_constants_of_the_wrong_size_or_type_are_refused():
    trt, builder, _ = tensorrt()
    net = Net(trt, builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)))
    for array, dtype, shape in (
        (np.zeros((4, 8), np.uint8), "FP4", (4, 8)),  # twice as many values as bytes
        (np.zeros((4, 8), np.float32), "BF16", None),
        (np.zeros((4, 8), np.uint8), "FP8", (4, 9)),
    ):
        with pytest.raises(BackendError, match=f"a {dtype} constant"):
            net.constant(array, dtype, shape)
