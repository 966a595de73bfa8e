"""What the files of a target that sees say about its tower: vision_config, the ids of images, the image processor.

A tower is read where config.json has a ``vision_config`` and a file beside it says how pictures become patches. A file
of text alone, and one whose image processor was left out, describes a target without a tower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_dflash.common.files import is_there
from edge_dflash.common.tables import read_json
from edge_dflash.model.config import LIBRARY, ROPE
from edge_dflash.model.fields import Fields, Key, Table, flag, free, inner, integer, integers, number, numbers, only
from edge_dflash.model.specs import MAX_LAYERS, PatchSpec, RopeSpec, TargetSpec, VisionSpec

TOWER: Table = {
    **LIBRARY,
    "depth": integer(27, most=MAX_LAYERS),
    "hidden_size": integer(1152),
    "intermediate_size": integer(4304),
    "num_heads": integer(16),
    "patch_size": integer(16, most=128),
    "spatial_merge_size": integer(2, most=16),
    "temporal_patch_size": integer(2, most=16),
    "out_hidden_size": integer(3584),
    "num_position_embeddings": integer(2304),
    "rope_parameters": inner({"rope_theta": number(10000.0), **only("rope_type", "axial", why="other angles")}),
    **only("in_channels", 3, why="pictures that are not RGB"),
    **only("hidden_act", "gelu_pytorch_tanh", why="another activation"),
    **only("deepstack_visual_indexes", None, [], why="deepstack, rows of a tower inside the language model"),
    **only(
        "model_type", *(f"qwen3_5{kind}{end}" for kind in ("", "_moe") for end in ("", "_vision")), why="another tower"
    ),
}
"""vision_config."""

_PIXELS = ["min_pixels", "max_pixels", "shortest_edge", "longest_edge"]
_BESIDE = "min_pixels or max_pixels has it"
IMAGES: Table = {
    **free(
        "a note of the tool that wrote the file", "processor_class feature_extractor_type auto_map transformers_version"
    ),
    **free(
        "a library's choice of arrays and memory",
        "data_format input_data_format device disable_grouping return_tensors default_to_square",
    ),
    **free("nothing is cropped or padded", "crop_size pad_size"),
    **only(
        "image_processor_type",
        *(f"Qwen2VLImageProcessor{kind}" for kind in ("", "Fast", "Pil")),
        why="another image processor",
    ),
    **only("do_resize do_rescale do_normalize do_convert_rgb", True, None, why="pictures left as they are"),
    **only("do_center_crop do_pad", False, None, why="pictures with parts cut off or added"),
    **only("resample", 3, None, why="another filter than bicubic"),
    **only("rescale_factor", 1 / 255, None, why="levels that are not 0 to 255"),
    "patch_size": integer(),
    "merge_size": integer(),
    "temporal_patch_size": integer(),
    "image_mean": numbers(3),
    "image_std": numbers(3),
    "min_pixels": integer(null=True),
    "max_pixels": integer(null=True),
    "size": inner({name: integer(null=True, beside=_BESIDE) for name in _PIXELS}),
}
"""preprocessor_config.json."""

PROCESSOR: Table = {
    "image_processor": inner(IMAGES),
    **free("a note of the tool that wrote the file", "processor_class auto_map transformers_version"),
    **free("pictures alone come in", "video_processor feature_extractor audio_processor"),
    **free("the tokenizer has it", "tokenizer chat_template"),
}
"""processor_config.json."""

FLAT_FILE, FILE = "preprocessor_config.json", "processor_config.json"


def pictured(nested: Table) -> Table:
    """Table of a config.json with ``vision_config``, by that of the same architecture without a tower."""
    rope = inner({**ROPE, "mrope_section": integers(least=1), **_INTERLEAVED})
    text: Mapping[str, Key] = nested["text_config"].keys or {}
    return {
        **nested,
        "text_config": replace(nested["text_config"], keys={**text, "rope_parameters": rope, "rope_scaling": rope}),
        "vision_config": inner(TOWER),
        **{name: integer(least=0) for name in _IDS},
        "language_model_only": flag(False, null=True),
    }


_IDS = ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
_INTERLEAVED = only("mrope_interleaved", True, None, why="positions in sections one behind the other")


def has_tower(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether config.json and the files beside it describe a tower."""
    if not config.get("vision_config") or config.get("language_model_only") is True:
        return False
    return is_there(directory / FLAT_FILE) or (
        is_there(file := directory / FILE) and read_json(file).get("image_processor") is not None
    )


