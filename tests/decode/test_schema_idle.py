"""A keyword is judged by its value: what forbids nothing is taken, what forbids something is enforced or refused."""

from __future__ import annotations

import json

import pytest

from edge_dflash.decode.grammar.calls import Calls
from edge_dflash.decode.grammar.schema_check import check
from edge_dflash.decode.grammar.schema_plain import plain
from edge_dflash.errors import RequestError
from edge_dflash.text.tool_calls import TaggedCalls
from tests.decode.test_grammar import accepts, schema

IDLE = [
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {}},
    {"propertyNames": True},
    {"propertyNames": {"type": ["string", "null"], "minLength": 0, "title": "name", "$comment": "x"}},
    {"not": False},
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"contains": {"type": "null"}, "minContains": 0},
    {"minContains": 3, "maxContains": 1},
    {"if": {"type": "string"}},
    {"if": {"type": "string"}, "then": True, "else": {"title": "x"}},
    {"then": {"type": "null"}, "else": False},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": True, "b": {}}},
    {"dependencies": {"a": [], "b": {"description": "x"}}},
    {"unevaluatedProperties": True, "unevaluatedItems": {}},
    {"unevaluatedProperties": False, "additionalProperties": True},
    {"nullable": False},
    {"nullable": True, "type": ["object", "array", "null"]},
    {"contentMediaType": "text/plain"},
    {"contentSchema": True},
    {"contentEncoding": "8bit"},
    {"allOf": []},
    {"allOf": [True, {"title": "x"}]},
    {"patternProperties": {}, "properties": {}, "required": []},
    {"additionalItems": True},
    {"additionalItems": {}, "prefixItems": [True]},
    {"minProperties": 0.0, "minItems": 0, "minLength": -0.0},
    {"minProperties": 1, "required": ["a"], "properties": {"a": True, "b": True}},
    {"$anchor": "here", "$dynamicAnchor": "there", "x-order": 3, "deprecated": True},
]


@pytest.mark.parametrize("idle", IDLE, ids=json.dumps)
def test_what_forbids_nothing_is_taken(idle):
    for document in ('{"a":1,"b":[]}', "[]", "[null]"):
        assert accepts(schema(idle), document)
    inside = {"type": "object", "properties": {"deep": {"anyOf": [idle, {"type": "null"}]}}}
    assert accepts(schema(inside), '{"deep":{"a":1,"b":[]}}')


