"""The reference's mixture of experts against float64, and what a row's bits may depend on."""

import numpy as np
import pytest
import torch
from mixture_maths import ROUNDINGS, mixture, random_rows

SIZES = [(8, 2, None), (8, 3, 96), (16, 4, 32), (32, 8, 64), (32, 8, None), (4, 4, 32), (1, 1, None)]
ROWS = (1, 2, 8, 16, 17, 64, 512)


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize(("count", "chosen", "shared"), SIZES)
def test_float32_is_the_float64_transcription(count, chosen, shared, renormalised):
    made = mixture(count, chosen, shared=shared, renormalised=renormalised)
    x = random_rows(40)
    found, wanted = made.run(x), made.maths(x)
    assert found.keys() == wanted.keys()
    assert np.array_equal(found["experts"], wanted["experts"])
    for name in ("router_logits", "weights", "routed", "out"):
        assert np.abs(found[name].numpy() - wanted[name]).max() <= 5e-6, name
    if renormalised:
        assert np.abs(found["weights"].sum(-1).numpy() - 1).max() <= 1e-6
    else:
        assert (count == chosen) == np.allclose(found["weights"].sum(-1), 1)


@pytest.mark.parametrize(("count", "chosen", "shared"), SIZES)
def test_bfloat16_rounds_what_linears_products_and_the_sum_give(count, chosen, shared):
    made = mixture(count, chosen, shared=shared)
    x = random_rows(40)
    found, wanted = made.run(x, "bfloat16"), made.maths(x, "bfloat16")
    near = np.abs(found["router_logits"].numpy() - wanted["router_logits"]).max(-1) == 0  # no tie of roundings
    assert near.mean() > 0.9
    assert np.array_equal(found["experts"][near], wanted["experts"][near])
    difference = np.abs(found["out"].numpy() - wanted["out"])[near]
    assert (difference <= 2.0**-8 * np.maximum(1, np.abs(wanted["out"][near]))).all()
    assert difference.mean() < 1e-4  # few land on the other side of a rounding
    wide = made.run(x)["out"].numpy()
    assert np.abs(wide - wanted["out"]).max() > 2.0**-9


@pytest.mark.parametrize(("count", "chosen", "shared"), SIZES)
def test_all_rows_at_once_differ_in_their_last_bits_alone(count, chosen, shared):
    """As calibration computes, each expert on the rows that chose it; the padding of the last tile chooses too."""
    made = mixture(count, chosen, shared=shared)
    x = random_rows(40)
    tiled, whole = made.run(x), made.run(x, row_tile=None)
    assert torch.equal(whole["experts"], tiled["experts"])
    for name in ("router_logits", "weights", "routed", "out"):
        assert (whole[name] - tiled[name]).abs().max() <= 5e-6, name
    for expert, down in enumerate(made.op.downs):  # what reaches it is told, of these rows alone
        assert len(whole.get(down, ())) == (whole["experts"] == expert).any(-1).sum()
        assert down not in tiled


@pytest.mark.parametrize("precision", ROUNDINGS)
@pytest.mark.parametrize(("count", "chosen", "shared", "hidden"), [(8, 2, 96, 64), (32, 8, 48, 320), (16, 3, None, 80)])
def test_a_row_has_the_same_bits_for_any_number_of_rows(count, chosen, shared, hidden, precision):
    made = mixture(count, chosen, inner=48, shared=shared, hidden=hidden)
    x = random_rows(max(ROWS), hidden)
    whole = made.run(x, precision)
    for rows in ROWS:
        first = made.run(x[:rows], precision)
        last = made.run(x[-rows:], precision)
        for name, values in whole.items():
            assert torch.equal(first[name], values[:rows]), (rows, name)
            assert torch.equal(last[name], values[-rows:]), (rows, name)


