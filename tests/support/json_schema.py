"""The part of JSON Schema that the document of the API and the schemas of tests use, checked value by value."""

from __future__ import annotations

import re
from fractions import Fraction

TYPES = {"string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}
WORDS = {
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "minimum", "maximum", "minLength", "maxLength",
    "pattern", "items", "minItems", "maxItems", "properties", "required", "additionalProperties", "$ref", "default",
    "description", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "prefixItems", "minProperties",
    "maxProperties", "patternProperties", "propertyNames", "uniqueItems", "$defs", "title", "format",
    "definitions", "discriminator", "examples", "x-shared",
}  # fmt: skip


def faults(schema, value, root, where="body"):
    """What of a value is not as a schema says; ``root`` is the document."""
    if isinstance(schema, bool):
        return [] if schema else [f"{where} must not be"]
    assert schema.keys() <= WORDS, schema.keys() - WORDS
    found = faults(pointed(root, schema["$ref"]), value, root, where) if "$ref" in schema else []
    kinds = schema.get("type", [])
    if kinds and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return [*found, f"{where} is {value!r}, no {kinds}"]
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


def pointed(root, reference):
    for part in reference.split("/")[1:]:
        root = root[int(part)] if isinstance(root, list) else root[part]
    return root


def same(value, other):
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
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
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        if (above is not None and value <= above) or (below is not None and value >= below):
            found.append(f"{where} is {value}, out of range")
        if "multipleOf" in schema and Fraction(repr(value)) % Fraction(repr(schema["multipleOf"])):
            found.append(f"{where} is {value}, no multiple")
    elif isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            found.append(f"{where} has {len(value)} characters")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            found.append(f"{where} does not match")
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{where} has {len(value)} items")
        if schema.get("uniqueItems") and any(same(a, b) for i, a in enumerate(value) for b in value[:i]):
            found.append(f"{where} has an item twice")
        first = schema.get("prefixItems", [])
        for index, item in enumerate(value):
            rule = first[index] if index < len(first) else schema.get("items", True)
            found += faults(rule, item, root, f"{where}[{index}]")
    elif isinstance(value, dict):
        tags = [schema["discriminator"]["propertyName"]] if "discriminator" in schema else []
        found += [f"{where}.{key} is missing" for key in (*schema.get("required", ()), *tags) if key not in value]
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
            found.append(f"{where} has {len(value)} properties")
        for key, item in value.items():
            found += faults(schema.get("propertyNames", True), key, root, f"{where}: {key}")
            matching = [one for pattern, one in schema.get("patternProperties", {}).items() if re.search(pattern, key)]
            if matching:
                found += [fault for one in matching for fault in faults(one, item, root, f"{where}.{key}")]
                others = True
            if key not in known and others is False:
                found.append(f"{where}.{key} is unknown")
            else:
                inner = known.get(key, others if isinstance(others, dict) else {})
                found += faults(inner, item, root, f"{where}.{key}")
    return found
