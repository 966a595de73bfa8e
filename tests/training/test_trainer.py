"""Training of a small drafter: it learns, keeps its best, and goes on after a kill as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_support import drafter_of, plan, prepared

from edge_dflash.errors import RequestError
from edge_dflash.training import trainer as training
from edge_dflash.training.evaluate import accepted
from edge_dflash.training.losses import block_loss
from edge_dflash.training.taps import BatchReader, damaged_file
from edge_dflash.training.trainer import (
    LEAST_STEPS,
    Trainer,
    kept_weights,
    learning_rate,
    walk_answers,
)
from edge_dflash.training.workdir import TrainingState


@pytest.fixture(scope="module")
def taps(tmp_path_factory):
    return tmp_path_factory.mktemp("taps")


@pytest.fixture(scope="module")
def ready(ids_bundle, taps):
    """Bundle and shards."""
    return prepared(ids_bundle, taps)


def trained(ready, folder, given, **more):
    bundle, shards = ready
    trainer = Trainer(drafter_of(bundle), shards, given, folder, **more)
    return trainer.run()


def test_a_drafter_learns_what_its_target_answers_and_the_best_is_kept(ready, tmp_path):
    said = []
    state = trained(ready, tmp_path, plan(steps=60), log=said.append)
    first, best = state.lengths[0][1], max(length for _, length in state.lengths)
    assert state.lengths[0][0] == 0
    assert best > first + 0.5
    assert state.losses[-1][1] < state.losses[0][1]
    assert state.best == pytest.approx(best, abs=1e-3)
    bundle, shards = ready
    kept = drafter_of(bundle, kept_weights(tmp_path))
    kept.quantized = True
    walked = walk_answers(kept, shards, shards.heldout.tolist(), "cpu")
    assert accepted(walked).mean == pytest.approx(state.best)
    assert "accept length" in said[-1]


def test_weights_that_got_worse_are_not_kept(ready, tmp_path, monkeypatch):
    lengths = iter((3, 2, 2, 2, 2))
    monkeypatch.setattr(training, "walk_answers", lambda *given: [[next(lengths)]])
    state, start = trained(ready, tmp_path, plan(steps=4)), drafter_of(ready[0]).weights()
    assert (state.best, state.best_step) == (3, 0)
    assert all(torch.equal(kept, start[name]) for name, kept in kept_weights(tmp_path).items())


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from training_support import drafter_of, plan, prepared
from edge_dflash.training.trainer import Trainer
bundle, shards = prepared(Path({bundle!r}), Path({taps!r}))
Trainer(drafter_of(bundle), shards, plan(steps=12, pause=0.0), Path({folder!r})).run(
    lambda stage, done, total: print(done, flush=True)
)
"""


