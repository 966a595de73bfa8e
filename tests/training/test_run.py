"""The whole training through its command, stopped in every stage and gone on with, and what it leaves."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from edge_dflash.builder import record
from edge_dflash.builder.card import read_card
from edge_dflash.bundle.manifest import MANIFEST, dump_manifest
from edge_dflash.demo.tasks import MODELS
from edge_dflash.errors import BackendError, BuildError, BundleError, CheckpointError, RequestError
from edge_dflash.model.registry import read_drafter_spec
from edge_dflash.training import run as stages
from edge_dflash.training.run import Training, train_drafter
from edge_dflash.training.settings import TrainingRun
from edge_dflash.training.start import same_files
from edge_dflash.training.workdir import TrainingDir

STAGES = ("answers", "taps", "training", "evaluation, before", "evaluation, after")


@pytest.fixture(scope="module", autouse=True)
def _short_selftests(demo_bundle):
    """Of the bundles that are built here: how well a drafter fits is not asked of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "NEW_TOKENS", 4)
        patch.setattr(record, "PROMPT_TOKENS", 64)
        yield


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


def part_of(given, output, *names):
    """A training of which some stages are done."""
    (output / "work").mkdir(parents=True)
    for name in names:
        source = given.output / "work" / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, output / "work" / name)
    return replace(given, output=output)


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


def best(files):
    """The one file of weights that were kept."""
    return files["best.safetensors"]


def test_a_run_that_is_stopped_in_every_stage_ends_as_one_that_was_not(given, whole, tmp_path, monkeypatch):
    result, _, kept = whole
    run, seen = part_of(given, tmp_path / "cut", "start", "before"), {}  # builds go on by themselves: tests/builder
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
    assert best(seen["training"]) == best(kept["training"])
    files = [(one.drafter / "model.safetensors").read_bytes() for one in (result, again)]
    assert files[0] == files[1]
    assert again.card.accept_length == result.card.accept_length
    assert again.card.checks == result.card.checks


def test_a_training_that_has_ended_is_not_begun_again(given, whole):
    said = []
    again = train_drafter(given, lambda *now: pytest.fail("a stage was begun"), said.append)
    assert (again.drafter, again.card) == (whole[0].drafter, whole[0].card)
    assert "nothing to do" in said[0]


def bundle_made(output):
    (output / "work" / "before").mkdir(parents=True)
    (output / "work" / "before" / MANIFEST).touch()


def test_what_was_wrong_may_be_put_right_before_anything_is_made(given, data, tmp_path):
    for wrong in ({"data": (tmp_path / "none",)}, {"target": tmp_path / "none"}, {"drafter": tmp_path / "none"}):
        with pytest.raises((RequestError, CheckpointError), match="none"):
            train_drafter(replace(given, output=tmp_path / "out", **wrong), say=pytest.fail)
        assert not (tmp_path / "out").exists()
    (tmp_path / "out" / "work" / "start").mkdir(parents=True)  # of another drafter
    with TrainingDir(replace(given, output=tmp_path / "out", seed=3)) as work:
        assert not work.start.exists()
        bundle_made(tmp_path / "out")
    with (
        pytest.raises(RequestError, match="--seed 3, now it is 0"),
        TrainingDir(replace(given, output=tmp_path / "out")),
    ):
        pass


def test_a_start_that_a_kill_tore_is_made_again(given, tmp_path, monkeypatch):
    run, copies = replace(given, output=tmp_path / "out"), []

    def killed(source, place):
        copies.append(place)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", killed)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(run)
    copies[0].write_bytes(b"half")  # what a kill leaves
    with TrainingDir(run) as work:
        assert not work.start.exists()
        monkeypatch.setattr(Training, "_build", lambda *parts: ())
        with pytest.raises(BundleError):  # there is none
            Training(run, work).before()
        for file in (MODELS / "drafter").iterdir():
            if file.name != "training.json":  # it tells of another training
                assert (work.start / file.name).read_bytes() == file.read_bytes()
        (work.start / "config.json").write_text("{}")  # as the drafter was, before it was put right
        with pytest.raises(BundleError):
            Training(run, work).before()
        assert same_files(MODELS / "drafter", work.start)


