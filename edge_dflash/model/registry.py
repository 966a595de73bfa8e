"""The registry of targets' architectures and of drafters, each from its config.json to its part of the three passes.

A row names the file that describes it. Weights have the names of Hugging Face's modules: a graph function says
``target.layers.3.mlp.gate_proj``, and :class:`TensorNames` says where that lies in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from edge_dflash.common.files import is_there
from edge_dflash.common.tables import read_json
from edge_dflash.errors import CheckpointError, UnsupportedModelError
from edge_dflash.model import dflash, dflash2, dspark, qwen3, qwen3_5, speculators, vision
from edge_dflash.model.blocks import decoder_layer, embed, logits
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.fields import Fields, Table
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import EMBEDDING, DrafterSpec, LayerSpec, PairSpec, TargetSpec


@dataclass(frozen=True)
class TensorNames:
    """What checkpoints write around the names of modules."""

    prefixes: tuple[str, ...] = ("model.language_model.", "model.", "")  # the first that a tensor has
    skipped: tuple[str, ...] = ("mtp.", "model.mtp.")  # those of a multi-token head
    tower: tuple[str, ...] = ("model.visual.", "visual.")  # a vision tower's, skipped where nobody wants one
    bare: tuple[str, ...] = (".A_log", ".dt_bias", ".bias")  # ends of names without ``.weight``
    k_scales: tuple[str, ...] = ("self_attn.k_proj.k_scale", "self_attn.k_scale")  # of FP8 keys, within a layer
    v_scales: tuple[str, ...] = ("self_attn.v_proj.v_scale", "self_attn.v_scale")
    copies: Mapping[str, str] = field(default_factory=dict)  # tensors of a drafter that repeat a weight of the target


@dataclass(frozen=True)
class Target:
    """An architecture of targets."""

    classes: tuple[str, ...]  # what config.json calls it
    table: Table  # of config.json
    read: Callable[[Fields], TargetSpec]
    layers: Callable[[TargetSpec], tuple[LayerSpec, ...]]
    nested: Table | None = None  # of a config.json with ``text_config``
    names: TensorNames = TensorNames()


@dataclass(frozen=True)
class Drafter:
    """A kind of drafters. All append their context as DFlash does."""

    classes: tuple[str, ...]  # what config.json calls it
    table: Table
    read: Callable[[Fields, int | None], DrafterSpec]  # (config.json, layers of the target)
    propose: Callable[[GraphBuilder, TargetSpec, DrafterSpec], Program]
    bare: tuple[str, ...]  # ends of names without ``.weight``
    modules: tuple[str, ...] = ()  # classes of weights in recipes besides attention, mlp, fc and norm
    skipped: tuple[str, ...] = ()  # see TensorNames

    @property
    def names(self) -> TensorNames:
        """What its checkpoints write around the names of modules."""
        skipped = (*dflash.TRAINED_WITH, *self.skipped)
        return TensorNames(tower=(), skipped=skipped, bare=self.bare, copies=dflash.COPIES)


TARGETS: Mapping[str, Target] = {
    "qwen3": Target(("Qwen3ForCausalLM",), qwen3.TABLE, qwen3.read, qwen3.layers),
    "qwen3_5": Target(qwen3_5.NAMES, qwen3_5.TABLE, qwen3_5.read, qwen3_5.layers, qwen3_5.NESTED),
    "qwen3_moe": Target(("Qwen3MoeForCausalLM",), qwen3.MOE_TABLE, qwen3.read_moe, qwen3.layers),
    "qwen3_5_moe": Target(qwen3_5.MOE_NAMES, qwen3_5.MOE_TABLE, qwen3_5.read_moe, qwen3_5.layers, qwen3_5.MOE_NESTED),
}
"""By :attr:`TargetSpec.architecture`."""

DRAFTERS: Mapping[str, Drafter] = {
    "dflash": Drafter(
        dflash.NAMES, dflash.TABLE, dflash.read, dflash.propose, bare=(".d2t",), skipped=(dflash.DRAFTED,)
    ),
    dflash2.KIND: Drafter(dflash2.NAMES, dflash2.TABLE, dflash2.read, dflash2.propose, dflash2.BARE, ("conv", "walk")),
    dspark.KIND: Drafter(dspark.NAMES, dspark.TABLE, dspark.read, dspark.propose, dspark.BARE, ("walk",)),
}
"""By :attr:`DrafterSpec.kind`."""


Row = TypeVar("Row", Target, Drafter)
MASK_ROW = "mask_embedding.pt"  # next to the files of some drafters
NO_DRAFTER = "none"  # in the place of a drafter's directory: the target alone


def read_pair(target: Path, drafter: Path | None) -> PairSpec:
    """Specs of two checkpoint directories that belong together, or of a target that is to decode plainly.

    Raises CheckpointError, UnsupportedModelError.
    """
    spec = read_target_spec(target)
    return PairSpec(spec, None) if drafter is None else match_pair(spec, read_drafter_spec(drafter, spec.num_layers))


def _config(directory: Path) -> tuple[Path, dict[str, Any]]:
    """The config.json of a checkpoint, and what it says. Raises CheckpointError."""
    if not is_there(directory):
        raise CheckpointError(
            f"no directory {directory}; give one with a checkpoint: a name of the hub is not downloaded"
        )
    file = directory / "config.json"
    return file, read_json(file)


def read_target_spec(directory: Path) -> TargetSpec:
    """Spec of the target in ``directory``. Raises CheckpointError, UnsupportedModelError for another architecture."""
    file, config = _config(directory)
    if speculators.is_spelled(config) or any(_name(file, config) in one.classes for one in DRAFTERS.values()):
        raise UnsupportedModelError(f"{file} is a drafter; give it as the drafter, not as the target")
    name, target = _of(file, config, TARGETS)
    text = config.get("text_config")
    if text is not None and target.nested is not None:
        flat, sees = qwen3_5.flat(target.nested, config), vision.has_tower(directory, config)
        fields = Fields(file, flat, vision.pictured(target.nested) if sees else target.nested)
        return vision.with_tower(target.read(fields), fields) if sees else target.read(fields)
    if name.endswith("ForConditionalGeneration"):
        raise CheckpointError(f"{file} lacks the field text_config, which {name} has; the checkpoint is incomplete")
    return target.read(Fields(file, config, target.table))


def read_drafter_spec(directory: Path, target_layers: int | None = None) -> DrafterSpec:
    """Spec of the drafter in ``directory``. Raises CheckpointError, UnsupportedModelError for another design.

    ``target_layers``: of its target, where a file may not say how many.
    """
    config: Mapping[str, Any]
    file, config = _config(directory)
    if is_there(directory / MASK_ROW):
        raise UnsupportedModelError(
            f"{directory / MASK_ROW}: a mask row of the drafter's own, wanted a drafter that embeds its mask token "
            "with the target's embedding"
        )
    if speculators.is_spelled(config):
        config = speculators.spelled(Fields(file, config, speculators.TABLE))
    _, drafter = _of(file, config, DRAFTERS)
    return drafter.read(Fields(file, config, drafter.table), target_layers)


def match_pair(target: TargetSpec, drafter: DrafterSpec) -> PairSpec:
    """Check that a drafter was made for a target of these dimensions. Raises CheckpointError naming the field."""
    for name, found, wanted in (
        ("num_target_layers", drafter.num_target_layers, target.num_layers),
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise CheckpointError(
                f"the drafter's {name} is {found}, the target's is {wanted}; use the drafter trained for this target"
            )
    for tap in drafter.target_layer_ids:
        if not EMBEDDING <= tap <= target.num_layers - 2:  # the last layer's output is only seen after the final norm
            raise CheckpointError(
                f"the drafter's target_layer_ids hold {tap}, wanted {EMBEDDING} (the embedding) to "
                f"{target.num_layers - 2} for this target"
            )
    if drafter.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"the drafter's mask_token_id is {drafter.mask_token_id}, outside the vocabulary of {target.vocab_size}"
        )
    return PairSpec(target, drafter)


def pair_programs(spec: PairSpec) -> PairPrograms:
    """Write the passes of a pair."""
    g = GraphBuilder("propose", commits=False)
    drafter = spec.drafter
    propose = DRAFTERS[drafter.kind].propose(g, spec.target, drafter) if drafter else g.program()
    return PairPrograms(_target(spec, "prefill"), _target(spec, "verify"), propose, _tower(spec.target))


def _tower(target: TargetSpec) -> Program | None:
    """The pass of the target's vision tower. Raises ValueError for one of another target."""
    if (spec := target.vision) is None:
        return None
    if spec.out != target.hidden_size or not 0 <= spec.image_token_id < target.vocab_size:
        raise ValueError(f"rows of {spec.out} columns and image token {spec.image_token_id} are of another target")
    rope = target.attention.rope
    if rope.mrope_section is None or sum(rope.mrope_section) != rope.dims // 2:
        raise ValueError(f"sections {rope.mrope_section} of {rope.dims // 2} pairs")
    return vision.vision_program(spec)


