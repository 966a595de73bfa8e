"""A recipe: which number format each weight, the activations and the KV cache of a bundle get; and its YAML file.

Module classes are those of :class:`edge_dflash.model.program.WeightSpec`; the file's keys are explained in
``engines/README.md``. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from sys import float_info
from typing import Literal, get_args

from edge_dflash.common.files import directory, is_file
from edge_dflash.common.nested import LINE, Items, Object, only
from edge_dflash.common.rules import FLAG, TEXT, either, number, one_of, whole
from edge_dflash.common.tables import encode, read_yaml
from edge_dflash.errors import RecipeError
from edge_dflash.model.program import WeightSpec
from edge_dflash.model.registry import DRAFTERS
from edge_dflash.model.specs import DrafterLayerMask, PairSpec
from edge_dflash.weights.formats import FORMATS, QUANTIZED, Weight, WeightFormat

Wish = str  # one of WISHES
WISHES: tuple[Wish, ...] = (*(form.name for form in FORMATS.values() if form.wished), "keep")
_QUANTIZED = tuple(form.name for form in QUANTIZED)
TARGET_MODULES = (
    *("attention", "gated_delta", "mlp", "experts", "lm_head", "vision"),
    *("gates", "router", "embedding", "norm", "conv"),
)
DRAFTER_MODULES = tuple(
    dict.fromkeys(["attention", "mlp", "fc", "norm", *(m for kind in DRAFTERS.values() for m in kind.modules)])
)
WIDE_MODULES = ("gates", "router", "embedding", "norm", "conv", "walk")  # small or sensitive: never quantized
Rounding = Literal["max", "search", "compensated"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
WITHOUT_BLOCKS = ("vision",)  # no format with block scales: rows of a picture are many, FP8 is as fast
W4A4_MODULES = ("attention", "gated_delta", "mlp")  # experts, lm_head and fc always read wide activations


@dataclass(frozen=True)
class Override:
    """A wish for all weights whose canonical name matches a glob (``*``, ``?``, ``[0-9]``, case-sensitive)."""

    match: str
    format: Wish


@dataclass(frozen=True)
class MaskOverride:
    """What the block rows of all drafter layers whose name matches a glob see, in place of what their config says."""

    match: str  # names are drafter.layers.0, drafter.layers.1, ...
    block: Literal["config", "causal", "bidirectional"] = "config"
    window: int | Literal["config", "none"] = "config"  # tokens


@dataclass(frozen=True)
class Calibration:
    """How KV and activation scales are measured: on up to ``tokens`` tokens of ``file``; KV scales get a ``margin``."""

    file: str = (
        "robot_planning.jsonl"  # in calib/, or an absolute path: what a recipe file names beside itself becomes one
    )
    tokens: int = 2048
    margin: float = 1.25  # >= 1: KV scale = amax * margin / 448, for values beyond the calibration set's

    @property
    def path(self) -> Path:
        """Where the prompts lie. Raises RecipeError when there is no such file."""
        path = directory("calib") / self.file  # an absolute path stays what it is
        if is_file(path):
            return path
        raise RecipeError(
            f"calibration file {self.file!r} is neither in calib/ nor beside the recipe: correct the name"
        )


@dataclass(frozen=True)
class Context:
    """Sizes of a build, lengths in tokens, unless its config gives others."""

    max_context: int = 8192
    prefill_chunk: int | None = None  # None: what the arch computes in a tenth of a second
    lanes: int = 1  # sequences that are decoded at once


@dataclass(frozen=True)
class Recipe:
    """All choices of a build. The field defaults are the default recipe; :meth:`choice` decides a weight's format."""

    name: str
    description: str = ""
    target: Mapping[str, Wish] = field(default_factory=lambda: DEFAULT_TARGET)
    drafter: Mapping[str, Wish] = field(default_factory=lambda: DEFAULT_DRAFTER)
    overrides: tuple[Override, ...] = ()
    masks: tuple[MaskOverride, ...] = ()
    activations: Literal["bf16", "nvfp4"] = "bf16"
    kv: Literal["fp8", "bf16"] = "fp8"
    calibration: Calibration = Calibration()
    context: Context = Context()
    requantize: Literal["never", "fp8"] = "never"  # weights that may be rounded a second time: those stored in FP8
    rounding: Rounding = "search"  # how NVFP4 block scales, and codes, are chosen
    keeps: bool = False  # a quantized weight stays as it is stored, whatever is wished of it

    @property
    def kv_format(self) -> Literal["fp8", "bfloat16"]:
        """Of stored keys and values."""
        return "fp8" if self.kv == "fp8" else "bfloat16"

    def choice(self, name: str, spec: WeightSpec, stored: Weight | None) -> WeightFormat:
        """Format that the weight gets in a bundle; equal to the stored format when it is to be copied as it is.

        ``stored`` is the checkpoint's weight; None (its file is not at hand) is taken as BF16. Weights other than
        linears, and gates, are always copied. Raises RecipeError, naming the weight, when the recipe asks for another
        format than a quantized checkpoint has, quantizes what must stay wide, or asks NVFP4 of an odd input dimension.
        """
        wish, origin = self._wish(name, spec)
        found: WeightFormat = "bf16" if stored is None else stored.format
        if spec.kind != "linear" or spec.module in WIDE_MODULES:
            if wish in _QUANTIZED:
                raise RecipeError(
                    f"recipe {self.name}: {origin} asks for {wish} of {name}, but {spec.module} weights "
                    "always stay wide: use keep, or a narrower match"
                )
            return found
        if not _may_be(spec.module, wish) and found != wish:
            raise RecipeError(
                f"recipe {self.name}: {origin} asks for {wish} of {name}, but {spec.module} weights are built as bf16 "
                "or fp8: use one of them, or a narrower match"
            )
        if wish == "keep" or wish == found or (self.keeps and found in _QUANTIZED):
            return found
        if found in _QUANTIZED and (found, wish) != (self.requantize, "nvfp4"):
            again = ", or requantize: fp8" if (found, wish) == ("fp8", "nvfp4") else ""
            raise RecipeError(
                f"recipe {self.name}: {origin} asks for {wish} of {name}, which the checkpoint stores as {found}; "
                f"a quantized weight is not converted: use keep or {found}, or a checkpoint in BF16{again}"
            )
        if (block := FORMATS[wish].block) and spec.shape[-1] % block:
            raise RecipeError(
                f"recipe {self.name}: {origin} asks for {wish} of {name}, whose input dimension {spec.shape[-1]} "
                f"is not a multiple of {block}: use fp8 or bf16"
            )
        return wish

    def formats(
        self, weights: Mapping[str, WeightSpec], stored: Mapping[str, Weight] | None = None
    ) -> dict[str, WeightFormat]:
        """Return the choice for every weight of a pair. Raises RecipeError also for an override that matches none.

        Those of a drafter mean nothing to a pair without one.
        """
        for override in self.overrides:
            idle = override.match.startswith("drafter.") and not any(name.startswith("drafter.") for name in weights)
            if not idle and not any(fnmatchcase(name, override.match) for name in weights):
                raise RecipeError(
                    f"recipe {self.name}: override {override.match!r} matches no weight of this pair: correct the glob "
                    f"(names look like {next(iter(weights), 'target.layers.0.mlp.gate_proj')})"
                )
        known = stored or {}
        return {name: self.choice(name, spec, known.get(name)) for name, spec in weights.items()}

    def masked(self, pair: PairSpec) -> PairSpec:
        """The pair with the drafter's masks as the recipe wants them. Raises RecipeError for one that matches none.

        Masks change how many drafts are accepted, never the output.
        """
        if pair.drafter is None:
            return pair
        layers = {f"drafter.layers.{i}": layer for i, layer in enumerate(pair.drafter.layers)}
        for mask in self.masks:
            found = [name for name in layers if fnmatchcase(name, mask.match)]
            if not found:
                raise RecipeError(
                    f"recipe {self.name}: mask {mask.match!r} matches no layer of the drafter: correct the glob "
                    f"(names are {', '.join(layers)})"
                )
            for name in found:
                layers[name] = DrafterLayerMask(
                    layers[name].bidirectional if mask.block == "config" else mask.block == "bidirectional",
                    layers[name].window if mask.window == "config" else None if mask.window == "none" else mask.window,
                )
        return replace(pair, drafter=replace(pair.drafter, layers=tuple(layers.values())))

    def nvfp4_activations(self, spec: WeightSpec, chosen: WeightFormat) -> bool:
        """Whether the linear reads its input as dynamic NVFP4 (W4A4), so that it needs a calibrated input scale."""
        return self.activations == "nvfp4" and chosen == "nvfp4" and spec.module in W4A4_MODULES

    def _wish(self, name: str, spec: WeightSpec) -> tuple[Wish, str]:
        """The wish for a weight and the key it comes from: the last matching override, or the module class."""
        for override in reversed(self.overrides):
            if fnmatchcase(name, override.match):
                return override.format, f"override {override.match!r}"
        model = name.split(".", 1)[0]
        modules = self.target if model == "target" else self.drafter
        return modules.get(spec.module, "keep"), f"{model}.{spec.module}"


