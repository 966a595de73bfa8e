"""What the files of a target say about its tower: read, refused by name, or absent."""

import json
import shutil

import pytest
from config_mutations import CONFIG, IMAGES, PROCESSOR
from golden_pairs import GOLDEN

from edge_dflash.common.tables import decode, encode
from edge_dflash.errors import CheckpointError, UnsupportedModelError
from edge_dflash.model.registry import read_target_spec
from edge_dflash.model.specs import PatchSpec, TargetSpec, VisionSpec

HALF = (0.5, 0.5, 0.5)


@pytest.fixture
def target(tmp_path):
    """A function that reads vision-tiny with keys changed, by file and path; a key whose value is ... goes."""
    files = {name: json.loads((GOLDEN / "vision-tiny" / name).read_text()) for name in (CONFIG, IMAGES)}

    def read(changes=None, without=()):
        for path, value in (changes or {}).items():
            *place, key = path.split("/")
            content = files.setdefault(place[0], {})
            for step in place[1:]:
                content = content[step]
            content.pop(key, None) if value is ... else content.update({key: value})
        for name in files.keys() - set(without):
            (tmp_path / name).write_text(json.dumps(files[name]))
        return read_target_spec(tmp_path)

    return read


def test_a_tower_is_read_with_its_patches_and_sections(target):
    spec = target()
    patches = PatchSpec(16, 2, 2, 4096, 65536, HALF, HALF)
    assert spec.vision == VisionSpec(2, 64, 96, 4, 6, 1e4, 64, 186, 187, 184, 185, patches)
    assert (patches.factor, patches.columns, spec.vision.head_dim) == (32, 1536, 16)
    assert spec.attention.rope.mrope_section == (3, 3, 2)
    assert decode(TargetSpec, encode(spec), "spec") == spec


def test_without_a_tower_the_target_is_what_it_was(target):
    spec = target(without=[IMAGES])
    assert spec.vision is None
    assert spec == target().text_only
    assert "vision" not in encode(spec)
    assert "mrope_section" not in encode(spec)["attention"]["rope"]
    for changes in ({f"{CONFIG}/vision_config": ...}, {f"{CONFIG}/language_model_only": True}):
        assert target(changes) == spec


@pytest.mark.parametrize(
    "size", [{"shortest_edge": 4096, "longest_edge": 65536}, {"min_pixels": 4096, "max_pixels": 65536}, None]
)
def test_every_spelling_of_the_bounds_is_read(target, size, tmp_path):
    flat = {} if size else {f"{IMAGES}/min_pixels": 4096, f"{IMAGES}/max_pixels": 65536}
    patches = target({f"{IMAGES}/size": size or ..., **flat}).vision.patches
    assert (patches.min_pixels, patches.max_pixels) == (4096, 65536)
    written = json.loads((tmp_path / IMAGES).read_text())
    nested = tmp_path / "nested"
    nested.mkdir()
    shutil.copy(tmp_path / CONFIG, nested)
    (nested / PROCESSOR).write_text(json.dumps({"image_processor": written, "processor_class": "Qwen3VLProcessor"}))
    assert read_target_spec(nested).vision.patches == patches


def test_two_files_that_disagree_are_refused(target, tmp_path):
    images = json.loads((GOLDEN / "vision-tiny" / IMAGES).read_text())
    (tmp_path / PROCESSOR).write_text(json.dumps({"image_processor": {**images, "image_mean": [0.4, 0.5, 0.5]}}))
    with pytest.raises(CheckpointError, match=f"{IMAGES} as in .*{PROCESSOR}; keep one"):
        target()


@pytest.mark.parametrize(
    ("path", "value", "error", "words"),
    [
        ("vision_config/deepstack_visual_indexes", [5, 11], UnsupportedModelError, "deepstack"),
        ("vision_config/hidden_act", "gelu", UnsupportedModelError, "another activation"),
        ("vision_config/in_channels", 4, UnsupportedModelError, "not RGB"),
        ("vision_config/model_type", "qwen3_vl", UnsupportedModelError, "another tower"),
        ("vision_config/window_size", 112, CheckpointError, "window_size is 112, wanted no such setting"),
        ("vision_config/num_heads", 3, CheckpointError, "num_heads is 3"),
        ("vision_config/num_position_embeddings", 35, CheckpointError, "is 35, wanted a square number"),
        ("vision_config/out_hidden_size", 128, CheckpointError, "out_hidden_size is 128, wanted the hidden_size"),
        ("vision_config/patch_size", 14, CheckpointError, "patch_size is 16, wanted 14"),
        ("image_token_id", 192, CheckpointError, "image_token_id is 192, wanted a token id below"),
        ("image_token_id", ..., CheckpointError, "lacks the field image_token_id"),
        ("vision_end_token_id", 186, CheckpointError, "another token than image_token_id"),
        ("text_config/rope_parameters/mrope_section", [3, 4, 1], CheckpointError, "mrope_section is .3, 4, 1."),
        ("text_config/rope_parameters/mrope_section", ..., CheckpointError, "mrope_section is .11, 11, 10."),
        ("text_config/rope_parameters/mrope_interleaved", False, UnsupportedModelError, "mrope_interleaved"),
    ],
)
def test_bad_towers_are_refused(target, path, value, error, words):
    with pytest.raises(error, match=words):
        target({f"{CONFIG}/{path}": value})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("image_processor_type", "CLIPImageProcessor", "another image processor"),
        ("resample", 2, "another filter than bicubic"),
        ("rescale_factor", 1.0, "levels that are not 0 to 255"),
        ("do_normalize", False, "pictures left as they are"),
        ("do_center_crop", True, "cut off"),
        ("image_mean", [0.5, 0.5], "wanted a list of 3 numbers"),
        ("image_std", [0.5, 0.0, 0.5], "wanted numbers above 0"),
        ("max_pixels", 4095, "max_pixels is 4095, wanted at least min_pixels"),
        ("size", {"shortest_edge": 4096}, "lacks the field size.longest_edge"),
        ("crop", 3, "crop is 3, wanted no such setting"),
    ],
)
def test_bad_image_processors_are_refused(target, key, value, words):
    with pytest.raises(CheckpointError, match=words):
        target({f"{IMAGES}/{key}": value})
