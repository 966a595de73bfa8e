"""A golden file with pictures: the tower's rows, positions, logits, tokens and the run of the drafter."""

import shutil

import numpy as np
import pytest
from golden_pairs import directories, golden, pair, store

from edge_dflash.checks.golden import check_golden, picture_names, verify_golden
from edge_dflash.errors import VerificationError
from edge_dflash.weights.formats import WideWeight

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
