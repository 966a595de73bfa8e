"""Prompts become token ids with an answer, and each byte of an answer has its place."""

import json

import pytest
from chat_families import family, reference
from quality_support import source

from edge_dflash.demo.tasks import TARGET
from edge_dflash.errors import RequestError
from edge_dflash.quality.texts import MOST_LINE, PLACES, fingerprint, label_bytes, make_texts, parse_tasks, places
from edge_dflash.text.tokenizer import Tokenizer

LETTERS = {
    "prose": "p",
    "json_keys": "k",
    "json_values": "v",
    "json_structure": "s",
    "tool_calls": "t",
    "thinking": "T",
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("go on", "ppppp"),
        ('{"a": 1}', "ssksssvs"),
        ('{"a":{"b":"x"},"c":[1,"y"]}', "sskssssk" + "sssvs" + "ssskss" + "svssvsss"),
        ('ok [1] {"a":"b\\"c"} end', "ppppppp" + "ssksssvvvvss" + "pppp"),
        ('[{"a": true}] x', "sssks" + "ssvvvvss" + "pp"),
        ("<think>a{</think>b", "T" * 17 + "p"),
        ('x<tool_call>{"a":1}</tool_call>', "p" + "t" * 30),
        ("<think>never closed", "T" * 19),
        ('{"a', "ssk"),
        ("}]", "pp"),
        ("", ""),
    ],
)
def test_bytes_have_their_places(text, wanted):
    assert "".join(LETTERS[place] for place in label_bytes(text.encode())) == wanted


def test_an_answer_may_begin_inside_a_thinking_span():
    prompt, answer = (tokenizer().encode_text(text) for text in ("<think>\nso ", "far</think>go"))
    labels = places(tokenizer(), prompt, answer)
    assert (labels[0], labels[-1]) == ("thinking", "prose")
    assert set(places(tokenizer(), answer, answer[-1:])) == {"prose"}


def tokenizer():
    return Tokenizer.open(TARGET)


def test_every_token_of_an_answer_has_a_place():
    messages = [{"role": "user", "content": "Tidy up."}, {"role": "assistant", "content": 'Yes: {"goal": "tidy"}'}]
    (text,) = make_texts([messages], tokenizer(), 1024, 500, None)
    prompt = tokenizer().encode_chat(messages[:1])
    assert text.ids[: len(prompt)] == prompt
    assert set(text.places[: len(prompt)]) == {"prompt"}
    answer = text.places[len(prompt) :]
    assert len(answer) == len(text.ids) - len(prompt)
    assert {"prose", "json_keys", "json_values"} <= set(answer) <= set(PLACES) - {"prompt"}
    assert text.ids[-1] == tokenizer().eos_token_id


CALL = {"id": "1", "type": "function", "function": {"name": "go", "arguments": '{"to": "dock"}'}}
PARSED = {"name": "go", "arguments": {"to": "dock"}}  # as templates take it
CALLED = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "On my way.", "tool_calls": [CALL]}]


def test_parsed_tool_calls_are_of_the_answer_as_the_template_spells_them():
    tokenizer = family("qwen3")[1]
    (text,) = make_texts([CALLED], tokenizer, 1 << 20, 500, None)
    prompt, answer = text.ids[: text.answer], text.ids[text.answer :]
    assert prompt == tokenizer.encode_chat(CALLED[:1], enable_thinking=False)
    assert (
        text.ids
        == reference("qwen3", [CALLED[0], CALLED[1] | {"tool_calls": [CALL | {"function": PARSED}]}])[: len(text.ids)]
    )
    assert answer[-1] == tokenizer.eos_token_id
    assert {"prose", "tool_calls"} <= set(text.places[text.answer :])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_thinking_before_parsed_tool_calls_is_of_the_answer(name):
    said = CALLED[1] | {"content": "<think>\nhm\n</think>\n\nOn."}
    (text,) = make_texts([[CALLED[0], said]], family(name)[1], 1 << 20, 500, None)
    assert {"thinking", "prose", "tool_calls"} <= set(text.places[text.answer :])