def test_no_other_model_is_written_over(given, tmp_path):
    for name in ("target", "drafter"):
        shutil.copytree(MODELS / name, tmp_path / name)
    run = replace(given, target=tmp_path / "target", drafter=tmp_path / "drafter")
    for output in (run.target, run.drafter, tmp_path / "drafter" / ".." / "drafter"):
        with pytest.raises(RequestError, match="is a model that is read"):
            train_drafter(replace(run, output=output))
    with pytest.raises(RequestError, match="holds a model that no training made"):
        train_drafter(replace(given, output=tmp_path / "target"))
    for name in ("target", "drafter"):
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == sorted(
            file.name for file in (MODELS / name).iterdir()
        )


def test_what_a_bundle_decides_is_not_given_again(given, tmp_path):
    with pytest.raises(BuildError, match="--max-context is 64 and --target is a bundle"):
        train_drafter(replace(given, output=tmp_path / "out", max_context=64))


def test_a_dry_run_leaves_steps_and_data_open_and_not_the_models(given, tmp_path):
    run = replace(given, output=tmp_path)
    bundle_made(tmp_path)
    with TrainingDir(replace(run, steps=0, sequences=9), dry=True):
        pass
    with TrainingDir(run, dry=True), pytest.raises(RequestError, match="another process"):
        TrainingDir(run, dry=True)
    with pytest.raises(RequestError, match="--seed 0, now it is 3"):
        TrainingDir(replace(run, seed=3), dry=True)
    for _ in range(2):
        with TrainingDir(run):
            pass
    with pytest.raises(RequestError, match="--sampled 1, now it is 2"):
        TrainingDir(replace(run, sampled=2))
    longer = replace(run, steps=7, sequences=1, accumulate=8)  # no answer depends on them, and no step is kept
    with TrainingDir(longer) as work:
        (work.training / "checkpoint-00000002").mkdir(parents=True)
    with pytest.raises(RequestError, match="--steps 7, now it is 4"):
        TrainingDir(run)


def test_the_command_tells_what_a_training_takes(given, whole, cli, tmp_path):
    run = part_of(given, tmp_path / "out", "start", "before")
    argv = ("--target", run.target, "--data", run.data[0], "--output", run.output, "--drafter", run.drafter)
    sizes = ("--steps", 4, "--new-tokens", 8, "--evaluated", 4, "--sequences", 2, "--anchors", 2)
    code, out, err = cli("train-drafter", *argv, *sizes, "--dry-run", "--json")
    told = json.loads(out)
    assert code == 0
    said = err.splitlines()
    assert said[0].startswith("a dry run builds the first bundle")
    hours = [told[f"{stage}_hours"] for stage in ("answers", "taps", "training", "evaluation")]
    assert min(hours) > 0
    assert told["hours"] == sum(hours)
    assert told["files"] > 36 * told["parameters"]
    assert told["parameters"] > 2e6
    assert 0 < told["memory"]["total"] < told["device"]
    assert {path.name for path in (run.output / "work").iterdir()} == {"start", "before", "lock", "run.json"}


def test_a_device_that_is_too_small_is_told_before_and_after(given, whole, tmp_path, monkeypatch):
    run, said = part_of(given, tmp_path / "out", "start", "before", "answers-0.jsonl"), []

    def full(trainer, part):
        raise torch.OutOfMemoryError("a page of the allocator's figures")

    monkeypatch.setattr("edge_dflash.training.forecast.read_memory", lambda root: SimpleNamespace(total=1 << 20))
    monkeypatch.setattr(stages.Trainer, "_step", full)
    with pytest.raises(BackendError, match=r"no room for 2 answers of up to \d+ tokens with 2 blocks each; give fewer"):
        train_drafter(run, say=said.append)
    warned = "\n".join(said)
    assert re.search(r"needs about \d+\.\d MB of memory, the device has 1\.0 MB; give fewer --sequences", warned)
    with TrainingDir(replace(run, sequences=1)) as work:  # as the remedy says
        assert work.answers(0).is_file()


