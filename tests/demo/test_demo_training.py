import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from calib.demo.corpus import make_task, tasks
from calib.demo.data import batches, load_dataset, pack, save_dataset, training_set
from calib.demo.drafter import KINDS, Drafter, DrafterConfig
from calib.demo.features import features
from calib.demo.losses import block_loss
from calib.demo.model import Target, TargetConfig
from calib.demo.storage import load_drafter, load_target
from calib.demo.tokenizer import (
    END_OF_TURN_ID,
    MASK,
    MASK_ID,
    SPECIAL,
    Sample,
    encode_tasks,
    render,
    save_tokenizer,
    train_tokenizer,
)
from calib.demo.train_drafter import DrafterRun, own_answers, train_drafters
from calib.demo.train_target import TargetRun, language_loss, train_target
from calib.demo.training import learning_rate
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
DRAFTER = DrafterConfig(
    **SMALL,
    num_attention_heads=2,
    num_key_value_heads=1,
    sliding=(True, False),
    sliding_window=64,
    block_size=4,
    target_layer_ids=(1, 2),
    num_target_layers=4,
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
DRAFTER_RUN = DrafterRun(
    tasks=8,
    steps=3,
    batch=4,
    anchors=4,
    workers=0,
    device="cpu",
    check_tasks=1,
    longest_answer=6,
    log_every=1,
    config=DRAFTER,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(60)


def silent(line):
    pass


def test_special_tokens_come_first(tokenizer):
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == list(range(len(SPECIAL)))
    assert SPECIAL[MASK_ID] == MASK


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


def test_thinking_is_off_by_default():
    messages = make_task(0).messages
    assert render(messages).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert render(messages, thinking=True).endswith("<|im_start|>assistant\n<think>\n")


def test_any_text_has_a_round_trip(tokenizer):
    text = 'Grüße 機器人 {"a": 12}\n\t'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_batches_are_whole_shuffled_and_repeatable():
    dataset = pack([Sample((1,) * (1 + i % 7), (2,)) for i in range(40)])
    first = [b.tolist() for b in batches(dataset, 8, 9, seed=3)]
    assert first == [b.tolist() for b in batches(dataset, 8, 9, seed=3)]
    assert first != [b.tolist() for b in batches(dataset, 8, 9, seed=4)]
    assert sorted(i for b in first[:5] for i in b) == list(range(40))
    assert all(np.ptp(dataset.lengths[b]) <= 2 for b in first)


def test_samples_come_back_from_a_dataset(tokenizer):
    wanted = encode_tasks(tokenizer, list(tasks("train", 0, 5)), 10_000)
    dataset = pack(wanted)
    assert [dataset.sample(i) for i in range(len(dataset))] == wanted


def test_a_dataset_reads_back(tmp_path):
    dataset = pack([Sample((1, 2), (3,)), Sample((4,), (5, 6, 1000))])
    save_dataset(dataset, tmp_path / "answers.npz")
    again = load_dataset(tmp_path / "answers.npz")
    assert [again.sample(i) for i in range(2)] == [dataset.sample(i) for i in range(2)]


def test_learning_rate_warms_up_and_falls():
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == 0.25
    assert max(rates) == rates[4] == 1.0
    assert rates[-1] < 0.03


def test_loss_ignores_what_comes_after_the_answer():
    torch.manual_seed(0)
    model = Target(TARGET)
    ids = torch.randint(0, 64, (1, 12))
    other = ids.clone()
    other[0, 9:] = 3
    lengths, prompts = torch.tensor([9]), torch.tensor([4])
    with torch.no_grad():
        losses = [language_loss(model, x, lengths, prompts, 0.1) for x in (ids, other)]
    assert torch.equal(*losses)


def test_features_are_those_of_each_sequence_alone():
    torch.manual_seed(0)
    target = Target(TARGET).requires_grad_(False)
    dataset = pack([Sample(tuple(range(10, 10 + n)), (7, 8, 9)) for n in (3, 70, 5, 9)])
    seen = features(target, dataset, (1, 2), device="cpu", batch=3)
    share = torch.tensor([[0.0, 0.999], [0.5, 0.999]])
    batch = seen.batch(np.array([2, 0]), share)
    assert batch.anchors.tolist() == [[5, 6], [4, 4]]
    for row, index in enumerate((2, 0)):
        sample = dataset.sample(index)
        ids = torch.tensor([sample.prompt + sample.answer])
        _, rows = target(ids, (1, 2, 3))
        length = ids.shape[1]
        assert torch.equal(batch.ids[row, :length], ids[0])
        both = torch.cat((batch.taps, batch.last), -1)[row, :length]
        torch.testing.assert_close(both, rows[0], atol=1e-5, rtol=1e-4)


def test_block_loss_reads_labels_without_a_shift():
    torch.manual_seed(0)
    target, drafter = Target(TARGET), Drafter(DRAFTER)
    target.requires_grad_(False)
    dataset = pack([Sample(tuple(range(10, 15)), tuple(range(15, 30)))])
    seen = features(target, dataset, DRAFTER.target_layer_ids, device="cpu")
    batch = seen.batch(np.array([0]), torch.tensor([[0.0]]))
    loss = block_loss(target, drafter, batch)
    ids = torch.arange(10, 30)[None]
    _, taps = target(ids, DRAFTER.target_layer_ids)
    hidden = drafter(taps, torch.tensor([[5]]), torch.tensor([[15]]), target.model.embed_tokens.weight)
    each = torch.nn.functional.cross_entropy(target.lm_head(hidden[0, 0, 1:]), ids[0, 6:9], reduction="none")
    weight = torch.exp(-torch.arange(3) / 7)
    torch.testing.assert_close(loss, (each * weight).sum() / weight.sum())


def test_own_answers_are_those_of_the_target(tokenizer):
    torch.manual_seed(0)
    target = Target(TARGET).requires_grad_(False)
    counter = iter(range(1000))

    def says_7_7_and_ends(x):
        logits = torch.zeros(x.shape[0], 1, TARGET.vocab_size)
        logits[:, :, END_OF_TURN_ID if next(counter) % 3 == 2 else 7] = 1.0
        return logits

    target.lm_head.forward = says_7_7_and_ends
    answered = own_answers(DRAFTER_RUN, target, tokenizer, silent)
    asked = training_set(tokenizer, DRAFTER_RUN.tasks)
    assert {answered.sample(i).answer for i in range(len(answered))} == {(7, 7, END_OF_TURN_ID)}
    assert {answered.sample(i).prompt for i in range(len(answered))} == {asked.sample(i).prompt for i in range(8)}


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


def test_drafters_of_each_kind_train_on_a_target_and_repeat(tmp_path, monkeypatch):
    train_target(TARGET_RUN, tmp_path, log=silent)
    monkeypatch.setattr(
        "calib.demo.train_drafter.own_answers",  # a target of six steps ends no answer: use the corpus's
        lambda run, target, tokenizer, log: training_set(tokenizer, run.tasks),
    )
    run = replace(DRAFTER_RUN, kinds=KINDS)
    records = train_drafters(run, tmp_path, log=silent)
    made = {kind: (tmp_path / kind / "model.safetensors").read_bytes() for kind in KINDS}
    assert len(load_dataset(tmp_path / "answers.npz")) == DRAFTER_RUN.tasks
    monkeypatch.setattr("calib.demo.train_drafter.own_answers", None)  # the file of answers is read
    again = train_drafters(replace(run, kinds=("dspark",)), tmp_path, log=silent)
    assert (tmp_path / "dspark" / "model.safetensors").read_bytes() == made["dspark"]
    assert again["dspark"]["loss"] == records["dspark"]["loss"]
    names = {f"target_{t}.drafter_{d}" for t in ("bf16", "nvfp4") for d in ("bf16", "nvfp4")}
    for kind in KINDS:
        record = json.loads((tmp_path / kind / "training.json").read_text())
        assert record["loss"] == records[kind]["loss"]
        assert record["loss"][-1][1] < record["loss"][0][1]
        assert set(record["heldout_accept_length"]) == set(record["heldout_acceptance"]) == names
        assert all(len(shares) <= 3 for shares in record["heldout_acceptance"].values())
        assert load_drafter(tmp_path / kind).c.mask_token_id == MASK_ID
        assert load_drafter(tmp_path / kind).c.kind == kind