DEFAULT_TARGET: Mapping[str, Wish] = {
    "attention": "nvfp4",
    "gated_delta": "nvfp4",
    "mlp": "nvfp4",
    "experts": "nvfp4",
    "lm_head": "nvfp4",
    "vision": "bf16",
}
DEFAULT_DRAFTER: Mapping[str, Wish] = {"attention": "nvfp4", "mlp": "nvfp4", "fc": "fp8"}


def default_recipe() -> Recipe:
    """All linears NVFP4, lm_head included; the drafter's fc FP8; the tower BF16; FP8 KV; BF16 activations.

    Linears that a checkpoint stores in FP8 or NVFP4 stay as they are: nobody asked for other formats.
    """
    text = "wide linears to NVFP4, the drafter's fc to FP8; quantized ones kept; FP8 keys and values, BF16 activations"
    return Recipe("default", text, keeps=True)


SCHEMA = 1
_POSITIVE = whole(1).saying("a positive integer")


def _modules(names: Sequence[str]) -> Object:
    """The wishes that a recipe may have for each class of modules."""
    return Object({name: one_of(*(wish for wish in WISHES if _may_be(name, wish))) for name in names})


def _may_be(module: str, wish: Wish) -> bool:
    if module in WIDE_MODULES:
        return wish in ("bf16", "keep")
    return module not in WITHOUT_BLOCKS or wish == "keep" or not FORMATS[wish].block


