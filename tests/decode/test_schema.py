"""A keyword is judged by its value: what forbids nothing is taken, what forbids something is enforced or refused.

A refusal says where, what, and what to do, in our words; what it advises can be done.
"""

from __future__ import annotations

import json
import re

import pytest

from edge_dflash.decode.grammar.schema import plain
from edge_dflash.errors import RequestError
from tests.decode.test_grammar import OWN, accepts, schema

TEXT, INTEGER, OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TWO = {"properties": {"a": TEXT, "b": TEXT}}
LOOP = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a", "required": ["x"]}}}
LIST = {"type": "array", "items": {"$ref": "#/$defs/a"}}
CALLS = [{"type": "object", "properties": {"do": {"const": name}}} for name in ("go", "hold")]
REQUIRED = [{**one, "required": ["do"]} for one in CALLS]
LARGE = 2**63 - 1024

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
    {"x-unit": "m", "x-order": [1, {"type": "nothing"}], "example": 1, "externalDocs": {"url": "https://example.org"}},
    {"readOnly": True, "default": 5, "$comment": "x", "examples": ["a"]},
]


@pytest.mark.parametrize("idle", IDLE, ids=json.dumps)
def test_what_forbids_nothing_is_taken(idle):
    for document in ('{"a":1,"b":[]}', "[]", "[null]"):
        assert accepts(schema(idle), document)
    inside = {"type": "object", "properties": {"deep": {"anyOf": [idle, {"type": "null"}]}}}
    assert accepts(schema(inside), '{"deep":{"a":1,"b":[]}}')


# Refusals: the reason, where @ is the place; schemas that follow its advice -------------------------------------------

UNENFORCED = [
    ({"propertyNames": {"type": "integer"}}, "propertyNames"),
    ({"propertyNames": False}, "propertyNames"),
    ({"propertyNames": {"pattern": "^a", "minLength": 1}}, "propertyNames"),
    ({"propertyNames": {"minLength": 1}, "properties": {"a": True}}, "propertyNames"),
    ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": True}}, "propertyNames"),
    ({"propertyNames": {"enum": list(map(str, range(9000)))}, "additionalProperties": TEXT}, "propertyNames"),
    ({"propertyNames": {"type": "string", "$ref": "#/$defs/i"}, "$defs": {"i": INTEGER}}, "propertyNames"),
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
    ({**TEXT, "contentSchema": {"type": "object"}}, "contentSchema"),
    ({"x-guidance": {"lenient": True}}, "x-guidance"),
]


@pytest.mark.parametrize(("source", "keyword"), UNENFORCED, ids=lambda value: str(value)[:60])
def test_what_forbids_something_and_is_not_enforced_is_refused(source, keyword):
    whole = {"type": "array", "items": source, "$defs": source.get("$defs", {})}
    with pytest.raises(RequestError, match=f"'(?:{keyword})' at #/items would not be enforced"):
        plain(whole)


