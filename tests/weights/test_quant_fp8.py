"""E4M3 codes against the definition of the format, and FP8 weights."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_dflash.errors import BuildError
from edge_dflash.weights.e4m3 import from_e4m3, to_e4m3
from edge_dflash.weights.quantize import dequantize, quantize_fp8, unscaled


def e4m3_value(code: int) -> float:
    """A code's value, from the format's definition."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


VALUES = [e4m3_value(code) for code in range(0x7F)]  # 0 .. 448, ascending


def nearest(x: float) -> int:
    """Code of the nearest magnitude, ties to the even code, by search in exact float64 arithmetic."""
    magnitude = min(abs(x), 448.0)
    best = min(range(0x7F), key=lambda c: (abs(VALUES[c] - magnitude), c & 1))
    return best | (0x80 if math.copysign(1, x) < 0 else 0)


def codes_of(*values: float) -> list[int]:
    return to_e4m3(torch.tensor(values, dtype=torch.float32)).tolist()


def test_every_code_decodes_to_its_definition():
    decoded = from_e4m3(torch.arange(256, dtype=torch.uint8)).double().numpy()
    np.testing.assert_array_equal(decoded, [e4m3_value(c) for c in range(256)])


def test_every_value_and_every_midpoint_encodes_to_nearest_even():
    middles = [(a + b) / 2 for a, b in itertools.pairwise(VALUES)]
    around = [np.nextafter(np.float32(m), np.float32(d)).item() for m in middles for d in (0, 500)]
    values = [s * v for v in (*VALUES, *middles, *around) for s in (1, -1)]
    assert codes_of(*values) == [nearest(v) for v in values]


def test_saturation_infinity_and_nan():
    assert codes_of(448, 449, 464, 1e30, math.inf, -464, -math.inf) == [0x7E] * 5 + [0xFE] * 2
    assert codes_of(math.nan, -math.nan) == [0x7F, 0x7F]
    assert codes_of(2.0**-10, 1.01 * 2.0**-10, 2.0**-11) == [0, 1, 0]


@given(st.lists(st.floats(width=32, min_value=-1000, max_value=1000), min_size=1, max_size=40))
def test_codes_are_the_nearest(values):
    assert codes_of(*values) == [nearest(v) for v in values]


@given(st.floats(width=32, min_value=2.0**-13, max_value=100), st.floats(width=32, min_value=-40000, max_value=40000))
def test_scale_divides_in_float32(scale, x):
    quotient = np.float32(x) / np.float32(scale)
    assert to_e4m3(torch.tensor([x]), scale).item() == nearest(float(quotient))


def test_tensor_and_channel_scales():
    w = torch.tensor([[1.0, -3.5, 0.25, 2.0], [896.0, 100.0, -7.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    tensor = quantize_fp8(w)
    assert tensor.scale.tolist() == [2.0]
    assert tensor.data[1, 0] == 0x7E
    channel = quantize_fp8(w.bfloat16(), per_channel=True)
    assert channel.scale.tolist() == [3.5 / 448, 2.0, 1.0]
    assert channel.data[:, :2].tolist() == [[nearest(128), 0xFE], [0x7E, nearest(50)], [0, 0]]
    matrix, scale = unscaled(channel)
    assert (matrix.shape, scale.shape, unscaled(tensor)[1].shape) == ((3, 4), (3,), ())
    torch.testing.assert_close(dequantize(channel), matrix * scale[:, None], rtol=0, atol=0)
    torch.testing.assert_close(dequantize(channel), w, rtol=1 / 16, atol=0)
    assert quantize_fp8(torch.zeros(2, 3)).scale.tolist() == [1.0]


def test_row_chunks_change_nothing(monkeypatch):
    w = torch.randn(37, 48, generator=torch.Generator().manual_seed(1))
    whole = quantize_fp8(w, per_channel=True)
    monkeypatch.setattr("edge_dflash.weights.quantize.CHUNK_ELEMENTS", 100)
    chunked = quantize_fp8(w, per_channel=True)
    assert (whole.data.tobytes(), whole.scale.tobytes()) == (chunked.data.tobytes(), chunked.scale.tobytes())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("per_channel", [False, True])
def test_not_finite_is_refused(bad, per_channel):
    w = torch.ones(3, 16)
    w[1, 5] = bad
    with pytest.raises(BuildError, match="finite"):
        quantize_fp8(w, per_channel=per_channel)
