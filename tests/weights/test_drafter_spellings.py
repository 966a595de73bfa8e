"""One drafter in the spellings of z-lab, DeepSpec and speculators; geometry from its file alone; its own copies."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_files import write
from golden_pairs import GOLDEN, directories
from native_support import NATIVE_PAIR, formats_of

from edge_dflash.backends.cuda.support import check_native
from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.bench.golden import verify_golden
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.checks.lossless import verify_lossless
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.errors import BackendError, CheckpointError, UnsupportedModelError
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_drafter_spec, read_pair, read_target_spec
from edge_dflash.planner import Planner
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.safetensors import TensorFiles

KINDS = {
    "qwen3": "dflash",
    "qwen3_5-dflash2": "dflash2",
    "qwen3-dspark-vanilla": "dspark",
    "qwen3-dspark-gated": "dspark",
    "qwen3-dspark-rnn": "dspark",
}
OWN = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
LOCAL = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OUTER = ("dflash_config", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "is_causal")


def config_of(name):
    return json.loads((directories(name)[1] / "config.json").read_text())


def speculators(name, **changes):
    """A golden drafter's config.json as speculators writes it."""
    config, kind = config_of(name), KINDS[name]
    inside = config.get("dflash_config", {})
    layer = {key: value for key, value in config.items() if key not in (*OUTER, *OWN, *LOCAL, "architectures")}
    layer.pop("num_anchors", None)
    found = {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "a/target", "architectures": []}},
        "transformer_layer_config": layer,
        "block_size": config.get("block_size", inside.get("block_size")),
        "mask_token_id": inside.get("mask_token_id", config.get("mask_token_id")),
        "draft_vocab_size": config["vocab_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in inside.get("target_layer_ids", config.get("target_layer_ids"))],
        "sample_from_anchor": kind == "dspark",
        **{key: inside.get(key, config.get(key)) for key in (*OWN, *LOCAL) if key in config or key in inside},
    }
    return {key: value for key, value in (found | changes).items() if value is not ...}


def written(directory, name, **changes):
    """A golden drafter's directory with that config."""
    shutil.copytree(directories(name)[1], directory)
    (directory / "config.json").write_text(json.dumps(speculators(name, **changes)))
    return directory


@pytest.mark.parametrize("name", KINDS)
def test_a_drafter_is_the_same_in_the_spelling_of_speculators(tmp_path, name):
    target, drafter = directories(name)
    found = read_pair(target, written(tmp_path / "drafter", name))
    wanted = read_pair(target, drafter)
    assert found == wanted
    programs = pair_programs(found)
    store, other = (PairCheckpoint.open(target, d, programs.weights) for d in (tmp_path / "drafter", drafter))
    for weight in programs.weights:
        np.testing.assert_array_equal(store.get(weight).data, other.get(weight).data)


@pytest.mark.parametrize("name", ["qwen3-dspark-vanilla", "qwen3_5-dflash2"])
def test_goldens_hold_in_the_spelling_of_speculators(tmp_path, name):
    result = verify_golden(
        directories(name)[0], written(tmp_path / "drafter", name), GOLDEN / f"golden_{name}.safetensors"
    )
    assert result.ok
    assert result.tokens_equal


def test_rows_are_those_that_the_file_says(tmp_path):
    def drafts(directory, **changes):
        spec = read_pair(directories("qwen3")[0], written(tmp_path / directory, "qwen3-dspark-vanilla", **changes))
        return spec.drafts, spec.block_size

    assert drafts("anchor") == (7, 7)
    assert drafts("older", sample_from_anchor=...) == (6, 7)
    assert drafts("said", sample_from_anchor=False) == (6, 7)
    plain = read_drafter_spec(written(tmp_path / "plain", "qwen3", sample_from_anchor=True))
    assert (plain.kind, plain.head, plain.anchor_drafts) == ("dspark", None, True)
    with pytest.raises(UnsupportedModelError, match="sample_from_anchor is true: a DSpark/DeepSpec drafter"):
        read_drafter_spec(written(tmp_path / "two", "qwen3_5-dflash2", sample_from_anchor=True))


def test_taps_are_one_less_than_hidden_states(tmp_path):
    ids = read_drafter_spec(written(tmp_path / "a", "qwen3-dspark-vanilla")).target_layer_ids
    assert ids == tuple(config_of("qwen3-dspark-vanilla")["target_layer_ids"])
    embedded = written(tmp_path / "b", "qwen3-dspark-vanilla", aux_hidden_state_layer_ids=[0, 2, 3])
    assert read_drafter_spec(embedded).target_layer_ids == (-1, 1, 2)
    last = read_target_spec(directories("qwen3")[0]).num_layers
    beyond = written(tmp_path / "c", "qwen3-dspark-vanilla", aux_hidden_state_layer_ids=[2, 3, last])
    with pytest.raises(CheckpointError, match=f"target_layer_ids hold {last - 1}"):
        read_pair(directories("qwen3")[0], beyond)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3', wanted 'dflash'"),
        ({"transformer_layer_config": ...}, "lacks the field transformer_layer_config"),
        ({"aux_hidden_state_layer_ids": ...}, "lacks the field aux_hidden_state_layer_ids"),
        ({"mask_token_id": ...}, "lacks the field mask_token_id"),
        ({"draft_vocab_size": 64}, "draft_vocab_size is 64, wanted vocab_size"),
        ({"target_hidden_size": 64}, r"target_hidden_size is 64, wanted the drafter's hidden_size \(128\)"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5: scaled logits"),
        ({"mask_embedding": True}, "mask_embedding is true"),
        ({"new_key": 1}, "new_key is 1, wanted no such setting"),
        ({"selector_rank": 64}, "selector_rank is 64, wanted no such key for a drafter of type 'dspark'"),
    ],
)
def test_what_speculators_writes_otherwise_is_refused_by_name(tmp_path, changes, words):
    with pytest.raises(CheckpointError, match=words):
        read_drafter_spec(written(tmp_path / "drafter", "qwen3-dspark-vanilla", **changes))


