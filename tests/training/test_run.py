"""The whole training through its command, stopped in every stage and gone on with, and what it leaves."""

import json
import shutil
from dataclasses import replace

import pytest

from edge_dflash.builder.card import CardLengths, read_card
from edge_dflash.demo.tasks import MODELS
from edge_dflash.errors import RequestError
from edge_dflash.model.registry import read_drafter_spec
from edge_dflash.training import run as stages
from edge_dflash.training.run import train_drafter
from edge_dflash.training.workdir import TrainingDir, TrainingRun

STAGES = ("answers", "taps", "training", "evaluation, before", "evaluation, after")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "plans.jsonl"
    goals = ("Go to the dock.", "Wait 5 s.", "Say hello.", "Inspect studio_rack.", "Go to studio.")
    bodies = [{"messages": [{"role": "user", "content": f"Rooms: studio\nPlaces: dock\nGoal: {one}"}]} for one in goals]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


@pytest.fixture(scope="module")
def given(demo_bundle, data):
    """A short training from the demo's own bundle and drafter."""
    return TrainingRun(
        target=demo_bundle, data=(data,), output=data.parent / "whole", drafter=MODELS / "drafter", steps=4, rate=1e-5,
        sampled=1, new_tokens=8, evaluated=1, plain=1, sequences=2, anchors=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(given):
    """What a run that nothing stopped leaves."""
    said, kept = [], {}
    clear = TrainingDir.clear

    def keep(work):
        for name in ("taps", "training"):
            kept[name] = {path.name: path.read_bytes() for path in (work.root / name).rglob("*.safetensors")}
        clear(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingDir, "clear", keep)
        result = train_drafter(given, say=said.append)
    return result, said, kept


def test_a_run_leaves_a_drafter_with_its_card(given, data, whole):
    result, said, _ = whole
    card = read_card(result.drafter)
    assert card == result.card
    assert (card.prompts, card.heldout, card.steps) == (4, 1, 4)
    assert set(card.measures) == {f"{when}, {way}" for when in ("before", "after") for way in ("greedy", "sampled")}
    assert all(one["equal"] == one["compared"] == 1 for one in card.measures.values())
    assert card.accept_length.before == pytest.approx(card.measures["before, greedy"]["accept_length"], abs=1e-3)
    assert card.checks
    assert str(data.parent) not in (result.drafter / "card.json").read_text()  # no path of this machine
    assert read_drafter_spec(result.drafter) == read_drafter_spec(MODELS / "drafter")
    assert any("their taps take" in line for line in said)
    assert not (given.output / "work" / "taps").exists()


def test_a_run_that_is_stopped_in_every_stage_ends_as_one_that_was_not(given, whole, tmp_path, monkeypatch):
    result, _, kept = whole
    run, seen = replace(given, output=tmp_path / "cut"), {}
    work = tmp_path / "cut" / "work"
    work.mkdir(parents=True)
    for name in ("start", "before"):  # builds go on by themselves, tests/builder says how
        shutil.copytree(given.output / "work" / name, work / name)
    clear = TrainingDir.clear

    def keep(work):
        for name in ("taps", "training"):
            seen[name] = {path.name: path.read_bytes() for path in (work.root / name).rglob("*.safetensors")}
        clear(work)

    monkeypatch.setattr(TrainingDir, "clear", keep)
    for stage in STAGES:

        def stop(name, done, total, stage=stage):
            if name == stage and done >= max(1, total // 2):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train_drafter(run, stop)
    again = train_drafter(run)
    assert seen["taps"] == kept["taps"]
    assert seen["training"]["best.safetensors"] == kept["training"]["best.safetensors"]
    files = [(one.drafter / "model.safetensors").read_bytes() for one in (result, again)]
    assert files[0] == files[1]
    assert again.card.accept_length == result.card.accept_length
    assert again.card.checks == result.card.checks


def test_a_training_that_has_ended_is_not_begun_again(given, whole):
    said = []
    again = train_drafter(given, lambda *now: pytest.fail("a stage was begun"), said.append)
    assert (again.drafter, again.card) == (whole[0].drafter, whole[0].card)
    assert "nothing to do" in said[0]


def test_a_dry_run_leaves_steps_and_data_open_and_not_the_models(given, tmp_path):
    run = replace(given, output=tmp_path)
    with TrainingDir(replace(run, steps=0, sequences=9), dry=True):
        pass
    with TrainingDir(run, dry=True), pytest.raises(RequestError, match="another process"):
        TrainingDir(run, dry=True)
    with pytest.raises(RequestError, match="--seed 0, now it is 3"):
        TrainingDir(replace(run, seed=3), dry=True)
    for _ in range(2):
        with TrainingDir(run):
            pass
    with pytest.raises(RequestError, match="--steps 4, now it is 7"):
        TrainingDir(replace(run, steps=7))


def test_another_training_in_the_same_place_is_refused(given, whole):
    with pytest.raises(RequestError, match="is of a training with --steps 4, now it is 5"):
        train_drafter(replace(given, steps=5))
    with TrainingDir(given), pytest.raises(RequestError, match="another process trains"):
        TrainingDir(given)


def test_taps_that_the_disk_may_not_take_are_refused(given, whole, tmp_path):
    run = replace(given, output=tmp_path / "full", disk=1e-6)
    (tmp_path / "full" / "work").mkdir(parents=True)
    for name in ("start", "before", "answers-0.jsonl"):
        source = given.output / "work" / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, tmp_path / "full" / "work" / name)
    with pytest.raises(RequestError, match="--disk allows"):
        train_drafter(run)


def test_a_drafter_that_became_worse_is_kept_apart_and_said_so(given, whole, monkeypatch, cli):
    card = replace(whole[0].card, better=False, accept_length=CardLengths(5.0, 2.0))
    monkeypatch.setattr(stages, "card_of", lambda *parts: card)
    monkeypatch.setattr(stages, "after", lambda *parts: None)
    output = given.output.parent / "worse-run"
    (output / "work").mkdir(parents=True)
    for name in ("start", "before", "answers-0.jsonl", "evaluation.json"):
        source = given.output / "work" / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, output / "work" / name)
    code, out, err = cli(
        "train-drafter", "--target", given.target, "--data", given.data[0], "--output", output, "--drafter",
        given.drafter, "--steps", 4, "--rate", 1e-5, "--new-tokens", 8, "--evaluated", 1, "--sequences", 2, "--anchors",
        2, "--json",
    )  # fmt: skip
    assert code == 9
    assert json.loads(out.splitlines()[-1])["better"] is False
    assert "worse than its start" in err
    assert (output / "worse" / "card.json").is_file()
    assert not (output / "model.safetensors").exists()


def test_the_command_says_what_is_missing(refused, tmp_path):
    assert "Missing option '--data'" in refused("train-drafter", "--target", tmp_path)[1]
    argv = ("train-drafter", "--target", tmp_path, "--data", tmp_path / "x", "--output", tmp_path / "o")
    assert "give one of --steps and --minutes" in refused(*argv)[1]
    assert "give one of --steps and --minutes" in refused(*argv, "--steps", 3, "--minutes", 3)[1]
