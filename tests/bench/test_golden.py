from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from golden_pairs import GOLDEN, NAMES, WALKS, directories, golden, pair, store
from safetensors.numpy import save_file
from verify_support import short_golden

from edge_dflash.bench.golden import ArrayDifference, GoldenComparison, check_golden, picture_names, verify_golden
from edge_dflash.errors import CheckpointError, VerificationError
from edge_dflash.weights.formats import WideWeight


def run(name, keys):
    return check_golden(pair(name), store(name), keys)


def key_of(result):
    return result.key.split(".", 1)[1]


def agrees(target, drafter, file):
    """A comparison within 1e-4 in which every array of the file is compared or skipped, or given to us."""
    path = GOLDEN / f"golden_{file}.safetensors"
    report = verify_golden(GOLDEN / target if isinstance(target, str) else target, GOLDEN / drafter, path)
    report.check()
    assert report.ok
    assert report.tokens_equal
    assert 0 < max(r.difference for r in report.results if r.tolerance is not None) <= 1e-4
    assert report.unknown == ()
    return report


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_agrees_with_every_array_of_the_golden_file(name):
    report = agrees(f"{name}-tiny", f"{name}-tiny-dflash", name)
    assert report.missing == ()
    compared = {r.key for r in report.results} | set(report.skipped)
    assert compared == {key for key in golden(name) if not key.endswith(".prompt")}
    assert all("nvfp4" in key for key in report.skipped)
    bf16 = [r.difference for r in report.results if r.key.endswith("bf16run")]
    assert len(bf16) == 3
    assert 1e-3 < max(bf16) <= 0.15  # informative: the scale of BF16 rounding


@pytest.mark.parametrize("name", WALKS)
def test_the_reference_agrees_with_goldens_of_walks(name):
    report = agrees(*directories(name), name)
    assert report.skipped == ()
    assert {r.key for r in report.results} == {
        key for key in golden(name) if not key.endswith((".prompt", ".threshold"))
    }


@pytest.mark.parametrize("form", ["", "-perexpert"])
def test_the_reference_agrees_with_goldens_of_experts(form):
    report = agrees(f"qwen3_5_moe-tiny{form}", "qwen3_5_moe-tiny-dflash", "qwen3_5_moe")
    assert report.skipped == ()
    compared = {r.key for r in report.results}
    assert compared == {key for key in golden("qwen3_5_moe") if not key.endswith(".prompt")}
    mixed = {key.split(".", 3)[3] for key in compared if ".moe." in key}
    assert {key.rsplit(".", 1)[0] for key in mixed} == {"in", "router_logits", "experts", "weights", "routed", "out"}
    assert not any(".moe." in key for key in report.missing if key.startswith(("p0", "p1")))


@pytest.mark.parametrize("form", ["modelopt", "ct"])
@pytest.mark.parametrize(("name", "prompts"), [("qwen3_5", (1,)), ("qwen3_5_moe", (0, 1, 2))])
def test_an_nvfp4_checkpoint_is_compared_with_the_nvfp4_arrays(name, prompts, form):
    file = name if name == "qwen3_5" else f"{name}_nvfp4-{form}"
    report = agrees(f"{name}-tiny-nvfp4-{form}", f"{name}-tiny-dflash", file)
    kinds = ("prefill_logits", "greedy_tokens")
    assert {r.key for r in report.results} == {f"p{n}.nvfp4_w4a16_{kind}" for n in prompts for kind in kinds}
    assert ("p1.prefill_logits" in report.skipped) == (name == "qwen3_5")


@pytest.mark.parametrize("part", ["experts", "weights", "router_logits", "routed", "out"])
def test_one_wrong_number_of_a_mixture_is_found(part):
    given = golden("qwen3_5_moe")
    keys = {key: array for key, array in given.items() if key.startswith("p1.moe.2.")}
    keys |= {key: given[key] for key in ("p1.prompt", "p1.greedy_tokens", "p1.cycle_draft_tokens")}
    wrong = {key: keys[key].copy() for key in (f"p1.moe.2.{part}.{phase}" for phase in ("prefill", "verify"))}
    for array in wrong.values():
        array[-1, 0] += 1
    report = run("qwen3_5_moe", keys | wrong)
    assert sorted(r.key for r in report.failures) == sorted(wrong)


