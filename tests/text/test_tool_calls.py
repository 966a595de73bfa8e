"""Calls as models write them: nothing is dropped, nothing is made up, and arguments have the types of their schema."""

from __future__ import annotations

import json
import time

import pytest

from edge_dflash.text.tool_calls import MalformedToolCall, meaning, parse_tool_call

METRES = {"type": "object", "properties": {"metres": {"type": "integer"}}, "required": ["metres"]}
MOVE = {"type": "function", "function": {"name": "move", "parameters": METRES}}
DOCK = {"type": "function", "function": {"name": "dock", "parameters": {"type": "object", "properties": {}}}}
BARE = {"name": "honk"}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ('{"name": "move", "parameters": {"metres": 2}}', {"metres": 2}),
        ('{"name": "move", "arguments": "{\\"metres\\": 2}"}', {"metres": 2}),
        ('{"name": "move"}', "the call has no arguments"),
        ('{"name": "move", "args": {"metres": 2}}', "the call has 'args' besides its name and arguments"),
        ('{"name": "move", "metres": 2}', "the call has 'metres' besides"),
        ('{"name": "move", "arguments": {"metres": 2}, "id": "x"}', "the call has 'id' besides"),
        ('{"name": "move", "arguments": {"metres": 2}, "parameters": {"metres": 3}}', "has 'parameters' besides"),
        ('{"name": "move", "arguments": {"metres": 2}, "arguments": {"metres": 3}}', "'arguments' comes twice"),
        ('{"name": "dock", "name": "move", "arguments": {"metres": 2}}', "'name' comes twice"),
        ('{"name": "move", "arguments": {"metres": 2, "metres": 3}}', "'metres' comes twice"),
        ('{"name": "move", "arguments": "{\\"metres\\": 2, \\"metres\\": 3}"}', "'metres' comes twice"),
        ('{"name": "move", "arguments": null}', "of type NoneType"),
        ('{"type": "function", "function": {"name": "move", "arguments": {"metres": 2}}}', "the call has no name"),
        ('{"name": "dock"}', {}),
        ('{"name": "honk"}', {}),
        ('{"name": "dock", "now": true}', "the call has 'now' besides"),
        ("<function=dock>\n</function>", {}),
    ],
)
def test_a_call_is_all_that_was_written(body, wanted):
    made = parse_tool_call(body, "id", [MOVE, DOCK, BARE])
    if isinstance(wanted, dict):
        assert json.loads(made.arguments) == wanted
    else:
        assert isinstance(made, MalformedToolCall)
        assert wanted in made.reason


SHARED = {
    "$defs": {
        "Pose": {"properties": {"x": {}}, "required": ["x"]},
        "Id": {"type": "integer"},
        "Self": {"$ref": "#/$defs/Self"},
    }
}
OBJECT, LIST, NUMBER = ('{"x": 1}', {"x": 1}), ("[1, 2]", [1, 2]), ("2", 2)


@pytest.mark.parametrize(
    ("schema", "case"),
    [
        *(({keyword: value}, OBJECT) for keyword, value in {
            "properties": {"x": {}}, "required": ["x"], "additionalProperties": False, "patternProperties": {},
            "minProperties": 1, "propertyNames": {}, "dependentRequired": {},
        }.items()),
        *(({keyword: value}, LIST) for keyword, value in {
            "items": {"type": "integer"}, "prefixItems": [{}], "minItems": 1, "uniqueItems": True, "contains": {},
        }.items()),
        *(({keyword: 1}, NUMBER) for keyword in ("minimum", "maximum", "exclusiveMinimum", "multipleOf")),
        *(({keyword: value}, ("2", "2")) for keyword, value in {"pattern": "2", "maxLength": 3}.items()),
        ({"$ref": "#/$defs/Pose"}, OBJECT),
        ({"$ref": "#/$defs/Pose", "description": "where"}, OBJECT),
        ({"$ref": "#/$defs/Pose", "default": None, "properties": {"y": {}}}, OBJECT),
        ({"allOf": [{"$ref": "#/$defs/Pose"}, {"description": "x"}]}, OBJECT),
        ({"allOf": [{}, {"type": ["object", "null"]}, {"type": "object"}]}, OBJECT),
        ({"oneOf": [{"properties": {"x": {}}}, {"$ref": "#/$defs/Pose"}]}, OBJECT),
        ({"anyOf": [{"items": {}}, {"type": "null"}]}, LIST),
        ({"anyOf": [{"items": {}}, {"type": "null"}]}, ("null", None)),
        ({"oneOf": [{"$ref": "#/$defs/Id"}, {"const": "all"}]}, NUMBER),
        ({"oneOf": [{"$ref": "#/$defs/Id"}, {"const": "all"}]}, ("all", "all")),
        ({"properties": {"x": {}}, "items": {}}, LIST),
        ({"type": ["integer", "string"], "enum": [1, 2]}, NUMBER),
        ({"type": "number", "allOf": [{"type": "integer"}]}, NUMBER),
        ({"$ref": "#/$defs/Self"}, ("2", "2")),
        ({"$ref": "#/$defs/None"}, ("2", "2")),
        ({"anyOf": [{"type": "integer"}, {}]}, ("2", "2")),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ("7", 7)),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ('"7"', '"7"')),
        ({"type": ["string", "null"]}, ("None", None)),
        ({"type": ["string", "null"]}, ("none of them", "none of them")),
        ({"type": "boolean"}, ("True", True)),
        ({"enum": [1, 2]}, NUMBER),
        ({"description": "x"}, ("2", "2")),
        (True, ("2", "2")),
    ],
)  # fmt: skip
def test_types_that_a_schema_names_or_implies(schema, case):
    text, value = case
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}, **SHARED}}
    body = f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    assert json.loads(parse_tool_call(body, "id", [tool]).arguments) == {"a": value}


def test_what_is_no_value_of_an_implied_type_is_malformed():
    tool = {"name": "f", "parameters": {"properties": {"a": {"properties": {"x": {}}}}}}
    made = parse_tool_call("<function=f><parameter=a>kitchen</parameter></function>", "id", [tool])
    assert "wanted object" in made.reason


def test_a_schema_of_many_branches_takes_no_time():
    schema = {"anyOf": [{"$ref": "#/$defs/A"}] * 9}
    began = time.process_time()
    assert (meaning(schema, {"$defs": {"A": schema}}).kinds or set()) == set()
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "schema", [{"type": 3}, {"enum": 1}, {"anyOf": 1}, {"allOf": {}}, {"type": [3]}, {"$ref": []}, {"anyOf": []}]
)
def test_what_is_no_schema_says_nothing(schema):
    assert (meaning(schema, {}).kinds or set()) == set()