REFUSED = [
    ({"minLenght": 3}, "'minLenght' at @ would not be enforced; did you mean 'minLength'", {"minLength": 3}, {}),
    ({"uniqueItems": True}, "'uniqueItems' at @ would not be enforced; remove it", {}, {"uniqueItems": False}),
    ({"nullable": True, "enum": ["a"]}, "write the rule with other keywords", {"enum": ["a", None]}),
    ({"items": {**TEXT, "$id": "x"}}, "$id at #/items would change what references mean; remove it", {"items": TEXT}),
    ({"$ref": "#/$defs/a"}, "points to nothing in the schema; define it under $defs", {**LIST, "$defs": {"a": TEXT}}),
    ({"$ref": "#/enum/1", "enum": [1, "go"]}, "points to 'go', which is no schema"),
    ({"$ref": "https://example.org/x"}, "only references inside the schema"),
    ({"$ref": 5}, "$ref at @ is 5; only references inside the schema"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}}, "leads to itself"),
    ({"propertyNames": {"$ref": 5}}, "$ref at @/propertyNames is 5"),
    ({"properties": []}, "properties at @ is [];"),
    ({"properties": {"a": 5}}, "the schema at @/properties/a is 5"),
    ({"additionalProperties": []}, "the schema at @/additionalProperties is []; a schema is an object, true or false"),
    ({"anyOf": TEXT}, "anyOf at @ is {'type': 'string'}"),
    ({"anyOf": []}, "anyOf at @ is []; give a list of at least one schema", {"anyOf": [TEXT]}),
    ({"enum": []}, "enum at @ is []; give a list of at least one value"),
    # types and formats
    ({"type": "strin"}, "type at @ is 'strin'; give one or more of null, boolean", {"type": ["null", "object"]}),
    ({"type": 5}, "type at @ is 5"),
    ({**TEXT, "format": "hex"}, "format at @ is 'hex'; enforced are date-time, date,", TEXT,
     {"format": "hex", "pattern": "^[0-9a-f]+$"}),
    ({**TEXT, "format": ["date"]}, "format at @ is ['date']"),
    ({**TEXT, "contentEncoding": "7"}, "enforced are base64, base16 of texts; remove it, or give a pattern", TEXT,
     {**TEXT, "contentEncoding": "7", "pattern": "^[ -~]*$"}),
    ({"type": ["string", "integer"], "format": "odd"}, "give a pattern of texts, minimum or maximum of numbers beside",
     {"type": ["string", "integer"], "format": "odd", "pattern": "a"},
     {**INTEGER, "format": "unix-time", "minimum": 5}, {**INTEGER, "format": "unix-time", "maximum": 5}),
    ({"format": "int32"}, "format at @ is 'int32'", {**INTEGER, "format": "int32"}),
    ({"type": "boolean", "format": "int32"}, "format at @ is 'int32'; enforced", {"type": "boolean"}),
    ({**INTEGER, "format": "date"}, "format at @ is 'date'; enforced", INTEGER),
    ({**INTEGER, "contentEncoding": "base64"}, "contentEncoding at @ is 'base64'; enforced are", INTEGER),
    # numbers and texts
    ({"maxLength": 2**31}, "maxLength at @ is 2147483648; give a whole number from 0 to 2147483647",
     {"maxLength": 2**31 - 1}, {"maxLength": 0}),
    ({"maxLength": -1}, "maxLength at @ is -1; give a whole number from 0 to 2147483647"),
    ({"type": "number", "maximum": "5"}, "maximum at @ is '5'; give a number"),
    ({"multipleOf": 0}, "multipleOf at @ is 0; give a number above 0", {"multipleOf": 0.5}),
    ({"multipleOf": 1e-11}, "multipleOf has too many digits; give at most 9, and at most 10 behind the point (at @)",
     {"multipleOf": 1e-10}),
    ({"allOf": [{"multipleOf": 70000}, {"multipleOf": 140000}]}, "write one multipleOf of them",
     {"multipleOf": 140000}),
    ({"const": 2**60 + 1}, "const at @ is 1152921504606846977; give numbers that a double holds, others as texts",
     {"const": str(2**60 + 1)}),
    ({"enum": [{"a": [2**70]}]}, "enum at @ is [{'a': [1180591620717411303424]}]"),
    ({"minimum": LARGE}, "minimum at @ is 9223372036854774784; give a number", {"minimum": LARGE - 1024}),
    ({"enum": [{"a": ["\x1b[0m"]}]}, "texts without control characters besides", {"enum": [{"a": ["[0m"]}]}),
    ({"required": "a"}, "required at @ is 'a'; give a list of names"),
    ({"pattern": 5}, "pattern at @ is 5; give a regular expression as a text"),
    ({"pattern": "a(?=b)"}, "look-around would not be enforced; write it without", {"pattern": "ab"}),
    ({"pattern": "(a)\\1"}, "backreferences would not be enforced; write it without", {"pattern": "aa"}),
    ({"pattern": "a\\b"}, "a word boundary inside, which would not be enforced; remove it", {"pattern": "a"}),
    ({"pattern": "a("}, "the regex /a(/ is not valid: unclosed group; write it in the syntax of Rust's regex crate",
     {"pattern": "a\\("}),
    ({**TEXT, "pattern": "^a{3}$", "maxLength": 2}, "less strict",
     {**TEXT, "pattern": "^a{3}$"}),
    # lists and objects
    ({"prefixItems": [TEXT], "additionalItems": False}, "and the rest as items",
     {"prefixItems": [TEXT], "items": False}),
    ({"additionalItems": False}, "without a list of items it would not be enforced; give prefixItems",
     {"prefixItems": [TEXT], "items": False}),
    ({**OBJECT, "minProperties": 2}, "require more names, or give at most 1", {"minProperties": 2, "required": ["a"]},
     {**OBJECT, "minProperties": 1}),
    ({**TWO, "minProperties": 2}, "are enforced only where all properties that are named are required; require them",
     {**TWO, "minProperties": 2, "required": ["a", "b"]}, TWO),
    ({**TWO, "maxProperties": 2}, "require them", {**TWO, "maxProperties": 3, "required": ["a", "b"]}, TWO),
    ({"patternProperties": {"^a": TEXT, "b$": TEXT}}, "/^a/ and /b$/ can match one name; make them match different",
     {"patternProperties": {"^a": TEXT, "^b": TEXT}}),
    # options and references
    ({**OBJECT, "oneOf": CALLS}, "options 0 and 1 could hold together; give each a type", {"oneOf": REQUIRED}),
    ({"oneOf": [{"minLength": 1}, {"minimum": 3}]}, "give each a type and let them differ in it or in a required const",
     {"oneOf": [{**TEXT, "minLength": 1}, INTEGER]}, {"anyOf": [{"minLength": 1}, {"minimum": 3}]}),
    ({"oneOf": [{**INTEGER, "minimum": 9 * i, "maximum": 9 * i + 8} for i in range(900)]},
     "let all differ in the constant of one property that they require",
     {"oneOf": [{**OBJECT, "properties": {"do": {"const": i}, "n": INTEGER}, "required": ["do"]} for i in range(900)]}),
    ({"$ref": "#/$defs/a", **OBJECT, "$defs": {"a": LOOP}}, "$ref #/$defs/a leads to itself beside other keywords; mov",
     {"$ref": "#/$defs/a", "$defs": {"a": {**OBJECT, "properties": {"x": {"$ref": "#/$defs/a"}}}}}),
    ({"allOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": LIST}}, "write the combination out",
     {**LIST, "$defs": {"a": LIST}}),
    # nothing satisfies them
    ({**INTEGER, "minimum": 5, "maximum": 3}, "make it less strict",
     {**INTEGER, "minimum": 3, "maximum": 3}),
    ({**OBJECT, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "make that property optional, or allow null",
     {**OBJECT, "properties": {"a": {"$ref": "#"}}},
     {**OBJECT, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]}),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite document"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "no finite document"),
    # too big
    ({"const": "x" * 100_000}, "leaves no choice for more than 4096 tokens"),
    ({**TEXT, "pattern": "^(a{1000}){100}$"}, "leaves no choice for more than 4096 tokens"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row[1][:50]}-{str(row[0])[:30]}")
