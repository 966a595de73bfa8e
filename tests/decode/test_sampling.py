import numpy as np
import pytest
from fakes import FakeRows
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from edge_dflash.decode.sampling import Sampling, candidates, choose, choose_row, gumbel, pack, philox, unpack, weights


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
    assert choose(FakeRows([[1.0, 3.0, 3.0]]), Sampling(), 0) == [1]


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(0, 2**64 - 1))
def test_a_row_is_chosen_by_its_position_alone(position, rows, seed):
    logits = np.random.default_rng(3).normal(size=(rows, 50)).astype(np.float32)
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=seed)
    together = choose(FakeRows(logits), sampling, position)
    alone = [choose(FakeRows(logits[r : r + 1]), sampling, position + r)[0] for r in range(rows)]
    assert together == alone


def test_choices_follow_the_softmax():
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    temperature, draws = 0.7, 20_000
    rows = FakeRows(np.tile(logits, (draws, 1)))
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


def test_the_smallest_temperature_is_nearly_greedy():
    rows = FakeRows(np.tile(np.array([1.0, 3.0, 2.0], np.float32), (50, 1)))
    assert set(choose(rows, Sampling(1e-4, top_p=0.9), 0)) == {1}


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5), Sampling(0.5, 3, 0.9, 7)])
def test_logits_that_are_no_numbers_give_some_token(value, sampling):
    """A drafter whose sums overflow proposes rubbish, and takes no request away."""
    row = np.full(20, value, np.float32)
    assert 0 <= choose_row(row, sampling, 5) < 20
    row[:10] = 1.0
    assert 0 <= choose_row(row, sampling, 5) < 20


@given(stn.arrays(np.bool_, st.integers(1, 200)))
def test_packed_flags_are_unpacked_as_they_were(flags):
    words = pack(flags)
    assert (words.dtype, words.shape) == (np.uint32, ((len(flags) + 31) // 32,))
    assert [int(words[t // 32]) >> t % 32 & 1 for t in range(len(flags))] == flags.tolist()
    assert int(words[-1]) >> ((len(flags) - 1) % 32 + 1) == 0
    np.testing.assert_array_equal(unpack(words, len(flags)), flags)


@given(st.lists(st.floats(-60, 60), min_size=1, max_size=50), st.floats(1e-3, 100))
def test_weights_are_the_exponentials_in_whole_units(logits, temperature):
    row = np.sort(np.array(logits))[::-1]
    found = weights(row, temperature)
    wanted = np.exp((row - row[0]) / temperature) * 2.0**40
    assert found[0] == 2**40
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=1e-14, atol=0.51)
    assert (np.diff(found.astype(np.int64)) <= 0).all()


def test_the_cut_of_equal_tokens_is_exact():
    row = np.zeros(1000, np.float32)
    for top_p, kept in ((0.25, 250), (0.2505, 251), (1e-9, 1), (1 - 2**-53, 1000)):
        seen = {choose_row(row, Sampling(1.0, top_p=top_p, seed=seed), 0) for seed in range(200)}
        assert max(seen) < kept
        assert kept < 1000 or max(seen) > 900
