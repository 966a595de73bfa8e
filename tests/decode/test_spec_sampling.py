import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_dflash.decode.sampling import Sampling, candidates, choose, choose_row, gumbel, philox
from edge_dflash.errors import RequestError


class FixedRows:
    def __init__(self, logits):
        self._logits = np.asarray(logits, dtype=np.float32)

    def __len__(self):
        return len(self._logits)

    def argmax(self):
        return [int(i) for i in self._logits.argmax(-1)]

    def logits(self):
        return self._logits


def test_philox_known_answers():
    # Random123's published vectors for philox4x32-10: zero counter and key; and its counter/key of all ones is not
    # reachable (words 2 and 3 of our counter are 0), so a second value is checked against NumPy-free integer code.
    assert int(philox(np.array([0], np.uint64), 0, 0)[0]) == 0x6627E8D5
    assert [int(x) for x in philox(np.array([7, 248_319], np.uint64), 4097, 0x1234_5678_9ABC_DEF0)] == [
        _philox_scalar(7, 4097, 0x1234_5678_9ABC_DEF0),
        _philox_scalar(248_319, 4097, 0x1234_5678_9ABC_DEF0),
    ]


def _philox_scalar(token, position, seed):
    c, k = [token, position, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def test_greedy_takes_the_lowest_id_on_a_tie():
    assert choose(FixedRows([[1.0, 3.0, 3.0]]), Sampling(), 0) == [1]


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(0, 2**64 - 1))
def test_a_row_is_chosen_by_its_position_alone(position, rows, seed):
    logits = np.random.default_rng(3).normal(size=(rows, 50)).astype(np.float32)
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=seed)
    together = choose(FixedRows(logits), sampling, position)
    alone = [choose(FixedRows(logits[r : r + 1]), sampling, position + r)[0] for r in range(rows)]
    assert together == alone


def test_choices_follow_the_softmax():
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    temperature, draws = 0.7, 20_000
    rows = FixedRows(np.tile(logits, (draws, 1)))
    counts = np.bincount(choose(rows, Sampling(temperature=temperature, seed=11), 0), minlength=4)
    p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    chi_square = float((((counts - draws * p) ** 2) / (draws * p)).sum())
    assert chi_square < 16.27  # 3 degrees of freedom, 0.1 % level


def test_noise_differs_between_positions_tokens_and_seeds():
    ids = np.arange(1000)
    base = gumbel(1, 5, ids)
    for other in (gumbel(2, 5, ids), gumbel(1, 6, ids), gumbel(1, 5, ids + 1000)):
        assert abs(float(np.corrcoef(base, other)[0, 1])) < 0.12
    assert abs(float(base.mean()) - 0.5772) < 0.15


def test_top_k_then_top_p():
    row = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    assert candidates(row, Sampling(1.0, top_k=2)).tolist() == [1, 3]
    assert candidates(row, Sampling(1.0, top_p=0.65)).tolist() == [1, 3]
    assert candidates(row, Sampling(1.0, top_p=0.71)).tolist() == [1, 3, 2]
    # among the top two the mass is 4/7 and 3/7, so 0.5 keeps one and 0.6 keeps both
    assert candidates(row, Sampling(1.0, top_k=2, top_p=0.5)).tolist() == [1]
    assert candidates(row, Sampling(1.0, top_k=2, top_p=0.6)).tolist() == [1, 3]
    assert candidates(np.zeros(4), Sampling(1.0, top_k=2)).tolist() == [0, 1]


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}],
)
def test_values_outside_their_range_are_refused(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("bad", [{"temperature": -1e-310}, {"temperature": "a"}, {"top_k": 1.5}, {"seed": 1.5}])
def test_values_of_another_kind_or_too_small_are_refused(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        Sampling(**bad)


def test_the_smallest_temperature_is_nearly_greedy():
    rows = FixedRows(np.tile(np.array([1.0, 3.0, 2.0], np.float32), (50, 1)))
    assert set(choose(rows, Sampling(1e-4, top_p=0.9), 0)) == {1}


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5), Sampling(0.5, 3, 0.9, 7)])
def test_logits_that_are_no_numbers_give_some_token(value, sampling):
    """A drafter whose sums overflow proposes rubbish, and takes no request away."""
    row = np.full(20, value, np.float32)
    assert 0 <= choose_row(row, sampling, 5) < 20
    row[:10] = 1.0
    assert 0 <= choose_row(row, sampling, 5) < 20