def test_a_refusal_names_the_place_and_a_schema_that_follows_its_advice_is_taken(row):
    source, reason, *followed = row

    def inside(one):
        return {"anyOf": [{"type": "array", "items": one, "minItems": 1}], "$defs": one.get("$defs", {})}

    places = [(lambda one: one, "#")]
    if "$ref" not in str(source) and "$id" not in str(source) and "x" * 9 not in str(source):
        places.append((inside, "#/anyOf/0/items"))
    for place, where in places:
        with pytest.raises(RequestError) as refused:
            schema(place(source))
        assert reason.replace("@", where) in str(refused.value)
        assert not OWN.search(str(refused.value))
        for one in followed:
            schema(place(one))


@pytest.mark.parametrize("key", ["minLength", "maxItems", "minProperties", "multipleOf", "minimum", "const", "enum"])
@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN"])
def test_numbers_beyond_a_double_are_refused_in_our_words(key, number):
    value = json.loads(f"[{number}]") if key == "enum" else json.loads(number)
    with pytest.raises(RequestError, match=re.escape(f"{key} at #/items ")):
        plain({"type": "array", "items": {key: value}})
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        schema(f'{{"{key}": {number}}}')


# Names of properties --------------------------------------------------------------------------------------------------

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
    made = schema(source)
    assert accepts(made, f'{{"m":{good}}}')
    assert accepts(made, '{"m":{}}')
    assert not accepts(made, f'{{"m":{bad}}}')
    assert not accepts(made, f'{{"m":{good}}}'.replace("1", '"x"'))


