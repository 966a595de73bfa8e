"""Recipes by file or, for those that ship with edge-dflash, by name."""

from __future__ import annotations

import re
from pathlib import Path

from edge_dflash.common.files import directory, is_file
from edge_dflash.errors import RecipeError


def find_recipe(given: Path) -> Path:
    """Return the recipe file ``given``, or the shipped recipe of that name. Raises RecipeError listing the names."""
    if is_file(given):
        return given
    shipped = {path.stem: path for path in sorted(directory("engines").glob("*.yaml"))}
    name = re.sub(r"(-sm\d+)a(?=-|$)", r"\1", str(given))  # sm110a is sm110
    if name in shipped:
        return shipped[name]
    raise RecipeError(f"no recipe file {given}, and none that ships is called so; shipped: {', '.join(shipped)}")
