"""Distributions compared slice by slice are those compared whole."""

import pytest
import torch
from quality_support import kld

from edge_dflash.quality import compare as module
from edge_dflash.quality.compare import Compared, Side, compare
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
    sides = {"moved": Side(moved, 0), "head": Side(hidden[:5], 1), "logits": Side((moved @ head.T)[:7], None)}
    found = compare(Side(hidden, 0), sides, heads, following, lambda done, total: seen.append((done, total)))
    wanted = {
        "moved": moved @ head.T,
        "head": hidden[:5] @ module.values_of(other).T,
        "logits": (moved @ head.T)[:7],
    }
    for name, z in wanted.items():
        p, one = (hidden @ head.T)[: len(z)], found[name]
        assert torch.allclose(one.kld, kld(p, z), rtol=1e-4, atol=1e-7), name
        assert torch.equal(one.top1, p.argmax(1) == z.argmax(1))
        assert torch.equal(one.top5, (z.topk(5).indices == p.argmax(1)[:, None]).any(1))
        for mine, logits in ((one.source, p), (one.other, z)):
            chosen = torch.log_softmax(logits.double(), -1).gather(1, following[: len(z), None])[:, 0]
            assert torch.allclose(mine, chosen, atol=1e-4 * scale)
    assert seen[-1] == (VOCABULARY, VOCABULARY)


def test_a_distribution_against_itself_is_zero():
    head, hidden, _, following = _case()
    (found,) = compare(Side(hidden, 0), {"same": Side(hidden, 0)}, [WideWeight(head.numpy())], following).values()
    figures = found.figures()
    assert (figures.kld.max, figures.top1, figures.top5, figures.band) == (0.0, 1.0, 1.0, "near lossless")
    assert figures.perplexity.source == figures.perplexity.bundle


def test_figures_are_those_of_their_tokens():
    n = 1000
    kld_of = torch.arange(n, dtype=torch.float64) / n
    yes = torch.ones(n, dtype=torch.bool)
    found = Compared(kld_of, yes, yes, torch.full((n,), -2.0).double(), torch.full((n,), -3.0).double())
    figures = found.figures()
    assert (figures.kld.p50, figures.kld.p99, figures.kld.p999) == pytest.approx((0.4995, 0.98901, 0.998001))
    assert (figures.perplexity.source, figures.perplexity.bundle) == pytest.approx((7.389, 20.0855), rel=1e-4)
    assert found.figures(kld_of < 0.5).tokens == 500
    both = Compared.summed([found, found]).figures()
    assert (both.kld.mean, both.perplexity.bundle) == pytest.approx((2 * figures.kld.mean, 54.598), rel=1e-4)
    assert figures.band == "bad"


def test_a_hopeless_model_has_a_perplexity_that_json_can_hold():
    rows = torch.full((3,), -1e6, dtype=torch.float64)
    yes = torch.ones(3, dtype=torch.bool)
    assert Compared(-rows, yes, yes, rows, rows).figures().perplexity.bundle < 1e305
