import json
from dataclasses import replace

import pytest
from bundle_support import PAIR, write_bundle
from bundle_support import random_weights as weights_of
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_dflash.bundle.manifest import (
    ARCHS_OF,
    EngineFiles,
    FileEntry,
    Manifest,
    RoundingUse,
    SourceFile,
    dump_manifest,
    parse_manifest,
)
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BundleError
from edge_dflash.model.registry import DRAFTERS, TARGETS
from edge_dflash.model.specs import DrafterLayerMask

SCALE = st.floats(min_value=1e-30, max_value=1e30)
NAME = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,8}(/[a-z][a-z0-9.-]{0,8}){0,2}", fullmatch=True)
PLANS = (
    EngineFiles("tensorrt", "10.13.3.9", ("plans/a.plan", "plans/b.plan"), ()),
    EngineFiles("tensorrt", None, ("plans/a.plan",), ("plans/a.plan",)),
    EngineFiles("tensorrt_rtx", "1.7.1.116", (), ()),
)
ENTRY = st.builds(FileEntry, st.integers(0, 2**256 - 1).map("{:064x}".format), st.integers(0, 2**60))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("manifest") / "bundle", weights_of())


@st.composite
def manifests(draw, base: Manifest):
    attention = replace(PAIR.drafter.attention, rope=replace(PAIR.drafter.attention.rope, theta=draw(SCALE)))
    masks = draw(
        st.lists(st.builds(DrafterLayerMask, st.booleans(), st.none() | st.integers(1, 9)), min_size=2, max_size=2)
    )
    drafter = replace(PAIR.drafter, attention=attention, layers=tuple(masks), rms_norm_eps=draw(SCALE))
    backend = draw(st.sampled_from(sorted(ARCHS_OF)))
    files = draw(st.dictionaries(NAME.filter(lambda n: n != "manifest.json" and not n.startswith("plans/")), ENTRY))
    plans = None
    if backend == "tensorrt":
        plans = draw(st.sampled_from(PLANS))
        files |= dict.fromkeys(set(plans.names) - set(plans.deferred), FileEntry("0" * 64, 1))
    return replace(
        base,
        pair=replace(PAIR, drafter=drafter),
        arch=draw(st.sampled_from(ARCHS_OF[backend])),
        backend=backend,
        precision=Precision(kv=draw(st.sampled_from(["fp8", "bfloat16", "float32"]))),
        recipe=draw(st.text()),
        max_context=draw(st.integers(64, 512)),
        kv_scales=draw(st.dictionaries(st.just("drafter.layers.1.kv"), st.tuples(SCALE, SCALE))),
        tokenizer=draw(st.booleans()),
        tools=draw(st.dictionaries(st.text(), st.text())),
        sources=tuple(draw(st.lists(st.builds(SourceFile, st.just("target"), st.text(), st.integers(0), st.text())))),
        files=files,
        plans=plans,
    )


@settings(max_examples=30)
@given(data=st.data())
def test_round_trip(manifest, data):
    value = data.draw(manifests(manifest))
    text = dump_manifest(value)
    assert parse_manifest(text) == value
    assert dump_manifest(parse_manifest(text)) == text


