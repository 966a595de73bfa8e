"""What benchmarks force: acceptance by position, experts by position."""

import numpy as np
import pytest

from edge_dflash.bench.workload import PROFILES, profile_pattern, reached, routing
from edge_dflash.checks.footprint import distinct
from edge_dflash.errors import RequestError
from edge_dflash.model.ops import Experts


def test_a_profile_goes_on_by_its_last_ratio():
    shares = reached("published", 15)
    assert shares[:6] == PROFILES["published"]
    assert shares[8] / shares[7] == pytest.approx(0.614 / 0.642)
    assert reached("published", 3) == PROFILES["published"][:3]
    with pytest.raises(RequestError, match="--acceptance is 'other'; give one of published"):
        reached("other", 3)


@pytest.mark.parametrize("drafts", [4, 7, 15])
def test_a_pattern_accepts_as_the_profile_says_for_any_number_of_drafts(drafts):
    pattern, shares = np.array(profile_pattern("published", drafts)), reached("published", drafts)
    assert pattern.max() == drafts
    for at, share in enumerate(shares):
        assert (pattern > at).mean() == pytest.approx(share, abs=1 / 32)
    for start in range(0, len(pattern), 32):
        assert pattern[start : start + 32].mean() == pattern.mean()


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_rows_choose_experts_of_their_own_or_the_same(correlation):
    table = routing(256, 8, correlation)
    assert table.shape == (1024, 8)
    assert all(len(set(line)) == 8 for line in table.tolist())
    assert table.min() >= 0
    assert table.max() < 256
    blocks = [len(set(table[start : start + 16].flatten().tolist())) for start in range(0, 1024, 16)]
    names = tuple(map(str, range(256)))
    op = Experts(
        *(),
        inputs=("x",),
        output="y",
        router="r",
        gates=names,
        ups=(),
        downs=(),
        top_k=8,
        renormalised=True,
        shared=None,
    )
    if correlation == 0.0:
        assert np.mean(blocks) == pytest.approx(distinct(op, 16), rel=0.03)
    elif correlation == 1.0:
        assert set(blocks) == {8}
    else:
        assert 8 < np.mean(blocks) < distinct(op, 16)
    assert np.array_equal(table, routing(256, 8, correlation))


def test_a_correlation_outside_0_to_1_is_refused():
    with pytest.raises(RequestError, match=r"--routing-correlation is 1\.5; give 0"):
        routing(256, 8, 1.5)
