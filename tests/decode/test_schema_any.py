"""Schemas of all keywords at any values: taken, and then answers satisfy them, or refused in our words."""

from __future__ import annotations

import json
import re

from grammar_support import Walk, compiled_here
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schema import faults

from edge_dflash.decode.grammar.schema import schema_json
from edge_dflash.errors import RequestError
from tests.decode.test_schema import IDLE
from tests.decode.test_schema_rewrite import STOP, drawn

NAMES = st.sampled_from(["a", "b", "do"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 1.0, 2.5, -0.0, "", "a", "go", "hold"])
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(NAMES, SCALARS, max_size=2)
COUNTS = st.sampled_from([0, 1, 2, 3, 0.0, 1.0, 2.0])
NUMBERS = st.sampled_from([0, 1, 3, -2, 0.5, -1.5, 10, 2.0, -0.0])
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
FLAT = {
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS),
    "multipleOf": st.sampled_from([1, 2, 0.5, 3.0]),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), COUNTS),
    "pattern": st.sampled_from(["^a", "b$", "^[ab]+$", "^go$"]),
    "format": st.sampled_from(["hex", "starts_with", "password", "double"]),
    "const": VALUES,
    "enum": st.lists(VALUES, min_size=1, max_size=3),
    "required": st.lists(NAMES, max_size=2, unique=True),
    "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
    "uniqueItems": st.booleans(),
    "propertyNames": st.sampled_from(
        [True, {"enum": ["a", "do"]}, {"pattern": "^a"}, {"maxLength": 2}, {"type": "string"}]
    ),
}


def some(fields, least=0, most=4):
    """A schema of a few of the keywords, in any order."""
    names = st.lists(st.sampled_from(sorted(fields)), min_size=least, max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


def tagged(values):
    """An option of a union: an object with a constant."""
    return st.builds(
        lambda value, inner, rest: {
            "type": "object",
            "properties": {"do": value, "a": inner},
            "required": ["do"],
            **rest,
        },
        st.sampled_from([{"const": "go"}, {"const": "hold"}, {"enum": ["a", 1]}, {"const": 1.0}]),
        values,
        some({"additionalProperties": st.just(False), "required": st.just([]), "maxProperties": st.just(2.0)}, most=1),
    )


def deeper(inner):
    several = st.lists(inner, min_size=1, max_size=3)
    options = st.lists(tagged(inner), min_size=2, max_size=3)
    return some(
        {
            **FLAT,
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "additionalProperties": st.booleans() | inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "o$"]), inner, max_size=1),
            "items": inner,
            "prefixItems": st.lists(inner, max_size=2),
            "anyOf": several | options,
            "oneOf": options | several,
            "allOf": several,
        },
        least=1,
        most=5,
    )


NODES = st.recursive(some(FLAT, 1) | st.booleans(), deeper, max_leaves=6)
ROOTS = st.builds(
    lambda root, x, y: {**(root if isinstance(root, dict) else {"type": "null"}), "$defs": {"x": x, "y": y}},
    deeper(NODES) | tagged(NODES),
    NODES | tagged(NODES),
    NODES,
)
OWN = re.compile(
    r"change it there|coerce_one_of|lenient|NoExtension|TooComplex|non-verbose|SearchRegex|json-schema:|Expected"
)


@given(ROOTS, st.sampled_from([{}, *(one for one in IDLE if not one.keys() & {"type", "required", "properties"})]))
@settings(max_examples=400, deadline=None)
def test_any_schema_is_enforced_or_refused_in_our_words(source, idle):
    said, grammar = "", None
    try:
        grammar = compiled_here("schema", schema_json({**idle, **source}), STOP)
    except RequestError as error:
        said = str(error)
    assert not OWN.search(said), said
    assert "\n" not in said
    for seed in range(4 if grammar else 0):
        if (text := drawn(Walk(grammar), seed, 0.5, 100)) is not None:
            assert not faults(source, json.loads(text), source), text