def test_another_training_in_the_same_place_is_refused(given, whole):
    again = r"is of a training with --steps 4, now it is 5; .* or remove .*done\.json to train again with its answers"
    with pytest.raises(RequestError, match=again):
        train_drafter(replace(given, steps=5))
    with pytest.raises(RequestError, match=r"is of a training with --sampled 1, now it is 2; .* or remove .*work$"):
        train_drafter(replace(given, sampled=2, steps=5))
    with TrainingDir(given), pytest.raises(RequestError, match="another process trains"):
        TrainingDir(given)


def test_a_full_disk_is_said_in_one_line(given, whole, tmp_path, monkeypatch):
    run = part_of(given, tmp_path / "out", "start", "before", "answers-0.jsonl")

    def full(*parts):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("edge_dflash.training.trainer.save_file", full)
    with pytest.raises(RequestError, match=r"cannot write .*checkpoint-00000004: .*No space left on device; make"):
        train_drafter(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(1 << 30) + 20_000_000))
    with pytest.raises(RequestError, match=r"bundles take 1\d\d\.\d MB|take 0\.\d+ GB.*has 20\.0 MB free; make room"):
        train_drafter(run)


def test_a_target_that_changed_meanwhile_is_refused(given, whole, tmp_path):
    run = part_of(given, tmp_path / "out", "start", "before")
    with TrainingDir(run) as work:
        training = Training(run, work)
        bundle = training.before()
        shutil.copytree(bundle.path, work.after)
        training.after(bundle)
        (first, *rest) = bundle.manifest.sources
        other = replace(bundle.manifest, sources=(replace(first, sha256="0" * 64), *rest))
        (work.after / MANIFEST).write_bytes(dump_manifest(other))
        with pytest.raises(BuildError, match="is not the target that it was when the training began"):
            training.after(bundle)


def test_an_ended_training_is_of_the_data_that_it_read(given, whole):
    text = given.data[0].read_text()
    given.data[0].write_text(text.replace("Say hello", "Say hallo"))
    try:
        with pytest.raises(RequestError, match=r"was trained on other prompts than .*plans\.jsonl has now"):
            train_drafter(given)
    finally:
        given.data[0].write_text(text)


def test_answers_that_were_removed_take_what_came_of_them_along(given, whole, tmp_path, monkeypatch):
    run = part_of(given, tmp_path / "out", "start", "before", "evaluation.json")
    work = run.output / "work"
    for name in ("training/checkpoint-00000004", "trained", "after", "after.building"):
        (work / name).mkdir(parents=True)
    monkeypatch.setattr(Training, "answers", lambda *parts: pytest.exit("on"))
    with pytest.raises(pytest.exit.Exception):
        train_drafter(run)
    assert {path.name for path in work.iterdir()} == {"start", "before", "lock", "run.json"}


def test_steps_that_were_removed_are_trained_and_measured_again(given, whole, tmp_path):
    run = part_of(given, tmp_path / "out", "start", "before", "answers-0.jsonl", "evaluation.json")
    heard = set()
    train_drafter(run, lambda stage, *now: heard.add(stage))
    assert "evaluation, after" in heard
    assert "evaluation, before" not in heard