@pytest.mark.parametrize("precision", ROUNDINGS)
def test_a_row_has_the_same_bits_at_any_place_beside_any_rows(precision):
    made = mixture(16, 4, shared=48)
    row = random_rows(1, seed=9)
    alone = made.run(row, precision)
    for place in range(35):
        x = random_rows(35, seed=place)
        x[place] = row
        for name, values in made.run(x, precision).items():
            assert torch.equal(values[place : place + 1], alone[name]), (place, name)


@pytest.mark.parametrize("precision", ROUNDINGS)
def test_of_equal_probabilities_the_lower_index_is_chosen(precision):
    made = mixture(8, 2)
    router = made.weights[made.op.router]
    router[:] = -np.abs(router)  # every other expert loses against the two below
    router[3] = router[6] = np.abs(router[3])
    x = np.abs(random_rows(20))
    assert made.run(x, precision)["experts"].tolist() == [[3, 6]] * 20
    router[1] = router[3]
    found = made.run(x, precision)
    assert found["experts"].tolist() == [[1, 3]] * 20  # and 6 is left out
    assert found["weights"].tolist() == [[0.5, 0.5]] * 20
    router[:] = 0
    assert made.run(x, precision)["experts"].tolist() == [[0, 1]] * 20


def routed_by_hand(count=8, chosen=1, **changes):
    """A mixture whose expert e is that of rows in which column e is largest."""
    made = mixture(count, chosen, **changes)
    router = made.weights[made.op.router]
    router[:] = 0
    router[np.arange(count), np.arange(count)] = 8
    return made


@pytest.mark.parametrize("shared", [None, 32])
def test_rows_may_go_to_one_expert_or_each_to_another(shared):
    made = routed_by_hand(count=17, shared=shared)
    x = random_rows(17) / 8
    x[:, :17] = 0
    one, each = x.copy(), x.copy()
    one[:, 5] = 1
    each[np.arange(17), np.arange(17)] = 1
    assert made.run(one)["experts"].flatten().tolist() == [5] * 17  # 16 experts have no row
    assert made.run(each)["experts"].flatten().tolist() == list(range(17))
    for rows in (one, each):
        found, wanted = made.run(rows), made.maths(rows)
        assert np.abs(found["out"].numpy() - wanted["out"]).max() <= 5e-6
        for row in range(17):
            assert torch.equal(made.run(rows[row : row + 1])["out"][0], found["out"][row])


def test_the_weights_of_an_expert_without_rows_are_not_read():
    made = routed_by_hand()
    x = random_rows(5)
    x[:, :8] = 0
    x[:, 2] = 1
    wanted = made.run(x)["out"]
    kept = {made.op.gates[2], made.op.ups[2], made.op.downs[2], made.op.router}
    made.weights = {name: values for name, values in made.weights.items() if name in kept}
    assert torch.equal(made.run(x)["out"], wanted)


@pytest.mark.parametrize("precision", ROUNDINGS)
def test_probabilities_that_underflow_choose_the_lower_index_and_stay_finite(precision):
    made = routed_by_hand(chosen=3)
    made.weights[made.op.router] *= 10
    x = random_rows(2)
    x[:, :8] = -1
    x[0, 6] = x[1, 2] = 1
    found = made.run(x, precision)
    assert found["router_logits"].abs().min() == found["router_logits"].abs().max() == 80
    assert found["experts"].tolist() == [[6, 0, 1], [2, 0, 1]]
    assert found["weights"].tolist() == [[1.0, 0.0, 0.0]] * 2  # exp(-160) is 0
    assert np.abs(found["out"].numpy() - made.maths(x, precision)["out"]).max() <= 2.0**-7
    assert found["out"].isfinite().all()


def test_every_weight_counts():
    """The comparisons above can fail: each matrix has an effect that is larger than what they allow."""
    made, x = mixture(8, 3, shared=32), random_rows(16)
    wanted = made.maths(x)["out"]
    for name in made.op.weights:
        kept = made.weights[name]
        made.weights[name] = kept * 0.5
        assert np.abs(made.run(x)["out"].numpy() - wanted).max() > 1e-2, name
        made.weights[name] = kept
