"""The drafter in training beside the reference backend, for every kind of drafter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_pairs import EXPERTS, FLOAT32, NAMES, WALKS, backend, directories, pair, store
from training_support import drafter_of, module, taps_of, weights_of

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.model.specs import DrafterLayerMask
from edge_dflash.training.drafter import HEAD, BlockDrafter, fake_weight
from edge_dflash.training.losses import Batch, block_loss, drafts
from edge_dflash.weights.quantize import dequantize, quantize_fp8, quantize_nvfp4

PAIRS = (*NAMES, *WALKS, EXPERTS, "vision")
PROMPT, ANCHORS = 37, (5, 17, 30)


@pytest.mark.parametrize("name", PAIRS)
def test_rows_logits_and_greedy_drafts_are_those_of_the_reference_backend(name):
    spec, one = pair(name), module(name)
    ids = np.random.default_rng(0).integers(0, spec.target.vocab_size, PROMPT).tolist()
    anchors = torch.tensor([ANCHORS, ANCHORS])
    first = torch.tensor([[ids[at] for at in ANCHORS]] * 2)
    with torch.no_grad():
        taps = taps_of(name, ids).expand(2, -1, -1)
        rows = one.block(one.context(taps), anchors, first)
        logits, found = one.logits(rows), drafts(one, rows, first)
    assert rows.shape == (2, len(ANCHORS), spec.drafter.drafts, spec.drafter.hidden_size)
    reference = backend(name, FLOAT32)
    for index, anchor in enumerate(ANCHORS):
        reference.reset()
        reference.prefill(ids[:anchor])
        proposed = reference.propose(ids[anchor])
        wanted = proposed.base if hasattr(proposed, "base") else proposed.logits()
        assert found[0, index].tolist() == proposed.argmax()
        assert np.abs(logits[0, index].numpy() - wanted).max() < 2e-3 * np.abs(wanted[wanted > -1e29]).max()
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_windows_of_its_layers_are_those_of_the_reference_backend(bidirectional):
    name, ids = "qwen3", list(range(3, 3 + PROMPT))
    whole, rows = pair(name), []
    for window in (None, 5):
        masks = tuple(DrafterLayerMask(bidirectional, window) for _ in whole.drafter.layers)
        spec = replace(whole, drafter=replace(whole.drafter, layers=masks))
        one, reference = (
            BlockDrafter(spec, weights_of(name)),
            ReferenceBackend(spec, store(name), FLOAT32, max_context=64),
        )
        reference.prefill(ids[:-1])
        with torch.no_grad():
            context = one.context(taps_of(name, ids)[None])
            rows.append(one.logits(one.block(context, torch.tensor([[PROMPT - 1]]), torch.tensor([ids[-1:]])))[0, 0])
        assert np.abs(rows[-1].numpy() - reference.propose(ids[-1]).logits()).max() < 2e-3 * rows[-1].abs().max()
    assert not torch.allclose(*rows, atol=1e-2)


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_reaches_every_weight_that_is_trained(name):
    spec, one = pair(name), module(name)
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, spec.target.vocab_size, (2, PROMPT)))
    last = torch.randn(2, PROMPT, spec.target.hidden_size)
    taps = torch.stack([taps_of(name, row.tolist()).clone() for row in ids])
    one.quantized, one._formats = True, {n: "nvfp4" for n, s in one.specs.items() if s.kind == "linear"}
    loss = block_loss(one, Batch(ids, torch.tensor([PROMPT, 29]), torch.tensor([ANCHORS[:2]] * 2), taps, last))
    loss.backward()
    assert loss.isfinite()
    for weight in one.specs:
        if (parameter := one.tensor(weight)).requires_grad:
            assert parameter.grad.isfinite().all(), weight
            assert parameter.grad.abs().sum() > 0, weight


@pytest.mark.parametrize("name", PAIRS)
def test_an_embedding_in_bf16_rounds_nothing_but_itself(name):
    spec, kept = pair(name), weights_of(name)
    ids = np.random.default_rng(6).integers(0, spec.target.vocab_size, PROMPT).tolist()
    narrow = kept["target.embed_tokens"].bfloat16()
    anchors, first, rows = torch.tensor([ANCHORS]), torch.tensor([[ids[at] for at in ANCHORS]]), []
    for embedding in (narrow, narrow.float()):
        one = BlockDrafter(spec, kept | {"target.embed_tokens": embedding})
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            rows.append(one.block(one.context(taps_of(name, ids)[None]), anchors, first))
    assert torch.equal(*rows)


def test_what_lies_behind_an_end_weighs_nothing():
    name = "qwen3"
    spec, one = pair(name), module(name)
    ids = torch.from_numpy(np.random.default_rng(4).integers(0, spec.target.vocab_size, (1, PROMPT)))
    taps = taps_of(name, ids[0].tolist()).clone()[None]
    other = ids.clone()
    other[:, 22:] = 3
    losses = [block_loss(one, Batch(x, torch.tensor([22]), torch.tensor([[17]]), taps)) for x in (ids, other)]
    assert losses[0] == losses[1]


def test_tokens_that_cannot_be_drafted_cost_nothing():
    name = "qwen3"
    spec, kept = pair(name), weights_of(name)
    drafted = torch.arange(0, spec.target.vocab_size, 2)
    own = {"drafter.lm_head": kept[HEAD][drafted], "drafter.d2t": drafted.float()}
    one = BlockDrafter(replace(spec, drafter=replace(spec.drafter, draft_vocab=len(drafted))), kept | own)
    ids = torch.from_numpy(np.random.default_rng(5).integers(0, spec.target.vocab_size, (1, PROMPT))) // 2 * 2
    taps = taps_of(name, ids[0].tolist()).clone()[None]

    def loss(ids):
        return block_loss(one, Batch(ids, torch.tensor([PROMPT]), torch.tensor([[5]]), taps))

    other = ids.clone()
    other[:, 9] += 1
    assert 0 < loss(other) < loss(ids) < 1e3
    other[:, 6:] = 1
    assert loss(other) == 0


def test_a_quantized_drafter_has_the_matrices_of_its_bundle_and_rounds_keys_and_values(tmp_path):
    name = "qwen3_5"
    config = BuildConfig(*directories(name), tmp_path / "bundle", calibrate=False, rounding="max")
    bundle = Bundle.open(build(config).bundle)
    kept, held = weights_of(name), drafter_of(bundle).weights()
    one = BlockDrafter(pair(name), kept, bundle.manifest.weights)
    built, wide = (BlockDrafter(pair(name), kept | held, fp8_kv=fp8) for fp8 in (True, False))
    ids = np.random.default_rng(7).integers(0, pair(name).target.vocab_size, PROMPT).tolist()
    anchors, first = torch.tensor([ANCHORS]), torch.tensor([[ids[at] for at in ANCHORS]])

    def rows(drafter, quantized):
        drafter.quantized = quantized
        with torch.no_grad():
            return drafter.block(drafter.context(taps_of(name, ids)[None]), anchors, first)

    assert torch.allclose(rows(one, True), rows(built, True), atol=1e-4)
    assert torch.equal(rows(wide, True), rows(built, False))
    different = rows(one, False), rows(built, False), rows(built, True)
    for index in range(3):
        assert not torch.allclose(different[index], different[index - 1], atol=1e-2)


def test_nvfp4_and_fp8_round_as_a_build_does():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    largest = weight.abs().max()
    assert torch.equal(fake_weight(weight, "nvfp4", largest), dequantize(quantize_nvfp4(weight)))
    assert torch.allclose(fake_weight(weight, "fp8", largest), dequantize(quantize_fp8(weight)), atol=1e-6)
    assert fake_weight(weight, "bf16", largest) is weight
