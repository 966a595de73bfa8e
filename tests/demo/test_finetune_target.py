"""The demo target trained further on tasks of another kind: a checkpoint as builds take it, the same every time."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from calib.finetune_target import TuningRun, finetune, read_samples
from calib.harbour import harbour_tasks
from edge_dflash.demo.tasks import MODELS
from edge_dflash.model.registry import read_pair

RUN = TuningRun(steps=3, batch=2)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("harbour") / "train.jsonl"
    lines = [json.dumps(task.line(answer=True)) for task in harbour_tasks("train", 8)]
    path.write_text("\n".join([*lines, '{"messages": [{"role": "user", "content": "no answer"}]}']) + "\n")
    return path


def test_samples_are_tasks_that_have_an_answer(tasks, tmp_path):
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    dataset = read_samples(tasks, tokenizer)
    assert len(dataset) == 8
    text = tokenizer.decode(list(dataset.sample(0).answer), skip_special_tokens=False)
    assert text.startswith('{"ship":')
    assert text.endswith("<|im_end|>")
    (tmp_path / "none.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="has no task with an answer"):
        read_samples(tmp_path / "none.jsonl", tokenizer)


def test_a_checkpoint_comes_out_that_a_drafter_fits_and_is_the_same_again(tasks, tmp_path):
    said = []
    record = finetune(RUN, tasks, tmp_path / "one", log=said.append)
    assert (record["steps"], record["samples"]) == (3, 8)
    assert said
    assert json.loads((tmp_path / "one" / "training.json").read_text())["run"]["start"] == "target"
    pair = read_pair(tmp_path / "one", MODELS / "drafter")
    assert pair == read_pair(MODELS / "target", MODELS / "drafter")
    finetune(RUN, tasks, tmp_path / "two", log=said.append)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    first = load_file(MODELS / "target" / "model.safetensors")
    assert not all(torch.equal(one[name], first[name]) for name in one)
    assert (tmp_path / "one" / "tokenizer.json").exists()


def test_minutes_end_a_training_too(tasks, tmp_path):
    record = finetune(TuningRun(minutes=0.02, batch=1), tasks, tmp_path / "short", log=lambda line: None)
    assert record["steps"] >= 1


def test_wide_training_never_rounds(tasks, tmp_path, monkeypatch):
    rounded = []
    monkeypatch.setattr("calib.finetune_target.WeightQuantizer.apply", lambda self: rounded.append(1))
    finetune(RUN, tasks, tmp_path / "rounded", log=lambda line: None)
    assert len(rounded) == 1  # the second half of three steps
    finetune(replace(RUN, wide=True), tasks, tmp_path / "wide", log=lambda line: None)
    assert len(rounded) == 1