@settings(max_examples=200)
@given(data=st.data())
def test_one_changed_byte_is_refused(manifest, data):
    text = bytearray(dump_manifest(manifest))
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BundleError):
        parse_manifest(bytes(text))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("arch", "sm42", "arch is 'sm42'; accepted are cpu, sm87"),
        ("backend", "onnx", "backend is 'onnx', wanted one of reference"),
        ("arch", "sm110a", "arch of a reference bundle is 'sm110', wanted one of cpu"),
        ("backend", "native", "arch of a native bundle is 'cpu', wanted one of sm87, sm89, sm90,"),
        ("max_context", 4, "max_context is 4, wanted 5 to 512"),
        ("max_context", 513, "max_context is 513, wanted 5 to 512"),
        ("prefill_chunk", 0, "prefill_chunk is 0, wanted 1 to 128"),
        ("lanes", 0, "lanes is 0, wanted 1 to 8"),
        ("lanes", 9, "lanes is 9, wanted 1 to 8"),
        ("kv_scales", {"target.layers.0.kv": (1.0, 1.0)}, "kv_scales.target.layers.0.kv is"),
        ("kv_scales", {"target.layers.1.kv": (1.0, 0.0)}, "kv_scales.target.layers.1.kv is (1.0, 0.0)"),
        ("weights", {}, "weights lacks drafter.fc"),
        ("files", {"../x": FileEntry("0" * 64, 1)}, "files names '../x'"),
        ("files", {"/etc/passwd": FileEntry("0" * 64, 1)}, "files names '/etc/passwd'"),
        ("files", {"a/./b": FileEntry("0" * 64, 1)}, "files names 'a/./b'"),
        ("files", {"a\nb": FileEntry("0" * 64, 1)}, "files names 'a\\nb'"),
        ("files", {"manifest.json": FileEntry("0" * 64, 1)}, "files names 'manifest.json'"),
        ("files", {"a": FileEntry("0" * 63, 1)}, "files.a has no valid sha256"),
        ("files", {"a": FileEntry("0" * 64, -1)}, "files.a has no valid sha256"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(manifest, field, value, message):
    text = dump_manifest(replace(manifest, **{field: value}))
    with pytest.raises(BundleError) as error:
        parse_manifest(text, "m")
    assert str(error.value).startswith(f"m: {message}")


PLAN = FileEntry("0" * 64, 1)


@pytest.mark.parametrize(
    ("plans", "files", "message"),
    [
        (None, {}, "plans is missing for backend 'tensorrt'"),
        (
            EngineFiles("tensorrt", "10.13", ("plans/a.plan",), ()),
            {},
            "plans.names and the files disagree on plans/a.plan",
        ),
        (
            EngineFiles("tensorrt", "10.13", (), ()),
            {"plans/a.plan": PLAN},
            "plans.names and the files disagree on plans/a",
        ),
        (
            EngineFiles("tensorrt", None, ("plans/a",), ("plans/a",)),
            {"plans/a": PLAN},
            "plans.names and the files disagree",
        ),
        (
            EngineFiles("tensorrt", None, ("plans/a",), ()),
            {"plans/a": PLAN},
            "plans.version is None with 0 plans deferred",
        ),
        (
            EngineFiles("tensorrt", "10.13", ("plans/a",), ("plans/a",)),
            {},
            "plans.version is '10.13' with 1 plans deferred",
        ),
    ],
)
def test_plans_are_files_or_deferred(manifest, plans, files, message):
    changed = replace(manifest, backend="tensorrt", arch="sm110", plans=plans, files={**manifest.files, **files})
    with pytest.raises(BundleError) as error:
        parse_manifest(dump_manifest(changed), "m")
    assert str(error.value).startswith(f"m: {message}")


def test_a_bundle_without_plans_is_written_as_before_there_were_any(manifest):
    assert b'"plans"' not in dump_manifest(manifest)
    with pytest.raises(BundleError, match="plans is given for backend 'reference'"):
        parse_manifest(dump_manifest(replace(manifest, plans=EngineFiles("tensorrt", "1", (), ()))))
    with pytest.raises(BundleError, match="checksum differs"):
        parse_manifest(change(manifest, plans=None))


def test_lanes_are_one_where_nothing_is_said_and_more_need_a_newer_reader(manifest):
    one, four = dump_manifest(manifest), dump_manifest(replace(manifest, lanes=4))
    assert b"lanes" not in one
    assert parse_manifest(one).lanes == 1
    assert (json.loads(one)["schema"], json.loads(four)["schema"]) == (1, 4)
    assert parse_manifest(four) == replace(manifest, lanes=4)


def test_what_is_said_of_rounding_needs_a_newer_reader(manifest):
    said = dump_manifest(replace(manifest, lanes=4, rounding=RoundingUse("search", 9, 2, 64)))
    assert json.loads(said)["schema"] == 6
    assert parse_manifest(said).rounding == RoundingUse("search", 9, 2, 64)
    assert b"rounding" not in dump_manifest(manifest)
    assert parse_manifest(dump_manifest(manifest)).rounding is None
    for bad, message in (
        ({"by": "luck", "rounded": 1, "kept": 0, "tokens": 0}, r"rounding.by: found 'luck'"),
        ({"by": "max", "rounded": -1, "kept": 0, "tokens": 0}, "rounding is of -1 and 0 weights by 0 tokens"),
    ):
        with pytest.raises(BundleError, match=message):
            parse_manifest(change(manifest, schema=6, rounding=bad))


def test_weights_the_models_do_not_have_are_refused(manifest):
    extra = replace(manifest, weights={**manifest.weights, "target.layers.9.mlp.up_proj": "bf16"})
    with pytest.raises(BundleError, match=r"weights names target\.layers\.9\.mlp\.up_proj"):
        parse_manifest(dump_manifest(extra))


def test_only_a_tied_lm_head_can_be_shared(manifest):
    shared = replace(manifest, weights={**manifest.weights, "drafter.fc": "tied"})
    with pytest.raises(BundleError, match=r"weights\.drafter\.fc is 'tied'"):
        parse_manifest(dump_manifest(shared))


def change(manifest, **keys):
    body = json.loads(dump_manifest(manifest))
    body.update(keys)
    return json.dumps(body).encode()


def test_schemas_and_keys_of_other_versions_are_refused(manifest):
    for text, message in (
        (change(manifest, schema=7), "schema is 7, this version reads 1 to 6; update edge-dflash"),
        (change(manifest, schema=0), "schema is 0, this version reads 1 to 6; build the bundle again"),
        (change(manifest, schema=True), "schema is True"),
        (change(manifest, future=1), "unknown key 'future'"),
        (change(manifest, block_size=8), "block_size is 8, wanted 4 as in pair"),
        (change(manifest, mask_token_id=None), "mask_token_id is None, wanted 47"),
        (change(manifest, target_layer_ids=[0]), "target_layer_ids is [0], wanted [0, 1]"),
        (change(manifest, max_context="128"), "manifest.json.max_context: found '128', wanted int"),
        (dump_manifest(manifest)[:-40], "is damaged"),
        (b"[1]", "holds list, wanted an object"),
        (b"\xff", "is damaged"),
        (b'{"a": 1, "a": 1}', "the name 'a' occurs twice"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"[" * 100_000, "is damaged"),
        (json.dumps(json.loads(dump_manifest(manifest))).encode(), "checksum differs"),
    ):
        with pytest.raises(BundleError) as error:
            parse_manifest(text)
        assert message in str(error.value)


def test_summary_counts_weights_by_format(manifest):
    assert sum(manifest.weight_summary.values()) == len(manifest.weights)
    assert manifest.size == sum(entry.size for entry in manifest.files.values())


def test_the_reason_for_no_selftest_is_kept_and_left_out_without_one(manifest):
    assert b"no_self_test" not in dump_manifest(manifest)
    reason = replace(manifest, no_self_test="the pair is too large")
    assert parse_manifest(dump_manifest(reason)) == reason
    with pytest.raises(BundleError, match=r"no_self_test: found 1, wanted str"):
        parse_manifest(dump_manifest(reason).replace(b'"the pair is too large"', b"1"))


@pytest.mark.parametrize(
    ("model", "field", "known"), [("target", "architecture", TARGETS), ("drafter", "kind", DRAFTERS)]
)
def test_kinds_of_models_are_those_of_the_registry(manifest, model, field, known):
    pair = replace(manifest.pair, **{model: replace(getattr(manifest.pair, model), **{field: "x"})})
    with pytest.raises(BundleError) as error:
        parse_manifest(dump_manifest(replace(manifest, pair=pair)), "m")
    names = ", ".join(map(repr, known))
    assert str(error.value) == f"m.pair.{model}.{field}: found 'x', wanted one of {names}"