def test_the_json_form_has_the_documented_keys():
    data = json.loads(json.dumps(run("qwen3", short_golden("qwen3", "p0", 4)).to_json()))
    assert {"ok", "differences", "missing", "unknown", "skipped", "failures", "tokens_equal"} <= data.keys()
    assert data["ok"] is True
    assert 0 < data["differences"]["p0.prefill_logits"] < 1e-4


def test_missing_keys_are_listed_and_unknown_keys_too():
    keys = short_golden("qwen3_5", "p0", 4)
    del keys["p0.prefill_hidden"], keys["p0.kv.3.k"]
    keys |= {"p0.surprise": np.zeros(3), "comment": np.zeros(1), "p7.prefill_logits": np.zeros((1, 2))}
    report = run("qwen3_5", keys)
    assert report.ok
    assert set(report.missing) == {"p0.prefill_hidden", "p0.kv.3.k", "p7.prompt"}
    assert set(report.unknown) == {"p0.surprise", "comment", "p7.prefill_logits"}


@pytest.mark.parametrize("kept", ["prefill_logits", "cycle_accepted", "teacher_forced_logits", "dflash_tokens"])
def test_a_file_with_a_prompt_and_one_array_is_enough(kept):
    keys = {key: golden("qwen3")[key] for key in ("p0.prompt", f"p0.{kept}")}
    report = run("qwen3", keys)
    assert report.ok
    assert [key_of(r) for r in report.results] == [kept]
    assert "p0.kv.0.k" in report.missing


def test_nothing_to_compare_is_not_a_pass():
    for keys in ({}, {"p0.prompt": golden("qwen3")["p0.prompt"]}):
        report = run("qwen3", keys)
        assert not report.ok
        with pytest.raises(VerificationError, match="nothing that can be compared"):
            report.check()


