"""Pairs whose dimensions ship with edge-dflash, so that they can be timed with random weights and no download."""

from __future__ import annotations

import json
from pathlib import Path

from edge_dflash.common.tables import decode
from edge_dflash.errors import RequestError
from edge_dflash.model.specs import PairSpec

FILE = Path(__file__).parent / "pairs.json"  # PairSpec by name, as read from the published config.json files


def pair_names() -> tuple[str, ...]:
    """Names of the pairs, the largest first."""
    return tuple(json.loads(FILE.read_text()))


def synthetic_pair(name: str) -> PairSpec:
    """Dimensions of a published pair. Raises RequestError listing the names."""
    found = json.loads(FILE.read_text())
    if name not in found:
        raise RequestError(f"no synthetic pair is called {name!r}; there are {', '.join(found)}")
    return decode(PairSpec, found[name], f"{FILE.name}: {name}")