@pytest.mark.parametrize("odd", ["start", "end"])
def test_an_answer_that_the_template_does_not_write_behind_the_prompt_is_all_prompt(monkeypatch, odd):
    tokenizer = family("qwen3")[1]
    whole, encode = tokenizer.encode_chat(CALLED, enable_thinking=False), Tokenizer.encode_chat

    def changed(self, messages, **more):
        ids = encode(self, messages, **more)
        last = len(ids) - 1 - ids[::-1].index(self.eos_token_id)
        return (0, *ids[1:]) if odd == "start" else (*ids[:last], *ids[last + 1 :])

    monkeypatch.setattr(Tokenizer, "encode_chat", changed)
    (text,) = make_texts([CALLED], tokenizer, 1 << 20, 500, None)
    assert (text.ids, set(text.places)) == (whole, {"prompt"})


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}, CALLED[1]], "no vision tower"),
        ([1, CALLED[1]], "is no token id"),
        ([CALLED[0], CALLED[1] | {"tool_calls": 7}], "tool_calls"),
    ],
)
def test_odd_tasks_with_tool_calls_are_refused_by_name(task, words):
    with pytest.raises(RequestError, match=words):
        make_texts([task], family("qwen3")[1], 1 << 20, 500, None)


def test_an_answer_is_generated_where_none_is_given():
    asked = []

    def answer(prompt):
        asked.append(prompt)
        return [5, 6, 7]

    texts = make_texts(["Tidy up.", [3, 4], "Stop."], tokenizer(), 1024, 10_000, answer)
    assert [text.ids[-3:] for text in texts] == [(5, 6, 7)] * 3
    assert asked == [text.ids[:-3] for text in texts]
    assert texts[1].places[:2] == ("prompt", "prompt")
    assert [text.ids for text in make_texts([[3, 4]], None, 1024, 100, None)] == [(3, 4)]


def test_a_token_alone_is_no_text():
    texts = make_texts([[1], [2], [3, 4]], None, 1024, 100, None)
    assert [text.ids for text in texts] == [(3, 4)]
    with pytest.raises(RequestError, match="no two tokens in a row"):
        make_texts([[1], [2]], None, 1024, 100, None)


def test_texts_end_at_the_budget():
    asked = []

    def answer(prompt):
        asked.append(prompt)
        return [5] * 100

    texts = make_texts([[1] * 10, [2] * 10, [3] * 10], None, 1024, 115, answer)
    assert [len(text.ids) for text in texts] == [110, 5]
    assert len(asked) == 1  # nothing is generated that would be cut off
    assert all(len(text.ids) == len(text.places) for text in texts)
    assert fingerprint(texts) != fingerprint(texts[:1])


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"messages": [], "text": "x"}', "exactly one of"),
        ('{"prompt": "x"}', "exactly one of"),
        ('{"text": ["x"]}', "wrong type"),
        ('{"messages": []}', "messages is empty"),
        ("not json", "not JSON"),
        ('{"text": "a\x00b"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        (json.dumps({"text": "x" * MOST_LINE}), "at most 1048576"),
    ],
)
def test_bad_lines_are_named(line, wanted):
    with pytest.raises(RequestError, match=f"FILE:2.*{wanted}"):
        parse_tasks('{"text": "ok"}\n' + line, "FILE", MOST_LINE)


@pytest.mark.parametrize("task", [[5000], [-1], [7]])
def test_ids_that_give_no_figure_are_refused(task):
    with pytest.raises(RequestError, match=r"outside 0 to 1023|no two tokens"):
        make_texts([task], None, source()[1].target.vocab_size, 100, None)


def test_images_are_refused():
    shown = [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]
    with pytest.raises(RequestError, match="image"):
        make_texts([shown], tokenizer(), 1024, 100, None)


def test_tasks_of_one_token_are_left_out_of_the_budget():
    """Units are measured on the first few tokens, of which some must be predicted."""
    texts = make_texts([[7]] * 50 + [[1, 2, 3], [8], [4, 5]], None, 1024, 5, None)
    assert [text.ids for text in texts] == [(1, 2, 3), (4, 5)]
