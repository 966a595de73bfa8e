"""The self-test of the demo bundle: a healthy pair passes, each planted fault is caught and said to be on its side."""

import json
import shutil
import time
from dataclasses import replace

import mutations as m
import numpy as np
import pytest
import torch
from builder_support import config_of
from selftest_support import TARGET_STORES, Damaged, backend_of, outcome, shuffled

from edge_dflash.backends import load
from edge_dflash.backends.reference import dense
from edge_dflash.backends.selftest import DRAFT_FLOOR, SelfTestResult, TokenDifference, check, promises_bits, replay
from edge_dflash.builder import record
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.manifest import dump_manifest
from edge_dflash.bundle.parts import hash_file
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import (
    SELFTEST,
    BestLogits,
    accept_floor,
    bf16_step,
    dump_selftest,
    load_selftest,
    parse_selftest,
)
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.shape import PairShape
from edge_dflash.errors import BackendError, BundleError, VerificationError
from edge_dflash.planner import Planner
from edge_dflash.weights.formats import Nvfp4Weight


@pytest.fixture(scope="module")
def demo_bundle(shared, build_demo, whole_recording):
    return shared("demo-bundle-whole", build_demo)


@pytest.fixture(scope="module")
def bundle(demo_bundle):
    return Bundle.open(demo_bundle)


@pytest.fixture(scope="module")
def selftest(bundle):
    return load_selftest(bundle)


def zero_drafter(name, weight):
    if not name.startswith("drafter."):
        return weight
    if isinstance(weight, Nvfp4Weight):
        return replace(weight, block_scale=np.zeros_like(weight.block_scale))
    return replace(weight, data=np.zeros_like(weight.data))


def scales(model, factor):
    def change(state, pair):
        return (pair[0] * factor, pair[1] * factor) if state.startswith(model) else pair

    return change


def ones(state, pair):
    return (1.0, 1.0)


