"""NVFP4 against the published worked example, a golden checkpoint and an exact search."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import GOLDEN
from safetensors import safe_open

from edge_dflash.errors import BuildError
from edge_dflash.weights.e4m3 import from_e4m3
from edge_dflash.weights.formats import Nvfp4Weight, WideWeight
from edge_dflash.weights.quantize import E2M1, dequantize, fused_group, quantize_activations, quantize_nvfp4, unscaled

WORKED = """
-0.96875 0.46875 1.09375 -5.25 -0.1875 0.34375 -1.09375 0.21875 0.65625 -0.65625 -1.40625 -0.5625 0.84375 1.21875
0.28125 1.3125 -1.90625 -0.375 2.3125 -0.40625 0 0.9375 1.25 -0.875 -0.25 -0.25 -2.1875 -0.40625 -2.46875 0.8125
-1.59375 -1.625
-0.09375 -0.03125 0.21875 2.75 1.15625 -0.78125 -1 -0.71875 -1.6875 1.5625 1.96875 -1.28125 -0.3125 -0.3125 0.59375
0.3125 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
"""
WORKED_VALUES = """
-0.875 0.4375 0.875 -5.25 0 0.4375 -0.875 0 0.875 -0.875 -1.3125 -0.4375 0.875 1.3125 0.4375 1.3125
-1.625 -0.40625 2.4375 -0.40625 0 0.8125 1.21875 -0.8125 -0.203125 -0.203125 -2.4375 -0.40625 -2.4375 0.8125 -1.625
-1.625
0 0 0.234375 2.8125 0.9375 -0.703125 -0.9375 -0.703125 -1.875 1.40625 1.875 -1.40625 -0.234375 -0.234375 0.703125
0.234375 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
"""


def matrix(text: str) -> torch.Tensor:
    return torch.tensor([float(x) for x in text.split()]).view(2, 32)


def codes(weight: Nvfp4Weight) -> np.ndarray:
    return np.stack((weight.packed & 15, weight.packed >> 4), -1).reshape(weight.shape)


def test_worked_example_bytes_and_values():
    w = quantize_nvfp4(matrix(WORKED))
    assert w.global_scale == 2.0**-9
    assert w.block_scale.tolist() == [[0x7E, 0x75], [0x77, 0x38]]
    assert w.packed[0].tobytes().hex() == "1af2180aa29b3231aea740c599af4fee"
    assert w.packed[1].tobytes().hex() == "8871b4bc5ed699130000000000000000"
    assert torch.equal(dequantize(w), matrix(WORKED_VALUES))


def test_golden_checkpoint_bytes():
    """Quantizing the tiny model gives the bytes that ModelOpt exported, for every quantized linear."""
    checked = 0
    with (
        safe_open(GOLDEN / "qwen3_5-tiny/model.safetensors", "pt") as wide,
        safe_open(GOLDEN / "qwen3_5-tiny-nvfp4-modelopt/model.safetensors", "pt") as quantized,
    ):

        def source(module: str) -> torch.Tensor:
            return wide.get_tensor(module.replace("model.language_model.", "model.") + ".weight")

        for key in sorted(quantized.keys()):
            if not key.endswith(".weight_scale_2"):
                continue
            module = key.removesuffix(".weight_scale_2")
            amax = max(source(member).abs().max().item() for member in fused_group(module))
            w = quantize_nvfp4(source(module), amax)
            assert w.global_scale == quantized.get_tensor(key).item(), module
            scales = quantized.get_tensor(module + ".weight_scale").view(torch.uint8).numpy()
            np.testing.assert_array_equal(w.block_scale, scales, err_msg=module)
            np.testing.assert_array_equal(w.packed, quantized.get_tensor(module + ".weight").numpy(), err_msg=module)
            checked += 1
    assert checked == 2 * 7 + 6 * 6


def test_fused_groups():
    layer = "target.layers.3."
    mlp = (layer + "mlp.gate_proj", layer + "mlp.up_proj")
    assert fused_group(mlp[0]) == fused_group(mlp[1]) == mlp
    for expert in ("mlp.experts.17.", "mlp.shared_expert."):
        both = (layer + expert + "gate_proj", layer + expert + "up_proj")
        assert fused_group(both[0]) == fused_group(both[1]) == both
        assert fused_group(layer + expert + "down_proj") == (layer + expert + "down_proj",)
    assert len(fused_group(layer + "self_attn.v_proj")) == 3
    assert len(fused_group(layer + "linear_attn.in_proj_z")) == 2
    for alone in ("mlp.down_proj", "self_attn.o_proj", "linear_attn.out_proj", "linear_attn.in_proj_a"):
        assert fused_group(layer + alone) == (layer + alone,)


def test_edges_zero_tiny_and_negative_to_zero():
    zeros = quantize_nvfp4(torch.zeros(2, 32))
    assert (zeros.global_scale, zeros.block_scale.tolist(), zeros.packed.any()) == (1.0, [[0x38] * 2] * 2, False)
    assert quantize_nvfp4(torch.full((1, 16), 1e-38)).global_scale == 1.0
    w = torch.zeros(1, 48)
    w[0, 0], w[0, 16], w[0, 17] = 2688.0, 1e-4, -1e-4  # global scale 1; the second block lies below 2^-9 * 0.25
    w[0, 32], w[0, 33] = -6.0, -0.0
    q = quantize_nvfp4(w)
    assert q.block_scale.tolist() == [[0x7E, 0x01, 0x38]]
    assert codes(q)[0, [0, 16, 17, 32, 33]].tolist() == [7, 0, 8, 15, 0]


def test_refusals():
    with pytest.raises(BuildError, match="found 24"):
        quantize_nvfp4(torch.ones(2, 24))
    with pytest.raises(BuildError, match="does not cover"):
        quantize_nvfp4(torch.full((1, 16), 2.0), 1.0)
    for bad in (math.nan, math.inf, -math.inf):
        w = torch.ones(2, 32)
        w[1, 20] = bad
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(BuildError, match="finite"):
                quantize_nvfp4(w.to(dtype))


def nearest_code(y: np.float32) -> int:
    """Nearest E2M1 magnitude by exact search, ties to the even code; the sign bit for negative values."""
    exact = abs(Fraction(float(y)))
    return min(range(8), key=lambda c: (abs(Fraction(E2M1[c]) - exact), c & 1)) | (8 if y < 0 else 0)


finite = st.floats(width=32, min_value=-8, max_value=8)
grid = st.sampled_from([s * i / 8 for i in range(65) for s in (1, -1)])


@settings(max_examples=60)
@given(st.lists(finite | grid, min_size=32, max_size=32), st.sampled_from([None, 8.0, 2688.0, 11.3]))
def test_codes_are_the_nearest(values, amax):
    w = np.array(values, dtype=np.float32)
    q = quantize_nvfp4(torch.tensor(w)[None], amax)
    scale = from_e4m3(torch.tensor(q.block_scale[0])).numpy().repeat(16) * np.float32(q.global_scale)
    if q.packed.any():
        assert codes(q)[0].tolist() == [nearest_code(y) for y in w / scale]


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_error_bounds_and_exact_in_bf16(seed, size):
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) * size
    q = quantize_nvfp4(w)
    product, scale = unscaled(q)
    assert scale.shape == ()
    assert torch.equal(product.bfloat16().float(), product)
    assert torch.equal(product * scale, dequantize(q))
    # Half of the widest gap (2 at 4..6) of the block's largest value, and E4M3's relative half step on the scale.
    bound = w.view(8, 4, 16).abs().amax(-1, keepdim=True) / 6 * (1 + 1 / 8)
    assert ((dequantize(q) - w).view(8, 4, 16).abs() <= bound).all()


def test_row_chunks_change_nothing(monkeypatch):
    w = torch.randn(70, 64, generator=torch.Generator().manual_seed(2), dtype=torch.bfloat16)
    whole = quantize_nvfp4(w)
    values = dequantize(whole)
    monkeypatch.setattr("edge_dflash.weights.quantize.CHUNK_ELEMENTS", 200)
    chunked = quantize_nvfp4(w)
    assert (whole.packed.tobytes(), whole.block_scale.tobytes()) == (
        chunked.packed.tobytes(),
        chunked.block_scale.tobytes(),
    )
    assert torch.equal(dequantize(chunked), values)


def test_wide_weights_of_any_shape_from_read_only_memory():
    bits = np.array([0x3F80, 0xC000, 0x3E00], dtype=np.uint16)
    bits.flags.writeable = False
    assert dequantize(WideWeight(bits)).tolist() == [1.0, -2.0, 0.125]
    conv = np.arange(12, dtype=np.float32).reshape(3, 1, 4)
    values, scale = unscaled(WideWeight(conv))
    assert values.shape == (3, 1, 4)
    assert scale.item() == 1.0
    values.zero_()
    assert conv[0, 0, 1] == 1.0  # never a view of the file


def test_activations_follow_the_weight_rule_per_row_and_block():
    """With one calibrated scale, an activation row has the codes and block scales of a weight row of the same amax."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    amax = 6.5
    weight = quantize_nvfp4(x, amax)
    sx = float(np.float32(amax) / np.float32(2688))
    assert torch.equal(quantize_activations(x, sx), unscaled(weight)[0])


def test_activations_do_not_depend_on_other_rows():
    x = torch.randn(19, 48, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 3, 19)[:, None]
    whole = quantize_activations(x, 0.01)
    for row in range(19):
        assert torch.equal(quantize_activations(x[row : row + 1], 0.01)[0], whole[row])


def test_activations_saturate_and_flush():
    x = torch.zeros(2, 16)
    x[0, 0], x[0, 1], x[0, 2] = 5000.0, -100.0, -120.0  # above 2688 * sx: block scale 448, code 7
    x[1, 0] = 1e-4  # block scale below half of 2^-9: zero
    y = quantize_activations(x, 1.0)
    assert y[0, :3].tolist() == [2688.0, 0.0, -224.0]
    assert not y[1].any()
