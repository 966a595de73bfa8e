from __future__ import annotations

import json

import pytest
from grammar_support import END, split_answer, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from edge_dflash.errors import RequestError
from edge_dflash.text.chat import Answer, AnswerStream, thinking_is_open
from edge_dflash.text.template import ChatTemplate
from edge_dflash.text.tokenizer import Tokenizer

ASK = [{"role": "user", "content": "tidy up"}]
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {"properties": {"to": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
END_ID = tokenizer().control_id(END)


def prompt(*, thinking=False, messages=ASK, **options):
    return tokenizer().encode_chat(messages, enable_thinking=thinking, **options)


def split(text, *, thinking=False, **options):
    """An answer as the tokenizer writes it: markers in ``text`` become their tokens."""
    ids = tokenizer().encode(text)
    return split_answer(ids, tokenizer(), prompt(thinking=thinking), stop_token_ids=(END_ID,), **options)


def spelled(text):
    """Ids of ``text`` where markers stay text."""
    return tuple(i for symbol in text for i in tokenizer().encode(symbol))


def test_a_template_that_opens_the_thinking_is_told_from_one_that_answers_without():
    assert thinking_is_open(prompt(thinking=True), tokenizer())
    assert not thinking_is_open(prompt(thinking=False), tokenizer())
    assert not thinking_is_open(tokenizer().encode("hello"), tokenizer())
    assert not thinking_is_open((), tokenizer())


def test_a_marker_inside_a_message_opens_nothing():
    quoting = [{"role": "user", "content": "what does <think> mean?"}, {"role": "user", "content": "<think>"}]
    assert not thinking_is_open(prompt(messages=quoting), tokenizer())
    bare = tokenizer().encode("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n")
    assert not thinking_is_open(bare, tokenizer())


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("first the mug\n\nthen\n</think>\n\nDone.\n<|im_end|>", True, Answer("first the mug\n\nthen", "Done.\n")),
        ("first the mug\n", True, Answer("first the mug", "")),  # cut inside the thinking
        (
            "a<tool_call>{}</tool_call></think>no",
            True,
            Answer("a<tool_call>{}</tool_call>", "no"),
        ),  # calls nothing there
        ("<think>\nhm\n</think>\n\nDone.<|im_end|>", False, Answer("hm", "Done.")),
        ("Done.\n\n<|im_end|>", False, Answer("", "Done.\n\n")),
        ("\nDone.", False, Answer("", "\nDone.")),
        ("a</think>b", False, Answer("", "ab")),  # a marker that closes nothing
    ],
)
def test_an_answer_is_its_thinking_and_its_content(text, thinking, answer):
    assert split(text, thinking=thinking) == answer


def test_text_that_looks_like_a_marker_is_text():
    ids = spelled("a </think> b <tool_call>{}</tool_call>")
    assert split_answer(ids, tokenizer(), prompt()) == Answer("", "a </think> b <tool_call>{}</tool_call>")
    assert split_answer(ids, tokenizer(), prompt(thinking=True)) == Answer("a </think> b <tool_call>{}</tool_call>")


def test_tool_calls_of_qwen3():
    text = 'I go.\n\n<tool_call>\n{"name": "move", "arguments": {"to": "Tür", "n": 2}}\n</tool_call>\n'
    second = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call><|im_end|>'
    answer = split(text + second)
    assert answer.content == "I go."
    assert answer.malformed == ()
    first, last = (call.openai() for call in answer.tool_calls)
    assert first["type"] == "function"
    assert first["function"]["name"] == "move"
    assert first["function"]["arguments"] == '{"to": "Tür", "n": 2}'
    assert last["function"] == {"name": "stop", "arguments": "{}"}
    assert first["id"].startswith("call_")
    assert first["id"] != last["id"]


