"""Schemas of tools in any form: what a grammar writes and a reader of calls reads satisfies them as they were given."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
from grammar_support import Walk, compiled_here, split_answer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_schema import faults

from edge_dflash.decode.grammar.calls import AnswerForm, Calls
from edge_dflash.decode.grammar.schema import plain
from edge_dflash.errors import RequestError
from edge_dflash.text.chat import dialect_of
from edge_dflash.text.tool_calls import MalformedToolCall, parse_tool_call
from tests.decode.test_grammar import SPELLING, accepts, schema
from tests.decode.test_tool_form import DIALECTS, STOP, TEXT, drawn, forced, form

INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}
REFERENCES = (
    "#/$defs/A", "#/$defs/B", "#/definitions/C", "#/x-shared/D", "#/examples/0", "#/properties/p", "#/$defs/B/anyOf/0"
)  # fmt: skip
FREE = re.compile(r"comes twice|[eE][+-]?0*[0-9]{3}")  # names and numbers that a schema leaves free
BESIDE = ({"maxLength": 2}, {"minItems": 1}, {"required": ["x"]}, {"minimum": 3}, {"description": "x"}, {"default": 1})
LEAVES = (
    INTEGER, {"type": "string", "maxLength": 3}, {"enum": ["5", 6, None]}, {"const": "x"}, {"type": "boolean"},
    {"type": ["string", "null"]}, {"type": "integer", "enum": [1, "1", 2.0]}, {"const": "x", "type": "integer"},
    {"anyOf": [{"const": "null"}, {"type": "null"}]}, {"enum": [{"x": 1}, "true", True]}, {"minimum": 4, "maximum": 6},
)  # fmt: skip


def tagged(option):
    """A option of a oneOf, without the required name that its discriminator asks for."""
    return st.tuples(option, option).map(
        lambda pair: {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": name}, "x": one}, "additionalProperties": False}
                for name, one in zip("ab", pair, strict=True)
            ],
            "discriminator": {"propertyName": "k"},
        }
    )


def larger(inner):
    names = st.sampled_from(({"enum": ["x", "y"]}, {"const": "x"}, {"$ref": "#/$defs/Names"}, {"pattern": "^x[0-9]$"}))
    records = st.builds(lambda rule, one: {"propertyNames": rule, "additionalProperties": one}, names, inner)
    objects = st.builds(
        lambda one, other, needed: {"properties": {"x": one, "y": other}, "required": needed} | {
            "additionalProperties": False
        },
        inner, inner, st.sampled_from(([], ["x"], ["x", "y"])),
    )  # fmt: skip
    typed = st.one_of(records, objects, inner.map(lambda one: {"items": one, "maxItems": 2}))
    kinds = typed.map(lambda one: {"type": "array" if "items" in one else "object", **one})
    beside = st.sampled_from(BESIDE)
    return st.one_of(
        typed, kinds, tagged(inner),
        st.lists(inner, min_size=1, max_size=2).map(lambda several: {"anyOf": several}),
        st.builds(lambda one, more: {"allOf": [one], **more}, inner, beside),
        st.builds(lambda one, more: {**one, **more}, inner, beside),
    )  # fmt: skip


reference = st.sampled_from(REFERENCES).map(lambda place: {"$ref": place})
node = st.recursive(st.one_of(st.sampled_from(LEAVES), reference), larger, max_leaves=4)


@st.composite
def parameters(draw):
    made = {
        "type": "object",
        "properties": {"p": draw(node), "q": draw(node)},
        "required": draw(st.sampled_from((["p"], ["q", "x"], ["p", "q"]))),
        "additionalProperties": draw(st.one_of(st.just(False), node)),
        "$defs": {"A": draw(node), "B": {"anyOf": [draw(node)]}, "Names": {"enum": ["x", "z", 5]}},
        "definitions": {"C": draw(node)},
        "x-shared": {"D": draw(node)},
        "examples": [draw(node)],
    }
    if draw(st.booleans()):
        made["propertyNames"] = {"enum": ["p", "q", "x"]}
    if draw(st.booleans()):
        folders = {key: made.pop(key) for key in ("definitions", "x-shared", "examples")}
        root = {"$ref": "#/$defs/Root", "properties": {"p": made["properties"]["p"]}, **folders}
        if draw(st.booleans()):
            del root["properties"]
            root["$defs"] = {**made.pop("$defs"), "Root": made}
            root = json.loads(json.dumps(root).replace("#/properties/p", "#/$defs/Root/properties/p"))
            return root
        return {**made, **folders}
    return made


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(source=parameters(), seed=st.integers(0, 99))
def test_a_call_that_is_written_satisfies_the_schema_that_was_given(dialect, source, seed):
    words, tool = DIALECTS[dialect], {"name": "f", "parameters": source}
    try:
        constraint = form([tool], dialect)
    except RequestError:
        return
    for turn in range(3):
        try:
            tokens = drawn(constraint.copy(), words, seed + turn)
        except RequestError:
            return
        except AssertionError as error:  # what refers to itself
            if "it does not end" not in str(error):
                raise
            return
        answer = split_answer(tokens, words, stop_token_ids=STOP, tools=[tool])
        if answer.malformed and FREE.search(f"{answer.malformed[0].text} {answer.malformed[0].reason}"):
            continue
        assert not answer.malformed, answer.malformed
        arguments = json.loads(answer.tool_calls[0].arguments)
        assert not faults(source, arguments, source), arguments


# what is written is counted -------------------------------------------------------------------------------------------


def records(depth, names):
    """Records of records, each with all the names."""
    made = {"type": "integer"}
    for _ in range(depth):
        made = {"type": "object", "propertyNames": {"$ref": "#/$defs/N"}, "additionalProperties": made}
    listed = {"enum": [f"n{index}" for index in range(names)]}
    return {"type": "object", "properties": {"a": made}, "required": ["a"], "$defs": {"N": listed}}


def test_records_in_records_are_written_once():
    made = plain(records(8, 40))
    assert len(json.dumps(made)) < 20_000
    assert not faults(made, {"a": {"n3": {}}}, made)
    one = schema(records(3, 3))
    assert accepts(one, '{"a":{"n1":{"n2":{"n0":5}}}}')
    assert not accepts(one, '{"a":{"n1":{"n2":{"n3":5}}}}')
    assert not accepts(one, '{"a":{"n1":{"n2":{"n0":"x"}}}}')
    for dialect in DIALECTS:
        assert len(forced({"name": "f", "parameters": records(4, 30)}, dialect=dialect)) < 10_000


def test_names_of_a_whole_schema_are_counted():
    record = {"type": "object", "propertyNames": {"$ref": "#/$defs/N"}, "additionalProperties": {"type": "integer"}}
    many = {
        "type": "object",
        "properties": {f"p{index}": record for index in range(2000)},
        "$defs": {"N": {"enum": [f"n{index}" for index in range(2000)]}},
    }
    began = time.process_time()
    with pytest.raises(RequestError, match=r"'propertyNames' at #/properties/p0 would not .* list fewer names"):
        plain(many)
    far = {"type": "object", "properties": {}, "x-shared": {"a": {"const": "x" * 3000}}}
    for index in range(40):
        far["x-shared"] = {"deeper": far["x-shared"], "a": far["x-shared"]["a"]}
        far["properties"][f"p{index}"] = {"$ref": "#/x-shared" + "/deeper" * index + "/a"}
    with pytest.raises(RequestError, match=r"cannot be followed: .* refer to definitions under \$defs"):
        plain(json.loads(json.dumps(far)))
    assert time.process_time() - began < 2


def test_what_stands_under_keywords_that_are_left_out_takes_no_time():
    deep = {}
    for _ in range(60):
        deep = {"if": True, "then": deep, "else": {}}
    began = time.process_time()
    plain(json.loads(json.dumps(deep)))
    assert time.process_time() - began < 1
    for key in ("contentSchema", "propertyNames", "then", "x-shared", "unevaluatedItems"):
        deep = {}
        for _ in range(900):
            deep = {key: deep}
        if key in ("then", "x-shared"):  # never looked at
            assert plain(deep) == {}
        else:
            with pytest.raises(RequestError, match="nested deeper than 64 levels"):
                plain(deep)


# references -----------------------------------------------------------------------------------------------------------

SHORT_NAMES = {"type": "object", "propertyNames": {"maxLength": 1}}
ONE_OF = {
    "oneOf": [{"type": "object", "properties": {"k": {"const": name}}, "additionalProperties": False} for name in "ab"],
    "discriminator": {"propertyName": "k"},
}


@pytest.mark.parametrize("place", ["x-shared", "examples", "default", "then", "else"])
def test_what_is_referred_to_is_enforced_wherever_it_stands(place):
    for target, good, bad in ((SHORT_NAMES, '[{"b":1}]', '[{"bb":1}]'), (ONE_OF, '[{"k":"a"}]', "[{}]")):
        source = {"type": "array", "items": {"$ref": f"#/{place}/0"}, place: [target]}
        made = schema(source)
        assert accepts(made, good)
        assert not accepts(made, bad)


def test_a_definition_that_is_true_has_numbers_that_end():
    made = schema({"$ref": "#/$defs/x", "$defs": {"x": True}})
    assert accepts(made, "17.5")
    assert not accepts(made, "1e400")


def test_an_option_is_tagged_only_where_a_discriminator_says_so():
    option = {"type": "object", "properties": {"k": {"const": "a"}}, "additionalProperties": False}
    source = {
        "type": "object",
        "properties": {
            "free": {"$ref": "#/$defs/A"},
            "one": {"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "discriminator": {"propertyName": "k"}},
        },
        "$defs": {"A": option},
    }
    assert accepts(schema(source), '{"free":{},"one":{"k":"a"}}')
    assert not accepts(schema(source), '{"free":{},"one":{}}')


def written(parameters, *values, dialect="tagged"):
    """For values of parameter a: whether each can be written, and what is read of it."""
    words, tool = DIALECTS[dialect], {"name": "f", "parameters": parameters}
    constraint = form([tool], dialect)
    found = []
    for value in values:
        body = f"\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n"
        walker = constraint.copy()
        assert walker.push(words.control_id("<tool_call>"))
        rest = body.encode()
        while rest:
            fits = [i for i, spelled in enumerate(SPELLING) if spelled and rest.startswith(spelled)]
            token = next((i for i in sorted(fits, key=lambda i: -len(SPELLING[i])) if walker.push(i)), None)
            if token is None:
                break
            rest = rest[len(SPELLING[token]) :]
        call = parse_tool_call(body, "id", [tool])
        found.append(
            (not rest, call.reason if isinstance(call, MalformedToolCall) else json.loads(call.arguments)["a"])
        )
    return found


def of(one, **rest):
    return {"type": "object", "properties": {"a": one}, "required": ["a"], **rest}


def test_keywords_beside_a_reference_hold():
    whole, listed = {"N": {"type": "integer"}}, {"N": {"type": "array", "items": {"type": "integer"}}}
    record = {"N": {"properties": {"x": {"type": "integer"}}, "additionalProperties": False}}
    for source, defs, good, bad in (
        ({"allOf": [{"$ref": "#/$defs/N"}], "minimum": 3}, whole, "4", "1"),
        ({"allOf": [{"type": "integer"}], "minimum": 3}, {}, "4", "1"),
        ({"$ref": "#/$defs/N", "minItems": 2}, listed, "[1, 2]", "[1]"),
        ({"$ref": "#/$defs/N", "required": ["x"]}, record, '{"x": 1}', "{}"),
        ({"$ref": "#/$defs/N", "required": ["x"]}, record, '{"x": 1}', '"x"'),
    ):
        (written_good, read), (written_bad, _) = written(of(source, **{"$defs": defs}), good, bad)
        assert (written_good, read, written_bad) == (True, json.loads(good), False), source
    texts = {"$defs": {"N": {"type": "string"}}}
    for source, more, keyword in (
        ({"$ref": "#/$defs/N", "maxLength": 3}, texts, "$ref"),
        ({"enum": ["a", "abc"], "minLength": 2}, {}, "enum"),
    ):
        with pytest.raises(RequestError, match=re.escape(f"'{keyword}' of parameter 'a' would not be enforced")):
            forced({"name": "f", "parameters": of(source, **more)})


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "number"}},
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "number"}},
        {"$ref": "#/definitions/F", "definitions": {"F": of({"type": "number"})}},
        {"type": "object", "allOf": [{"$ref": "#/definitions/F"}], "definitions": {"F": of({"type": "number"})}},
        of({"$ref": "#/properties/b"}) | {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "number"}}},
        of({"$ref": "#/$defs/F/properties/x"}, **{"$defs": {"F": {"properties": {"x": {"type": "number"}}}}}),
    ],
    ids=lambda one: json.dumps(one)[:60],
)
def test_grammar_and_reader_find_the_same_schema(parameters):
    assert written(parameters, "1", "x") == [(True, 1), (False, "the parameter 'a' is 'x', wanted number")]


def test_a_parameter_that_refers_to_all_of_them_is_one():
    tree = {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}
    assert written(tree, '[{"a": []}]') == [(True, [{"a": []}])]
    assert not written(tree, "[[]]")[0][0]


def test_values_are_read_as_they_are_listed():
    assert written(of({"enum": ["5", 6, "null"]}), "5", "6", "null") == [(True, "5"), (True, 6), (True, "null")]
    assert written(of({"anyOf": [{"const": "1"}, {"const": 2}]}), "1", "2", "3")[:2] == [(True, "1"), (True, 2)]
    assert written(of({"type": ["string", "number"]}), "1e999", "NaN") == [(True, "1e999"), (True, "NaN")]
    with pytest.raises(RequestError, match="nothing satisfies parameter 'a'"):
        written(of({"type": "integer", "const": "x"}))


def test_definitions_go_where_they_are_needed():
    defs = {f"D{index}": {"type": "object", "properties": {"x" * 40: {"type": "string"}}} for index in range(200)}
    properties = {f"p{index}": {"type": "integer"} for index in range(60)} | {"d": {"$ref": "#/$defs/D7"}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties, "$defs": defs}}
    assert len(forced(tool)) < 8000


# beside a form, and where they are compiled ---------------------------------------------------------------------------

TAGGED, JSON = (dialect_of(words) for words in DIALECTS.values())
REPORT = AnswerForm("schema", '{"type":"object","properties":{"ok":{"type":"boolean"}}}')
LOOKS = {"name": "odd", "parameters": of({"type": "string", "pattern": "^(?=x)x$"})}
FINE = {"name": "fine", "parameters": of(INTEGER, additionalProperties=False)}


@pytest.mark.parametrize("dialect", [TAGGED, JSON])
def test_a_tool_that_the_library_refuses_is_held_to_its_name(dialect):
    compiled_here("calls", Calls.of("beside", [LOOKS, FINE], dialect, REPORT).to_json(), STOP)
    for strict in ({**LOOKS, "strict": True}, FINE):
        calls = Calls.of("beside", [{**LOOKS, "strict": strict is not FINE}, FINE], dialect, REPORT)
        report = REPORT if strict is not FINE else AnswerForm("schema", '{"pattern":"(?=x)"}')
        with pytest.raises(RequestError, match="look-around would not be enforced"):
            compiled_here("calls", replace(calls, form=report).to_json(), STOP)
    with pytest.raises(RequestError, match="look-around would not be enforced"):
        compiled_here("calls", Calls.of("forced", [LOOKS], dialect).to_json(), STOP)


def test_the_others_are_still_held_to_their_schemas():
    grammar = Walk(compiled_here("calls", Calls.of("beside", [LOOKS, FINE], JSON, REPORT).to_json(), STOP))
    assert accepts(grammar, '{"ok":true}')
    assert grammar.push(DIALECTS["json"].control_id("<tool_call>"))
    assert not accepts(grammar, '\n{"name": "fine", "arguments": {"a": "x')
    for token in DIALECTS["json"].encode_text('\n{"name": "odd", "arguments": {"a": "y'):
        assert grammar.push(token)


def test_many_tools_beside_a_form_are_held_to_their_names_the_largest_first():
    few = [{**FINE, "name": f"small{index}"} for index in range(3)]
    large = [
        {"name": f"t{index}", "parameters": {"type": "object", "properties": {f"p{i}": INTEGER for i in range(8)}}}
        for index in range(60)
    ]
    made = Calls.of("beside", [*few, *large], TAGGED, REPORT).grammar()
    compiled_here("tools", made, STOP)
    assert made.count("<parameter=a>") == 3
    assert 0 < made.count("<parameter=p0>") < 60
    with pytest.raises(RequestError, match=r"too large for calls beside a schema: .* leave it out, or give fewer"):
        Calls.of("beside", [{**tool, "strict": True} for tool in large], TAGGED, REPORT).grammar()
    assert Calls.of("strict", [*large, {**FINE, "strict": True}], TAGGED).grammar().count("<parameter=") == 1


def test_the_schemas_of_tools_are_bounded_like_schemas():
    huge = {"name": "huge", "parameters": of({"enum": ["x" * 1000 + str(index) for index in range(300)]})}
    for which in ("forced", "strict"):
        with pytest.raises(RequestError, match=r"schemas of [0-9]+ bytes, at most 262144 are taken; give fewer tools"):
            Calls.of(which, [{**huge, "strict": True}], JSON)
    assert [tool["held"] for tool in Calls.of("beside", [huge, FINE], JSON, REPORT).tools] == ["free", "where it can"]
    assert Calls.of("strict", [huge], JSON).tools == ({"name": "huge", "held": "free"},)
    calls = Calls.of("beside", [LOOKS, FINE], TAGGED, REPORT)
    assert Calls.from_json(calls.to_json()) == calls


# what others write ----------------------------------------------------------------------------------------------------

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
UUID = "00000000-0000-4000-8000-000000000000"
TAKEN = [
    ({**TEXT, "format": "email", "pattern": EMAIL}, ["a'b.c@x.co", "a@b-c.de.fg"],
     ["a..b@x.co", ".a@x.co", "a'@x.co", "a@x"]),
    ({**TEXT, "format": "duration", "pattern": DURATION}, ["P1D", "PT5S", "P2W"], ["P", "PT", "P1DT"]),
    ({**TEXT, "pattern": DECIMAL}, ["1", "-0.5", ".5", "5.", "007"], ["", "-", ".", "+.", "1e5"]),
    ({**TEXT, "format": "uuid4"}, [UUID], [UUID.replace("4", "3"), UUID.replace("8", "7")]),
    ({**TEXT, "format": "file-path"}, ["/a"], [5]),
    ({**TEXT, "nullable": True, "enum": ["a", None]}, ["a", None], ["b"]),
    ({"type": "object", "properties": {"x": TEXT}, "unevaluatedProperties": False}, [{"x": "1"}, {}], [{"y": "1"}]),
    ({"enum": ["a"], "enumNames": ["A"], "markdownDescription": "x", "propertyOrdering": []}, ["a"], ["b"]),
    ({"type": "object", "propertyNames": {**TEXT, "format": "uuid"}, "additionalProperties": INTEGER}, [{UUID: 1}],
     [{"x": 1}]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}, {}]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "good", "bad"), TAKEN, ids=[json.dumps(row[0])[:70] for row in TAKEN])
def test_what_the_libraries_of_others_write_is_enforced(source, good, bad):
    made = schema(source)
    for value in good:
        assert accepts(made, json.dumps(value, separators=(",", ":"))), value
        assert not isinstance(value, str) or re.search(source.get("pattern", ""), value)
    for value in bad:
        assert not accepts(made, json.dumps(value, separators=(",", ":"))), value


def test_what_may_be_null_is_read_as_null():
    assert written(of({**TEXT, "nullable": True}), "null", "x") == [(True, None), (True, "x")]
    both = {"oneOf": [{**TEXT, "nullable": True}, {**INTEGER, "nullable": True}]}
    with pytest.raises(RequestError, match="could hold together"):
        plain(both)
