from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_support import TEMPLATE, byte_tokenizer, write_tokenizer

from edge_dflash.errors import BundleError, RequestError
from edge_dflash.text.chat import Detokenizer
from edge_dflash.text.template import ChatTemplate
from edge_dflash.text.tokenizer import Tokenizer

HF = byte_tokenizer()
START, END = HF.token_to_id("<|start|>"), HF.token_to_id("<|end|>")


def render(source, messages=({"role": "user", "content": "hi"},), **variables):
    return ChatTemplate(source, {}, "here").render(list(messages), **variables)


def test_end_of_text_may_be_an_object_or_absent(tmp_path):
    write_tokenizer(tmp_path / "a", config={"eos_token": {"content": "<|end|>"}})
    write_tokenizer(tmp_path / "b", config={"eos_token": None})
    assert Tokenizer.open(tmp_path / "a").eos_token_id == END
    assert Tokenizer.open(tmp_path / "b").eos_token_id is None


def test_a_tokenizer_needs_no_configuration(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.template is None
    assert tokenizer.eos_token_id is None


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("tokenizer.json", b'{"cut', r"tokenizer.json .*build the bundle again"),
        ("tokenizer_config.json", b'{"cut', r"tokenizer_config.json .*build the bundle again"),
        ("chat_template.json", b"{", "chat_template.json"),
        ("chat_template.json", b"[]", "chat_template.json"),
        ("special_tokens_map.json", b"1", "special_tokens_map.json"),
        ("chat_template.jinja", b"\xff", r"cannot read .*chat_template.jinja \(.*utf-8.*\); build the bundle again"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json holds list, wanted an object; build the bundle again"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, data, words):
    write_tokenizer(tmp_path, template=None)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BundleError, match=words) as caught:
        Tokenizer.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_lone_surrogate_is_refused(tmp_path):
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path))
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("a\ud800")


# the template's environment ------------------------------------------------------------------------------------------


def test_a_template_may_refuse():
    with pytest.raises(RequestError, match=r"refuses the messages: no system message$"):
        render("{{ raise_exception('no system\nmessage') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ messages[5].content.x }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10000000) | list }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(RequestError, match="refuses the messages"):
        render(source)


def test_a_broken_template_is_the_bundles_fault():
    with pytest.raises(BundleError, match="here: the chat template is not valid Jinja"):
        render("{% if %}")


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, {"role": 1, "content": "x"}, "text"])
def test_a_message_needs_role_and_content(message):
    with pytest.raises(RequestError, match=r"message 1 is .*; give \{\"role\""):
        render(TEMPLATE, [{"role": "user", "content": "hi"}, message])


# streaming -----------------------------------------------------------------------------------------------------------


def chunks(ids, cuts):
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def decode(ids):
    return HF.decode(list(ids), skip_special_tokens=True)


@given(st.text(max_size=12), st.lists(st.integers(0, 60), max_size=12))
def test_pieces_of_text_join_to_the_text_and_never_break_a_character(text, cuts):
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.add(part) for part in chunks(HF.encode(text).ids, cuts)]
    whole = "".join(pieces) + detokenizer.finish()
    assert whole == decode(HF.encode(text).ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@given(st.lists(st.integers(0, START + 1), max_size=24), st.lists(st.integers(0, 30), max_size=12))
def test_pieces_of_any_ids_join_to_their_text(ids, cuts):
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.add(part) for part in chunks(ids, cuts)]
    assert "".join(pieces) + detokenizer.finish() == decode(ids)


def test_a_character_comes_with_its_last_byte():
    detokenizer = Detokenizer(decode)
    ids = HF.encode("a🤖").ids
    assert [detokenizer.add([i]) for i in ids] == ["a", "", "", "", "🤖"]
    assert detokenizer.finish() == ""
