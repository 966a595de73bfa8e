"""Distributions compared slice by slice are those compared whole."""

import pytest
import torch
from quality_support import kld

from edge_dflash.quality import compare as module
from edge_dflash.quality.compare import compare, figures, summed
from edge_dflash.weights.formats import WideWeight
from edge_dflash.weights.quantize import quantize_nvfp4

ROWS, HIDDEN, VOCABULARY = 12, 32, 101


def _case(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator) * scale
    moved = hidden + 0.3 * torch.randn(ROWS, HIDDEN, generator=generator)
    return head, hidden, moved, torch.randint(0, VOCABULARY, (ROWS,), generator=generator)


@pytest.mark.parametrize("numbers", [1, 7 * ROWS, 1 << 22], ids=["one id a slice", "seven", "all"])
@pytest.mark.parametrize("scale", [1.0, 200.0], ids=["ordinary", "huge logits"])
def test_slices_give_what_the_whole_gives(monkeypatch, numbers, scale):
    monkeypatch.setattr(module, "_SLICE", numbers)
    head, hidden, moved, following = _case(scale)
    other = quantize_nvfp4(head)
    heads = WideWeight(head.numpy()), other
    seen = []
    sides = {"moved": (moved, 0), "head": (hidden[:5], 1), "logits": ((moved @ head.T)[:7], None)}
    found = compare((hidden, 0), sides, heads, following, lambda done, total: seen.append((done, total)))
    wanted = {
        "moved": moved @ head.T,
        "head": hidden[:5] @ module.values_of(other).T,
        "logits": (moved @ head.T)[:7],
    }
    for name, z in wanted.items():
        p, one = (hidden @ head.T)[: len(z)], found[name]
        assert torch.allclose(one[0], kld(p, z), rtol=1e-4, atol=1e-7), name
        assert torch.equal(one[1], (p.argmax(1) == z.argmax(1)).double())
        assert torch.equal(one[2], (z.topk(5).indices == p.argmax(1)[:, None]).any(1).double())
        for mine, logits in ((one[3], p), (one[4], z)):
            chosen = torch.log_softmax(logits.double(), -1).gather(1, following[: len(z), None])[:, 0]
            assert torch.allclose(mine, chosen, atol=1e-4 * scale)
    assert seen[-1] == (VOCABULARY, VOCABULARY)


def test_a_distribution_against_itself_is_zero():
    head, hidden, _, following = _case()
    (found,) = compare((hidden, 0), {"same": (hidden, 0)}, [WideWeight(head.numpy())], following).values()
    cost = figures(found)
    assert (cost.kld.max, cost.top1, cost.top5, cost.band) == (0.0, 1.0, 1.0, "near lossless")
    assert cost.perplexity.source == cost.perplexity.bundle


@pytest.mark.parametrize("numbers", [1, 1 << 22], ids=["one id a slice", "all"])
def test_of_equal_logits_the_first_is_the_token_that_decoding_takes(monkeypatch, numbers):
    monkeypatch.setattr(module, "_SLICE", numbers)
    p = torch.tensor([[1.0, 5, 5, 1, 0, 0, 0], [0.0, 1, 2, 3, 4, 5, 6], [5.0, 1, 2, 3, 4, 4, 4]])
    q = torch.tensor([[0.0, 5, 5, 5, 5, 5, 5], [0.0, 0, 0, 0, 0, 9, 9], [0.0, 1, 2, 3, 4, 5, 6]])
    heads = [WideWeight(torch.zeros(7, 4).numpy())]
    found = compare((p, None), {"q": (q, None)}, heads, torch.tensor([0, 1, 2]))["q"]
    assert found[1].tolist() == [1, 0, 0]
    assert found[2].tolist() == [1, 1, 0]


def test_figures_are_those_of_their_tokens():
    n = 1000
    cost, yes = torch.arange(n, dtype=torch.float64) / n, torch.ones(n, dtype=torch.float64)
    found = torch.stack((cost, yes, yes, -2 * yes, -3 * yes))
    its = figures(found)
    assert (its.kld.p50, its.kld.p99, its.kld.p999) == pytest.approx((0.4995, 0.98901, 0.998001))
    assert (its.perplexity.source, its.perplexity.bundle) == pytest.approx((7.389, 20.0855), rel=1e-4)
    assert (figures(found[:, cost < 0.5]).tokens, its.band) == (500, "bad")
    other = torch.stack((cost, (cost < 0.3).double(), (cost < 0.6).double(), -2 * yes, -3 * yes))
    both = figures(summed([found, other]))
    assert (both.kld.mean, both.perplexity.bundle) == pytest.approx((2 * its.kld.mean, 54.598), rel=1e-4)
    assert (both.top1, both.top5) == pytest.approx((0.3, 0.6))


def test_a_hopeless_model_has_a_perplexity_that_json_can_hold():
    rows = torch.full((5, 3), -1e6, dtype=torch.float64)
    assert figures(rows).perplexity.bundle < 1e305
