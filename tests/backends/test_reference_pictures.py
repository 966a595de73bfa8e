"""The reference with pictures: the golden run's states, logits, tokens and drafts; chunks, lanes and snapshots."""

import numpy as np
import pytest
from golden_pairs import ENGINE, FLOAT32, backend, golden, pair, same_bits, store
from pictures_support import filled, mixed, noise, picture, prompt

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.decode.backend import Asked, Precision
from edge_dflash.errors import BackendError
from edge_dflash.pictures.pictured import Sight

RUNS = range(4)
TOLERANCE = 1e-4
TEXT = [5, 17, 99, 31, 140]
STATES = {
    **{f"kv.3.{role}": f"target.layers.3.kv.{role}" for role in "kv"},
    **{f"draft_ctx_{role}.{layer}": f"drafter.layers.{layer}.kv.{role}" for role in "kv" for layer in range(2)},
    **{
        f"gdn.{layer}.{role}.after0": f"target.layers.{layer}.delta.{role}"
        for role in ("state", "conv")
        for layer in range(3)
    },
}


def of_run(run):
    return {key.partition(".")[2]: value for key, value in golden("vision").items() if key.startswith(f"p{run}.")}


def fill(b, said, lane=0):
    return filled(b, said, lane).logits()


@pytest.mark.parametrize("run", RUNS)
def test_states_and_logits_are_those_of_the_golden_run(run):
    found, b = of_run(run), backend("vision")
    assert np.abs(fill(b, prompt(run))[0] - found["prefill_logits"][-1]).max() <= TOLERANCE
    state = b.snapshot()
    assert state.delta == found["rope_delta"][0]
    for key, name in STATES.items():
        ours, wanted = state.arrays[name], found[key]
        if key.startswith("kv."):
            ours = ours.transpose(1, 0, 2)
        if ".conv." in key:
            ours = ours.T
        assert ours.shape == wanted.shape, key
        assert np.abs(ours - wanted).max() <= TOLERANCE, key
    anchor = int(found["greedy_tokens"][0])
    drafts = b.propose(anchor)
    assert drafts.argmax() == found["cycle_draft_tokens"][0].tolist()
    assert np.abs(drafts.logits() - found["cycle_draft_logits"][0]).max() <= TOLERANCE
    verified = b.verify([anchor, *drafts.argmax()]).logits()
    assert np.abs(verified - found["cycle0_verify_logits"]).max() <= TOLERANCE


@pytest.mark.parametrize("run", RUNS)
def test_tokens_and_cycles_are_those_of_the_golden_run(run):
    found, b, said = of_run(run), backend("vision"), prompt(run)
    tokens, accepted, starts = [int(fill(b, said)[0].argmax())], [], []
    while len(tokens) < 32:
        starts.append(b.length())
        cycle = b.cycle(Asked(tokens[-1]))
        accepted.append(cycle.accepted)
        tokens += cycle.tokens
        b.commit(len(cycle.tokens))
    assert tokens[:32] == found["dflash_tokens"].tolist() == found["greedy_tokens"].tolist()
    assert starts == found["cycle_start"].tolist()
    assert accepted[:-1] == found["cycle_accepted"].tolist()[:-1]


@pytest.mark.parametrize("precision", [FLOAT32, ENGINE, Precision("bfloat16", "bfloat16")], ids=lambda p: p.kv)
def test_chunks_may_cut_pictures_anywhere(precision):
    said = mixed([1, 2], picture(0), picture(2), [3], picture(1), noise(1, (2, 2)), [4, 5])
    whole = backend("vision", precision)
    logits, state = fill(whole, said), whole.snapshot()
    seen = {placed.at: whole.see(placed.picture) for placed in said.pictures}
    for chunk in (1, 2, 5, 6, 7, 11):
        inner, outer = backend("vision", precision, prefill_chunk=chunk), backend("vision", precision)
        for first in range(0, len(said.ids), chunk):
            stop = min(first + chunk, len(said.ids))
            sight = said.sight(first, stop, lambda placed: seen[placed.at])
            rows = outer.prefill(said.ids[first:stop], 0, sight)
            assert outer.snapshot().delta == said.delta(stop)
        assert np.array_equal(rows.logits(), logits)
        assert same_bits(outer.snapshot(), state)
        assert np.array_equal(fill(inner, said), logits)
        assert same_bits(inner.snapshot(), state)


def test_text_behind_an_image_goes_on_at_its_delta_and_alone_it_is_as_ever():
    said, b, sighted = mixed(TEXT, picture(0), TEXT), backend("vision", ENGINE), backend("vision", ENGINE)
    before, stop = said.until(11), len(said.ids)
    fill(b, before)
    fill(sighted, before)
    one = b.prefill(TEXT).logits()
    two = sighted.prefill(TEXT, 0, said.sight(10, stop, lambda placed: sighted.see(placed.picture)).part(1, 6)).logits()
    assert np.array_equal(one, two)
    assert same_bits(b.snapshot(), sighted.snapshot())
    plain, explicit = (backend("vision", ENGINE) for _ in range(2))
    rows = explicit.prefill(TEXT, 0, Sight(mixed(TEXT).positions(0, 5), 0, ()))
    assert np.array_equal(plain.prefill(TEXT).logits(), rows.logits())
    assert same_bits(plain.snapshot(), explicit.snapshot())


def test_a_lane_has_its_delta_and_snapshot_restore_copy_and_reset_carry_it():
    b = backend("vision", ENGINE, lanes=3)
    said, drafts = mixed(TEXT, picture(0), [3]), [9, 8, 7, 6]
    fill(b, said, 1)
    b.prefill(TEXT, 0)
    state, wanted = b.snapshot(1), b.verify(drafts, 1).logits()
    assert (state.delta, b.snapshot(0).delta) == (-3, 0)
    b.copy(1, 2)
    assert np.array_equal(b.verify(drafts, 2).logits(), wanted)
    b.restore(state, 0)
    assert np.array_equal(b.verify(drafts, 0).logits(), wanted)
    b.commit(4, 0)
    assert b.snapshot(0).delta == -3
    b.reset(2)
    assert b.snapshot(2).delta == 0
    fresh = backend("vision", ENGINE)
    assert np.array_equal(b.prefill(TEXT, 2).logits(), fresh.prefill(TEXT).logits())


def test_pictures_beside_each_other_have_other_positions_than_one():
    apart, together = backend("vision"), backend("vision")
    a = fill(apart, mixed(TEXT, noise(1, (4, 4)), TEXT))
    b = fill(together, mixed(TEXT, noise(1, (2, 8)), TEXT))
    assert np.abs(a - b).max() > 1e-3


def test_a_text_is_what_it_is_without_a_tower():
    blind = ReferenceBackend(pair("vision").text_only, store("vision"), ENGINE, max_context=160)
    sees, ids = backend("vision", ENGINE), [(7 * i) % 180 for i in range(70)]
    fill(sees, mixed(TEXT, picture(0)))
    sees.reset()
    assert np.array_equal(blind.prefill(ids).logits(), sees.prefill(ids).logits())
    assert np.array_equal(blind.verify(TEXT).logits(), sees.verify(TEXT).logits())
    assert np.array_equal(blind.propose(3).logits(), sees.propose(3).logits())
    assert same_bits(blind.snapshot(), sees.snapshot())


def test_a_target_without_a_tower_refuses():
    b = backend("qwen3_5")
    with pytest.raises(BackendError, match="no vision tower"):
        b.see(picture(0))
