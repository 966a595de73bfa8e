"""The three kinds of drafter in training: equal to the goldens, and each loss at work."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from calib.demo.drafter import KINDS, Drafter, DrafterConfig, of_kind
from calib.demo.fakequant import Linear
from calib.demo.generate import acceptance
from calib.demo.heads import MarkovConfig, MarkovHead, Selector, SelectorConfig
from calib.demo.losses import Batch, Rows, block_loss, selector_loss
from calib.demo.model import Target, TargetConfig
from calib.demo.modules import GroupedConv
from calib.demo.storage import drafter_config, drafter_config_json, load_drafter, load_target, save_model, target_copies
from calib.demo.tokenizer import Sample

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = ("p0", "p1", "p2")
FORMS = ("vanilla", "gated", "rnn")
SIDES = ("before", "after")
CLOSE = {"atol": 1e-4, "rtol": 0}
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
SIZES = DrafterConfig(**SMALL, block_size=5, target_layer_ids=(1, 2), num_target_layers=4)
TARGET = TargetConfig(**SMALL, num_hidden_layers=4, rotary_dims=4, linear_key_head_dim=16, linear_value_head_dim=16)


def first_cycle(drafter, golden, prompt, taps, weights):
    """Hidden rows, their logits and the drafts of the block after the prompt, each of one sequence and one block."""
    embedding, head = weights
    anchors = torch.tensor([[len(golden[f"{prompt}.prompt"])]])
    first = golden[f"{prompt}.greedy_tokens"][:1][None]
    hidden = drafter(taps[f"{prompt}.prefill_taps"][None], anchors, first, embedding)
    rows = hidden[:, :, -drafter.c.drafts :]
    logits = rows @ head.T
    drafts = drafter.proposals(rows, logits, first)
    before = torch.cat((first[..., None], drafts[..., :-1]), -1)
    return hidden, rows, logits, drafts, before


@pytest.fixture(scope="module")
def qwen3():
    """Embedding of the target, which is its head too."""
    tensors = load_file(GOLDEN / "qwen3-tiny" / "model.safetensors")
    return (tensors["model.embed_tokens.weight"].float(),) * 2


@pytest.fixture(scope="module")
def dflash2():
    return load_file(GOLDEN / "golden_qwen3_5-dflash2.safetensors")


@pytest.fixture(scope="module")
def qwen3_5():
    return load_target(GOLDEN / "qwen3_5-tiny").requires_grad_(False)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("form", FORMS)
def test_dspark_agrees_with_the_golden(form, prompt, qwen3):
    golden = load_file(GOLDEN / f"golden_qwen3-dspark-{form}.safetensors")
    taps = load_file(GOLDEN / "golden_qwen3-dspark-vanilla.safetensors")
    drafter = load_drafter(GOLDEN / f"qwen3-tiny-dspark-{form}").requires_grad_(False)
    hidden, rows, logits, drafts, before = first_cycle(drafter, golden, prompt, taps, qwen3)
    scores = logits + drafter.markov_head(rows, before)
    torch.testing.assert_close(hidden[0, 0], golden[f"{prompt}.cycle0_draft_hidden"], **CLOSE)
    torch.testing.assert_close(logits[0, 0], golden[f"{prompt}.cycle0_base_logits"], **CLOSE)
    torch.testing.assert_close(scores[0, 0], golden[f"{prompt}.cycle_draft_logits"][0], **CLOSE)
    assert torch.equal(drafts[0, 0], golden[f"{prompt}.cycle_draft_tokens"][0])
    assert (drafter.confidence_head is None) == (form == "gated")
    if drafter.confidence_head is not None:
        sure = torch.sigmoid(drafter.confidence_head(rows, drafter.markov_head.markov_w1(before)))
        torch.testing.assert_close(sure[0, 0], golden[f"{prompt}.cycle_confidence"][0], **CLOSE)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_dflash2_agrees_with_the_golden(prompt, dflash2, qwen3_5):
    drafter = load_drafter(GOLDEN / "qwen3_5-tiny-dflash2").requires_grad_(False)
    outputs = []
    for module in drafter.modules():
        if isinstance(module, GroupedConv):
            module.register_forward_hook(lambda _, inputs, output: outputs.append(output[0]))
    weights = (qwen3_5.model.embed_tokens.weight, qwen3_5.lm_head.weight)
    hidden, rows, logits, drafts, before = first_cycle(drafter, dflash2, prompt, dflash2, weights)
    candidates, scores = drafter.candidate_selector(rows, logits, before)
    torch.testing.assert_close(hidden[0, 0], dflash2[f"{prompt}.cycle0_draft_hidden"], **CLOSE)
    torch.testing.assert_close(logits[0, 0], dflash2[f"{prompt}.cycle_draft_logits"][0], **CLOSE)
    assert torch.equal(drafts[0, 0], dflash2[f"{prompt}.cycle_draft_tokens"][0])
    by_id = (candidates[0, 0].argsort(-1), dflash2[f"{prompt}.cycle_candidates"][0].argsort(-1))
    torch.testing.assert_close(
        scores[0, 0].gather(-1, by_id[0]), dflash2[f"{prompt}.cycle_scores"][0].gather(-1, by_id[1]), **CLOSE
    )
    if prompt == "p0":
        names = [f"{layer}.{part}.{side}" for layer in range(2) for part in ("attention", "mlp") for side in SIDES]
        for name, output in zip(names, outputs, strict=True):
            torch.testing.assert_close(output, dflash2[f"p0.cycle0_conv.{name}"], **CLOSE)


@pytest.mark.parametrize(("block", "name"), [(8, ""), (5, "short_")])
def test_dflash2_accepts_what_the_golden_loop_accepts(block, name, dflash2, qwen3_5):
    drafter = load_drafter(GOLDEN / "qwen3_5-tiny-dflash2").requires_grad_(False)
    drafter.c = replace(drafter.c, block_size=block)
    for prompt in PROMPTS:
        sample = Sample(*(tuple(dflash2[f"{prompt}.{key}"].tolist()) for key in ("prompt", "greedy_tokens")))
        found = acceptance(qwen3_5, drafter, [sample])
        accepted = dflash2[f"{prompt}.{name}cycle_accepted"]
        assert found.cycles == len(accepted)
        assert found.tokens == len(sample.answer) - 1
        left = len(sample.prompt) + len(sample.answer) - 1 - dflash2[f"{prompt}.{name}cycle_start"]
        shares = [float((accepted[left > j + 1] > j).double().mean()) for j in range(block - 1)]
        assert found.by_position == pytest.approx(shares[: int(accepted.max())])


def test_a_walk_agrees_with_the_terms_of_known_tokens():
    torch.manual_seed(0)
    for form in FORMS:
        head = MarkovHead(64, 8, MarkovConfig(kind=form, rank=4))
        torch.nn.init.normal_(head.markov_w2.weight)
        hidden, logits, first = torch.randn(3, 5, 8), torch.randn(3, 5, 64), torch.tensor([1, 2, 3])
        walked = head.walk(hidden, logits, first)
        before = torch.cat((first[:, None], walked[:, :-1]), 1)
        assert torch.equal((logits + head(hidden, before)).argmax(-1), walked)


def test_a_selector_chooses_among_its_candidates_by_the_token_before():
    selector = Selector(64, 8, SelectorConfig(rank=2, top_k=3))
    logits = torch.full((1, 2, 64), -9.0)
    logits[0, :, 10:13] = torch.tensor([3.0, 2.0, 1.0])
    hidden = torch.ones(1, 2, 8)
    assert selector.walk(hidden, logits, torch.tensor([5])).tolist() == [[10, 10]]
    with torch.no_grad():
        selector.hidden_projection.weight.fill_(1 / 8)
        selector.predecessor_codebook.zero_()
        selector.predecessor_codebook[5, 0] = selector.predecessor_codebook[12, 1] = 1.0
        selector.successor_codebook[12, 0] = selector.successor_codebook[11, 1] = 4.0
        selector.successor_codebook[40] = 99.0  # no candidate
    assert selector.walk(hidden, logits, torch.tensor([5])).tolist() == [[12, 11]]


def test_a_new_drafter_of_any_kind_proposes_by_the_plain_head():
    torch.manual_seed(0)
    for kind in KINDS:
        drafter = Drafter(of_kind(kind, SIZES))
        rows = torch.randn(2, 3, drafter.c.drafts, 32)
        logits = torch.randn(2, 3, drafter.c.drafts, 64)
        assert torch.equal(drafter.proposals(rows, logits, torch.ones(2, 3, dtype=torch.long)), logits.argmax(-1))


def test_kinds_have_equal_drafts_and_their_own_files(tmp_path):
    torch.manual_seed(0)
    target = Target(TARGET)
    for kind, architecture in zip(KINDS, ("DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel"), strict=True):
        drafter = Drafter(of_kind(kind, SIZES))
        assert (drafter.c.kind, drafter.c.drafts) == (kind, 4)
        assert drafter_config_json(drafter.c)["architectures"] == [architecture]
        save_model(drafter, tmp_path / kind, target_copies(target, drafter.c))
        again = load_drafter(tmp_path / kind)
        assert again.c == drafter.c
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor.bfloat16().float())
        held = load_file(tmp_path / kind / "model.safetensors")
        assert ("lm_head.weight" in held, "embed_tokens.weight" in held) == ((kind == "dspark"),) * 2


@pytest.mark.parametrize("name", [*(f"qwen3-tiny-dspark-{form}" for form in FORMS), "qwen3_5-tiny-dflash2"])
def test_files_have_the_names_and_keys_of_the_goldens(name):
    drafter = load_drafter(GOLDEN / name)
    held = set(load_file(GOLDEN / name / "model.safetensors")) - {"embed_tokens.weight", "lm_head.weight"}
    assert set(drafter.state_dict()) == held
    written = drafter_config_json(drafter.c)
    assert drafter_config(written) == drafter.c
    theirs = json.loads((GOLDEN / name / "config.json").read_text())
    ours = {key: value for key, value in written.items() if key in theirs}
    assert ours == {key: theirs[key] for key in ours}
    assert set(written) - set(theirs) == set()


def batch_of(target, drafter, ids, anchors):
    _, rows = target(ids, (*drafter.c.target_layer_ids, target.c.num_hidden_layers - 1))
    lengths = torch.full((len(ids),), ids.shape[1])
    hidden = target.c.hidden_size
    return Batch(ids, lengths, anchors, rows[..., :-hidden], rows[..., -hidden:])


def test_dspark_learns_from_the_anchors_row_and_the_targets_distribution():
    torch.manual_seed(0)
    target = Target(TARGET).requires_grad_(False)
    drafter = Drafter(of_kind("dspark", SIZES))
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    ids, anchors = torch.arange(10, 30)[None], torch.tensor([[5]])
    loss = block_loss(target, drafter, batch_of(target, drafter, ids, anchors))
    logits, taps = target(ids, SIZES.target_layer_ids)
    hidden = drafter(taps, anchors, ids[:, 5:6], target.model.embed_tokens.weight)[0, 0]
    before, labels = ids[0, 5:9], ids[0, 6:10]
    embedded = drafter.markov_head.markov_w1(before)
    scores = target.lm_head(hidden) + drafter.markov_head.markov_w2(embedded)
    distance = (logits[0, 5:9].softmax(-1) - scores.softmax(-1)).abs().sum(-1)
    sure = torch.sigmoid(drafter.confidence_head.proj(torch.cat((hidden, embedded), -1)))[:, 0]
    wanted = 1 - distance.detach() / 2
    each = 0.1 * torch.nn.functional.cross_entropy(scores, labels, reduction="none") + 0.9 * distance
    each = each - wanted * sure.log() - (1 - wanted) * (1 - sure).log()
    weight = torch.exp(-torch.arange(4) / 7)
    torch.testing.assert_close(loss, (each * weight).sum() / weight.sum())


def test_the_selectors_loss_is_of_rows_whose_candidates_hold_the_label():
    torch.manual_seed(0)
    drafter = Drafter(of_kind("dflash2", replace(SIZES, vocab_size=64)))
    torch.nn.init.normal_(drafter.candidate_selector.successor_codebook)
    hidden, logits = torch.randn(1, 1, 4, 32), torch.randn(1, 1, 4, 64)
    order = logits.argsort(-1, descending=True)
    labels = torch.stack([order[0, 0, row, rank] for row, rank in enumerate((0, 15, 16, 3))])[None, None]
    before = torch.tensor([[[1, 2, 3, 4]]])
    rows = Rows(hidden, logits, before, labels, torch.tensor([[[1.0, 0.5, 0.25, 0.0]]]))
    _, scores = drafter.candidate_selector(hidden, logits, before)
    logs = scores.log_softmax(-1)[0, 0]
    wanted = -(logs[0, 0] + 0.5 * logs[1, 15]) / 1.75
    torch.testing.assert_close(selector_loss(drafter.candidate_selector, rows), wanted)


def test_every_parameter_of_every_kind_learns():
    torch.manual_seed(0)
    target = Target(TARGET).requires_grad_(False)
    ids, anchors = torch.randint(0, 64, (2, 24)), torch.tensor([[5, 9], [7, 12]])
    for kind in KINDS:
        drafter = Drafter(of_kind(kind, SIZES))
        for head in (drafter.candidate_selector, drafter.markov_head):
            for parameter in [] if head is None else head.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
        block_loss(target, drafter, batch_of(target, drafter, ids, anchors)).backward()
        still = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
        assert still == []


def test_weights_of_convolutions_and_heads_stay_wide():
    for kind in KINDS:
        drafter = Drafter(of_kind(kind, SIZES))
        wide = {name for name, m in drafter.named_modules() if isinstance(m, Linear) and m.wide}
        assert {name.rpartition(".")[2] for name in wide} == {
            "dflash": set(),
            "dflash2": {"kernel_projection", "hidden_projection"},
            "dspark": {"markov_w2"},
        }[kind]
