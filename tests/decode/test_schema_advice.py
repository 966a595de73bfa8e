"""What a refusal advises can be done, and a schema that follows it is taken."""

from __future__ import annotations

import pytest

from edge_dflash.decode.grammar.calls import Calls
from edge_dflash.errors import RequestError
from edge_dflash.text.tool_calls import TaggedCalls
from tests.decode.test_grammar import schema

TEXT, INTEGER, OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
TWO = {"properties": {"a": TEXT, "b": TEXT}}
LOOP = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a", "required": ["x"]}}}
LIST = {"type": "array", "items": {"$ref": "#/$defs/a"}}
CALLS = [{"type": "object", "properties": {"do": {"const": name}}} for name in ("go", "hold")]
LARGE = 2**63 - 1024

# refused, advice, schemas that follow it
ADVICE = [
    ({"minLenght": 3}, "did you mean 'minLength'", [{"minLength": 3}, {}]),
    ({"uniqueItems": True}, "remove it", [{}, {"uniqueItems": False}]),
    ({"nullable": True, "enum": ["a"]}, "write the rule with other keywords", [{"enum": ["a", None]}]),
    ({"items": {**TEXT, "$id": "x"}}, "remove it", [{"items": TEXT}]),
    ({"$ref": "#/$defs/a"}, "define it under $defs", [{"$ref": "#/$defs/a", "$defs": {"a": TEXT}}]),
    (
        {**TEXT, "format": "hex"},
        "or give a pattern beside it",
        [{**TEXT, "format": "hex", "pattern": "^[0-9a-f]+$"}, TEXT],
    ),
    ({"format": "hex"}, "remove it, or give a pattern beside it", [{"format": "hex", "pattern": "^[0-9a-f]+$"}]),
    (
        {**TEXT, "contentEncoding": "quoted-printable"},
        "remove it, or give a pattern beside it",
        [{**TEXT, "contentEncoding": "quoted-printable", "pattern": "^[ -~]*$"}, TEXT],
    ),
    (
        {**INTEGER, "format": "unix-time"},
        "remove it, or give minimum or maximum beside it",
        [{**INTEGER, "format": "unix-time", bound: 5} for bound in ("minimum", "maximum")] + [INTEGER],
    ),
    (
        {"type": ["string", "integer"], "format": "odd"},
        "or give a pattern or minimum or maximum beside it",
        [{"type": ["string", "integer"], "format": "odd", **more} for more in ({"pattern": "a"}, {"minimum": 3})],
    ),
    ({"format": "int32"}, "give type integer", [{**INTEGER, "format": "int32"}]),
    ({"type": "boolean", "format": "date"}, "remove it", [{"type": "boolean"}]),
    ({**INTEGER, "contentEncoding": "base64"}, "remove it", [INTEGER]),
    ({"type": "strin"}, "give one or more of", [{"type": ["null", "object"]}]),
    ({"maxLength": 2**31}, "give a whole number from 0 to 2147483647", [{"maxLength": 2**31 - 1}, {"maxLength": 0}]),
    ({"multipleOf": 0}, "give a number above 0", [{"multipleOf": 0.5}]),
    ({"multipleOf": 1e-11}, "give at most 9, and at most 10 behind the point", [{"multipleOf": 1e-10}]),
    (
        {"allOf": [{"multipleOf": 70000}, {"multipleOf": 140000}]},
        "write one multipleOf of them",
        [{"multipleOf": 140000}],
    ),
    ({"const": 2**60 + 1}, "give it as a text", [{"const": str(2**60 + 1)}]),
    ({"minimum": LARGE}, "give a bound within", [{"minimum": LARGE - 1024}]),
    ({"const": "\x00"}, "leave them out", [{"const": ""}]),
    ({"anyOf": []}, "give a list of at least one schema", [{"anyOf": [TEXT]}]),
    (
        {"prefixItems": [TEXT], "additionalItems": False},
        "and the rest as items",
        [{"prefixItems": [TEXT], "items": False}],
    ),
    ({"additionalItems": False}, "give prefixItems and items", [{"prefixItems": [TEXT], "items": False}]),
    ({**OBJECT, "minProperties": 2}, "require more names", [{"minProperties": 2, "required": ["a"]}]),
    ({**OBJECT, "minProperties": 2}, "or give at most 1", [{**OBJECT, "minProperties": 1}]),
    ({**TWO, "minProperties": 2}, "require them", [{**TWO, "minProperties": 2, "required": ["a", "b"]}, TWO]),
    ({**TWO, "maxProperties": 2}, "require them", [{**TWO, "maxProperties": 3, "required": ["a", "b"]}, TWO]),
    (
        {"patternProperties": {"^a": TEXT, "b$": TEXT}},
        "make them match different names",
        [{"patternProperties": {"^a": TEXT, "^b": TEXT}}],
    ),
    ({**OBJECT, "oneOf": CALLS}, "in a required constant", [{"oneOf": [{**one, "required": ["do"]} for one in CALLS]}]),
    (
        {"oneOf": [{"minLength": 1}, {"minimum": 3}]},
        "give each a type",
        [{"oneOf": [{**TEXT, "minLength": 1}, INTEGER]}],
    ),
    ({"oneOf": [{"minLength": 1}, {"minimum": 3}]}, "or use anyOf", [{"anyOf": [{"minLength": 1}, {"minimum": 3}]}]),
    (
        {"oneOf": [{**INTEGER, "minimum": 10 * i, "maximum": 10 * i + 9} for i in range(900)]},
        "let all differ in the constant of one property that they require",
        [
            {
                "oneOf": [
                    {**OBJECT, "properties": {"do": {"const": i}, "n": INTEGER}, "required": ["do"]} for i in range(900)
                ]
            }
        ],
    ),
    (
        {"$ref": "#/$defs/a", **OBJECT, "$defs": {"a": LOOP}},
        "move them into the definition",
        [{"$ref": "#/$defs/a", "$defs": {"a": {**OBJECT, "properties": {"x": {"$ref": "#/$defs/a"}}}}}],
    ),
    (
        {"allOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": LIST}},
        "write the combination out",
        [{**LIST, "$defs": {"a": LIST}}],
    ),
    (
        {**OBJECT, "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "make that property optional, or allow null",
        [
            {**OBJECT, "properties": {"a": {"$ref": "#"}}},
            {**OBJECT, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
        ],
    ),
    ({"pattern": "a(?=b)"}, "look-around would not be enforced; write it without", [{"pattern": "ab"}]),
    ({"pattern": "(a)\\1"}, "backreferences would not be enforced; write it without", [{"pattern": "aa"}]),
    ({"pattern": "a\\b"}, "has a word boundary inside, which would not be enforced; remove it", [{"pattern": "a"}]),
    ({"pattern": "a("}, "write it in the syntax of Rust's regex crate", [{"pattern": "a\\("}]),
    ({**TEXT, "pattern": "^a{3}$", "maxLength": 2}, "less strict", [{**TEXT, "pattern": "^a{3}$"}]),
    ({**INTEGER, "minimum": 5, "maximum": 3}, "make it less strict", [{**INTEGER, "minimum": 3, "maximum": 3}]),
]


@pytest.mark.parametrize(
    ("source", "advice", "followed"), ADVICE, ids=[f"{row[1]}-{i}" for i, row in enumerate(ADVICE)]
)
def test_a_schema_that_follows_the_advice_is_taken(source, advice, followed):
    for place in (
        lambda one: one,
        lambda one: {"anyOf": [{"type": "array", "items": one, "minItems": 1}], "$defs": one.get("$defs", {})},
    ):
        if place(source) is not source and ("$ref" in str(source) or "$id" in str(source)):
            continue
        with pytest.raises(RequestError) as refused:
            schema(place(source))
        assert advice in str(refused.value)
        assert "\n" not in str(refused.value)
        for one in followed:
            schema(place(one))


# parameters of a tool, required, advice, parameters that follow it
FORCED = [
    (
        {"a": {"type": ["string", "integer"], "minimum": 3}},
        "give it one type",
        {"a": {"type": "integer", "minimum": 3}},
    ),
    ({"a": {**TEXT, "pattern": "^a|b$"}}, "write it as ^(...)$", {"a": {**TEXT, "pattern": "^(a|b)$"}}),
    ({"a": {**TEXT, "allOf": [{"maxLength": 3}]}}, "remove it", {"a": TEXT}),
    ({"a>b": TEXT}, "use letters, digits and _", {"a_b1": TEXT}),
    ({"a": {"enum": ["x</parameter>"]}}, "leave it out", {"a": {"enum": ["x"]}}),
    ({"a": {**TEXT, "format": "hex"}}, "give a pattern beside it", {"a": {**TEXT, "format": "hex", "pattern": "^0"}}),
]


@pytest.mark.parametrize(("given", "advice", "followed"), FORCED, ids=[advice for _, advice, _ in FORCED])
def test_parameters_that_follow_the_advice_are_taken(given, advice, followed):
    tags = TaggedCalls("<function=", ">\n", ">\n", "\n", "\n", "</function>\n")

    def made(properties):
        return Calls.of(
            "forced", [{"name": "f", "parameters": {"type": "object", "properties": properties}}], tags
        ).grammar()

    with pytest.raises(RequestError) as refused:
        made(given)
    assert advice in str(refused.value)
    made(followed)
