"""A drafter's acceptance on the self-test's prompt, judged by what the build saw."""

from dataclasses import replace

import pytest
from cli_support import last_json
from fakes import SHAPE, FakeBackend
from selftest_support import Damaged, backend_of, shuffled

from edge_dflash.backends.selftest import CYCLES, AcceptanceCheck, check_acceptance
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import load_selftest
from edge_dflash.decode.drafts import Drafting

WRONG = shuffled("drafter.fc")


@pytest.fixture(scope="module")
def recorded(demo_bundle):
    bundle = Bundle.open(demo_bundle)
    return bundle, load_selftest(bundle)


def test_a_healthy_drafter_accepts_what_it_accepted_at_build(recorded):
    bundle, test = recorded
    found = check_acceptance(backend_of(bundle), test)
    assert found.ok
    assert found.here.accept_length == pytest.approx(test.accept_length, rel=0.05)
    assert found.to_json()["acceptance_at_build"] == list(test.acceptance)


def test_a_wrong_drafter_behind_an_intact_record_is_found(recorded):
    bundle, test = recorded
    found = check_acceptance(backend_of(bundle, store=Damaged(bundle, weight=WRONG)), test)
    assert not found.ok
    assert found.here.accept_length < found.floor
    assert f"at least {found.floor:.2f}" in found.summary


def test_verify_ends_with_9_and_says_which_part(cli, demo_bundle, tmp_path, monkeypatch):
    get, prompts = Bundle.get, tmp_path / "prompts.jsonl"
    prompts.write_text('{"ids": [1, 2, 3]}\n')
    monkeypatch.setattr(Bundle, "get", lambda self, name: WRONG(name, get(self, name)))
    code, out, err = cli("verify", demo_bundle, "--prompts", prompts, "--max-new-tokens", 4, "--json")
    found = last_json(out)
    assert (code, found["ok"], found["differences"]) == (9, False, [])
    assert not found["drafter"]["ok"]
    assert found["drafter"]["accept_length"] < found["drafter"]["floor"] < found["drafter"]["accept_length_at_build"]
    assert "the drafter accepts too little: accept length" in err


def test_nothing_is_judged_without_a_drafter_or_a_record(recorded):
    assert check_acceptance(FakeBackend(), None).unknown == "the build recorded no self-test"
    found = check_acceptance(FakeBackend(replace(SHAPE, drafts=0)), recorded[1])
    assert (found.ok, found.unknown) == (True, "the bundle has no drafter")
    assert found.summary == "not judged: the bundle has no drafter"


def cycles(count, *accepted):
    """``count`` cycles of 3 drafts with each of these numbers of accepted ones."""
    return Drafting((3,) * count * len(accepted), accepted * count)


@pytest.mark.parametrize(
    ("here", "below"),
    [
        (cycles(20, 3, 3, 2, 3), ()),
        (cycles(20, 3, 0, 3, 3), ()),
        (cycles(20, 3, 2, 2, 2), (3,)),
        (cycles(20, 3, 0, 0, 0), (1, 2, 3)),
        (Drafting((3,) * (CYCLES - 1), (0,) * (CYCLES - 1)), ()),
    ],
)
def test_a_position_is_judged_where_enough_cycles_tried_it(here, below):
    found = AcceptanceCheck(here, cycles(20, 3, 3, 3, 3), 1.0)
    assert found.below == below
    assert found.ok == (not below)
    assert AcceptanceCheck(here, here, 4.5).ok is False
