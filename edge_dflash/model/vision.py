"""The vision tower of Qwen3.5 / Qwen3.6: what files say of it, its Program, and its tables for a grid of patches.

A tower is read where config.json has a ``vision_config`` and a file next to it says how pictures become patches. A file
of text alone, and one whose image processor was left out, describes a target without a tower.

Formulas: transformers' ``Qwen3_5VisionModel``. Blocks have GELU by tanh, the merger by erf. Patches stand
merge-block-major: the merge x merge patches that become one row of the language model follow each other, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_dflash.common.files import is_there
from edge_dflash.common.tables import read_json
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.config import LIBRARY, ROPE
from edge_dflash.model.fields import Fields, Key, Table, flag, free, inner, integer, integers, number, numbers, only
from edge_dflash.model.ops import Bias, Elementwise, Fold, FrameAttend, GeluErf, GeluTanh, LayerNorm, PositionRows
from edge_dflash.model.program import Program
from edge_dflash.model.specs import MAX_LAYERS, PatchSpec, RopeSpec, TargetSpec, VisionSpec

TOWER = "target.visual."  # names of a tower's weights start with it
PATCH_EMBED = f"{TOWER}patch_embed.proj"  # checkpoints store it as a convolution [H, channels, frames, rows, columns]
EPS = 1e-6  # of all norms

TOWER_TABLE: Table = {
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
        "vision_config": inner(TOWER_TABLE),
        **{name: integer(least=0) for name in _IDS},
        "language_model_only": flag(False, null=True),
    }


_IDS = ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
_INTERLEAVED = only("mrope_interleaved", True, None, why="positions in sections one behind the other")


def has_tower(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether config.json and the files next to it describe a tower."""
    if not config.get("vision_config") or config.get("language_model_only") is True:
        return False
    return is_there(directory / FLAT_FILE) or (
        is_there(file := directory / FILE) and read_json(file).get("image_processor") is not None
    )


def with_tower(target: TargetSpec, config: Fields) -> TargetSpec:
    """The target with its tower, by a file with a :func:`pictured` table. Raises CheckpointError."""
    tower, text = config.child("vision_config"), config.child("text_config")
    hidden, heads = tower["hidden_size"], tower["num_heads"]
    if hidden % (4 * heads):
        raise tower.error("num_heads", heads, f"heads whose columns, of {hidden}, are a multiple of 4")
    positions = tower["num_position_embeddings"]
    if (side := math.isqrt(positions)) ** 2 != positions:
        raise tower.error("num_position_embeddings", positions, "a square number")
    if (out := tower["out_hidden_size"]) != target.hidden_size:
        raise tower.error("out_hidden_size", out, f"the hidden_size of text_config ({target.hidden_size})")
    vision = VisionSpec(
        depth=tower["depth"],
        hidden_size=hidden,
        intermediate_size=tower["intermediate_size"],
        heads=heads,
        positions=side,
        theta=tower.child("rope_parameters")["rope_theta"],
        out=out,
        **{name: _token(config, name, target) for name in _IDS},
        patches=_patches(config.file.parent, tower),
    )
    rope = replace(target.attention.rope, mrope_section=_sections(text, target.attention.rope))
    return replace(target, vision=vision, attention=replace(target.attention, rope=rope))


def _token(config: Fields, name: str, target: TargetSpec) -> int:
    if (token := config[name]) >= target.vocab_size:
        raise config.error(name, token, f"a token id below vocab_size {target.vocab_size}")
    if name != _IDS[0] and token == config[_IDS[0]]:
        raise config.error(name, token, f"another token than {_IDS[0]}")
    return int(token)


