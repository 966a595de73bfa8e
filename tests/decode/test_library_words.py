"""What the library says, in our words: where, what, and what to do; none of its own names."""

from __future__ import annotations

import re

import pytest

from edge_dflash.decode.grammar.library import in_our_words
from edge_dflash.errors import RequestError
from tests.decode.test_grammar import lark, regex, schema

TREE = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a", "required": ["x"]}}}
LIST = {"type": "array", "items": {"$ref": "#/$defs/a"}}
TWO = {"type": "object", "properties": {"a": {}, "b": {}}}
REFUSED = [
    (schema, {"properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}}, "(at #/properties/a)"),
    (schema, {**TWO, "minProperties": 2}, "are enforced only where all properties that are named are required"),
    (schema, {"patternProperties": {"^a": True, "b$": True}}, "/^a/ and /b$/ can match one name"),
    (schema, {"$ref": "#/$defs/a", "type": "object", "$defs": {"a": TREE}}, "$ref #/$defs/a leads to itself"),
    (schema, {"allOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": LIST}}, "write the combination out"),
    (schema, {"multipleOf": 1e-20}, "multipleOf has too many digits"),
    (schema, {"type": "string", "pattern": "^a{3}$", "maxLength": 2}, "no text matches its pattern, format and length"),
    (schema, {"type": "string", "pattern": "\\bfoo"}, "has a word boundary inside, which would not be enforced"),
    (schema, {"type": "string", "pattern": "a("}, "the regex 'a(' is not valid: unclosed group"),
    (schema, {"allOf": [{"multipleOf": 4294967295}, {"multipleOf": 7}]}, "too large to be combined"),
    (schema, {"type": "string", "maxLength": 10**12}, "maxLength at # is 1000000000000; give a whole number from 0"),
    (schema, {"anyOf": []}, "anyOf at # is []; give a list of at least one schema"),
    (regex, "[^\\s\\S]", "no text leads to its end"),
    (regex, "a{5,2}", "the regex 'a{5,2}' is not valid: invalid repetition count range"),
    (lark, "start: x\nx: y\ny: x", "no text leads to its end"),
    (lark, 'start: a\na: b c\nc: "x"', 'line 2, column 4: unknown name: "b"'),
    (lark, "start: 'x'", "line 1, column 8: a character stands where none of the language can"),
    (lark, "start: (a", "line 1, column 10: Expected token ')'"),
    (lark, 'x: "a"', "it has no start rule"),
    (lark, "start: /(/", "line 1, column 8: the regex '(' is not valid: unclosed group"),
]
OWN = re.compile(
    r"coerce_one_of|lenient|NoExtension|TooComplex|non-verbose|Some\(|SearchRegex|json-schema:|\bserde|\d \| |\^\^|`|\n"
)


@pytest.mark.parametrize(("compiled", "source", "reason"), REFUSED, ids=[reason for _, _, reason in REFUSED])
def test_a_refusal_says_what_and_where_in_our_words(compiled, source, reason):
    with pytest.raises(RequestError) as refused:
        compiled(source)
    assert reason in str(refused.value)
    assert not OWN.search(str(refused.value))


def test_unknown_messages_are_cleaned():
    said = in_our_words(
        "grammar", "at 3(4): ParserWhatever: Some(5) of `x` in json-schema:///#\n   3 | A: B\n       ^\n"
    )
    assert said == "line 3, column 4: : (5) of x in #; change it there"
    assert in_our_words("regex", "") == "it cannot be used; change it there"
    assert len(in_our_words("regex", "x" * 1000)) <= 320