def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(ready, ids_bundle, taps, tmp_path):
    whole = trained(ready, tmp_path / "whole", plan(steps=12, pause=0.0))
    code = CHILD.format(path=sys.path, bundle=str(ids_bundle), taps=str(taps), folder=str(tmp_path / "cut"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if int(line) >= 5:
                os.kill(child.pid, signal.SIGKILL)
                break
    (tmp_path / "cut" / "checkpoint.part").mkdir(exist_ok=True)  # what a kill leaves
    said = []
    resumed = trained(ready, tmp_path / "cut", plan(steps=12, pause=0.0), log=said.append)
    assert re.fullmatch(r"the training goes on behind step \d+", said[0])
    assert resumed.step == whole.step == 12
    assert resumed.lengths == whole.lengths
    ours, theirs = (kept_weights(tmp_path / name) for name in ("cut", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_step_of_two_passes_learns_from_the_mean_of_both(ready, tmp_path):
    given, (bundle, shards) = plan(steps=1, pause=0.0, sequences=2, anchors=3, accumulate=2), ready
    trained(ready, tmp_path, given)
    alone, reader = drafter_of(bundle), BatchReader(shards, given)
    for number in (0, 1):
        (block_loss(alone, reader.batch(number).to("cpu")) / 2).backward()
    reader.close()
    learnt = [parameter for parameter in alone.parameters() if parameter.requires_grad]
    torch.nn.utils.clip_grad_norm_(learnt, 1.0)
    groups = [{"params": [p for p in learnt if p.ndim == 2]}, {"params": [p for p in learnt if p.ndim != 2]}]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = training.WEIGHT_DECAY, 0.0
    torch.optim.AdamW(groups, lr=learning_rate(1.0, given.peak), betas=(0.9, 0.95)).step()
    found = load_file(str(tmp_path / "checkpoint-00000001" / "model.safetensors"))
    for name, wanted in alone.state_dict().items():
        assert torch.allclose(found[name], wanted, atol=1e-6), name


@pytest.mark.parametrize(("changes", "wide"), [({}, 4), ({"rounded": 0.25}, 6), ({"rounded": 0.0}, 8)])
def test_the_last_steps_and_every_check_see_what_a_bundle_rounds(ready, tmp_path, monkeypatch, changes, wide):
    learnt, checked = [], []

    def loss(drafter, *given):
        learnt.append(drafter.quantized)
        return block_loss(drafter, *given)

    def walk(drafter, *given):
        checked.append(drafter.quantized)
        return walk_answers(drafter, *given)

    monkeypatch.setattr(training, "block_loss", loss)
    monkeypatch.setattr(training, "walk_answers", walk)
    trained(ready, tmp_path, plan(steps=8, patience=0, **changes))
    assert learnt == [False] * wide + [True] * (8 - wide)
    assert checked == [True] * 5


def test_it_ends_when_the_held_out_answers_get_no_better(ready, tmp_path):
    said = []
    state = trained(ready, tmp_path, plan(steps=24, rate=1e-12, patience=2, checks=12), log=said.append)
    assert state.step == 16  # two checks behind its half: before, no weight was rounded
    assert state.best_step == 0
    assert "2 checks without a better accept length end the training (--patience)" in said


class Clock:
    """A step of the reading takes half a second, and a rounded one twice as long."""

    def __init__(self):
        self.now, self.slow = 0.0, False

    def perf_counter(self):
        self.now += 0.5 + 0.5 * self.slow
        return self.now


def test_minutes_are_kept_whatever_a_step_takes(ready, tmp_path, monkeypatch):
    clock, rounded = Clock(), []
    bundle, shards = ready
    trainer = Trainer(drafter_of(bundle), shards, plan(steps=0, minutes=1.0, patience=0), tmp_path)
    step = trainer._step

    def slower(part):
        loss = step(part)
        clock.slow = trainer._drafter.quantized
        rounded.append((part, clock.slow))
        return loss

    monkeypatch.setattr("edge_dflash.training.trainer.time", clock)
    monkeypatch.setattr(trainer, "_step", slower)
    heard = []
    state = trainer.run(lambda *now: heard.append(now))
    assert 60 <= state.seconds < 66  # the last step and the last check
    assert heard[-2:] == [("training", 1000, 1000), ("training", 1000, 1000)]
    assert [slow for _, slow in rounded] == [part >= 0.5 for part, _ in rounded]
    assert len(state.lengths) == 5  # four checks, and one before the first step
    assert state.lengths[1][0] / state.step > 0.3  # the first quarter of the time holds more steps than the last one


def test_few_minutes_have_some_steps_nevertheless(ready, tmp_path):
    assert trained(ready, tmp_path, plan(steps=0, minutes=1e-6, patience=0)).step == LEAST_STEPS


def test_a_step_takes_what_the_later_steps_took_of_each_half():
    assert TrainingState(times=[9.0, 1.0, 7.0, 3.0]).step_seconds == 2.0
    assert TrainingState(times=[4.0]).step_seconds == 4.0
    assert TrainingState().step_seconds == 0.0


def test_a_loss_that_is_no_number_ends_the_training(ready, tmp_path, monkeypatch):
    monkeypatch.setattr("edge_dflash.training.trainer.block_loss", lambda *parts: block_loss(*parts) * float("nan"))
    with pytest.raises(RequestError, match=r"the loss of step 1 is nan; remove .* and give a --rate below 0.003"):
        trained(ready, tmp_path, plan(steps=8))


@pytest.mark.parametrize("body", ["[]", '["model.safetensors"]', "7", "null", '"x"', "[" * 100_000, "{"])
def test_hashes_that_are_no_object_are_damaged(tmp_path, body):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "sha256.json").write_text(body)
    assert damaged_file(tmp_path) == tmp_path / "sha256.json"


def test_a_damaged_checkpoint_is_named_and_not_gone_on_from(ready, tmp_path):
    trained(ready, tmp_path, plan(steps=2))
    (kept,) = tmp_path.glob("checkpoint-*")
    files = sorted(path for path in kept.iterdir())
    assert len(files) > 3
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(bytes((*whole[:-20], whole[-20] ^ 1, *whole[-19:])))
        for use in (lambda: trained(ready, tmp_path, plan(steps=2)), lambda: kept_weights(tmp_path)):
            with pytest.raises(RequestError, match=r"checkpoint-00000002/.* is damaged; remove .* to train again: ans"):
                use()
        file.unlink()
        with pytest.raises(RequestError, match="is damaged"):
            kept_weights(tmp_path)
        file.write_bytes(whole)
    assert trained(ready, tmp_path, plan(steps=2)).step == 2


def test_a_checkpoint_that_the_disk_refuses_is_said_in_one_line(ready, tmp_path, monkeypatch):
    def full(*parts):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nmore")

    monkeypatch.setattr("accelerate.Accelerator.save_state", full)
    with pytest.raises(RequestError, match=r"cannot write .*checkpoint-00000002: \[enforce fail .* vs 0; make room on"):
        trained(ready, tmp_path, plan(steps=2))


def test_a_check_needs_no_more_room_than_a_step(ready, tmp_path, monkeypatch):
    _, shards = ready
    sizes, batch = [], shards.batch
    monkeypatch.setattr(
        shards, "batch", lambda rows, *rest, **more: sizes.append(len(rows)) or batch(rows, *rest, **more)
    )
    trained(ready, tmp_path, plan(steps=1, sequences=2))
    assert max(sizes) == 2


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate((step + 1) / 100, 1.0) for step in range(100)]
    assert np.argmax(rates) in (3, 4)
    assert rates[0] == 0.25
    assert rates[-1] < 0.03
