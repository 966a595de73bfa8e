"""A schema in plain form: the same documents, said in the keywords and values that a grammar is made of.

What forbids nothing is left out. A oneOf is an anyOf, because no two of its options hold together; the property that a
discriminator names is required, as OpenAPI says. Names of properties are listed, or have a pattern. Formats of whole
numbers are their bounds, lengths have no decimal point. What is referred to and was left out becomes a definition.

The schema was taken by :func:`edge_dflash.decode.grammar.schema_check.check`.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from typing import Any

from edge_dflash.decode.grammar.schema_apart import tag_of
from edge_dflash.decode.grammar.schema_check import all_nodes, resolve
from edge_dflash.decode.grammar.schema_formats import INTEGERS
from edge_dflash.decode.grammar.schema_idle import forbids_nothing, may_be
from edge_dflash.decode.grammar.schema_keywords import COUNTS, KNOWN, LISTS, NAMED, SINGLE, is_number, kinds_of
from edge_dflash.decode.grammar.schema_names import with_names
from edge_dflash.errors import RequestError


def plain(root: dict[str, Any]) -> dict[str, Any]:
    """The schema in plain form. ``root`` is not changed."""
    root = _narrowed(root)
    made: dict[str, Any] = _node(root)
    names = (name for name in map("left{}".format, count()) if name not in root.get("$defs", {}))
    places: dict[str, str] = {}  # of a reference: where what it means is now
    pending = [made]
    while pending:
        for node in tuple(all_nodes(pending.pop())):
            reference = node.get("$ref", "#")
            if reference not in places:
                places[reference] = reference
                if not _leads(made, reference):
                    name = next(names)
                    places[reference] = f"#/$defs/{name}"
                    made.setdefault("$defs", {})[name] = left = _node(resolve(root, reference))
                    pending.append(left)
            if "$ref" in node:
                node["$ref"] = places[reference]
    return made


def _node(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    kept = (key for key in node if key in KNOWN and not forbids_nothing(key, node))
    made = {key: _value(key, node[key]) for key in kept}
    if "oneOf" in made:
        options = made.pop("oneOf")
        if "anyOf" in made:
            made["allOf"] = [*made.get("allOf", ()), {"anyOf": options}]
        else:
            made["anyOf"] = options
    if made.get("format") in INTEGERS and may_be(node, "integer", "number"):
        _be_within(made, *INTEGERS[made.pop("format")])
    return made


def _narrowed(root: dict[str, Any]) -> dict[str, Any]:
    """A copy that says propertyNames by other keywords, and requires the properties that discriminators name."""
    made: dict[str, Any] = json.loads(json.dumps(root))
    for node in all_nodes(made):
        if "propertyNames" in node and not forbids_nothing("propertyNames", node):
            node |= with_names(node, partial(resolve, made)) or {}
    pending = [(option, tag) for node in all_nodes(made) if (tag := tag_of(node)) for option in node["oneOf"]]
    seen: set[tuple[int, str]] = set()
    while pending:
        option, tag = pending.pop()
        if not isinstance(option, dict) or (id(option), tag) in seen:
            continue
        seen.add((id(option), tag))
        inside = [child for key in ("allOf", "anyOf", "oneOf") for child in option.get(key, ())]
        if "$ref" in option:
            inside.append(resolve(made, option["$ref"]))
        pending += ((child, tag) for child in inside)
        if not inside or tag in option.get("properties", ()):
            option["required"] = list(dict.fromkeys([*option.get("required", ()), tag]))
    return made


def _value(key: str, value: Any) -> Any:
    if key in NAMED:
        return {name: _node(child) for name, child in value.items()}
    if key in LISTS and isinstance(value, list):
        return [_node(child) for child in value]
    if key in SINGLE:
        return _node(value)
    if key in COUNTS or (is_number(value) and value == 0):  # 2.0 is 2, -0.0 is 0
        return int(value)
    return value


def _be_within(made: dict[str, Any], low: int, high: int) -> None:
    """Let numbers be whole, and within bounds besides those that are given."""
    made["type"] = list(dict.fromkeys("integer" if kind == "number" else kind for kind in kinds_of(made)))
    for key, bound, sign in (("minimum", low, 1), ("maximum", high, -1)):
        given = made.get(key)
        if not is_number(given) or (bound - given) * sign > 0:
            made[key] = bound
            if isinstance(made.get(f"exclusive{key.capitalize()}"), bool):  # it was of the other bound
                del made[f"exclusive{key.capitalize()}"]


def _leads(made: dict[str, Any], reference: str) -> bool:
    try:
        resolve(made, reference)
    except RequestError:
        return False
    return True
