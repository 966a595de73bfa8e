"""Schemas as the library is given them: numbers end, formats mean what they say, nothing asserted is ignored."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import random
import re
import uuid
from urllib.parse import urlsplit

import pytest
from grammar_support import END, Walk, compiled_here, tokenizer

from edge_dflash.decode.grammar.keywords import LARGEST
from edge_dflash.decode.grammar.rewrite import rewrite
from edge_dflash.decode.grammar.schema import schema_json
from tests.decode.test_grammar import SPELLING, accepts, schema, text_of, walk

STOP = (tokenizer().control_id(END),)
DIGITS = frozenset(i for i, text in enumerate(SPELLING) if text.isdigit())
ENDS = frozenset(i for i, text in enumerate(SPELLING) if text[:1] in (b"]", b"}"))


def drawn(constraint, seed, digits=0.0, longest=400):
    """A random answer; ``digits`` is how often a digit comes where one may. None when it does not end."""
    found = walk(
        constraint, random.Random(seed), longest, lambda tokens: ((DIGITS, digits), (ENDS, len(tokens) / longest))
    )
    return None if found is None else text_of(found)


def answers(source, count=20, digits=0.9):
    grammar = compiled_here("schema", schema_json(source), STOP)
    return [text for seed in range(count) if (text := drawn(Walk(grammar), seed, digits)) is not None]


# numbers --------------------------------------------------------------------------------------------------------------

ENDLESS = [
    {"type": "number"},
    {"type": "integer"},
    {"type": ["integer", "null"]},
    {"type": "number", "minimum": 5},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "integer", "maximum": -3},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "multipleOf": 0.25},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "maximum": 1.7976931348623157e308},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    {"minimum": 3},
    {"type": "object", "maxProperties": 2},
    {"type": "array", "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "number"}], "maxItems": 2},
    {"type": "array", "items": [{"type": "null"}], "maxItems": 2},
    {},
    {"properties": {"a": True, "b": {"title": "b"}}, "required": ["a", "b"], "additionalProperties": False},
    {"anyOf": [{"type": "number"}, {"type": "integer"}]},
    {"allOf": [{"type": "number"}, {"minimum": 2}]},
    {"$ref": "#/$defs/n", "minimum": 2, "$defs": {"n": {"type": "number"}}},
    {"type": "array", "items": {"$ref": "#/$defs/any"}, "$defs": {"any": {"type": "integer"}}, "maxItems": 2},
]


@pytest.mark.parametrize("source", ENDLESS, ids=lambda source: json.dumps(source)[:60])
def test_numbers_end_however_much_a_model_likes_digits(source):
    found = answers(source, 12)
    assert len(found) >= 4
    for text in found:
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
        assert not re.search(r"[0-9]{20}|\.[0-9]{11}|[0-9][eE]", bare), text
        json.loads(text)


def test_numbers_inside_a_lark_grammar_end():
    grammar = compiled_here("grammar", 'start: %json {"type": "number"}', STOP)
    for seed in range(8):
        assert re.fullmatch(r"-?\d{1,19}(\.\d{1,10})?", drawn(Walk(grammar), seed, 0.98))


NAMED = [
    ({"const": 1e25}, "10000000000000000000000000"),
    ({"const": 1e-20}, "0.00000000000000000001"),
    ({"enum": [100000000000000000, 0.1]}, "0.1"),
    ({"type": "number", "const": 1e-15}, "0.000000000000001"),
    ({"allOf": [{"type": "number"}, {"const": 1e-15}]}, "0.000000000000001"),
    ({"type": "number", "minimum": 1e-12, "maximum": 2e-12}, "0.0000000000015"),
    ({"type": "number", "minimum": 0.3, "maximum": 0.3}, "0.3"),
    ({"type": "number", "multipleOf": 0.0001, "minimum": 0}, "12.3456"),
    ({"type": "integer", "maximum": 2**63 - 1}, str(LARGEST)),
    ({"type": "integer", "minimum": -(2**63)}, str(-LARGEST)),
    ({"type": "integer", "maximum": 2**64 - 1}, "1800000000000000000"),
    ({"type": "number", "minimum": -1e300}, "-1234567890123456789.0123456789"),
    ({"type": "number"}, "-0.0000000001"),
    ({"type": "integer", "multipleOf": 1000000}, "7000000"),
    ({"allOf": [{"multipleOf": 0.01}, {"multipleOf": 5}, {"type": "number"}]}, "15"),
]


@pytest.mark.parametrize(("source", "text"), NAMED, ids=lambda value: str(value)[:50])
def test_values_that_a_schema_names_are_possible(source, text):
    assert accepts(schema(source), text)


def test_free_values_are_any_json():
    document = '{"a":[1,-2.5,{"b":null,"c":[true,"x"]}],"d":{}}'
    for source in ({}, {"type": "object"}, {"properties": {"a": True}}, {"$defs": {"x": True}}):
        assert accepts(schema(source), document)
    assert accepts(schema({"allOf": [{"type": "object"}, {"required": ["a"]}]}), document)
    assert not accepts(schema({"type": "object", "additionalProperties": False}), document)
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"k": {"$ref": "#/$defs/t"}}, "type": "object"}}}
    both = {"allOf": [tree["$defs"]["t"], {"type": "object", "required": ["k"]}], "$defs": tree["$defs"]}
    assert accepts(schema(tree), '{"k":{"k":{}},"other":[1]}')
    assert accepts(schema(both), '{"k":{"k":{}},"other":[1]}')


def test_a_rewritten_schema_leaves_the_given_one_alone():
    source = {"type": "object", "title": "x", "properties": {"n": {"type": "number"}}, "x-note": 1}
    before = json.dumps(source)
    made = rewrite(source)
    assert json.dumps(source) == before
    assert "title" not in made
    assert "x-note" not in made


# formats --------------------------------------------------------------------------------------------------------------


def _email(text):
    local, _, domain = text.rpartition("@")
    assert 0 < len(local) <= 64
    assert domain


def _hostname(text):
    assert len(text) <= 253
    assert all(0 < len(label) <= 63 and not label.startswith("-") for label in text.split("."))


def _base64(text):
    assert base64.b64encode(base64.b64decode(text, validate=True)).decode() == text


JUDGES = {
    "date-time": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "duration": lambda text: re.fullmatch(r"P(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+S)?)?)", text).group(),
    "email": _email,
    "hostname": _hostname,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": lambda text: urlsplit(text).port,
    "base64": _base64,
    "base16": lambda text: base64.b16decode(text),
}


@pytest.mark.parametrize("name", JUDGES)
def test_texts_of_a_format_are_what_it_names(name):
    key = "contentEncoding" if name.startswith("base") else "format"
    found = [json.loads(text) for share in (0.0, 0.9) for text in answers({"type": "string", key: name}, 40, share)]
    assert len(found) > 20
    for text in found:
        JUDGES[name](text)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("time", "23:59:59.999999+00:00", "12:00:60Z"),
        ("time", "12:00:00Z", "12:00:00z"),
        ("date-time", "2024-02-29T00:00:00Z", "2023-02-29T00:00:00Z"),
        ("date-time", "2016-12-31T23:59:59Z", "2016-12-31T23:59:60Z"),
        ("date-time", "2016-12-31T23:59:59Z", "2016-12-31t23:59:59Z"),
        ("date", "2000-02-29", "1900-02-29"),
        ("date", "0001-01-01", "0000-01-01"),
        ("date", "2023-04-30", "2023-04-31"),
        ("ipv6", "1:2:3:4:5:6:7::", "1::2::3"),
        ("ipv6", "::", ":::"),
        ("uri", "http://[::1]:8080/a?b#c", "http://a:99999/"),
        ("email", "a.b@c.de", "a..b@c.de"),
        ("duration", "P1DT2H", "P1DT"),
    ],
)
def test_the_edges_of_formats(name, good, bad):
    for source in ({"type": "string", "format": name}, {"format": name}, {"type": ["string", "null"], "format": name}):
        assert accepts(schema(source), json.dumps(good))
        assert not accepts(schema(source), json.dumps(bad))


def test_a_format_holds_beside_a_pattern_and_a_length():
    both = schema({"type": "string", "format": "date", "pattern": "^2024-"})
    assert accepts(both, '"2024-02-29"')
    assert not accepts(both, '"2024-02-30"')
    assert not accepts(both, '"2025-01-01"')
    assert not accepts(schema({"type": "string", "format": "email", "maxLength": 8}), '"a@example.org"')
    encoded = schema({"type": "string", "contentEncoding": "base64", "maxLength": 4})
    assert accepts(encoded, '"QQ=="')
    assert not accepts(encoded, '"QR=="')
    assert not accepts(encoded, '"Q"')