def _target(spec: PairSpec, name: Literal["prefill", "verify"]) -> Program:
    """ids -> logits, with the drafter's context, if there is one, appended from the same rows' taps."""
    target, prefill = spec.target, name == "prefill"
    layers = TARGETS[target.architecture].layers(target)
    g = GraphBuilder(name, commits=prefill)
    x = embed(g, target)
    outputs = {EMBEDDING: x}  # outputs[i] is the output of layer i: HF hidden_states[i + 1]
    for index, layer in enumerate(layers):
        outputs[index] = x = decoder_layer(g, x, f"target.layers.{index}", layer)
    tapped: dict[str, str] = {}
    if (drafter := spec.drafter) is not None:
        tapped["taps"] = g.concat(tuple(outputs[i] for i in drafter.target_layer_ids), "taps")
        dflash.append_context(g, tapped["taps"], drafter)
    if prefill:
        x = g.select_rows(x, "last", "last_row")
    plus_one = any(layer.plus_one for layer in layers)
    x = g.rms_norm(x, "target.norm", target.rms_norm_eps, "hidden", plus_one=plus_one)
    return g.program(logits=logits(g, x, target), hidden=x, **tapped)


def _name(file: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"{file}: architectures is {names!r}, wanted a list with one name")
    return names[0]


def _of(file: Path, config: Mapping[str, Any], rows: Mapping[str, Row]) -> tuple[str, Row]:
    """The class that config.json names, and its row. Raises UnsupportedModelError."""
    name, known = _name(file, config), {called: row for row in rows.values() for called in row.classes}
    if name not in known:
        raise UnsupportedModelError(f"{file}: architecture {name} is not supported, wanted {' or '.join(known)}")
    return name, known[name]
