import json
from dataclasses import replace

import numpy as np
import pytest

from calib.demo.corpus import tasks
from calib.demo.data import batches, pack
from calib.demo.model import TargetConfig
from calib.demo.storage import load_target
from calib.demo.tokenizer import (
    Sample,
    encode_tasks,
    save_tokenizer,
    train_tokenizer,
)
from calib.demo.train_target import TargetRun, train_target
from edge_dflash.text.tokenizer import Tokenizer

SMALL = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
TARGET = TargetConfig(
    **SMALL,
    num_attention_heads=2,
    num_key_value_heads=1,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    rotary_dims=4,
    num_hidden_layers=4,
)
TARGET_RUN = TargetRun(
    tasks=24,
    steps=6,
    batch=4,
    workers=0,
    device="cpu",
    check_tasks=1,
    longest_answer=6,
    tokenizer_tasks=60,
    log_every=1,
    quantized_part=0.5,
    peak_rate=1e-2,
    config=TARGET,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(60)


def silent(line):
    pass


def test_prompts_are_the_same_as_the_runtime_makes(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path, 2048)
    runtime = Tokenizer.open(tmp_path)
    for task in tasks("train", 0, 30):
        thinking = bool(task.thinking)
        (sample,) = encode_tasks(tokenizer, [task], 10_000)
        switches = {"enable_thinking": True} if thinking else {}
        assert runtime.encode_chat(task.messages, **switches) == sample.prompt
        said = runtime.decode(sample.answer)
        assert ("</think>" in said) == thinking
        assert said.rpartition("</think>")[2].strip() == task.answer
    assert runtime.eos_token_id == sample.answer[-1]


def test_batches_are_whole_shuffled_and_repeatable():
    dataset = pack([Sample((1,) * (1 + i % 7), (2,)) for i in range(40)])
    first = [b.tolist() for b in batches(dataset, 8, 9, seed=3)]
    assert first == [b.tolist() for b in batches(dataset, 8, 9, seed=3)]
    assert first != [b.tolist() for b in batches(dataset, 8, 9, seed=4)]
    assert sorted(i for b in first[:5] for i in b) == list(range(40))
    assert all(np.ptp(dataset.lengths[b]) <= 2 for b in first)


def test_a_few_steps_lower_the_loss_and_the_same_seed_gives_the_same_files(tmp_path):
    records = [train_target(TARGET_RUN, tmp_path / name, log=silent) for name in ("a", "b")]
    losses = [loss for _, loss in records[0]["loss"]]
    assert losses[-1] < losses[0] - 0.5
    files = sorted(path.name for path in (tmp_path / "a" / "target").iterdir())
    assert files == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]
    again = replace(TARGET_RUN, start=str(tmp_path / "a" / "target"), steps=1, first_task=24)
    record = train_target(again, tmp_path / "c", log=silent)
    assert record["loss"][0][1] < losses[0] - 0.5  # it goes on from what was learned
    for name in files[:-1]:
        assert (tmp_path / "a" / "target" / name).read_bytes() == (tmp_path / "b" / "target" / name).read_bytes()
    assert load_target(tmp_path / "a" / "target").c.vocab_size == records[0]["run"]["config"]["vocab_size"]
    assert json.loads((tmp_path / "a" / "target" / "training.json").read_text())["loss"] == records[0]["loss"]