def test_named_properties_are_held_to_the_names_too():
    source = {"type": "object", "properties": {"a": DIGIT, "z": DIGIT}, "propertyNames": {"enum": ["a", "b"]}}
    assert accepts(schema(source), '{"a":1,"b":"free"}')
    assert not accepts(schema(source), '{"z":1}')
    with pytest.raises(RequestError, match="'z' is unsatisfiable"):
        schema({**source, "required": ["z"]})
    loop = {"type": "object", "propertyNames": {"$ref": "#"}, "items": {"propertyNames": {"$ref": "#"}}}
    with pytest.raises(RequestError, match="'propertyNames' at #"):
        plain(loop)
    with pytest.raises(RequestError, match="pattern at #/propertyNames is 5"):
        plain({"propertyNames": {"pattern": 5}})


def test_the_name_of_a_property_has_one_spelling_and_is_counted_once():
    free = schema({"type": "object", "properties": {"do": {"const": "go"}}})
    assert accepts(free, '{"do":"go","x\\n":1}')
    assert not accepts(free, '{"\\u0064o":1}')
    two = schema({"type": "object", "minProperties": 2, "required": ["a"]})
    assert accepts(two, '{"a":1,"b":1}')
    assert not accepts(two, '{"a":1}')


# References -----------------------------------------------------------------------------------------------------------


def test_references_into_what_is_left_out_hold():
    source = {
        "type": "array",
        "items": {"$ref": "#/x-types/pair"},
        "propertyNames": {"type": "string", "maxLength": 3},
        "x-types": {"pair": {"prefixItems": [{"$ref": "#/propertyNames"}], "items": {"$ref": "#/x-types/pair"}}},
        "maxItems": 1,
    }
    assert accepts(schema(source), '[["a",["b"]]]')
    for bad in ("[[1]]", '[["a",[2]]]', '[["long",["b"]]]'):
        assert not accepts(schema(source), bad)
    assert "x-types" in source
    defs = {"a": {"$ref": "#/x-b", "x-d": {"type": "array"}}, "c": {"$ref": "#/$defs/a/x-d"}}
    far = {"$ref": "#/$defs/a", "$defs": defs, "x-b": {"type": "null"}}
    assert accepts(schema(far), "null")
    assert not accepts(schema(far), "1")


def test_definitions_forbid_something_where_they_are_referred_to():
    defs = {"$defs": {"x": {"contains": {}}, "y": {"$ref": "#/nowhere"}}}
    assert plain({**TEXT, **defs}) == TEXT
    with pytest.raises(RequestError, match=r"'contains' at #/\$defs/x would not be enforced"):
        plain({"properties": {"p": {"$ref": "#/$defs/x"}}, **defs})


# Formats and numbers --------------------------------------------------------------------------------------------------

ENFORCED = [
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
    # whole numbers written as decimals
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, '"ab"', '"abc"'),
    ({"type": "array", "minItems": 1e0, "maxItems": 2.0}, "[1]", "[]"),
    ({"type": "object", "required": ["a"], "minProperties": 2.0, "maxProperties": 2.0}, '{"a":1,"b":1}', '{"a":1}'),
    ({"type": "integer", "multipleOf": 2.0, "minimum": -0.0, "maximum": 1e1}, "10", "9"),
    ({"const": 2.0}, "2", "3"),
    ({"enum": [-0.0, {"a": [-0.0]}]}, '{"a":[0]}', "1"),
    ({"enum": [-0.0, 1e1]}, "0", "1"),
    # the older dialect of lists
    ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{"type": "null"}], "items": False,
      "type": "array"}, "[null]", "[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "good", "bad"), ENFORCED, ids=lambda value: str(value)[:60])
def test_formats_and_numbers_are_enforced_or_said_by_what_stands_beside_them(source, good, bad):
    inside = schema({"type": "object", "properties": {"a": source}, "required": ["a"]})
    for made, around in ((schema(source), "{}"), (inside, '{{"a":{}}}')):
        assert accepts(made, around.replace("{{", "{").replace("}}", "}").replace("{}", good))
        assert not accepts(made, around.replace("{{", "{").replace("}}", "}").replace("{}", bad))


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
