"""Reading a recipe from YAML. Knows the file's keys, explained in ``engines/README.md``, and no weight; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from edge_dflash.common.files import is_file
from edge_dflash.common.yaml_table import Table, read_table
from edge_dflash.weights.recipe import (
    DEFAULT_DRAFTER,
    DEFAULT_TARGET,
    DRAFTER_MODULES,
    TARGET_MODULES,
    WIDE_MODULES,
    WISHES,
    Calibration,
    Context,
    MaskOverride,
    Override,
    Recipe,
    Wish,
)

SCHEMA = 1
KEYS = (
    "schema",
    "name",
    "description",
    "target",
    "drafter",
    "overrides",
    "masks",
    "activations",
    "kv",
    "calibration",
    "context",
)


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe file. Keys that are left out have the default recipe's values.

    Raises RecipeError naming the file, the key, the value found and what is accepted.
    """
    path = Path(path)
    table = read_table(path, KEYS, "engines/README.md")
    if table.get("schema") != SCHEMA:
        raise table.wrong("schema", f"{SCHEMA}, the version that this edge-dflash reads")
    recipe = Recipe(
        name=table.text("name", None),
        description=table.text("description", ""),
        target=_modules(table.child("target", TARGET_MODULES), DEFAULT_TARGET),
        drafter=_modules(table.child("drafter", DRAFTER_MODULES), DEFAULT_DRAFTER),
        overrides=tuple(
            Override(entry.text("match", None), entry.one_of("format", WISHES, None))
            for entry in table.children("overrides", ("match", "format"))
        ),
        masks=tuple(_mask(entry) for entry in table.children("masks", ("match", "block", "window"))),
        activations=table.one_of("activations", ("bf16", "nvfp4"), "bf16"),
        kv=table.one_of("kv", ("fp8", "bf16"), "fp8"),
        calibration=_calibration(table.child("calibration", ("file", "tokens", "margin"))),
        context=_context(table.child("context", ("max_context", "prefill_chunk"))),
    )
    beside = path.parent / recipe.calibration.file
    if is_file(beside):
        recipe = replace(recipe, calibration=replace(recipe.calibration, file=str(beside.resolve())))
    return recipe


def _modules(table: Table, default: Mapping[str, Wish]) -> dict[str, Wish]:
    wishes = dict(default)
    for module in table.given:
        accepted: tuple[Wish, ...] = ("bf16", "keep") if module in WIDE_MODULES else WISHES
        wishes[module] = table.one_of(module, accepted, None)
    return wishes


def _mask(table: Table) -> MaskOverride:
    words: tuple[Literal["config", "none"], ...] = ("config", "none")
    window = table.get("window", "config")
    if window not in words and (isinstance(window, bool) or not isinstance(window, int) or window <= 0):
        raise table.wrong("window", "a positive integer, none or config")
    return MaskOverride(
        match=table.text("match", None),
        block=table.one_of("block", ("config", "causal", "bidirectional"), "config"),
        window=table.one_of("window", words, "config") if isinstance(window, str) else table.positive("window", 1),
    )


def _calibration(table: Table) -> Calibration:
    default = Calibration()
    margin = table.get("margin", default.margin)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 1 <= margin < math.inf:
        raise table.wrong("margin", "a number from 1 (a scale is multiplied by it)")
    return Calibration(table.text("file", default.file), table.positive("tokens", default.tokens), float(margin))


def _context(table: Table) -> Context:
    default = Context()
    chunk = table.positive("prefill_chunk", 1) if "prefill_chunk" in table.given else default.prefill_chunk
    return Context(table.positive("max_context", default.max_context), chunk)
