"""Forced calls: always a call of an allowed tool, whose arguments satisfy its schema, in either dialect."""

from __future__ import annotations

import contextlib
import json
import random
import time

import pytest
from grammar_support import END, Walk, compiled_here, split_answer, tokenizer
from json_schema import faults

from edge_dflash.decode.grammar.calls import Calls
from edge_dflash.decode.options import Options
from edge_dflash.errors import RequestError
from edge_dflash.text.chat import dialect_of
from edge_dflash.text.template import ChatTemplate
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.text.tool_calls import JsonCalls, TaggedCalls
from tests.decode.test_grammar import SPELLING, accepts, walk

JSON_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"""
STOP = (tokenizer().control_id(END),)
CLOSE = "\n</parameter>"
QUOTES = {i for i, text in enumerate(SPELLING) if text[:1] in (b'"', b"}", b"]")}


def with_template(source):
    return Tokenizer(tokenizer()._tokenizer, ChatTemplate(source, {}, "test"), STOP[0])


DIALECTS = {"tagged": tokenizer(), "json": with_template(JSON_TEMPLATE)}


def tool(name, properties=None, required=(), **rest):
    given = {"properties": properties or {}, "required": list(required), "additionalProperties": False}
    parameters = {"type": "object", **given, **rest}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


PLACE = {"properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
GRASP = tool(
    "grasp",
    {
        "object": {"type": "string", "title": "Object"},
        "force": {"type": "number", "minimum": 0},
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[a-z]\\d/x$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
        "place": {"$ref": "#/$defs/Place"},
        "pose": PLACE,
        "path": {"anyOf": [{"items": {"type": "integer"}, "maxItems": 2}, {"type": "null"}]},
        "choice": {"anyOf": [{"$ref": "#/$defs/Choice"}, {"type": "null"}]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "short": {"type": "string", "minLength": 2, "maxLength": 4},
        "gently": {"type": "boolean"},
    },
    ("object", "place", "pose"),
    **{"$defs": {"Place": {"type": "object", **PLACE}, "Choice": {"enum": ["near", "far", None]}}},
)
WAIT = {"type": "function", "function": {"name": "wait"}}
TOOLS = [GRASP, WAIT, tool('say "é"', {"text": {"type": "string"}}, ("text",))]


def forced(*tools, dialect="tagged"):
    """The grammar of a call of one of the tools."""
    return Calls.of("forced", tools, dialect_of(DIALECTS[dialect])).grammar()


def form(tools, dialect):
    """The same, at its start; the tokenizers differ in their templates only."""
    return Walk(compiled_here("tools", forced(*tools, dialect=dialect), STOP))


def drawn(constraint, words, seed):
    """Tokens of a random call; texts are led to their end."""

    def favoured(tokens):
        tail = b"".join(SPELLING[i] if i < len(SPELLING) else b"" for i in tokens[-20:])
        begun = next((n for n in range(len(CLOSE), 0, -1) if tail.endswith(CLOSE[:n].encode())), 0)
        rest = CLOSE[begun:].encode()
        return ({i for i, text in enumerate(SPELLING) if text and rest.startswith(text)}, 0.8), (QUOTES, 0.3)

    found = walk(constraint, random.Random(seed), 3000, favoured)
    assert found is not None, "it does not end"
    return found


def test_the_dialect_is_that_of_the_template():
    assert isinstance(dialect_of(DIALECTS["tagged"]), TaggedCalls)
    assert dialect_of(DIALECTS["json"]) == JsonCalls('\n{"name": ', ', "arguments": ', "}\n")
    silent = with_template("{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match="writes tool calls in a form that is not known; give tool_choice auto"):
        dialect_of(silent)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_forced_answer_is_one_call_whose_arguments_satisfy_the_schema(dialect):
    words = DIALECTS[dialect]
    constraint = form(TOOLS, dialect)
    seen = set()
    for seed in range(24):
        tokens = drawn(constraint.copy(), words, seed)
        answer = split_answer(tokens, words, stop_token_ids=STOP, tools=TOOLS)
        assert not answer.malformed
        assert not answer.content
        (call,) = answer.tool_calls
        arguments = json.loads(call.arguments)
        seen.add(call.name)
        (called,) = (one["function"] for one in TOOLS if one["function"]["name"] == call.name)
        parameters = called.get("parameters", {"maxProperties": 0})
        assert not faults(parameters, arguments, parameters)
        if dialect == "tagged":  # the types that their schemas imply
            assert isinstance(arguments.get("pose", {}), dict)
            assert isinstance(arguments.get("path"), list | None)
    assert seen == {"grasp", "wait", 'say "é"'}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_the_template_writes_for_a_call_is_allowed(dialect):
    words = DIALECTS[dialect]
    arguments = {"object": 'a "red" mug\n</b>', "force": 2.5, "place": {"x": 3}, "pose": {"x": 0}, "gently": False}
    call = {"type": "function", "function": {"name": "grasp", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    ids = words.encode_chat(messages, tools=TOOLS)
    opened, closed = (words.control_id(name) for name in ("<tool_call>", "</tool_call>"))
    start = len(ids) - 1 - ids[::-1].index(opened)
    constraint = form(TOOLS, dialect)
    for token in ids[start : ids.index(closed, start) + 1]:
        assert constraint.push(token), words.decode([token])
    assert constraint.complete


TEXT = {"type": "string"}
REFUSED = [  # parameters, the reason with its advice, parameters that follow it
    ({"a": {"type": ["string", "integer"], "minimum": 3}}, "be told apart in this model's dialect; give it one type",
     {"a": {"type": "integer", "minimum": 3}}),
    ({"a": {**TEXT, "pattern": "^a|b$"}}, "has an anchor inside or beside |; write it as ^(...)$",
     {"a": {**TEXT, "pattern": "^(a|b)$"}}),
    ({"a": {**TEXT, "allOf": [{"maxLength": 3}, {"minLength": 1}]}}, "'allOf' of parameter 'a' would not be enforced i",
     {"a": TEXT}),
    ({"a>b": TEXT}, "which cannot stand in a tag; use letters, digits and _", {"a_b1": TEXT}),
    ({"a": {"enum": ["x</parameter>"]}}, "holds a closing tag; leave it out", {"a": {"enum": ["x"]}}),
    ({"a": {**TEXT, "format": "hex"}}, "give a pattern of texts", {"a": {**TEXT, "format": "hex", "pattern": "^0"}}),
    ({"a": {"type": "integer", "uniqueItems": True}}, "'uniqueItems' at #/properties/a would not be enforced", {}),
]  # fmt: skip


@pytest.mark.parametrize(("properties", "reason", "followed"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_the_tags_cannot_hold_is_refused_by_name(properties, reason, followed):
    with pytest.raises(RequestError) as refused:
        forced(tool("f", properties))
    assert str(refused.value).startswith("a call of the tool 'f' cannot be forced: ")
    assert reason in str(refused.value)
    forced(tool("f", followed))


def test_a_parameter_that_nothing_satisfies_is_left_out_where_it_is_optional():
    nothing, fine = {"type": "integer", "enum": [1.5, "1"]}, {"type": "boolean"}
    with pytest.raises(RequestError, match="nothing satisfies parameter 'a'; make it optional"):
        forced(tool("f", {"a": nothing, "b": fine}, ("a",)))
    made = forced(tool("f", {"a": nothing, "b": fine}))
    assert "parameter=b" in made
    assert "parameter=a" not in made


def test_values_of_another_type_are_no_choices():
    integers = tool("f", {"a": {"type": "integer", "enum": [1, 1.5, 2.0, True, "3"]}}, ("a",))
    text = forced(integers)
    assert 'c0p0v: ("1" | "2.0") ' in text


def test_rules_of_the_whole_are_refused_where_they_would_not_hold():
    with pytest.raises(RequestError, match="'minProperties' of its parameters would not be enforced"):
        forced(tool("f", {"a": {}}, minProperties=1))
    with pytest.raises(RequestError, match="its parameters are not of type object"):
        forced({"name": "f", "parameters": {"type": "array"}}, dialect="json")


def test_tools_that_are_too_many_or_alike_are_refused():
    with pytest.raises(RequestError, match="two tools are called 'wait'"):
        forced(WAIT, WAIT, dialect="json")
    many = [tool(f"t{index}", {"a": {"const": "x" * 1000}}) for index in range(80)]
    with pytest.raises(RequestError, match=r"too large for a forced call: .* choose one by name, or give fewer"):
        forced(*many, dialect="json")


CHOICES = [
    ({"tool_choice": "required"}, "tool_choice is 'required', and there are no tools"),
    ({"tool_choice": "grasp"}, "tool_choice is 'grasp', and there are no tools"),
    ({"tool_choice": "fly", "tools": TOOLS}, "tool_choice is 'fly'; give one of auto, none, required, grasp, wait"),
    ({"tool_choice": "required", "tools": TOOLS, "regex": "a"}, "regex and tool_choice 'required' are given"),
    ({"tool_choice": "wait", "tools": TOOLS, "stop": "x"}, "tool_choice and stop are given"),
]


@pytest.mark.parametrize(("given", "reason"), CHOICES, ids=lambda value: str(value)[:40])
def test_choices_that_cannot_be_are_refused(given, reason):
    with pytest.raises(RequestError) as refused:
        Options.of(given)
    assert reason in str(refused.value)


def test_a_choice_of_none_tells_of_no_tools():
    assert Options(tools=TOOLS, tool_choice="none").tools is None
    assert Options(tools=TOOLS, tool_choice="wait").forced_tools == (WAIT,)
    assert Options(tools=TOOLS).forced_tools == ()
    assert accepts(form([WAIT], "json"), "") is False


def branches(depth, end):
    """Definitions, each with nine references to the next one."""
    names = [f"d{index}" for index in range(depth)]
    refs = [{"$ref": f"#/$defs/{name}"} for name in names[1:]]
    return {name: {"anyOf": [ref] * 9} for name, ref in zip(names, [*refs, end], strict=True)}


@pytest.mark.parametrize("end", [{"$ref": "#/$defs/d0"}, {"const": 1}, {"type": ["string", "null"]}, {}], ids=str)
@pytest.mark.parametrize("depth", [1, 12])
def test_branches_that_multiply_or_lead_to_themselves_take_no_time(end, depth):
    many = tool("f", {"a": {"$ref": "#/$defs/d0"}}, **{"$defs": branches(depth, end)})
    began, made = time.process_time(), ""
    with contextlib.suppress(RequestError):
        made = forced(many)
    assert len(made) < 1 << 16
    assert time.process_time() - began < 1
