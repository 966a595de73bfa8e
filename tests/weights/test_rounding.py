"""Block scales by search against all 126 of them, in float64; ties; rows alone decide; odd importance."""

import numpy as np
import pytest
import torch

from edge_dflash.errors import BuildError
from edge_dflash.weights import quantize, rounding
from edge_dflash.weights.e4m3 import from_e4m3
from edge_dflash.weights.quantize import E2M1, GLOBAL_DIVISOR, dequantize, quantize_nvfp4
from edge_dflash.weights.rounding import Search

MAGNITUDES = torch.tensor(E2M1, dtype=torch.float64)


def random(n, k, seed=0, power=1.0):
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return values.sign() * values.abs() ** power * 0.02


def losses(w, global_scale, h):
    """[126, n, K / 16] in float64: the weighted error of each block with each code 0x01..0x7E, nearest magnitudes."""
    a = w.double().abs().view(len(w), -1, 16)
    scales = from_e4m3(torch.arange(1, 127, dtype=torch.uint8)).double() * global_scale
    found = []
    for scale in scales:
        away = (a[..., None] - MAGNITUDES * scale).abs().amin(-1)
        found.append((away.square() * h.double().view(-1, 16)).sum(-1))
    return torch.stack(found)


def loss_of(weight, w, h):
    away = (dequantize(weight).double() - w.double()).square() * h.double()
    return away.view(len(w), -1, 16).sum(-1)


@pytest.mark.parametrize("power", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_search_is_within_a_hundredth_of_the_best_of_all_scales(power, weighted):
    w = random(12, 512, power=power)
    h = torch.rand(512, generator=torch.Generator().manual_seed(1)) ** 2 if weighted else torch.ones(512)
    by_max, searched = quantize_nvfp4(w), quantize_nvfp4(w, None, Search(h))
    assert searched.global_scale == by_max.global_scale
    best = losses(w, by_max.global_scale, h).amin(0)
    before, after = loss_of(by_max, w, h), loss_of(searched, w, h)
    assert (after <= before * (1 + 1e-5)).all()
    assert best.sum() * (1 - 1e-6) <= after.sum() <= best.sum() * 1.01
    assert after.sum() < 0.9 * before.sum()


def test_importance_is_of_the_input_and_of_any_unit():
    w, h = random(4, 64), torch.ones(64)
    h[::16] = 1e4
    for unit in (1.0, 1e-30, 1e30):
        weight = quantize_nvfp4(w, None, Search(h * unit))
        assert weight.block_scale.tolist() == quantize_nvfp4(w, None, Search(h)).block_scale.tolist()
    lead = (dequantize(weight) - w)[:, ::16].square().sum()
    assert lead < 0.5 * (dequantize(quantize_nvfp4(w, None, Search())) - w)[:, ::16].square().sum()


def test_without_importance_every_input_counts_the_same():
    w = random(4, 64)
    same = [quantize_nvfp4(w, None, Search(h)).packed for h in (None, torch.zeros(64), torch.full((64,), 7.0))]
    assert same[0].tobytes() == same[1].tobytes() == same[2].tobytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_importance_that_is_no_weight_is_refused(value):
    h = torch.ones(32)
    h[5] = value
    with pytest.raises(BuildError, match=r"importance is from .* wanted finite numbers from 0"):
        Search(h)


def test_of_equal_errors_max_over_six_wins():
    """Blocks that several scales hold exactly, or that all hold as badly."""
    w = torch.zeros(3, 48)
    w[0, 0], w[1, :16], w[2, :16] = 6.0, 1.5, 0.75  # alone; as 6 or 4 or 3 or 2 times a scale, all exact
    w[0, 16:32] = 3.0
    by_max, searched = quantize_nvfp4(w), quantize_nvfp4(w, None, Search())
    assert searched.block_scale.tolist() == by_max.block_scale.tolist()
    assert searched.packed.tobytes() == by_max.packed.tobytes()
    assert searched.block_scale[0, 2] == 0x38  # of zeros


def test_the_largest_block_and_the_smallest_keep_to_the_codes_that_kernels_read():
    w = random(8, 64)
    w[0, :16] = w.abs().max() * 40
    w[1, :16] = w.abs().max() * 1e-8
    weight = quantize_nvfp4(w, None, Search())
    assert weight.block_scale.min() >= 0x01
    assert weight.block_scale.max() <= 0x7E
    assert not weight.damaged()


def test_a_row_is_rounded_alike_whatever_rows_and_values_are_beside_it(monkeypatch):
    w, h = random(40, 96), torch.rand(96, generator=torch.Generator().manual_seed(2))
    amax = float(w.abs().max())
    whole = quantize_nvfp4(w, amax, Search(h))
    for at_once, rows in ((96, 7), (500, 3), (1, 40), (1 << 20, 1)):
        monkeypatch.setattr(rounding, "AT_ONCE", at_once)
        monkeypatch.setattr(quantize, "CHUNK_ELEMENTS", rows * 96)
        parts = [quantize_nvfp4(part, amax, Search(h)) for part in w.split(rows)]
        assert np.concatenate([part.packed for part in parts]).tobytes() == whole.packed.tobytes()
        assert np.concatenate([part.block_scale for part in parts]).tobytes() == whole.block_scale.tobytes()


def test_codes_are_those_of_the_chosen_scales_with_ties_to_even():
    w = random(16, 128).bfloat16()
    weight = quantize_nvfp4(w, None, Search())
    values = from_e4m3(torch.from_numpy(weight.block_scale)).double() * weight.global_scale
    y = (w.double().view(16, -1, 16) / values[..., None]).view(16, 128)
    away = (y.abs()[..., None] - MAGNITUDES).abs()
    codes = np.stack((weight.packed & 15, weight.packed >> 4), -1).reshape(16, 128)
    least = away.amin(-1)
    chosen = away.gather(-1, torch.from_numpy(codes & 7).long()[..., None])[..., 0]
    assert (chosen <= least + 1e-6).all()
    tie = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    error = rounding._error(tie.repeat(2, 1), torch.empty(2, 8))
    assert (error[0] + tie).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


def test_edges_are_as_without_a_search():
    zeros = quantize_nvfp4(torch.zeros(2, 32), None, Search())
    assert (zeros.block_scale == 0x38).all()
    assert not zeros.packed.any()
    assert quantize_nvfp4(torch.full((1, 16), 1e-38), None, Search()).global_scale == 1.0
    tiny = torch.full((1, 16), 6 * GLOBAL_DIVISOR * 2.0**-126)
    assert quantize_nvfp4(tiny, None, Search()).global_scale > 0
    for bad in (float("nan"), float("inf")):
        with pytest.raises(BuildError, match="largest magnitude"):
            quantize_nvfp4(torch.tensor([[bad, *[1.0] * 15]]), None, Search())
    with pytest.raises(BuildError, match="multiple of 16"):
        quantize_nvfp4(torch.ones(2, 24), None, Search())
    assert quantize_nvfp4(torch.empty(0, 32), None, Search()).shape == (0, 32)