def test_other_keywords_stay_where_those_are_left_out():
    small = {"type": "integer", "minimum": 0, "maximum": 9}
    record = schema({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": small})
    assert accepts(record, '{"any":3}')
    assert not accepts(record, '{"any":10}')
    both = schema({"type": "integer", "multipleOf": 1, "not": False, "if": False, "minimum": 3})
    assert accepts(both, "3")
    assert not accepts(both, "2")
    closed = {"type": "object", "properties": {"a": small}, "additionalProperties": False, "maxProperties": 1.0}
    assert accepts(schema(closed), "{}")
    assert not accepts(schema(closed), '{"b":1}')


FORBID = [
    ({"propertyNames": {"type": "integer"}}, "propertyNames"),
    ({"propertyNames": False}, "propertyNames"),
    ({"propertyNames": {"pattern": "^a", "minLength": 1}}, "propertyNames"),
    ({"propertyNames": {"minLength": 1}, "properties": {"a": True}}, "propertyNames"),
    ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": True}}, "propertyNames"),
    (
        {"propertyNames": {"enum": [str(i) for i in range(9000)]}, "additionalProperties": {"type": "null"}},
        "propertyNames",
    ),
    ({"propertyNames": {"type": "string", "$ref": "#/items/items"}, "items": {"type": "integer"}}, "propertyNames"),
    ({"not": {}}, "not"),
    ({"uniqueItems": True, "maxItems": 2}, "uniqueItems"),
    ({"contains": {}}, "contains"),
    ({"contains": {}, "minContains": False}, "minContains|contains"),
    ({"contains": {}, "minContains": 0, "maxContains": 1}, "maxContains|contains"),
    ({"if": True, "then": {"type": "null"}}, "if|then"),
    ({"if": {"type": "null"}, "else": False}, "if|else"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({"dependencies": {"a": ["b"]}}, "dependencies"),
    ({"dependencies": []}, "dependencies"),
    ({"unevaluatedProperties": False, "anyOf": [{}]}, "unevaluatedProperties"),
    ({"unevaluatedItems": False, "items": True}, "unevaluatedItems"),
    ({"nullable": True}, "nullable"),
    ({"contentMediaType": "application/octet-stream"}, "contentMediaType"),
    ({"x-guidance": {}}, "x-guidance"),
]


@pytest.mark.parametrize(("source", "keyword"), FORBID, ids=lambda value: str(value)[:60])
def test_what_forbids_something_and_is_not_enforced_is_refused(source, keyword):
    with pytest.raises(RequestError, match=f"'(?:{keyword})' at #/items would not be enforced"):
        check({"type": "array", "items": source})


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NAMES = [
    ({"enum": ["a", "b", 5]}, '{"b":1}', '{"c":1}'),
    ({"type": "string", "const": "a"}, '{"a":1}', '{"b":1}'),
    ({"$ref": "#/$defs/Color"}, '{"a":1,"b":2}', '{"red":1}'),
    ({"pattern": "^a[0-9]$"}, '{"a1":1,"a2":2}', '{"a":1}'),
    ({"type": "string", "minLength": 1.0}, '{"b":1}', '{"":1}'),
    ({"maxLength": 2, "title": "short"}, '{"bc":1}', '{"bcd":1}'),
]


@pytest.mark.parametrize(("names", "good", "bad"), NAMES, ids=lambda value: str(value)[:40])
def test_the_names_of_a_record_are_enforced(names, good, bad):
    source = {
        "type": "object",
        "properties": {"m": {"type": "object", "propertyNames": names, "additionalProperties": DIGIT}},
        "$defs": {"Color": {"$ref": "#/$defs/Two"}, "Two": {"type": "string", "enum": ["a", "b"]}},
    }
    assert accepts(schema(source), f'{{"m":{good}}}')
    assert accepts(schema(source), '{"m":{}}')
    assert not accepts(schema(source), f'{{"m":{bad}}}')
    assert not accepts(schema(source), f'{{"m":{good}}}'.replace("1", '"x"'))


def test_named_properties_are_held_to_the_names_too():
    source = {"type": "object", "properties": {"a": DIGIT, "z": DIGIT}, "propertyNames": {"enum": ["a", "b"]}}
    assert accepts(schema(source), '{"a":1,"b":"free"}')
    assert not accepts(schema(source), '{"z":1}')
    with pytest.raises(RequestError, match="'z' is unsatisfiable"):
        schema({**source, "required": ["z"]})
    loop = {"type": "object", "propertyNames": {"$ref": "#"}, "items": {"propertyNames": {"$ref": "#"}}}
    with pytest.raises(RequestError, match="'propertyNames' at #"):
        check(loop)
    with pytest.raises(RequestError, match="pattern at #/propertyNames is 5"):
        check({"propertyNames": {"pattern": 5}})


def test_references_into_what_is_left_out_hold():
    source = {
        "type": "array",
        "items": {"$ref": "#/x-types/pair"},
        "propertyNames": {"type": "string", "maxLength": 3},
        "x-types": {"pair": {"prefixItems": [{"$ref": "#/propertyNames"}], "items": {"$ref": "#/x-types/pair"}}},
        "maxItems": 1,
    }
    assert accepts(schema(source), '[["a",["b"]]]')
    assert not accepts(schema(source), "[[1]]")
    assert not accepts(schema(source), '[["a",[2]]]')
    assert not accepts(schema(source), '[["long",["b"]]]')
    assert "x-types" in source
    far = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/x-b"}, "c": {"$ref": "#/$defs/a/x-d"}},
        "x-b": {"type": "null"},
    }
    far["$defs"]["a"]["x-d"] = {"type": "array"}
    assert accepts(schema(far), "null")
    assert not accepts(schema(far), "1")


def test_the_parameters_of_a_tool_are_in_plain_form():
    text = {"type": "string", "format": "starts_with", "pattern": "^a", "minLength": 2.0, "allOf": [], "example": "ab"}
    choice = {"oneOf": [{"const": "x"}, {"const": "y"}], "nullable": False}
    parameters = {
        "type": "object",
        "properties": {"t": text, "c": choice, "n": {"type": "integer", "format": "uint8"}},
        "propertyNames": {"type": "string"},
        "minProperties": 0,
        "additionalProperties": False,
    }
    assert plain(parameters)["properties"]["t"] == {"type": "string", "pattern": "^a", "minLength": 2}
    made = Calls.of("forced", [{"name": "f", "parameters": parameters}], TaggedCalls("", "", "", "", "", "")).grammar()
    assert '("x" | "y")' in made
    assert '"maximum": 255' in made


# formats --------------------------------------------------------------------------------------------------------------

HINTED = [
    ({"type": "string", "format": "starts_with", "pattern": "^arm_[0-9]$"}, '"arm_1"', '"leg_1"'),
    ({"type": "string", "format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{3}$"}, '"ab_"', '"ab"'),
    ({"type": "string", "format": "x", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, '"ab"', '"aa"'),
    ({"format": "hex", "pattern": "^[0-9a-f]*$"}, '"0f"', '"x"'),
    ({"type": ["string", "null"], "format": "ulid", "pattern": "^0"}, "null", '"1"'),
    ({"type": "string", "format": "color", "enum": ["red"]}, '"red"', '"blue"'),
    ({"type": "string", "format": "date", "pattern": "^2024"}, '"2024-02-29"', '"2024-02-30"'),
    ({"type": "string", "contentEncoding": "base64url", "pattern": "^[A-Za-z0-9_-]*$"}, '"a_"', '"+"'),
    ({"type": "string", "format": "password"}, '"any"', "1"),
    ({"type": "string", "format": "byte"}, '"QQ=="', '"QR=="'),
    ({"type": "integer", "format": "unix-time", "minimum": 0}, "5", "-5"),
    ({"type": "number", "format": "double"}, "2.5", '"2.5"'),
    ({"type": "integer", "format": "int32"}, "2147483647", "2147483648"),
    ({"type": "integer", "format": "int32"}, "-2147483648", "-2147483649"),
    ({"type": "integer", "format": "int8", "minimum": 5, "maximum": 300}, "127", "128"),
    ({"type": "integer", "format": "int8", "minimum": 5, "maximum": 300}, "5", "4"),
    ({"type": "integer", "format": "uint64"}, "9223372036854774784", "-1"),
    ({"type": "number", "format": "uint16"}, "65535", "1.5"),
    ({"type": "integer", "format": "uint8", "exclusiveMaximum": 255}, "254", "255"),
    ({"type": "integer", "format": "int8", "minimum": -500, "exclusiveMinimum": True}, "-128", "-129"),
    ({"type": ["integer", "string"], "format": "uint8"}, '"x"', "256"),
    ({"allOf": [{"type": "integer", "format": "int8"}, {"type": "integer", "format": "uint8"}]}, "127", "128"),
]


@pytest.mark.parametrize(("source", "good", "bad"), HINTED, ids=lambda value: str(value)[:60])
def test_formats_are_enforced_or_said_by_what_stands_beside_them(source, good, bad):
    assert accepts(schema(source), good)
    assert not accepts(schema(source), bad)


# whole numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, '"ab"', '"abc"'),
        ({"type": "array", "minItems": 1e0, "maxItems": 2.0}, "[1]", "[]"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 0.0}, "[[]]", "1"),
        ({"type": "object", "required": ["a"], "minProperties": 2.0, "maxProperties": 2.0}, '{"a":1,"b":1}', '{"a":1}'),
        ({"type": "integer", "multipleOf": 2.0, "minimum": -0.0, "maximum": 1e1}, "10", "9"),
        ({"const": 2.0}, "2", "3"),
        ({"enum": [-0.0, {"a": [-0.0]}]}, '{"a":[0]}', "1"),
        ({"enum": [-0.0, 1e1]}, "0", "1"),
    ],
)
def test_whole_numbers_may_be_written_as_decimals(source, good, bad):
    assert accepts(schema(source), good)
    assert not accepts(schema(source), bad)
    inside = {"type": "object", "properties": {"a": source}, "required": ["a"]}
    if "$ref" not in json.dumps(source):
        assert accepts(schema(inside), f'{{"a":{good}}}')
        assert not accepts(schema(inside), f'{{"a":{bad}}}')