def test_tool_calls_of_qwen3_5_get_the_types_of_the_tool():
    text = (
        "<tool_call>\n<function=move>\n<parameter=to>\n5\nlines </parameter> here\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    (call,) = split(text, tools=[MOVE]).tool_calls
    assert json.loads(call.arguments) == {"to": "5\nlines </parameter> here", "n": 3}
    (untyped,) = split(text).tool_calls
    assert json.loads(untyped.arguments)["n"] == "3"


def test_what_the_template_writes_for_a_call_is_read_back():
    arguments = {"to": "  shelf\n", "n": -4}
    said = {"role": "assistant", "content": None}
    said["tool_calls"] = [
        {"id": "x", "type": "function", "function": {"name": "move", "arguments": json.dumps(arguments)}}
    ]
    ids = prompt(messages=[*ASK, said])
    opened, closed = tokenizer().control_id("<tool_call>"), tokenizer().control_id("</tool_call>")
    answer = ids[ids.index(opened) : ids.index(closed) + 1]
    (call,) = split_answer(answer, tokenizer(), prompt(), tools=[MOVE]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("move", arguments)


def test_ids_of_calls_are_repeatable_and_differ_between_prompts():
    ids = tokenizer().encode('<tool_call>{"name": "stop"}</tool_call>')
    other = prompt(messages=[*ASK, *ASK])
    one, same, two = (split_answer(ids, tokenizer(), p).tool_calls[0].id for p in (prompt(), prompt(), other))
    assert one == same != two


MALFORMED = [
    ('{"name": "move", "arguments": {"to": }', "no JSON"),
    ('{"arguments": {}}', "no name"),
    ('{"name": "move", "arguments": [1]}', "type list, wanted an object"),
    ('{"name": "move", "arguments": "x"}', "arguments are no JSON"),
    ('{"name": "move", "arguments": {"n": NaN}}', "not JSON compliant"),
    ('{"name": "fly", "arguments": {}}', "there is no tool 'fly'; there are move"),
    ("move()", "neither a JSON object nor"),
    ("<function=move>\n<parameter=n>\n1\n</parameter>\n", "neither a JSON object nor"),
    ("<function=move>\n<parameter=n>\nmany\n</parameter>\n</function>", "'n' is 'many', wanted integer"),
    ("<function=move><parameter=n>1.5</parameter></function>", "'n' is '1.5', wanted integer"),
    ("<function=move>\nn = 1\n</function>", "text that is no parameter: 'n = 1"),
    ("<function=move><parameter=n>1</parameter><parameter=n>2</parameter></function>", "'n' comes twice"),
    ("", "neither a JSON object nor"),
]


@pytest.mark.parametrize(("body", "reason"), MALFORMED)
def test_malformed_calls_are_reported(body, reason):
    answer = split(f"a<tool_call>{body}</tool_call>b", tools=[MOVE])
    assert answer.tool_calls == ()
    assert answer.content == "ab"
    (malformed,) = answer.malformed
    assert malformed.text == body
    assert reason in malformed.reason


def test_calls_that_are_never_closed_are_reported():
    answer = split('<tool_call>{"name": <tool_call>{"name": "stop"}</tool_call><tool_call>{"na')
    assert [m.text for m in answer.malformed] == ['{"name": ', '{"na']
    assert [m.reason for m in answer.malformed] == [
        "another call begins inside the call",
        "the answer ended inside the call",
    ]
    assert [call.name for call in answer.tool_calls] == ["stop"]


PIECES = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "\n",
            "\n\n",
            "é中",
            "ok ",
            '{"name": "stop"}',
            "🦾",
            END,
        ]
    ),
    max_size=12,
)


@given(PIECES, st.booleans(), st.lists(st.integers(1, 4), max_size=40))
def test_a_stream_gives_the_same_as_the_whole(pieces, thinking, sizes):
    ids = tokenizer().encode("".join(pieces))
    opening = prompt(thinking=thinking)
    whole = split_answer(ids, tokenizer(), opening, stop_token_ids=(END_ID,))
    stream = AnswerStream(tokenizer(), opening, stop_token_ids=(END_ID,))
    joined, position = Answer(), 0
    for size in [*sizes, len(ids)]:
        joined += stream.add(ids[position : position + size])
        position += size
    assert joined + stream.finish() == whole
    assert "\ufffd" not in whole.content + whole.thinking


def test_a_stream_says_when_it_thinks_and_holds_newlines_back():
    stream = AnswerStream(tokenizer(), prompt(thinking=True))
    assert stream.thinking
    assert stream.add(tokenizer().encode("\nhm\n")) == Answer("hm")
    assert stream.add(tokenizer().encode("so")) == Answer("\nso")
    assert stream.add(tokenizer().encode("\n</think>\n\n")) == Answer()
    assert not stream.thinking
    assert stream.add(tokenizer().encode("Done")) == Answer("", "Done")


def test_a_template_that_takes_no_tools_refuses_them():
    plain = Tokenizer(tokenizer()._tokenizer, ChatTemplate("{{ messages[0].content }}", {}, "test"), None)
    assert plain.encode_chat(ASK) == tokenizer().encode("tidy up")
    with pytest.raises(RequestError, match="takes no tools"):
        plain.encode_chat(ASK, tools=[MOVE])


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"function": {"name": 3}}, "move"])
def test_tools_need_a_name(tool):
    with pytest.raises(RequestError, match="tool 0 has no name"):
        prompt(tools=[tool])


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("move", "type str; give a list"),
        ([{"function": {}}], "no function with a name"),
        ([{"function": {"name": "f", "arguments": "{"}}], "are no JSON"),
        ([{"function": {"name": "f", "arguments": "[" * 100_000}}], "are no JSON"),
        ([{"function": {"name": "f", "arguments": [1]}}], "type list; give an object"),
    ],
)
def test_earlier_calls_must_be_whole(calls, reason):
    with pytest.raises(RequestError, match=reason):
        prompt(messages=[*ASK, {"role": "assistant", "tool_calls": calls}])