def _sections(text: Fields, rope: RopeSpec) -> tuple[int, int, int]:
    """Pairs of T, H and W; the published ones where the file does not say it."""
    places = [text.child(name) for name in ("rope_parameters", "rope_scaling")]
    place = next((one for one in places if one.has("mrope_section")), places[0])
    found, pairs = place["mrope_section"] or (11, 11, 10), rope.dims // 2
    _, h, w = found if len(found) == 3 else (0, 0, 0)
    fits = len(range(1, min(3 * h, pairs), 3)) == h and len(range(2, min(3 * w, pairs), 3)) == w
    if len(found) != 3 or sum(found) != pairs or not fits:
        raise place.error("mrope_section", list(found), f"three numbers of pairs that share {pairs} in turns")
    if all(one.has("mrope_section") for one in places) and places[1]["mrope_section"] != found:
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
        if images[name] != (wanted := tower[other]):
            raise images.error(name, images[name], f"{wanted}, the {other} of vision_config")
    mean, std = images["image_mean"], images["image_std"]
    if min(std) < 1e-6:
        raise images.error("image_std", list(std), "numbers above 0")
    least, most = _bound(images, "min_pixels", "shortest_edge"), _bound(images, "max_pixels", "longest_edge")
    patch, merge, temporal = (images[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    if not least <= most >= (patch * merge) ** 2:
        raise images.error("max_pixels", most, f"at least min_pixels ({least}) and one block of {patch * merge} pixels")
    return PatchSpec(patch, merge, temporal, least, most, (mean[0], mean[1], mean[2]), (std[0], std[1], std[2]))


def _bound(images: Fields, name: str, edge: str) -> int:
    """A number of pixels: flat, or in ``size``, where newer files call it an edge."""
    size = images.child("size")
    for place, key in ((images, name), (size, name), (size, edge)):
        if place.has(key):
            return int(place[key])
    raise size.lacks(edge) if size.values else images.lacks(name)


def vision_program(spec: VisionSpec) -> Program:
    """The pass ``see``: inputs patches [N, C], and those of :class:`PatchTables`.

    Outputs: "embedded" [N, H] before the first block, "hidden" [N, H] after the last, "rows" [N / merge^2, out].
    """
    check_tower(spec)
    half = spec.head_dim // 2
    inputs = {"patches": spec.patches.columns, "corners": 4, "shares": 4, "cos": half, "sin": half}
    g = GraphBuilder("see", commits=False, inputs=inputs)
    x = _linear(g, "patches", PATCH_EMBED, spec.hidden_size, "patch_rows")
    table = g.weight(f"{TOWER}pos_embed", (spec.positions**2, spec.hidden_size), "embedding", "embedding")
    places = g.emit(PositionRows(inputs=("corners", "shares"), output="places", weight=table), spec.hidden_size)
    embedded = x = g.add(x, places, "embedded")
    for index in range(spec.depth):
        x = _block(g, x, f"{TOWER}blocks.{index}", spec)
    return g.program(embedded=embedded, hidden=x, rows=_merger(g, x, spec))


def check_tower(spec: VisionSpec) -> None:
    """Raise ValueError for sizes that no tower has."""
    patches = spec.patches
    sizes = {"heads": spec.heads, "positions": spec.positions, "patch": patches.patch, "merge": patches.merge}
    sizes |= {"frames": patches.temporal, "least pixels": patches.min_pixels, "depth": spec.depth}
    for what, size in sizes.items():
        if size < 1:
            raise ValueError(f"the tower's {what} is {size}")
    if spec.hidden_size % (4 * spec.heads) or spec.depth > MAX_LAYERS:
        raise ValueError(f"a tower of {spec.depth} blocks of {spec.hidden_size} columns in {spec.heads} heads")
    if patches.max_pixels < max(patches.min_pixels, patches.factor**2) or min(patches.std) <= 0:
        raise ValueError(f"{patches} makes no patches")


def _block(g: GraphBuilder, x: str, name: str, spec: VisionSpec) -> str:
    """x + W_proj attend(W_qkv LN1(x)), then y + W_fc2 gelu_tanh(W_fc1 LN2(y)); every linear has a bias."""
    qkv = _linear(g, _norm(g, x, f"{name}.norm1"), f"{name}.attn.qkv", 3 * spec.hidden_size, f"{name}.qkv")
    op = FrameAttend(inputs=(qkv, "cos", "sin"), output=f"{name}.attended", heads=spec.heads, head_dim=spec.head_dim)
    o = g.emit(op, spec.hidden_size)
    x = g.add(x, _linear(g, o, f"{name}.attn.proj", spec.hidden_size, f"{name}.o"), f"{name}.mid")
    up = _linear(g, _norm(g, x, f"{name}.norm2"), f"{name}.mlp.linear_fc1", spec.intermediate_size, f"{name}.up")
    down = _linear(g, _gelu(g, GeluTanh, up), f"{name}.mlp.linear_fc2", spec.hidden_size, f"{name}.down")
    return g.add(x, down, f"{name}.out")


def _merger(g: GraphBuilder, x: str, spec: VisionSpec) -> str:
    """W_fc2 gelu_erf(W_fc1 fold(LN(x))): the patches of a block, side by side, become one row."""
    name, count = f"{TOWER}merger", spec.patches.merge**2
    folded = g.emit(Fold(inputs=(_norm(g, x, f"{name}.norm"),), output="folded", count=count), count * spec.hidden_size)
    up = _linear(g, folded, f"{name}.linear_fc1", count * spec.hidden_size, "merger.up")
    return _linear(g, _gelu(g, GeluErf, up), f"{name}.linear_fc2", spec.out, "rows")


def _linear(g: GraphBuilder, x: str, weight: str, columns: int, out: str) -> str:
    """Linear layer and its bias, each rounded."""
    y = g.linear(x, weight, columns, "vision", f"{out}.product")
    bias = g.weight(f"{weight}.bias", (columns,), "vector", "norm")
    return g.emit(Bias(inputs=(y,), output=out, weight=bias), columns)


def _norm(g: GraphBuilder, x: str, name: str) -> str:
    columns = (g.columns(x),)
    weight, bias = (g.weight(part, columns, "vector", "norm") for part in (name, f"{name}.bias"))
    return g.emit(LayerNorm(inputs=(x,), output=f"{name}.out", weight=weight, bias=bias, eps=EPS), columns[0])


def _gelu(g: GraphBuilder, kind: type[Elementwise], x: str) -> str:
    return g.elementwise(kind, (x,), f"{x}.gelu")


FloatTable = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PatchTables:
    """Inputs of a tower's pass besides the patches: neighbours in the table of positions, and angles.

    N = rows x columns of the grid, D a head's columns. By the grid alone; in float64, rounded once.
    """

    corners: npt.NDArray[np.int32]  # [N, 4] rows of the position table: upper left and right, lower left and right
    shares: FloatTable  # [N, 4] of each of them; they sum to 1
    cos: FloatTable  # [N, D / 2]
    sin: FloatTable


def patch_tables(spec: VisionSpec, grid: tuple[int, int]) -> PatchTables:
    """Tables of a frame of ``grid`` (rows, columns) patches, each a positive multiple of the merge size.

    The table of positions is spread over the frame so that its corners lie on the frame's (``align_corners``), with
    bilinear interpolation. Angles: the first half of each is row * f, the second column * f, with
    f = theta^(-2 j / (D / 2)) for j below D / 4 (transformers' ``Qwen3_5VisionModel``). Raises ValueError for another
    grid.
    """
    rows, columns = grid
    merge = spec.patches.merge
    if rows < 1 or columns < 1 or rows % merge or columns % merge:
        raise ValueError(f"a grid of {rows} x {columns} patches, wanted positive multiples of {merge}")
    y, x = merge_order(grid, merge)
    corners, shares = _bilinear(y, x, grid, spec.positions)
    quarter = spec.head_dim // 4
    frequency = spec.theta ** (-np.arange(quarter, dtype=np.float64) / quarter)
    angles = np.concatenate([y[:, None] * frequency, x[:, None] * frequency], axis=1)
    return PatchTables(corners, shares, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def merge_order(grid: tuple[int, int], merge: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and column [N] of each patch of a grid, merge-block-major."""
    rows, columns = grid
    shape = (rows // merge, columns // merge, merge, merge)
    block_y, block_x, y, x = np.indices(shape).reshape(4, -1)
    return block_y * merge + y, block_x * merge + x


def _bilinear(
    y: npt.NDArray[np.int64], x: npt.NDArray[np.int64], grid: tuple[int, int], side: int
) -> tuple[npt.NDArray[np.int32], FloatTable]:
    """The four places of the table around each patch, and their shares."""
    low, high, part = [], [], []
    for index, count in zip((y, x), grid, strict=True):
        place = index * (side - 1) / max(count - 1, 1)
        floor = np.floor(place)
        low.append(floor.astype(np.int64))
        high.append(np.minimum(floor.astype(np.int64) + 1, side - 1))
        part.append(place - floor)
    corners = [row * side + column for row in (low[0], high[0]) for column in (low[1], high[1])]
    shares = [down * right for down in (1 - part[0], part[0]) for right in (1 - part[1], part[1])]
    return np.stack(corners, 1).astype(np.int32), np.stack(shares, 1).astype(np.float32)