_RECIPE = Object(
    {
        "schema": only(f"give {SCHEMA}, the version that this edge-dflash reads", SCHEMA),
        "name": LINE,
        "description": TEXT,
        "target": _modules(TARGET_MODULES),
        "drafter": _modules(DRAFTER_MODULES),
        "overrides": Items(
            Object(
                {"match": LINE, "format": one_of(*WISHES)},
                {"match": "give a glob of names", "format": f"give one of {', '.join(WISHES)}"},
            )
        ),
        "masks": Items(
            Object(
                {
                    "match": LINE,
                    "block": one_of("config", "causal", "bidirectional"),
                    "window": either(one_of("config", "none"), whole(1), "a positive integer, none or config"),
                },
                {"match": "give a glob of the drafter's layers"},
            )
        ),
        "requantize": one_of("never", "fp8"),
        "rounding": one_of(*ROUNDINGS),
        "keeps": FLAG,
        "activations": one_of("bf16", "nvfp4"),
        "kv": one_of("fp8", "bf16"),
        "calibration": Object(
            {
                "file": LINE,
                "tokens": _POSITIVE,
                "margin": number(1, float_info.max).saying("a number from 1 (a scale is multiplied by it)"),
            }
        ),
        "context": Object({"max_context": _POSITIVE, "prefill_chunk": _POSITIVE, "lanes": _POSITIVE}),
    },
    {"schema": f"give {SCHEMA}, the version that this edge-dflash reads", "name": "give a text"},
)


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe file. Keys that are left out have the default recipe's values.

    Raises RecipeError naming the file, the key, the value found and what is accepted.
    """
    path = Path(path)
    found = read_yaml(path, _RECIPE, "engines/README.md")
    del found["schema"]
    found["target"] = {**DEFAULT_TARGET, **found.get("target", {})}
    found["drafter"] = {**DEFAULT_DRAFTER, **found.get("drafter", {})}
    found["overrides"] = tuple(Override(**one) for one in found.get("overrides", ()))
    found["masks"] = tuple(MaskOverride(**one) for one in found.get("masks", ()))
    found["calibration"] = Calibration(**found.get("calibration", {}))
    found["context"] = Context(**found.get("context", {}))
    recipe = Recipe(**found)
    near = path.parent / recipe.calibration.file
    if is_file(near):
        recipe = replace(recipe, calibration=replace(recipe.calibration, file=str(near.resolve())))
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """Text of a file that :func:`load_recipe` reads as this recipe."""
    import yaml

    body = {"schema": SCHEMA, **encode(recipe)}
    body["context"] = {key: value for key, value in body["context"].items() if value is not None}
    return str(yaml.safe_dump(body, sort_keys=False, width=120))