@pytest.mark.parametrize(
    "key",
    ["greedy_tokens", "prefill_logits", "kv.3.v", "gdn.0.conv.after0", "cycle_draft_logits", "cycle_accepted"],
)
def test_one_wrong_number_is_found(key):
    keys = short_golden("qwen3_5", "p0", 6)
    wrong = keys[f"p0.{key}"].copy()
    wrong.flat[wrong.size // 2 if key == "prefill_logits" else 0] += 1
    report = run("qwen3_5", keys | {f"p0.{key}": wrong})
    assert [key_of(r) for r in report.failures] == [key]
    assert not report.ok
    with pytest.raises(VerificationError, match=rf"1 of \d+ golden arrays differ; worst: p0\.{key} by"):
        report.check()


def test_other_shapes_and_nan_are_failures():
    keys = short_golden("qwen3", "p0", 4)
    logits = keys["p0.prefill_logits"].copy()
    logits[0, 0] = np.nan
    report = run("qwen3", keys | {"p0.prefill_taps": keys["p0.prefill_taps"][:, :7], "p0.prefill_logits": logits})
    assert {key_of(r) for r in report.failures} == {"prefill_taps", "prefill_logits"}
    assert report.logits_difference == math.inf
    assert report.to_json()["differences"]["p0.prefill_logits"] is None


def test_tolerances_are_absolute_for_logits_and_relative_for_large_arrays():
    keys = short_golden("qwen3", "p0", 4)
    by_key = {key_of(r): r.tolerance for r in run("qwen3", keys).results}
    assert by_key["prefill_logits"] == by_key["cycle0_verify_logits"] == 1e-3
    assert by_key["prefill_taps"] == pytest.approx(1e-3 * max(1, np.abs(keys["p0.prefill_taps"]).max()))
    assert by_key["greedy_tokens"] == 0
    assert by_key["prefill_logits_bf16run"] is None


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(VerificationError, match=r"p0: the prompt is empty or ids are outside the vocabulary of 512"):
        run("qwen3", {"p0.prompt": np.array([1, 512])})
    with pytest.raises(VerificationError, match="is empty"):
        run("qwen3", {"p0.prompt": np.array([], np.int64)})
    keys = short_golden("qwen3_5", "p1", 4)
    with pytest.raises(VerificationError, match="outside the vocabulary"):
        run("qwen3_5", keys | {"p1.cycle_draft_tokens": keys["p1.cycle_draft_tokens"] + 512})


def test_an_unreadable_golden_file_and_a_wrong_pair_are_refused(tmp_path):
    path = tmp_path / "golden.safetensors"
    target, drafter = GOLDEN / "qwen3-tiny", GOLDEN / "qwen3-tiny-dflash"
    path.write_bytes(b"\x00" * 4)
    with pytest.raises(VerificationError, match="not a readable safetensors file") as caught:
        verify_golden(target, drafter, path)
    assert "\n" not in str(caught.value)
    with pytest.raises(VerificationError, match="not a readable"):
        verify_golden(target, drafter, tmp_path / "absent.safetensors")
    save_file({"p0.prompt": np.array([1])}, path)
    with pytest.raises(CheckpointError):
        verify_golden(target, GOLDEN / "qwen3_5-tiny-dflash", path)


def test_a_report_decides_only_by_what_decides():
    fine = ArrayDifference("p0.prefill_logits_bf16run", 9.0, None)
    assert not GoldenComparison((fine,), (), (), ()).ok
    assert GoldenComparison((fine, ArrayDifference("p0.greedy_tokens", 0.0, 0.0)), (), (), ()).ok


FILE = directories("vision")[0].parent / "golden_vision.safetensors"


def without(*parts, **changes):
    """The golden arrays without keys that contain one of ``parts``, some changed."""
    kept = {key: array for key, array in golden("vision").items() if not any(part in key for part in parts)}
    return kept | {key.replace("__", "."): array for key, array in changes.items()}


def test_the_golden_file_is_met():
    result = verify_golden(*directories("vision"), FILE)
    result.check()
    assert result.tokens_equal
    assert result.logits_difference <= 1e-4
    differences = {r.key: r.difference for r in result.results}
    for number in range(4):
        for key in ("position_ids", "rope_delta", "mm_token_type_ids", "greedy_tokens", "dflash_tokens"):
            assert differences[f"p{number}.{key}"] == 0
    for name in ("img0", "img1", "img2", "clip"):
        assert differences[f"{name}.tower_rows"] <= 1e-4
    for number in range(3):
        assert differences[f"img{number}.pixel_values"] == differences[f"img{number}.grid_thw"] == 0
    assert set(result.unknown) == {f"img{number}.levels_pil" for number in range(3)}
    assert set(picture_names(golden("vision"))) == {"clip", "img0", "img1", "img2"}


class Rolled:
    """The checkpoint with one weight of the tower rolled by a row."""

    def __init__(self, name):
        self._store, self._name = store("vision"), name

    def get(self, name):
        weight = self._store.get(name)
        return WideWeight(np.roll(weight.data, 1, 0)) if name == self._name else weight

    def kv_scale(self, state):
        return self._store.kv_scale(state)


@pytest.mark.parametrize("name", ["pos_embed", "blocks.1.attn.qkv", "merger.linear_fc2"])
def test_a_wrong_tower_is_found(name):
    given = without("p1.", "p2.", "p3.")
    result = check_golden(pair("vision"), Rolled(f"target.visual.{name}"), given)
    assert not result.ok
    failures = {failure.key for failure in result.failures}
    assert {"img0.tower_rows", "clip.tower_rows", "p0.prefill_logits"} <= failures
    assert "p0.position_ids" not in failures


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"img0__grid_thw": np.array([1, 4, 4])}, "img0: 24 patches, its grid has 1 x 4 x 4"),
        ({"p0__images": np.array([7])}, "lacks img7"),
        ({"p0__images": np.array([0, 0])}, "or a placeholder 186 for it"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(VerificationError, match=words):
        check_golden(pair("vision"), store("vision"), without("p1.", "p2.", "p3.", **changes))


def test_another_picture_is_found(tmp_path):
    target, drafter = directories("vision")
    shutil.copytree(target, tmp_path / "target")
    shutil.copy(target / "img0.png", tmp_path / "target" / "img1.png")
    result = verify_golden(tmp_path / "target", drafter, FILE)
    assert {failure.key for failure in result.failures} == {"img1.pixel_values", "img1.grid_thw"}


def test_a_target_of_text_is_not_compared_with_pictures():
    with pytest.raises(VerificationError, match="no vision tower; give its checkpoint"):
        check_golden(pair("vision").text_only, store("vision"), golden("vision"))
