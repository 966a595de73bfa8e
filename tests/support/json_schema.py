"""The part of JSON Schema that the document of the API uses, checked value by value."""

from __future__ import annotations

import re

TYPES = {"string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}
WORDS = {
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "minimum", "maximum", "minLength", "maxLength",
    "pattern", "items", "minItems", "maxItems", "properties", "required", "additionalProperties", "$ref", "default",
    "description",
}  # fmt: skip


def faults(schema, value, root, where="body"):
    """What of a value is not as a schema says; ``root`` is the document."""
    assert schema.keys() <= WORDS, schema.keys() - WORDS
    if "$ref" in schema:
        named = root["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return faults(named, value, root, where)
    found = []
    kinds = schema.get("type", [])
    if kinds and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return [f"{where} is {value!r}, no {kinds}"]
    if "enum" in schema and not any(same(value, one) for one in schema["enum"]):
        found.append(f"{where} is {value!r}, none of {schema['enum']}")
    if "const" in schema and not same(value, schema["const"]):
        found.append(f"{where} is {value!r}, not {schema['const']!r}")
    for word, wanted in (("anyOf", range(1, 99)), ("oneOf", (1,)), ("allOf", (len(schema.get("allOf", ())),))):
        if word in schema:
            each = [faults(one, value, root, where) for one in schema[word]]
            if sum(not one for one in each) not in wanted:
                found += [f"{where}: {word} does not hold"] + [fault for one in each for fault in one]
    if "not" in schema and not faults(schema["not"], value, root, where):
        found.append(f"{where} is what it must not be")
    return found + _inside(schema, value, root, where)


def same(value, other):
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _is(value, kind):
    if kind in ("integer", "number"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or float(value).is_integer())
    return isinstance(value, TYPES[kind])


def _inside(schema, value, root, where):
    found = []
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            found.append(f"{where} is {value}, out of range")
    elif isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            found.append(f"{where} has {len(value)} characters")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            found.append(f"{where} does not match")
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{where} has {len(value)} items")
        for index, item in enumerate(value):
            found += faults(schema.get("items", {}), item, root, f"{where}[{index}]")
    elif isinstance(value, dict):
        found += [f"{where}.{key} is missing" for key in schema.get("required", ()) if key not in value]
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, item in value.items():
            if key not in known and others is False:
                found.append(f"{where}.{key} is unknown")
            else:
                inner = known.get(key, others if isinstance(others, dict) else {})
                found += faults(inner, item, root, f"{where}.{key}")
    return found