def test_a_drafter_that_changed_is_read_again_or_refused(given, whole, tmp_path):
    init = shutil.copytree(given.drafter, tmp_path / "init")
    run = replace(given, drafter=init, output=tmp_path / "out")
    with TrainingDir(run) as work:
        training = Training(run, work)
        first = training.before().manifest.sources
        config = json.loads((init / "config.json").read_text())
        (init / "config.json").write_text(json.dumps(config, indent=8))
        assert training.before().manifest.sources != first
        work.answers(0).touch()
        assert training.before()
        (init / "config.json").write_text(json.dumps(config, indent=9))
        with pytest.raises(RequestError, match="init has changed since this training began; give another --output, or"):
            training.before()


def test_what_a_kill_behind_the_end_left_goes(given, whole):
    work = given.output / "work"
    for name in ("taps", "training", "trained", "after"):
        (work / name).mkdir()
    train_drafter(given)
    assert {path.name for path in work.iterdir() if path.is_dir()} == {"start", "before"}


def test_taps_that_the_disk_may_not_take_are_refused(given, whole, tmp_path):
    run = part_of(given, tmp_path / "full", "start", "before", "answers-0.jsonl")
    with pytest.raises(RequestError, match=r"taps take \d+\.\d kB, --disk is 1e-06 GB; give --disk 0\.0"):
        train_drafter(replace(run, disk=1e-6))


@pytest.mark.parametrize(
    ("begun", "after", "worse"), [("weights", 1.9, True), ("weights", 2.0, False), ("sizes", 1.9, False)]
)
def test_a_drafter_that_became_worse_is_kept_apart_and_said_so(
    given, whole, cli, tmp_path, monkeypatch, begun, after, worse
):
    monkeypatch.setattr(TrainingDir, "forget_trained", lambda work: None)  # what is measured below
    output, drafter = tmp_path / "out", given.drafter
    if begun == "sizes":
        drafter = tmp_path / begun
        drafter.mkdir()
        shutil.copy2(given.drafter / "config.json", drafter / "config.json")  # the time, too: it has not changed
    part_of(given, output, "start", "before", "answers-0.jsonl")
    shutil.copytree(given.output / "work" / "before", output / "work" / "after")
    measures = json.loads((given.output / "work" / "evaluation.json").read_text())
    measures["before"]["greedy"]["accept_length"], measures["after"]["greedy"]["accept_length"] = 2.0, after
    (output / "work" / "evaluation.json").write_text(json.dumps(measures))
    code, out, err = cli(
        "train-drafter", "--target", given.target, "--data", given.data[0], "--output", output, "--drafter", drafter,
        "--steps", 4, "--rate", 1e-5, "--new-tokens", 8, "--evaluated", 1, "--sequences", 2, "--anchors", 2, "--json",
    )  # fmt: skip
    assert code == (9 if worse else 0)
    assert json.loads(out.splitlines()[-1])["better"] is not worse
    assert ("worse than its start" in err) is worse
    for name in ("card.json", "model.safetensors"):
        assert (output / "worse" / name).is_file() is worse
        assert (output / name).is_file() is not worse


def test_the_command_says_what_is_missing(refused, tmp_path):
    assert "Missing option '--data'" in refused("train-drafter", "--target", tmp_path)[1]
    argv = ("train-drafter", "--target", tmp_path, "--data", tmp_path / "x", "--output", tmp_path / "o")
    assert "give one of --steps and --minutes" in refused(*argv)[1]
    assert "give one of --steps and --minutes" in refused(*argv, "--dry-run")[1]
    assert "give one of --steps and --minutes" in refused(*argv, "--steps", 3, "--minutes", 3)[1]
    assert "--rate is 0; give a rate above 0" in refused(*argv, "--steps", 3, "--rate", 0)[1]
    for seed in (-1, 2**31):
        assert "'--seed'" in refused(*argv, "--steps", 3, "--seed", seed)[1]
    (tmp_path / "x").touch()
    argv = ("train-drafter", "--target", tmp_path, "--data", tmp_path / "x", "--steps", 3)
    assert "is no directory; give a new one" in refused(*argv, "--output", tmp_path / "x")[1]
