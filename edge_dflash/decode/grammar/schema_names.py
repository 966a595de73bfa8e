"""``propertyNames`` said by other keywords: by ``properties`` where it lists them, else by ``patternProperties``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from edge_dflash.decode.grammar.schema_idle import forbids_nothing
from edge_dflash.decode.grammar.schema_keywords import Node, kinds_of

_MOST_BYTES = 64 * 1024  # of the schema of free properties, written once per name


def names_in(node: dict[str, Any], resolve: Callable[[str], Node]) -> Node:
    """What a schema says of the names of properties, references followed."""
    names: Node = node["propertyNames"]
    for _ in range(16):
        if not isinstance(names, dict) or set(_says(names)) != {"$ref"}:
            break
        names = resolve(names["$ref"])
    return names


def with_names(node: dict[str, Any], resolve: Callable[[str], Node]) -> dict[str, Any] | None:
    """The schema without ``propertyNames``, for the same objects; None where other keywords cannot say it."""
    names = names_in(node, resolve)
    if not isinstance(names, dict) or node.get("patternProperties"):
        return None
    says, known, rest = _says(names), node.get("properties", {}), node.get("additionalProperties", True)
    made = {**node, "additionalProperties": False}
    del made["propertyNames"]
    if says.keys() in ({"enum"}, {"const"}):
        listed = [name for name in says.get("enum", [says.get("const")]) if isinstance(name, str)]
        free = dict.fromkeys((name for name in listed if name not in known), rest)
        if len(free) * len(json.dumps(rest)) > _MOST_BYTES:
            return None
        return {**made, "properties": {**{name: known[name] for name in known if name in listed}, **free}}
    if known:
        return None
    if says.keys() == {"pattern"}:
        return {**made, "patternProperties": {says["pattern"]: rest}}
    if says.keys() <= {"minLength", "maxLength"}:
        low, high = says.get("minLength", 0), says.get("maxLength", "")
        return {**made, "patternProperties": {f"^(?s:.{{{low:.0f},{high and format(high, '.0f')}}})$": rest}}
    return None


def _says(names: dict[str, Any]) -> dict[str, Any]:
    """What forbids some text."""
    texts = "string" in kinds_of(names)
    return {
        key: value for key, value in names.items() if not forbids_nothing(key, names) and not (key == "type" and texts)
    }
