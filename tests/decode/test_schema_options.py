"""oneOf: options are taken when no two can hold together, however they are written; else they are refused."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from edge_dflash.decode.grammar.schema import plain
from edge_dflash.errors import RequestError
from tests.decode.test_grammar import accepts, schema

DRIVE = {"type": "object", "properties": {"do": {"const": "drive"}, "n": {"type": "integer"}}, "required": ["do", "n"]}
HOLD = {"type": "object", "properties": {"do": {"enum": ["hold"]}}, "required": ["do"], "additionalProperties": False}
DEFS = {"D": DRIVE, "H": HOLD, "chain": {"$ref": "#/$defs/D"}, "both": {"oneOf": [{"$ref": "#/$defs/chain"}, HOLD]}}
REFS = [{"$ref": "#/$defs/D"}, {"$ref": "#/$defs/H"}]
UNTYPED = [{key: value for key, value in one.items() if key != "type"} for one in (DRIVE, HOLD)]
LEAF = {
    "type": "object",
    "properties": {"kind": {"const": "leaf"}},
    "required": ["kind"],
    "additionalProperties": False,
}
NODE = {
    **LEAF,
    "properties": {"kind": {"const": "node"}, "left": {"$ref": "#/$defs/t"}, "right": {"$ref": "#/$defs/t"}},
    "required": ["kind", "left", "right"],
}

TAKEN = [
    ({"oneOf": REFS}, '{"do":"hold"}', '{"do":"grip"}'),
    ({"oneOf": [{"$ref": "#/$defs/chain"}, {"$ref": "#/$defs/H"}]}, '{"do":"drive","n":1}', '{"do":"drive"}'),
    ({"oneOf": [{"$ref": "#/$defs/both"}, {"type": "null"}]}, '{"do":"hold"}', "1"),
    ({"oneOf": [{"anyOf": REFS}, {"type": "array", "items": {"oneOf": REFS}}]}, '[{"do":"hold"}]', '[{"do":"grip"}]'),
    ({"anyOf": [{"oneOf": REFS}, {"type": "null"}]}, "null", "true"),
    ({"type": "object", "oneOf": UNTYPED}, '{"do":"hold"}', '"hold"'),
    ({"allOf": [{"type": "object"}, {"oneOf": UNTYPED}]}, '{"do":"hold"}', '"hold"'),
    ({"oneOf": REFS, "discriminator": {"propertyName": "do"}, "anyOf": [{"type": "object"}]}, '{"do":"hold"}', "{}"),
    ({"oneOf": [{"allOf": [{"$ref": "#/$defs/D"}, {"maxProperties": 2}]}, HOLD]}, '{"do":"drive","n":1}', "{}"),
    ({"oneOf": [{"const": "a"}, {"const": 2.0}, {"enum": [True, 1]}]}, "true", "false"),
    ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}]}, "3.5", '"3"'),
    ({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}]}, '"abc"', "3"),
    ({"oneOf": [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}]}, "[1,2]", "{}"),
    ({"oneOf": [{"type": ["string", "null"]}, {"type": "integer"}, {"type": "boolean"}]}, "null", "[]"),
    ({"oneOf": [{**LEAF, "additionalProperties": False}, HOLD]}, '{"do":"hold"}', '{"do":"hold","kind":"leaf"}'),
    ({"oneOf": [False, {"type": "string"}, {"enum": [5]}]}, "5", "6"),
    ({"oneOf": [{"type": "array", "prefixItems": [one], "minItems": 1} for one in REFS]}, '[{"do":"hold"}]', "[]"),
    ({"oneOf": [{"type": "string"}]}, '"a"', "1"),
]


@pytest.mark.parametrize(("source", "good", "bad"), TAKEN, ids=lambda value: str(value)[:60])
def test_options_of_which_no_two_hold_together_are_taken(source, good, bad):
    full = {**source, "$defs": DEFS}
    assert accepts(schema(full), good)
    assert not accepts(schema(full), bad)
    inside = {"type": "object", "properties": {"a": source}, "required": ["a"], "$defs": DEFS}
    assert accepts(schema(inside), f'{{"a":{good}}}')
    assert not accepts(schema(inside), f'{{"a":{bad}}}')


def test_options_may_lead_to_themselves():
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"oneOf": [LEAF, NODE]}}}
    leaf = '{"kind":"leaf"}'
    assert accepts(
        schema(tree), f'{{"kind":"node","left":{leaf},"right":{{"kind":"node","left":{leaf},"right":{leaf}}}}}'
    )
    assert not accepts(schema(tree), f'{{"kind":"node","left":{leaf},"right":{{"kind":"nodes"}}}}')


class Drive(BaseModel):
    do: Literal["drive"] = "drive"


class Repeat(BaseModel):
    do: Literal["repeat", "again"] = "repeat"
    steps: list[Annotated[Drive | Repeat, Field(discriminator="do")]]


class Plan(BaseModel):
    step: Annotated[Drive | Repeat, Field(discriminator="do")]


def test_the_property_of_a_discriminator_is_required():
    assert accepts(schema(Plan), '{"step":{"do":"again","steps":[{"do":"drive"}]}}')
    assert not accepts(schema(Plan), '{"step":{}}')
    assert not accepts(schema(Plan), '{"step":{"do":"again","steps":[{}]}}')
    free = {"type": "object", "additionalProperties": {"const": "z"}}
    tagged = {"oneOf": [{**HOLD, "required": []}, free], "discriminator": {"propertyName": "do"}}
    assert accepts(schema(tagged), '{"do":"z","a":"z"}')
    assert not accepts(schema(tagged), "{}")
    assert not accepts(schema(tagged), '{"a":"z"}')


TOGETHER = [
    {"oneOf": UNTYPED},
    {"oneOf": [DRIVE, {"type": "object"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{"enum": [{"a": 1}]}, {"const": {"a": 1.0}}]},
    {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0.5}]},
    {"oneOf": [{**HOLD, "required": []}, {**LEAF, "required": []}]},
    {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]},
    {"oneOf": [{"type": "object", "patternProperties": {"^d": {"const": "z"}}, "required": ["do"]}, HOLD]},
    {"oneOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/t"}], "$defs": {"t": NODE}},
    {"oneOf": [{"const": "a"}, {"const": "b"}, {"anyOf": [{"const": "c"}, {"const": "b"}]}]},
    {"type": "array", "items": {"oneOf": [True, {"type": "null"}]}},
]


@pytest.mark.parametrize("source", TOGETHER, ids=lambda value: str(value)[:60])
def test_options_that_could_hold_together_are_refused(source):
    with pytest.raises(RequestError, match=r"only one option .* options \d and \d could hold together; .* \(at #"):
        plain({**source, "$defs": {**source.get("$defs", {}), "t": {"oneOf": [LEAF, NODE]}}})


def _tagged(index, **more):
    return {"type": "object", "properties": {"do": {"const": f"n{index}"}, **more}, "required": ["do"]}


def _doubling(leaf, levels=12):
    for _ in range(levels):
        leaf = {"anyOf": [leaf, leaf]}
    return leaf


MANY = [
    {"oneOf": [{"const": f"n{i}"} for i in range(9000)]},
    {"oneOf": [_tagged(i) for i in range(2500)]},
    {"oneOf": [_tagged(7) for i in range(2500)]},
    {"oneOf": [{"type": "integer", "minimum": 10 * i, "maximum": 10 * i + 9} for i in range(4000)]},
    {"oneOf": [{"enum": [f"{i} {j}" for j in range(4000)]} for i in range(4)]},
    {"oneOf": [{"oneOf": [_tagged(f"{i} {j}") for j in range(40)]} for i in range(40)]},
    {"oneOf": [_doubling(_tagged(1, x={"maxLength": 3})), {"type": "object", "required": ["z"]}]},
    {"allOf": [{"oneOf": [_tagged(f"{i} {j}") for j in range(3)]} for i in range(400)]},
    {"oneOf": [_tagged(i, **{f"p{j}": {"const": j} for j in range(100)}) for i in range(60)]},
    {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {
            name: {
                "type": "object",
                "properties": {f"p{i}": {"anyOf": [{"$ref": f"#/$defs/{n}"} for n in "ab"]} for i in range(30)},
                "required": [f"p{i}" for i in range(30)],
            }
            for name in "ab"
        },
    },
]


REFUSED = {2: "options 0 and 1 could hold", 3: "too many to be told apart; let all differ in", 6: "could", 9: "could"}


@pytest.mark.parametrize("index", [*range(len(MANY))])
def test_many_options_are_told_apart_or_refused_in_bounded_time(index):
    began = time.process_time()
    with pytest.raises(RequestError, match=REFUSED[index]) if index in REFUSED else contextlib.nullcontext():
        plain(MANY[index])
    assert time.process_time() - began < 5


def test_a_union_that_is_not_looked_through_soon_may_still_differ_in_its_type():
    deep = {"type": "object", **_doubling({"required": ["z"]})}
    plain({"oneOf": [deep, {"type": "string"}]})