@pytest.mark.parametrize(("key", "value"), [("block_size", 3), ("mask_token_id", 1), ("target_layer_ids", [0])])
def test_keys_of_the_layers_do_not_contradict_those_beside_them(tmp_path, key, value):
    layers = speculators("qwen3")["transformer_layer_config"]
    with pytest.raises(CheckpointError, match=rf"transformer_layer_config.{key} is .*, wanted no such key, or"):
        read_drafter_spec(written(tmp_path / "drafter", "qwen3", transformer_layer_config={**layers, key: value}))


def test_quantization_inside_the_layers_is_not_overlooked(tmp_path):
    layer = speculators("qwen3")["transformer_layer_config"] | {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(CheckpointError, match="with a quantization_config"):
        read_drafter_spec(written(tmp_path / "inside", "qwen3", transformer_layer_config=layer))
    outside = written(tmp_path / "outside", "qwen3", quantization_config={"quant_method": "gptq"})
    pair = read_pair(directories("qwen3")[0], outside)
    with pytest.raises(CheckpointError, match="quant_method is 'gptq'"):
        PairCheckpoint.open(directories("qwen3")[0], outside, pair_programs(pair).weights)


def test_a_drafter_of_speculators_is_no_target(tmp_path):
    with pytest.raises(UnsupportedModelError, match="is a drafter; give it as the drafter"):
        read_target_spec(written(tmp_path / "drafter", "qwen3"))


def test_a_mask_row_of_the_drafters_own_is_refused(tmp_path):
    drafter = written(tmp_path / "drafter", "qwen3")
    (drafter / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"mask_embedding\.pt: a mask row of the drafter's own"):
        read_drafter_spec(drafter)


def with_copies(directory, name, edit=lambda tensors: None):
    """A golden drafter whose files repeat the target's embedding and head."""
    target, drafter = directories(name)
    files, held = TensorFiles.open(drafter), TensorFiles.open(target)
    tensors = {tensor: files.array(tensor) for tensor in files.names()}
    embedding = next(tensor for tensor in held.names() if tensor.endswith("embed_tokens.weight"))
    head = "lm_head.weight" if "lm_head.weight" in held else embedding
    for tensor, source in (("embed_tokens.weight", embedding), ("lm_head.weight", head)):
        tensors[tensor] = tuple(held.array(source))
    tensors["verifier_lm_head.weight"] = tensors["lm_head.weight"]
    tensors["verifier_norm.weight"] = ("BF16", np.ones(4, np.uint16))  # of training alone
    edit(tensors)
    return write(directory, tensors, config_of(name))


def opened(target, drafter):
    return PairCheckpoint.open(target, drafter, pair_programs(read_pair(target, drafter)).weights)


@pytest.mark.parametrize("name", KINDS)
def test_copies_are_left_out_where_they_are_the_targets(tmp_path, name):
    target, drafter = directories(name)
    store, other = opened(target, with_copies(tmp_path / "drafter", name)), opened(target, drafter)
    np.testing.assert_array_equal(store.get("drafter.fc").data, other.get("drafter.fc").data)
    assert not any("drafter.embed" in weight or "drafter.lm_head" in weight for weight in store._expected)


@pytest.mark.parametrize("tensor", ["embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight"])
def test_one_other_bit_of_a_copy_is_refused_by_its_name(tmp_path, tensor):
    def flip(tensors):
        kind, array = tensors[tensor]
        array = array.copy()
        array[-1, -1] ^= 1
        tensors[tensor] = (kind, array)

    drafter = with_copies(tmp_path / "drafter", "qwen3", flip)
    with pytest.raises(CheckpointError, match=f"{tensor} differs from the target's, and drafts are made with the"):
        opened(directories("qwen3")[0], drafter)


def test_a_copy_beside_a_quantized_head_is_refused_with_the_reason(tmp_path):
    target = shutil.copytree(GOLDEN / "qwen3_5-tiny-nvfp4-modelopt", tmp_path / "target")
    drafter = with_copies(tmp_path / "drafter", "qwen3_5")
    held = TensorFiles.open(target)
    if held.entry("lm_head.weight").dtype != "U8":
        opened(target, drafter)  # the goldens leave the head wide
        tensors = {name: held.array(name) for name in held.names()}
        codes = np.ones(held.entry("lm_head.weight").shape, np.uint8)
        scale = np.array([0.01], np.float32)
        tensors |= {"lm_head.weight": ("F8_E4M3", codes), "lm_head.weight_scale": ("F32", scale)}
        config = json.loads((target / "config.json").read_text())
        config.pop("quantization_config", None)
        shutil.rmtree(target)
        write(target, tensors, config)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is wide, target\.lm_head quantized"):
        opened(target, drafter)


def with_draft_vocabulary(directory, edit=lambda tensors, config: None):
    """The golden DFlash drafter that drafts three of four tokens, through its own head and its maps."""
    target, drafter = directories("qwen3")
    files, held = TensorFiles.open(drafter), TensorFiles.open(target)
    tensors = {tensor: files.array(tensor) for tensor in files.names()}
    head = next(t for t in ("lm_head.weight", "model.embed_tokens.weight") if t in held)
    rows = held.array(head)[1]
    ids = np.flatnonzero(np.arange(len(rows)) % 4 != 3)
    marked = np.zeros(len(rows), np.uint8)
    marked[ids] = 1
    tensors |= {"d2t": ("I64", ids - np.arange(len(ids))), "t2d": ("BOOL", marked)}
    tensors["lm_head.weight"] = ("BF16", rows[ids])
    config = speculators("qwen3", draft_vocab_size=len(ids))
    edit(tensors, config)
    return write(directory, tensors, config), ids


def test_drafts_of_a_smaller_vocabulary_are_mapped(tmp_path):
    target, whole = directories("qwen3")
    drafter, ids = with_draft_vocabulary(tmp_path / "drafter")
    prompt, backends = [3, 1, 4, 1, 5, 9, 2, 6], []
    for directory in (whole, drafter):
        pair = read_pair(target, directory)
        backends.append(
            ReferenceBackend(pair, opened(target, directory), Precision("float32", "float32"), max_context=96)
        )
    first = [backend.prefill(prompt).argmax()[0] for backend in backends]
    wide, mapped = (backend.propose(token).logits() for backend, token in zip(backends, first, strict=True))
    np.testing.assert_allclose(mapped[:, ids], wide[:, ids], atol=1e-5)
    others = np.setdiff1d(np.arange(wide.shape[1]), ids)
    assert (mapped[:, others] == np.float32(-1e30)).all()
    for options in (Options(max_new_tokens=40), Options(max_new_tokens=40, temperature=2.0, seed=4)):
        tokens = []
        for speculative in (True, False):
            backends[1].reset()
            found = generate(backends[1], prompt, replace(options, speculative=speculative))
            tokens.append(found.tokens)
        assert tokens[0] == tokens[1]


def test_a_bundle_keeps_the_map_and_kernels_without_it_say_so(tmp_path):
    drafter, ids = with_draft_vocabulary(tmp_path / "drafter")
    keep = tmp_path / "keep.yaml"
    keep.write_text("schema: 1\nname: keep\ntarget: {attention: keep, mlp: keep, lm_head: keep}\n")
    build(BuildConfig(directories("qwen3")[0], drafter, tmp_path / "bundle", recipe=keep, max_context=256))
    bundle = Bundle.open(tmp_path / "bundle")
    np.testing.assert_array_equal(bundle.get("drafter.d2t").data, ids)
    with Planner.open(tmp_path / "bundle") as planner:
        assert planner.self_test.ok
        assert verify_lossless(planner.backend, [[5, 6, 7]], max_new_tokens=12).ok
    own = replace(NATIVE_PAIR, drafter=replace(NATIVE_PAIR.drafter, draft_vocab=16))
    with pytest.raises(BackendError, match="no kernel for a draft vocabulary"):
        check_native(own, formats_of(pair=own))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t, c: t.update(d2t=("I64", np.zeros(384, np.int64))), "d2t is of other tokens"),
        (lambda t, c: t.update(d2t=("I64", t["d2t"][1] + 1)), "d2t is of other tokens"),
        (lambda t, c: t.update(d2t=("F32", np.zeros(384, np.float32))), "d2t is dtype F32"),
        (lambda t, c: t.update(d2t=("I64", np.zeros(9, np.int64))), r"d2t is shape \[9\], wanted \[384\]"),
        (lambda t, c: t.update(t2d_scale=t["t2d"]), "t2d_scale .* is not part of the drafter"),
        (lambda t, c: t.pop("d2t"), "lacks 1 tensors of the drafter, the first is d2t"),
        (lambda t, c: t.pop("lm_head.weight"), r"the first is lm_head\.weight"),
        (lambda t, c: c.update(draft_vocab_size=513), "draft_vocab_size is 513, wanted at most"),
    ],
)
def test_maps_that_do_not_fit_are_refused(tmp_path, edit, words):
    drafter, _ = with_draft_vocabulary(tmp_path / "drafter", edit)
    with pytest.raises(CheckpointError, match=words):
        opened(directories("qwen3")[0], drafter)
