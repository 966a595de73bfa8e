"""Templates find what they find in transformers: tags, functions, variables."""

from __future__ import annotations

import json
import time

import pytest
from text_support import byte_tokenizer, write_tokenizer

from edge_dflash.errors import BundleError, RequestError
from edge_dflash.text.template import ChatTemplate
from edge_dflash.text.tokenizer import Tokenizer

ASK = [{"role": "user", "content": "hi"}]


def written(source, variables=(), **given):
    return ChatTemplate(source, dict(variables), "here").render(given.pop("messages", ASK), **given)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "ahib"),
        ("{% for m in messages %}\n  {%- generation -%}\n  x\n  {%- endgeneration -%}\n{% endfor %}", "x"),
        ("{% for i in range(9) %}{% generation %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endgeneration %}"
         "{% endfor %}", "012"),
        ("{% set n = namespace(a=0) %}{% generation %}{% set n.a = 4 %}{% endgeneration %}{{ n.a }}", "4"),
        ("{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}", "21"),
        ("{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "0234"),
        ("{{ {'b': '<', 'a': 'ä'} | tojson }}", '{"b": "<", "a": "ä"}'),
        ("{{ {'b': 1, 'a': 'ä'} | tojson(true, none, (',', ':'), true) }}", '{"a":"\\u00e4","b":1}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", "True True True"),
        ("{{ enable_thinking is defined }} {{ tools is defined }}", "False True"),
    ],
)  # fmt: skip
def test_what_transformers_has(source, text):
    assert written(source) == text


def test_the_date_is_the_local_one():
    before = time.strftime("%d %b %Y")
    assert written("{{ strftime_now('%d %b %Y') }}") in (before, time.strftime("%d %b %Y"))
    assert written("{% if strftime_now is defined %}{{ strftime_now('%H') }}{% endif %}").isdigit()


def test_a_control_token_of_a_generation_is_one():
    made = ChatTemplate("{% generation %}{{ messages[0].content }}<|a|>{% endgeneration %}", {}, "here")
    assert made.pieces(("<|a|>",), [{"role": "user", "content": "<|a|>"}]) == ["<|a|>", "<|a|>", ""]


def test_a_template_is_told_the_special_tokens(tmp_path):
    config = {
        "bos_token": {"content": "<|start|>"},
        "eos_token": "<|end|>",
        "sep_token": None,
        "additional_special_tokens": ["<|start|>", {"content": "<|end|>"}],
        "extra_special_tokens": {"image_token": "<img>"},
    }
    template = (
        "{{ bos_token }}{{ image_token }}{{ sep_token }}{{ cls_token is defined }}{{ additional_special_tokens[1] }}"
    )
    directory = write_tokenizer(tmp_path, template, config)
    (directory / "special_tokens_map.json").write_text(json.dumps({"sep_token": "<sep>", "eos_token": "old"}))
    assert Tokenizer.open(directory).render_pieces(ASK) == ["", "<|start|>", "<img><sep>False", "<|end|>", ""]
    assert Tokenizer.open(directory).eos_token_id == byte_tokenizer().token_to_id("<|end|>")


# by name --------------------------------------------------------------------------------------------------------------


def opened(tmp_path, config=(), files=()):
    directory = write_tokenizer(tmp_path, None, {"eos_token": "<|end|>", **dict(config)})
    for name, text in dict(files).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return Tokenizer.open(directory)


def both(tokenizer):
    return tokenizer.template.render(ASK), tokenizer.tool_template.render(ASK)


LIST = {"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}
NAMED = {"additional_chat_templates/tool_use.jinja": "A", "additional_chat_templates/rag.jinja": "{{"}
OLDER = {"chat_template.json": json.dumps({"chat_template": "P"})}


@pytest.mark.parametrize(
    ("config", "files", "wanted"),
    [
        (LIST, {}, ("D", "T")),
        ({"chat_template": {"default": "d", "tool_use": "t"}}, {}, ("d", "t")),
        ({"chat_template": "C"}, NAMED, ("C", "A")),
        (LIST, NAMED, ("D", "A")),
        ({}, {"chat_template.jinja": "J", **NAMED}, ("J", "A")),
        (LIST, {"chat_template.jinja": "J"}, ("J", "J")),
        ({"chat_template": "C"}, {"chat_template.jinja": "J"}, ("J", "J")),
        ({}, OLDER, ("P", "P")),
        ({"chat_template": "C"}, OLDER, ("C", "C")),
        ({}, {"chat_template.json": json.dumps(LIST)}, ("D", "T")),
        ({}, {**OLDER, "chat_template.jinja": "J"}, ("J", "J")),
    ],
)
def test_which_template_is_taken(tmp_path, config, files, wanted):
    assert both(opened(tmp_path, config, files)) == wanted


def test_only_a_template_for_tools(tmp_path):
    tokenizer = opened(tmp_path, {}, {"additional_chat_templates/tool_use.jinja": "A"})
    assert tokenizer.tool_template.render(ASK) == "A"
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_pieces(ASK)


def test_a_folder_of_too_many_templates(tmp_path):
    with pytest.raises(BundleError, match="has 65 templates, at most 64"):
        opened(tmp_path, {}, {f"additional_chat_templates/{i}.jinja": "x" for i in range(65)})


# the tokenizers' library ----------------------------------------------------------------------------------------------


def test_a_regular_expression_without_end_is_an_error_of_ours(tmp_path):
    directory = write_tokenizer(tmp_path)
    files = json.loads((directory / "tokenizer.json").read_text())
    files["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
            files["pre_tokenizer"],
        ],
    }
    (directory / "tokenizer.json").write_text(json.dumps(files))
    tokenizer = Tokenizer.open(directory)
    with pytest.raises(RequestError, match="the tokenizer cannot read this text"):
        tokenizer.encode("a" * 64 + "b")
    with pytest.raises(RequestError, match="the tokenizer cannot read this text"):
        tokenizer.encode_text("a" * 64 + "b")
    assert tokenizer.encode("ab")


def changed(tmp_path, **changes):
    directory = write_tokenizer(tmp_path)
    files = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps({**files, **changes}))
    return Tokenizer.open(directory)


def test_truncation_and_padding_of_a_training_run_change_no_prompt(tmp_path):
    whole = changed(tmp_path / "whole").encode("a" * 100)
    cut = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 10**4}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    assert (
        changed(tmp_path / "cut", truncation=cut, padding={**pad, "pad_to_multiple_of": None}).encode("a" * 100)
        == whole
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Prepend", "prepend": ""}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAEAAAD/////"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
)
def test_a_panic_at_the_opening_is_an_error_of_ours(tmp_path, changes):
    with pytest.raises(BundleError, match="use the tokenizer"):
        changed(tmp_path, **changes)


def test_a_panic_of_a_decoder_is_an_error_of_ours(tmp_path):
    tokenizer = changed(tmp_path, decoder={"type": "Strip", "content": "a", "start": 99, "stop": 99})
    with pytest.raises(RequestError, match="cannot write this answer"):
        tokenizer.decode(tokenizer.encode("ab"))
