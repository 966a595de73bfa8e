"""The fixed action schema of plans: JSON Schema, and a validator for the part of JSON Schema that it uses.

Which names exist in a scene is checked in :mod:`edge_dflash.demo.checking`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

GRIPS = ("normal", "gentle", "both_arms")

# action -> arguments in the order in which plans write them, each with its JSON Schema
_NAME: dict[str, Any] = {"type": "string"}
ACTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "navigate": {"to": _NAME},
    "open": {"target": _NAME},
    "close": {"target": _NAME},
    "unlock": {"target": _NAME, "with": _NAME},
    "pick": {"object": _NAME, "from": _NAME, "grip": {"enum": list(GRIPS)}},
    "place": {"object": _NAME, "to": _NAME},
    "handover": {"object": _NAME, "to": _NAME},
    "inspect": {"target": _NAME},
    "wait": {"seconds": {"type": "integer"}},
    "say": {"text": {"type": "string"}},
}

Step = dict[str, Any]  # {"action": name, argument: value, ...}


def step(action: str, *arguments: str | int) -> Step:
    """A step with its arguments in schema order."""
    return {"action": action, **dict(zip(ACTIONS[action], arguments, strict=True))}


def plan_schema(names: Mapping[tuple[str, str], Collection[str]] | None = None) -> dict[str, Any]:
    """JSON Schema of a plan: goal, steps of the fixed actions, notes; nothing else is allowed.

    ``names`` gives the names that an argument may have, by (action, argument): an action without any for one of its
    arguments is left out.
    """
    actions = ACTIONS if names is None else _bound(names)
    steps = [
        {
            "type": "object",
            "properties": {"action": {"const": name}, **arguments},
            "required": ["action", *arguments],
            "additionalProperties": False,
        }
        for name, arguments in actions.items()
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Robot plan",
        "type": "object",
        "properties": {
            "goal": {"type": "string"},
            "steps": {"type": "array", "items": {"oneOf": steps}},
            "notes": {"type": "string"},
        },
        "required": ["goal", "steps", "notes"],
        "additionalProperties": False,
    }


def _bound(names: Mapping[tuple[str, str], Collection[str]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The actions with their arguments bound to names."""
    return {
        action: {
            key: {"enum": sorted(names[action, key])} if (action, key) in names else schema
            for key, schema in arguments.items()
        }
        for action, arguments in ACTIONS.items()
        if all(names.get((action, key), "any") for key in arguments)
    }


def schema_problems(value: Any, schema: dict[str, Any], where: str = "plan") -> list[str]:
    """What of ``value`` breaks ``schema``: type, enum, const, required, properties, additionalProperties, items, oneOf.

    Of the choices of a oneOf, the problems of the one whose constants fit are told.
    """
    if "const" in schema and value != schema["const"]:
        return [f"{where} is {value!r}, not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where} is {value!r}, none of {schema['enum']}"]
    if "oneOf" in schema:
        return _one_of(value, schema["oneOf"], where)
    kinds: dict[str, type] = {"string": str, "integer": int, "array": list, "object": dict}
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, kinds[kind]) or isinstance(value, bool)):
        return [f"{where} is {type(value).__name__}, not {kind}"]
    found: list[str] = []
    if kind == "object":
        properties = schema["properties"]
        found += [f"{where} lacks {key!r}" for key in schema["required"] if key not in value]
        found += [f"{where} has unknown key {key!r}" for key in value if key not in properties]
        for key in properties:
            if key in value:
                found += schema_problems(value[key], properties[key], f"{where}.{key}")
    if kind == "array":
        for index, item in enumerate(value):
            found += schema_problems(item, schema["items"], f"{where}[{index}]")
    return found


def _one_of(value: Any, choices: list[dict[str, Any]], where: str) -> list[str]:
    action = value.get("action") if isinstance(value, dict) else None
    for choice in choices:
        if choice["properties"]["action"]["const"] == action:
            return schema_problems(value, choice, where)
    return [f"{where} is no known action: {action!r}"]