@pytest.mark.parametrize(
    "keyword", ["minLength", "maxItems", "minProperties", "multipleOf", "minimum", "const", "enum"]
)
@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN"])
def test_numbers_beyond_a_double_are_refused_in_our_words(keyword, number):
    value = json.loads(f"[{number}]") if keyword == "enum" else json.loads(number)
    with pytest.raises(RequestError) as refused:
        check({"type": "array", "items": {keyword: value}})
    assert f"{keyword} at #/items " in str(refused.value)
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        schema(f'{{"{keyword}": {number}}}')


# what is taken is enforced --------------------------------------------------------------------------------------------


def test_the_name_of_a_property_has_one_spelling():
    free = schema({"type": "object", "properties": {"do": {"const": "go"}}})
    assert accepts(free, '{"do":"go","x\\n":1}')
    assert not accepts(free, '{"\\u0064o":1}')
    with pytest.raises(RequestError, match=r"enum at # has .* control characters besides .* are not written"):
        check({"enum": [{"a": ["\x1b[0m"]}]})


def test_a_free_name_that_comes_twice_is_counted_once():
    with pytest.raises(RequestError, match="minProperties at # is 2; that free names differ would not be enforced"):
        check({"type": "object", "minProperties": 2})
    assert accepts(schema({"type": "object", "minProperties": 2, "required": ["a"]}), '{"a":1,"b":1}')
    assert not accepts(schema({"type": "object", "minProperties": 2, "required": ["a"]}), '{"a":1}')


@pytest.mark.parametrize("bound", [0, 3, -7, 10**6, 2**40])
def test_a_bound_that_is_excluded_is_no_value(bound):
    above = {"type": "number", "exclusiveMinimum": bound, "maximum": bound + 0.5}
    below = {"type": "number", "exclusiveMaximum": bound, "minimum": bound - 0.5}
    for source in (above, below, {"allOf": [above, {}, {"type": "number"}]}):
        assert not accepts(schema(source), str(bound))
        assert not accepts(schema(source), f"-{bound}")
    assert accepts(schema(above), str(bound + 0.25))
    assert accepts(schema(below), str(bound - 0.25))
    assert accepts(schema({"type": "integer", "exclusiveMinimum": bound}), str(bound + 1))
