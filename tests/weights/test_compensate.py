"""Error compensation: GPTQ as it is written, in float64; what it saves and leaves alone; rows decide; odd inputs."""

import numpy as np
import pytest
import torch

from edge_dflash.errors import BuildError
from edge_dflash.weights import compensate, quantize
from edge_dflash.weights.compensate import DAMPING, Compensated, feedback, peak_bytes
from edge_dflash.weights.e4m3 import from_e4m3
from edge_dflash.weights.quantize import E2M1, dequantize, quantize_nvfp4
from edge_dflash.weights.rounding import Search

K = 320  # three steps of columns, the last one short


def correlated(rows, seed=0, k=K):
    made = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, 24, generator=made) @ weights(24, k) * 50
    return (mixed + 0.3 * torch.randn(rows, k, generator=made)).bfloat16()


def weights(n=70, k=K):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(9)) * 0.02


def search(x):
    h = x.double().square().mean(0)
    return Search((h + 0.1 * h.mean()).float())


def compensated(w, x, amax=None):
    return quantize_nvfp4(w, amax, Compensated(search(x), feedback(x)))


def moments(x):
    """X^T X, damped."""
    h = x.double().T @ x.double()
    return h + DAMPING * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)


def same(one, other):
    return one.packed.tobytes() == other.packed.tobytes() and one.block_scale.tobytes() == other.block_scale.tobytes()


def nearest(y):
    """By the definition: of the magnitudes the nearest, of two as near the one of the even code."""
    away = (y.abs()[:, None] - torch.tensor(E2M1, dtype=torch.float64)).abs()
    away[:, 1::2] += 1e-12
    return torch.copysign(torch.tensor(E2M1, dtype=torch.float64)[away.argmin(-1)], y)


def textbook(w, x, weight):
    """Values by the paper's algorithm: the inverse's Cholesky factor, all columns behind brought up to date at once."""
    upper = torch.linalg.cholesky(torch.linalg.inv(moments(x)), upper=True)
    scales = from_e4m3(torch.from_numpy(weight.block_scale)).double() * weight.global_scale
    left, found = w.double().clone(), torch.zeros_like(w, dtype=torch.float64)
    for i in range(w.shape[1]):
        scale = scales[:, i // 16]
        found[:, i] = nearest(left[:, i] / scale) * scale
        error = (left[:, i] - found[:, i]) / upper[i, i]
        left[:, i + 1 :] -= error[:, None] * upper[i, i + 1 :]
    return found


@pytest.mark.parametrize("rows", [40, 200, 900])  # fewer than columns, and more than two times as many
def test_codes_are_those_of_gptq(rows):
    x, w = correlated(rows), weights()
    found = compensated(w, x)
    wanted = textbook(w, x, found)
    assert ((dequantize(found) - wanted).abs() > 1e-6).float().mean() < 0.002  # a tie that float32 decides otherwise
    assert found.block_scale.tobytes() == quantize_nvfp4(w, None, search(x)).block_scale.tobytes()


def test_the_output_errs_less_than_by_search_on_other_rows_too():
    w = weights()
    for x in (correlated(200), correlated(900)):
        for seen in (x, correlated(400, seed=1)):
            by = {}
            for name, weight in (("search", quantize_nvfp4(w, None, search(x))), ("compensated", compensated(w, x))):
                by[name] = float((seen.double() @ (dequantize(weight).double() - w.double()).T).square().sum())
            assert by["compensated"] < (0.2 if seen is x else 0.6) * by["search"]


def test_uncorrelated_inputs_change_nothing():
    w, x = weights(), torch.eye(K)
    assert not feedback(x).any()
    assert same(compensated(w, x), quantize_nvfp4(w, None, search(x)))


def test_the_factor_is_that_of_the_damped_moments():
    for rows in (30, 330, 1000):
        x = correlated(rows)
        upper = torch.linalg.cholesky(moments(x).flip(0, 1)).flip(0, 1)
        wanted = (upper.T / upper.diagonal()[:, None]).tril(-1)
        torch.testing.assert_close(feedback(x).double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_row_is_rounded_alike_whatever_rows_are_beside_it(monkeypatch):
    w, x = weights(1100), correlated(100)
    amax, choose = float(w.abs().max()), Compensated(search(x), feedback(x))
    whole = quantize_nvfp4(w, amax, choose)
    assert choose.rows == 1024
    for first, last in ((0, 1), (1, 8), (500, 1090), (1023, 1025)):
        part = quantize_nvfp4(w[first:last], amax, choose)
        assert part.packed.tobytes() == whole.packed[first:last].tobytes()
    monkeypatch.setattr(quantize, "CHUNK_ELEMENTS", 1)
    assert same(quantize_nvfp4(w, amax, choose), whole)
    assert [r.stop - r.start for r in quantize.row_chunks(2100, K, 1024)] == [1024, 1024, 52]


def test_inputs_that_say_little():
    w, x = weights(), correlated(50)
    x[:, 7], x[:, 128:160] = 0, 0
    found = compensated(w, x)
    assert np.isfinite(dequantize(found).numpy()).all()
    assert not feedback(x)[:, 7].any()
    one = correlated(1)
    assert torch.isfinite(feedback(one)).all()
    assert not feedback(torch.zeros(5, K)).any()
    large = torch.full((3, 32), 3e38)
    assert torch.isfinite(feedback(large)).all()
    for bad in (float("nan"), float("inf")):
        x[3, 4] = bad
        with pytest.raises(BuildError, match="hold NaN or infinity"):
            feedback(x)


def test_edges_are_as_by_search():
    x = correlated(40)
    zeros = compensated(torch.zeros(2, K), x)
    assert (zeros.block_scale == 0x38).all()
    assert not zeros.packed.any()
    assert compensated(torch.empty(0, K), x).shape == (0, K)
    w = weights()
    w[2] = 0
    w[3, :16] = w.abs().max() * 40
    found = compensated(w, x)
    assert not found.packed[2].any()
    assert not found.damaged()
    assert compensated(weights(5, 16), x[:, :16]).shape == (5, 16)


def test_the_checkpoints_rows_are_not_written_to():
    w, x = weights(), correlated(40)
    kept = w.clone()
    compensated(w, x)
    assert torch.equal(w, kept)


def test_memory_is_that_of_the_factor_and_a_few_times_the_rows():
    assert peak_bytes(2048, 17408) < 2.3e9
    assert peak_bytes(10**6, 1024) < 2.1e9 + 4e8  # the rows themselves, and no square of them
    assert compensate.STEP % 16 == 0