def with_tower(target: TargetSpec, config: Fields) -> TargetSpec:
    """The target with its tower, by a file with a :func:`pictured` table. Raises CheckpointError."""
    tower, text = config.child("vision_config"), config.child("text_config")
    hidden, heads = tower.integer("hidden_size"), tower.integer("num_heads")
    if hidden % (4 * heads):
        raise tower.error("num_heads", heads, f"heads whose columns, of {hidden}, are a multiple of 4")
    positions = tower.integer("num_position_embeddings")
    if (side := math.isqrt(positions)) ** 2 != positions:
        raise tower.error("num_position_embeddings", positions, "a square number")
    if (out := tower.integer("out_hidden_size")) != target.hidden_size:
        raise tower.error("out_hidden_size", out, f"the hidden_size of text_config ({target.hidden_size})")
    vision = VisionSpec(
        depth=tower.integer("depth"),
        hidden_size=hidden,
        intermediate_size=tower.integer("intermediate_size"),
        heads=heads,
        positions=side,
        theta=tower.child("rope_parameters").number("rope_theta"),
        out=out,
        image_token_id=_token(config, "image_token_id", target),
        video_token_id=_token(config, "video_token_id", target),
        vision_start_token_id=_token(config, "vision_start_token_id", target),
        vision_end_token_id=_token(config, "vision_end_token_id", target),
        patches=_patches(config.file.parent, tower),
    )
    rope = replace(target.attention.rope, mrope_section=_sections(text, target.attention.rope))
    return replace(target, vision=vision, attention=replace(target.attention, rope=rope))


def _token(config: Fields, name: str, target: TargetSpec) -> int:
    if (token := config.integer(name)) >= target.vocab_size:
        raise config.error(name, token, f"a token id below vocab_size {target.vocab_size}")
    if name != _IDS[0] and token == config.integer(_IDS[0]):
        raise config.error(name, token, f"another token than {_IDS[0]}")
    return token


def _sections(text: Fields, rope: RopeSpec) -> tuple[int, int, int]:
    """Pairs of T, H and W; the published ones where the file does not say it."""
    places = [text.child(name) for name in ("rope_parameters", "rope_scaling")]
    place = next((one for one in places if one.has("mrope_section")), places[0])
    found, pairs = place.integers("mrope_section") or (11, 11, 10), rope.dims // 2
    _, h, w = found if len(found) == 3 else (0, 0, 0)
    fits = len(range(1, min(3 * h, pairs), 3)) == h and len(range(2, min(3 * w, pairs), 3)) == w
    if len(found) != 3 or sum(found) != pairs or not fits:
        raise place.error("mrope_section", list(found), f"three numbers of pairs that share {pairs} in turns")
    if all(one.has("mrope_section") for one in places) and places[1].integers("mrope_section") != found:
        raise place.error("mrope_section", list(found), "the same as in rope_scaling; keep one")
    return found[0], h, w


def _patches(directory: Path, tower: Fields) -> PatchSpec:
    """How pictures become patches, by the file or files that say it; those must agree with the tower."""
    found: dict[Path, PatchSpec] = {}
    if is_there(file := directory / FILE):
        whole = Fields(file, read_json(file), PROCESSOR)
        if whole.has("image_processor"):
            found[file] = _read_patches(whole.child("image_processor"), tower)
    if is_there(file := directory / FLAT_FILE):
        found[file] = _read_patches(Fields(file, read_json(file), IMAGES), tower)
    (first, patches), *others = found.items()
    for other, said in others:
        if said != patches:
            raise tower.error("image processor", said, f"the same in {other} as in {first}; keep one")
    return patches


def _read_patches(images: Fields, tower: Fields) -> PatchSpec:
    for name, other in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        if images.integer(name) != (wanted := tower.integer(other)):
            raise images.error(name, images.integer(name), f"{wanted}, the {other} of vision_config")
    mean, std = images.numbers("image_mean"), images.numbers("image_std")
    if min(std) < 1e-6:
        raise images.error("image_std", list(std), "numbers above 0")
    least, most = _bound(images, "min_pixels", "shortest_edge"), _bound(images, "max_pixels", "longest_edge")
    patch, merge, temporal = (images.integer(name) for name in ("patch_size", "merge_size", "temporal_patch_size"))
    if not least <= most >= (patch * merge) ** 2:
        raise images.error("max_pixels", most, f"at least min_pixels ({least}) and one block of {patch * merge} pixels")
    return PatchSpec(patch, merge, temporal, least, most, (mean[0], mean[1], mean[2]), (std[0], std[1], std[2]))


def _bound(images: Fields, name: str, edge: str) -> int:
    """A number of pixels: flat, or in ``size``, where newer files call it an edge."""
    size = images.child("size")
    for place, key in ((images, name), (size, name), (size, edge)):
        if place.has(key):
            return place.integer(key)
    raise size.lacks(edge) if size.values else images.lacks(name)
