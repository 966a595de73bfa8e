"""Kinds of drafters: what their config.json says, what of it a manifest keeps, and which taps a pass reads."""

import json
from dataclasses import replace

import pytest
from golden_pairs import NAMES, WALKS, directories, pair, programs

from edge_dflash.common.tables import decode, encode
from edge_dflash.errors import BundleError, CheckpointError, UnsupportedModelError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Concat, MarkovWalk, SelectorWalk
from edge_dflash.model.registry import match_pair, read_drafter_spec
from edge_dflash.model.specs import (
    EMBEDDING,
    DrafterSpec,
    GroupedConvSpec,
    MarkovSpec,
    PairSpec,
    SelectorSpec,
)

NEW = {"kind", "anchor_drafts", "conv", "head"}


@pytest.fixture
def drafter(tmp_path):
    """A function that reads a golden drafter's config, changed; a key whose value is ... goes."""

    def read(name, **changes):
        directory = directories(name)[1]
        config = json.loads((directory / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
        return read_drafter_spec(tmp_path)

    return read


def test_the_golden_drafters():
    vanilla, gated, rnn, selector = (pair(name).drafter for name in WALKS)
    assert vanilla.head == MarkovSpec("vanilla", 16, None, "markov")
    assert gated.head == MarkovSpec("gated", 16, None, None)
    assert rnn.head == MarkovSpec("rnn", 16, None, "hidden")
    assert (vanilla.drafts, vanilla.verify_rows, vanilla.block_size) == (7, 8, 7)
    assert selector.conv == GroupedConvSpec(2, 16)
    assert selector.head == SelectorSpec(16, 16)
    assert (selector.drafts, selector.verify_rows, selector.block_size) == (7, 8, 8)
    assert isinstance(programs(WALKS[0]).propose.walk, MarkovWalk)
    assert isinstance(programs(WALKS[3]).propose.walk, SelectorWalk)
    assert programs("qwen3").propose.walk is None


@pytest.mark.parametrize("name", NAMES + WALKS)
def test_a_manifest_keeps_a_spec_and_writes_no_defaults(name):
    spec = pair(name)
    written = json.loads(json.dumps(encode(spec)))
    assert decode(PairSpec, written, "pair") == spec
    assert NEW & written["drafter"].keys() == {f for f in NEW if getattr(spec.drafter, f) != getattr(PLAIN, f)}


PLAIN: DrafterSpec = pair("qwen3").drafter


@pytest.mark.parametrize("head", [{"rank": 4}, {"rank": 4, "top_k": 2, "kind": "rnn"}, 3, {}])
def test_a_head_of_neither_kind_is_refused(head):
    written = encode(pair(WALKS[3]))
    written["drafter"]["head"] = head
    with pytest.raises(BundleError, match=r"pair\.drafter\.head"):
        decode(PairSpec, written, "pair")


def test_keys_of_dspark(drafter):
    base = drafter(WALKS[0])
    assert drafter(WALKS[0], sample_from_anchor=True) == base
    rows = drafter(WALKS[0], sample_from_anchor=False)
    assert rows == replace(base, anchor_drafts=False)
    assert (rows.drafts, rows.verify_rows) == (6, 7)
    assert drafter(WALKS[0], dspark_draft_topk=9).head == replace(base.head, top_k=9)
    assert drafter(WALKS[0], dspark_draft_topk=10**6).head == replace(base.head, top_k=512)
    assert drafter(WALKS[0], vocab_size=5000).head == replace(base.head, top_k=64)
    assert drafter(WALKS[0], vocab_size=4096).head == base.head
    assert drafter(WALKS[0], markov_head_type=None).head == base.head
    assert drafter(WALKS[0], enable_confidence_head=False).head == replace(base.head, confidence=None)
    plain = drafter(WALKS[1], markov_rank=0)
    assert plain == replace(drafter(WALKS[1]), head=None)
    assert pair_programs(match_pair(pair("qwen3").target, plain)).propose.walk is None
    moved = {"mask_token_id": 511, "markov_rank": 16, "sample_from_anchor": False}
    assert drafter(WALKS[1], dflash_config=moved, markov_rank=..., mask_token_id=...).anchor_drafts is False
    assert drafter(WALKS[0], target_layer_ids=[EMBEDDING, 2]).target_layer_ids == (EMBEDDING, 2)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (WALKS[0], {"markov_rank": ...}, "lacks the field markov_rank"),
        (WALKS[0], {"target_layer_ids": ...}, "lacks the field target_layer_ids"),
        (WALKS[0], {"markov_head_type": "lstm"}, "markov_head_type is 'lstm'|markov_head_type is lstm"),
        (WALKS[0], {"markov_rank": 0}, "enable_confidence_head is true, wanted false, or a markov_rank above 0"),
        (WALKS[0], {"target_layer_ids": [-2]}, "a list of integers of at least -1"),
        (WALKS[0], {"dflash_config": {"sample_from_anchor": False}, "sample_from_anchor": True}, "the same as"),
        (
            WALKS[3],
            {"dflash_config": {"block_size": 8, "mask_token_id": 1, "target_layer_ids": [1]}},
            "lacks the field conv_kernel_size",
        ),
        (WALKS[3], {"conv_group_size": 7}, "conv_group_size is 16, wanted the same"),
        (WALKS[3], {"hidden_size": 120}, "conv_group_size is 16, wanted a divisor of hidden_size"),
        (WALKS[3], {"vocab_size": 8}, "selector_top_k is 16, wanted at most vocab_size"),
    ],
)
def test_odd_values_are_refused(drafter, name, changes, words):
    with pytest.raises(CheckpointError, match=words):
        drafter(name, **changes)


MATHS = {
    "output_multiplier": 0.19612,
    "final_logit_softcapping": 20.0,
    "input_embedding_scale": 2.0,
    "logit_scale": 0.5,
    "attention_sink_bias": True,
    "is_neox_style": False,
    "mask_embedding": True,
    "shift_labels": True,
    "projector_type": "mlp",
}


@pytest.mark.parametrize("name", ["qwen3", WALKS[0], WALKS[3]])
@pytest.mark.parametrize("key", MATHS)
def test_maths_that_this_version_does_not_do_is_refused_by_name(drafter, name, key):
    with pytest.raises(UnsupportedModelError, match=key):
        drafter(name, **{key: MATHS[key]})
    nested = json.loads((directories(name)[1] / "config.json").read_text()).get("dflash_config", {})
    with pytest.raises(UnsupportedModelError, match=rf"dflash_config\.{key}"):
        drafter(name, dflash_config=nested | {key: MATHS[key]})


def test_a_tap_may_be_the_embedding():
    spec = pair(WALKS[0])
    drafter = replace(spec.drafter, target_layer_ids=(EMBEDDING, 3, 4))
    passes = pair_programs(match_pair(spec.target, drafter))
    (taps,) = (op for op in passes.verify.ops if isinstance(op, Concat))
    assert taps.inputs == ("embedding", "target.layers.3.out", "target.layers.4.out")
    with pytest.raises(CheckpointError, match=r"hold 5, wanted -1 \(the embedding\) to 4"):
        match_pair(spec.target, replace(drafter, target_layer_ids=(5,)))