# Faults that change much: seen with exact comparison and also without (as on backends that round in another way).
DRAFTER_SPECS = {
    "mask id one up": m.drafter(mask_token_id=lambda i: i + 1),
    "mask id zero": m.drafter(mask_token_id=0),
    "mask id at the end of the vocabulary": m.drafter(mask_token_id=1023),
    "taps one layer up": m.taps(lambda i: i + 1),
    "taps one layer down": m.taps(lambda i: i - 1),
    "taps in reverse": m.drafter(target_layer_ids=lambda ids: ids[::-1]),
    "two taps exchanged": m.drafter(target_layer_ids=lambda ids: (ids[0], ids[2], ids[1], ids[3])),
    "theta ten times smaller": m.rope("drafter", theta=lambda t: t / 10),
    "theta of the first models": m.rope("drafter", theta=lambda t: 1e4),
    "window ignored": m.masks(window=lambda s: None),
    "window halved": m.masks(window=lambda s: s // 2),
    "sliding layers see ahead": m.masks(bidirectional=lambda b: True),
}
DRAFTER_STORES = {
    "rows of fc shuffled": {"weight": shuffled("drafter.fc")},
    "rows of a down projection shuffled": {"weight": shuffled("drafter.layers.1.mlp.down_proj")},
    "rows of a query projection shuffled": {"weight": shuffled("drafter.layers.0.self_attn.q_proj")},
    "rows of a key projection shuffled": {"weight": shuffled("drafter.layers.1.self_attn.k_proj")},
    "a drafter of zeros": {"weight": zero_drafter},
    "KV scales of the drafter four times too small": {"scale": scales("drafter", 0.25)},
    "KV scales eight times too small": {"scale": scales("", 0.125)},
}
# Faults that change little: a share of the drafts within rounding, so that only equal bits can tell.
SLIGHT_SPECS = {
    "window one wider": m.masks(window=lambda s: s + 1),
    "window one narrower": m.masks(window=lambda s: s - 1),
    "full layers are causal": m.masks(bidirectional=lambda b: False),
    "theta of the target ten times smaller": m.rope("target", theta=lambda t: t / 10),
}
SLIGHT_STORES = {
    "KV scales lost": {"scale": ones},
    "KV scales of keys and values exchanged": {"scale": lambda state, pair: pair[::-1]},
    "feature norm shuffled": {"weight": shuffled("drafter.hidden_norm")},
    "key norm shuffled": {"weight": shuffled("drafter.layers.1.self_attn.k_norm")},
}


def test_a_healthy_bundle_passes_quickly(bundle, selftest):
    backend = load(bundle)
    backend.prefill([1, 2, 3])
    began = time.process_time()
    result = check(bundle, backend)
    assert time.process_time() - began < 3  # 0.6 s on an idle core
    assert result.ok
    assert result.exact
    assert result.identical
    assert result.verdict == "identical"
    assert result.diagnosis == ""
    assert result.accept_length == result.recorded.accept_length == selftest.accept_length
    assert backend.length() == 0
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["ok"] is True


def test_the_recording_of_the_demo(bundle, selftest):
    assert selftest.source == "kitchen-01 of robot_planning.jsonl"
    assert len(selftest.tokens) >= 48
    assert selftest.accept_length > 2
    assert selftest.accept_floor == accept_floor(selftest.accept_length) == 0.7 * selftest.accept_length
    assert accept_floor(1.1) == 1.0
    window = next(mask.window for mask in bundle.pair.drafter.layers if mask.window)
    assert len(selftest.prompt) > window  # or the window would be out of the test's sight


@pytest.mark.parametrize("fault", DRAFTER_SPECS)
def test_a_drafter_read_wrongly(bundle, selftest, fault):
    for result in outcome(bundle, selftest, spec=DRAFTER_SPECS[fault](bundle.pair)):
        assert result.target_ok
        assert not result.drafter_ok
        assert "the drafter is not the one that was built" in result.diagnosis
        assert ("mask token id" in result.diagnosis) == (
            fault.startswith("mask") or fault == "theta of the first models"
        )
        assert ("taps" in result.diagnosis) == ("mask token id" not in result.diagnosis)


@pytest.mark.parametrize("fault", DRAFTER_STORES)
def test_a_drafter_that_is_damaged(bundle, selftest, fault):
    for result in outcome(bundle, selftest, store=Damaged(bundle, **DRAFTER_STORES[fault])):
        assert not result.drafter_ok
        assert not result.ok


@pytest.mark.parametrize("fault", [*SLIGHT_SPECS, *SLIGHT_STORES])
def test_a_slight_fault_is_seen_where_bits_are_promised(bundle, selftest, fault):
    changes = (
        {"spec": SLIGHT_SPECS[fault](bundle.pair)}
        if fault in SLIGHT_SPECS
        else {"store": Damaged(bundle, **SLIGHT_STORES[fault])}
    )
    exact, rounded = outcome(bundle, selftest, **changes)
    assert not exact.ok
    assert "slightly off" in exact.diagnosis or "the target is not" in exact.diagnosis
    assert rounded.ok  # the limit of the test: as small as another rounding
    assert not rounded.identical


@pytest.mark.parametrize("fault", TARGET_STORES)
def test_a_damaged_target(bundle, selftest, fault):
    for result in outcome(bundle, selftest, store=Damaged(bundle, **TARGET_STORES[fault])):
        assert not result.target_ok
        assert result.verdict == "fault"
        for one in (result.differences[0], result.worst):
            assert selftest.tokens[one.position] == one.wanted != one.found
        worst = result.worst
        assert max(result.moved / result.bound, result.moved_most / result.bound_most) > 1.4
        assert f"new token {worst.position} is {worst.found}, wanted {worst.wanted}" in result.diagnosis
        assert f"{worst.steps:.3g} BF16 steps behind; " in result.diagnosis


@pytest.mark.parametrize(
    "precision", [Precision("float32", "fp8"), Precision("bfloat16", "bfloat16"), Precision("float32", "bfloat16")]
)
def test_another_rounding_passes_where_no_bits_are_promised(bundle, selftest, precision):
    exact, rounded = outcome(bundle, selftest, precision=precision)
    assert not exact.ok
    assert rounded.ok
    assert rounded.draft_agreement > DRAFT_FLOOR + 0.1


def test_what_is_excused_among_tokens(selftest):
    """At most three times the rounding of the build in the median row, eight times in any, and a step of BF16."""
    recorded, near = replace(selftest, rounding=0.01, rounding_most=0.02), TokenDifference(3, 1, 2, 0.25, 8.0)
    bound, most = 0.03 + recorded.resolution, 0.16 + recorded.resolution
    result = SelfTestResult(recorded, False, (near,) * 20, recorded.drafted, recorded.accept_length, 0.0, bound, most)
    assert (result.verdict, result.diagnosis) == ("rounding", "")
    assert "; 20 tokens differ by at most 8 BF16 steps, which rounding explains (logits moved by" in result.summary
    assert "; 1 token differs by 8 BF16 steps" in replace(result, differences=(near,)).summary
    exact = replace(result, exact=True)
    assert exact.verdict == "fault"
    assert "this backend promises the bits of the recording" in exact.diagnosis
    assert not replace(result, moved=1.01 * bound).ok
    assert not replace(result, moved_most=1.01 * most).ok
    assert f"20 of {result.tokens} tokens differ; new token 3 is 1, wanted 2, 0.25 nats or 8 BF16 steps behind; " in (
        replace(result, moved=0.5).diagnosis
    )
    assert replace(result, differences=(), moved=0.5).verdict == "identical"  # a fault that changes no choice
    assert not replace(result, accept_length=0.99 * recorded.accept_floor).ok
    number = float("nan")
    nan = replace(result, differences=(replace(near, regret=number, steps=number),), moved_most=number)
    assert nan.verdict == "fault"
    assert nan.to_json()["first_difference"]["regret"] is None
    assert nan.to_json()["moved_most"] is None


def test_a_step_is_that_of_bf16():
    assert [bf16_step(value) for value in (1.0, -1.99, 4.0, 7.9, 26.0)] == [2**-7, 2**-7, 2**-5, 2**-5, 2**-3]
    assert np.isnan(bf16_step(float("inf")))


def test_how_far_logits_moved():
    row = np.array([1, 5, 3, 2, 5], np.float32)
    best = BestLogits.of(row)
    assert (best.ids, best.logits) == ((1, 4, 2, 3, 0), (5.0, 5.0, 3.0, 2.0, 1.0))
    assert best.moved(row) == best.moved(row + 7) == 0.0
    assert best.moved(row + np.array([0, 1, 0, 0, -1])) == pytest.approx((2 / 4) ** 0.5 / row.std())
    assert np.isnan(best.moved(row * float("nan")))
    assert BestLogits.of(np.zeros(4, np.float32)).moved(np.arange(4, dtype=np.float32)) == float("inf")


def test_bits_are_promised_by_the_same_arithmetic_only(selftest, monkeypatch):
    assert promises_bits(selftest, "reference")
    assert not promises_bits(selftest, "native")
    monkeypatch.setattr(dense, "_maker", lambda: "another")
    assert not promises_bits(selftest, "reference")


def test_a_failure_refuses_warns_or_is_not_looked_for(bundle, selftest):
    backend = backend_of(bundle, spec=m.drafter(mask_token_id=0)(bundle.pair))
    with pytest.raises(VerificationError) as error:
        check(bundle, backend)
    message = str(error.value)
    assert "\n" not in message
    for word in (str(bundle.path), "mask token id", f"at build {selftest.accept_length:.2f}", "self_test='warn'"):
        assert word in message
    assert backend.length() == 0
    with pytest.warns(RuntimeWarning, match="mask token id"):
        assert not check(bundle, backend, "warn").ok
    assert check(bundle, backend, "off") is None
    with pytest.raises(BackendError, match="self_test is 'on', accepted are refuse, warn, off"):
        check(bundle, backend, "on")


def test_a_planner_opens_only_what_passes(demo_bundle, monkeypatch):
    wrong = m.drafter(mask_token_id=0)
    closed = []

    def load_wrong(bundle, drafter, lanes):
        backend = backend_of(bundle, spec=wrong(bundle.pair))
        backend.close = lambda: closed.append(True)
        return backend

    monkeypatch.setattr("edge_dflash.planner.load", load_wrong)
    with pytest.raises(VerificationError, match="mask token id"):
        Planner.open(demo_bundle)
    assert closed == [True]
    with pytest.warns(RuntimeWarning, match="mask token id") as caught:
        Planner.open(demo_bundle, self_test="warn").close()
    assert caught[0].filename == __file__
    Planner.open(demo_bundle, self_test="off").close()


def test_verify_prints_a_failed_selftest_and_fails(cli, ids_bundle, monkeypatch):
    wrong = m.drafter(mask_token_id=0)
    monkeypatch.setattr("edge_dflash.planner.load", lambda bundle, **_: backend_of(bundle, spec=wrong(bundle.pair)))
    code, out, err = cli("verify", ids_bundle, "--count", 1, "--max-new-tokens", 4, "--json")
    found = json.loads(out)
    assert code == 9
    assert "the self-test failed: the drafter is not the one that was built" in err
    assert (found["ok"], found["differences"]) == (False, [])
    assert (found["self_test"]["ok"], found["self_test"]["tokens_equal"]) == (False, True)


def rewrite(path, data, reason=None):
    """Give a bundle another selftest.json (None: none, for a ``reason``) and a manifest that agrees."""
    manifest = Bundle.open(path, check_hashes=False).manifest
    files = dict(manifest.files)
    del files[SELFTEST]
    (path / SELFTEST).unlink()
    if data is not None:
        (path / SELFTEST).write_bytes(data)
        files[SELFTEST] = hash_file(path / SELFTEST, lambda count: None)
    (path / "manifest.json").write_bytes(dump_manifest(replace(manifest, files=files, no_self_test=reason)))
    return Bundle.open(path)


def test_a_bundle_whose_selftest_was_taken_out_is_refused(demo_bundle, tmp_path):
    bundle = rewrite(shutil.copytree(demo_bundle, tmp_path / "old"), None)
    assert load_selftest(bundle) is None
    gone = "has no selftest.json, and its manifest does not say why: the file was taken out, or an older version"
    for opened in (Planner.open, lambda path: replay(bundle, None)):
        with pytest.raises(VerificationError, match=gone):
            opened(bundle.path)
    with pytest.warns(RuntimeWarning, match=gone) as caught:
        Planner.open(bundle.path, self_test="warn").close()
    assert caught[0].filename == __file__
    Planner.open(bundle.path, self_test="off").close()


def test_a_bundle_that_says_why_it_has_no_selftest_opens(demo_bundle, tmp_path):
    bundle = rewrite(shutil.copytree(demo_bundle, tmp_path / "large"), None, "the pair is too large")
    assert bundle.manifest.no_self_test == "the pair is too large"
    with Planner.open(bundle.path) as planner:
        assert planner.self_test is None


def test_a_damaged_selftest_is_refused_before_it_runs(demo_bundle, tmp_path):
    bundle = rewrite(shutil.copytree(demo_bundle, tmp_path / "odd"), b"{}\n")
    with pytest.raises(BundleError, match=r"selftest.json: schema is None, this version reads 2"):
        check(bundle, load(bundle))
    file = tmp_path / "odd" / SELFTEST
    file.unlink()
    with pytest.raises(BundleError, match=r"selftest.json is missing"):
        Bundle.open(tmp_path / "odd")


SHAPE = PairShape(1024, 16, 5, 1024, 128, 15)
FIELDS = {
    "schema": (3, "schema is 3, this version reads 2; update edge-dflash"),
    "source": (1, ".source: found 1, wanted str"),
    "prompt": ([], "prompt is empty"),
    "tokens": ([1024], "tokens is token id 1024, wanted ids of the vocabulary of 1024"),
    "drafts": ([[1, 2]], "accept_lengths is {cycles} numbers, wanted as many as drafts"),
    "accept_lengths": ([3] * 3, r"accept_lengths is 3 numbers, wanted as many as drafts \({cycles}\)"),
    "accept_length": (2.5, "accept_length is 2.5, wanted {accept_length}"),
    "accept_floor": (3.5, r"accept_floor is 3.5, wanted 1 to {accept_length} \(accept_length\)"),
    "best": ([], "best is of 0 tokens, wanted of 49, as many as tokens"),
    "rounding": (-1.0, "rounding is -1.0, wanted 0 to "),
    "rounding_most": (0.0, "rounding is .*, wanted 0 to 0.0"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_checked(selftest, field):
    value, message = FIELDS[field]
    message = message.format(cycles=len(selftest.drafts), accept_length=selftest.accept_length)
    body = json.loads(dump_selftest(selftest))
    with pytest.raises(BundleError, match=f"here.*{message}"):
        parse_selftest(json.dumps({**body, field: value}).encode(), SHAPE, "here")
    del body[field]
    with pytest.raises(BundleError, match="schema is None" if field == "schema" else f"key '{field}' is missing"):
        parse_selftest(json.dumps(body).encode(), SHAPE, "here")


def test_an_accept_length_is_that_of_its_drafts(selftest):
    lengths = [length % 15 + 1 for length in selftest.accept_lengths]
    body = json.loads(dump_selftest(selftest)) | {"accept_lengths": lengths}
    wanted = rf"accept_lengths\[0\] is {lengths[0]}, wanted {selftest.accept_lengths[0]}"
    with pytest.raises(BundleError, match=wanted):
        parse_selftest(json.dumps(body).encode(), SHAPE, "here")


@pytest.mark.parametrize(
    "changed", [{"ids": []}, {"ids": [1, 2]}, {"ids": [9999] * 8}, {"logits": [1.0]}, {"spread": -1.0}]
)
def test_the_best_logits_are_checked(selftest, changed):
    body = json.loads(dump_selftest(selftest))
    body["best"][7] |= changed
    with pytest.raises(BundleError, match=rf"here: best\[7\] is .*, wanted .* token {selftest.tokens[7]} first"):
        parse_selftest(json.dumps(body).encode(), SHAPE, "here")


def test_only_the_text_of_a_build_is_read(selftest):
    text = dump_selftest(selftest)
    assert parse_selftest(text, SHAPE) == selftest
    for odd, message in (
        (text.rstrip(), "not the text that a build writes"),
        (text[:-9], "is damaged"),
        (b"\xff", "is damaged"),
        (b"[]", "holds list, wanted an object"),
        (text.replace(b'"prompt"', b'"more": 1, "prompt"'), "unknown key 'more'"),
    ):
        with pytest.raises(BundleError, match=message):
            parse_selftest(odd, SHAPE)
    with pytest.raises(BundleError, match=r"wanted at most 484 \(the usable context\)"):
        parse_selftest(text, replace(SHAPE, max_context=500))
    with pytest.raises(BundleError, match=r"drafts is 15 ids in a cycle, wanted 7"):
        parse_selftest(text, replace(SHAPE, block_size=8, drafts=7))


def test_recording_again_gives_the_same_bytes_on_any_number_of_threads(bundle, selftest):
    torch.set_num_threads(2)
    try:
        assert dump_selftest(record.record_selftest(bundle)) == (bundle.path / SELFTEST).read_bytes()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_pair_without_tokenizer_gets_pseudo_random_ids_and_a_warning(golden, tmp_path):
    directories = (golden / name for name in ("qwen3_5-tiny", "qwen3_5-tiny-dflash"))
    bundle = Bundle.open(build(BuildConfig(*directories, tmp_path / "ids", rounding="max")).bundle)
    test = load_selftest(bundle)
    assert (test.source, len(test.prompt)) == ("pseudo-random ids", 32)
    assert check(bundle, load(bundle)).identical
    warning = record.fit_warning(test)
    assert "the drafter does not fit the target: accept length 1." in warning
    assert "mask_token_id or target_layer_ids" in warning


def test_no_selftest_for_a_large_pair_or_a_short_context(tmp_path, monkeypatch):
    result = build(config_of("qwen3", tmp_path / "short", max_context=64))
    assert any("max_context is 64, a self-test needs at least 65" in warning for warning in result.warnings)
    assert "needs at least 65" in Bundle.open(result.bundle).manifest.no_self_test
    assert check(Bundle.open(result.bundle), None) is None
    result = build(config_of("qwen3", tmp_path / "least", max_context=65))
    assert check(Bundle.open(result.bundle), load(Bundle.open(result.bundle))).identical
    monkeypatch.setattr(record, "MAX_PARAMETERS", 1000)
    result = build(config_of("qwen3", tmp_path / "large"))
    assert any("parameters, the reference backend takes up to" in warning for warning in result.warnings)
    assert not (result.bundle / SELFTEST).exists()
    assert Bundle.open(result.bundle).manifest.no_self_test in result.warnings


def test_a_prompt_that_does_not_fit_keeps_its_end(bundle):
    whole = record._prompt(bundle, record.PROMPT_TOKENS)[1]
    source, ids = record._prompt(bundle, 20)
    assert source == "end of kitchen-01 of robot_planning.jsonl"
    assert ids == whole[-20:]
    assert record._prompt(bundle, 100)[0] == "prose-01 of robot_planning.jsonl"
