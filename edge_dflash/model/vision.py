"""The vision tower of Qwen3.5 / Qwen3.6 as a Program: patches of one frame -> rows of the language model.

Formulas: transformers' ``Qwen3_5VisionModel``. Blocks have GELU by tanh, the merger by erf.
"""

from __future__ import annotations

from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.ops import Elementwise
from edge_dflash.model.program import Program
from edge_dflash.model.specs import MAX_LAYERS, VisionSpec
from edge_dflash.model.vision_ops import Bias, Fold, FrameAttend, GeluErf, GeluTanh, LayerNorm, PositionRows

TOWER = "target.visual."  # names of a tower's weights start with it
PATCH_EMBED = f"{TOWER}patch_embed.proj"  # checkpoints store it as a convolution [H, channels, frames, rows, columns]
MODULE = "vision"  # of linears in recipes
EPS = 1e-6  # of all norms


def vision_program(spec: VisionSpec) -> Program:
    """The pass ``see``: inputs patches [N, C], and those of :class:`~edge_dflash.model.patch_tables.PatchTables`.

    Outputs: "embedded" [N, H] before the first block, "hidden" [N, H] behind the last, "rows" [N / merge^2, out].
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
    y = g.linear(x, weight, columns, MODULE, f"{out}.product")
    bias = g.weight(f"{weight}.bias", (columns,), "vector", "norm")
    return g.emit(Bias(inputs=(y,), output=out, weight=bias), columns)


def _norm(g: GraphBuilder, x: str, name: str) -> str:
    columns = (g.columns(x),)
    weight, bias = (g.weight(part, columns, "vector", "norm") for part in (name, f"{name}.bias"))
    return g.emit(LayerNorm(inputs=(x,), output=f"{name}.out", weight=weight, bias=bias, eps=EPS), columns[0])


def _gelu(g: GraphBuilder, kind: type[Elementwise], x: str) -> str:
    return g.elementwise(kind, (x,), f"{x}.gelu")
