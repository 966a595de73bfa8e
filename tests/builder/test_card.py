"""card.json of a drafter: read strictly, written whole; a build answers its prompts and warns when less is accepted."""

import json
import shutil
from dataclasses import replace

import pytest
from builder_support import BF16, DRAFTERS, config_of, recipe

from edge_dflash.builder import card as cards
from edge_dflash.builder.card import (
    CARD,
    MARGIN,
    CardCheck,
    CardLengths,
    CardTarget,
    DrafterCard,
    accept_length,
    card_warning,
    check_bundle,
    read_card,
    write_card,
)
from edge_dflash.builder.write import build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import CheckpointError

CHECKS = (CardCheck((1, 2, 3), (4, 2)), CardCheck((5, 6), (3,)))
GOOD = DrafterCard(
    data_sha256="ab" * 32,
    prompts=2000,
    heldout=200,
    steps=300,
    seconds=600.0,
    accept_length=CardLengths(1.7, 3.1),
    target=CardTarget("demo", "qwen3_5"),
    measures={"after": {"greedy": 3.1, "sampled": 2.9}},
    acceptance={"after": (0.9, 0.5)},
    checks=CHECKS,
)


def test_a_card_is_read_as_it_was_written(tmp_path):
    assert read_card(tmp_path) is None
    write_card(tmp_path, GOOD)
    assert read_card(tmp_path) == GOOD
    assert [path.name for path in tmp_path.iterdir()] == [CARD]
    body = json.loads((tmp_path / CARD).read_text())
    assert body["format"] == 1
    assert body["accept_length"] == {"before": 1.7, "after": 3.1}
    assert GOOD.checked_length == 3.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format is 2, this version reads 1"),
        ({"steps": "many"}, "card.json.steps: found"),
        ({"more": 1}, "unknown key 'more'"),
        ({"accept_length": {"before": 1.0}}, "key 'after' is missing"),
        ({"checks": [{"prompt": [1], "accept_lengths": [1]}] * 9}, "9 checks, wanted at most 8"),
    ],
)
def test_a_damaged_card_is_refused_with_its_field_and_the_remedy(tmp_path, change, words):
    write_card(tmp_path, GOOD)
    path = tmp_path / CARD
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match="train the drafter again") as error:
        read_card(tmp_path)
    assert words in str(error.value)


def test_the_warning_begins_where_the_margin_ends():
    said = accept_length(CHECKS)
    enough = [CardCheck((1, 2, 3), (said * (1 - MARGIN) + 0.01,))]  # of the first prompt alone
    assert card_warning(GOOD, ()) is None
    assert card_warning(GOOD, CHECKS) is None
    assert card_warning(GOOD, enough) is None
    warning = card_warning(GOOD, [CardCheck((1, 2, 3), (2, 2))])
    assert warning is not None
    assert "accept length 2.00 on the 1 prompts" in warning
    assert "says 3.00" in warning
    worse = replace(GOOD, better=False, accept_length=CardLengths(3.0, 2.0))
    assert "worse than the one" in card_warning(worse, CHECKS)


def drafter_of(tmp_path, card):
    path = tmp_path / "drafter"
    if not path.exists():
        shutil.copytree(DRAFTERS["qwen3"], path)
    write_card(path, card)
    return path


def test_a_build_measures_the_card_s_prompts_and_warns(tmp_path):
    wide = recipe(tmp_path, BF16)
    plain = build(config_of("qwen3", tmp_path / "plain", recipe=wide))
    bundle = Bundle.open(plain.bundle)
    prompts = replace(GOOD, checks=(CardCheck(tuple(range(3, 40)), ()), CardCheck(tuple(range(50, 70)), ())))
    here = check_bundle(bundle, prompts)
    assert [check.prompt for check in here] == [check.prompt for check in prompts.checks]
    assert all(sum(check.accept_lengths) <= cards.NEW_TOKENS - 1 for check in here)

    same = drafter_of(tmp_path, replace(GOOD, checks=here))
    told = build(config_of("qwen3", tmp_path / "same", drafter=same, recipe=wide))
    assert told.warnings == plain.warnings  # nothing of the card

    better = tuple(replace(check, accept_lengths=tuple(2 * n for n in check.accept_lengths)) for check in here)
    drafter_of(tmp_path, replace(GOOD, checks=better))
    told = build(config_of("qwen3", tmp_path / "less", drafter=same, recipe=wide))
    (warning,) = set(told.warnings) - set(plain.warnings)
    assert CARD in warning
    assert "wanted at least" in warning
    assert "demo" in warning


def test_a_bad_card_stops_a_build_before_it_writes(tmp_path):
    drafter = drafter_of(tmp_path, GOOD)
    (drafter / CARD).write_text("[]")
    with pytest.raises(CheckpointError, match=r"found \["):
        build(config_of("qwen3", tmp_path / "out", drafter=drafter))
    assert not (tmp_path / "out").exists()


def test_checks_that_do_not_fit_the_context_are_left_out(tmp_path):
    bundle = Bundle.open(build(config_of("qwen3", tmp_path / "small", max_context=128)).bundle)
    card = replace(GOOD, checks=(CardCheck(tuple(range(120)), (2,)), CardCheck((7, 8), (2,))))
    assert [check.prompt for check in check_bundle(bundle, card)] == [(7, 8)]
