"""Chat templates run in a process of bounded time and memory: whatever they do, the planner goes on."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
from text_support import TEMPLATE, write_tokenizer

from edge_dflash.errors import BundleError, RequestError
from edge_dflash.text import template
from edge_dflash.text.template import ChatTemplate
from edge_dflash.text.tokenizer import Tokenizer

ASK = [{"role": "user", "content": "hi"}]
DOUBLING = "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
RANGES = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = [
    DOUBLING,
    "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "{% set n = 9999999999 %}{{ 'x' * n }}",
    "{{ 'x' * 9999999999 }}",  # while it is compiled
    "{{ 'x' | center(9999999999) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ messages[0].content.join(range(99999)).replace('1', 'x' * 99999) }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ lipsum(n=99999999) }}",
]
DEEP = [
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "{{ " + "(" * 100_000 + ")" * 100_000 + " }}",
    "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "{{ " + "not " * 200_000 + "true }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% include 'x' %}",
]


def works():
    return ChatTemplate(TEMPLATE, {}, "here").render(ASK) == "<|start|>user\nhi<|end|><|start|>assistant\n"


@pytest.mark.parametrize("source", [*LARGE, *DEEP, RANGES], ids=lambda source: source[:60])
def test_a_bomb_ends_with_one_line(source):
    began, before = sum(os.times()[:4]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((BundleError, RequestError)) as caught:
        ChatTemplate(source, {}, "here").render(ASK)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert sum(os.times()[:4]) - began < 30  # seconds of this process and its children
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    assert works()


@pytest.mark.parametrize("source", [DOUBLING, "{{ 'x' * 9999999999 }}"])
def test_a_bundle_with_a_bomb_does_not_open(tmp_path, source):
    with pytest.raises(BundleError, match=r"the chat template takes more than 2 s or 512 MiB"):
        Tokenizer.open(write_tokenizer(tmp_path, template=source))


def test_a_bomb_that_a_message_sets_off_is_about_that_message(tmp_path):
    source = "{% for m in messages %}{% if 'boom' in m.content %}" + DOUBLING + "{% endif %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path, template=source))
    with pytest.raises(RequestError, match=r"the chat template takes more than 2 s or 512 MiB for these messages"):
        tokenizer.encode_chat([{"role": "user", "content": "boom"}])
    assert tokenizer.encode_chat(ASK) == tokenizer.encode("hi")


def test_a_long_template_is_refused():
    with pytest.raises(BundleError, match="has 1048577 characters, at most 1048576"):
        ChatTemplate("x" * ((1 << 20) + 1), {}, "here")


def test_a_long_prompt_is_refused():
    with pytest.raises(RequestError, match="at most 8388608 are taken"):
        ChatTemplate("{{ messages[0].content * 9 }}", {}, "here").render([{"role": "user", "content": "x" * (2 << 20)}])


def test_a_process_that_was_ended_is_started_again():
    assert works()
    os.kill(template._process._process.pid, signal.SIGKILL)
    template._process._process.wait()
    assert works()


def test_threads_get_their_own_answers():
    made = ChatTemplate("{{ messages[0].content }}", {}, "here")
    answers = {}

    def ask(name):
        answers[name] = [made.render([{"role": "user", "content": f"{name} {i}"}]) for i in range(50)]

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {name: [f"{name} {i}" for i in range(50)] for name in "abcd"}


FORK = """
import os
from edge_dflash.text.template import ChatTemplate

made = ChatTemplate("{{ messages[0].content }}", {}, "here")
works = lambda: made.render([{"role": "user", "content": "hi"}]) == "hi"
assert works()
child = os.fork()
if child == 0:
    os._exit(0 if works() else 1)
assert os.waitpid(child, 0)[1] == 0
assert works()
"""


def test_a_fork_has_its_own_process():
    assert subprocess.run([sys.executable, "-c", FORK], check=False, timeout=60).returncode == 0


def test_the_planner_does_not_import_jinja_nor_torch():
    code = "import sys, edge_dflash.text.tokenizer; sys.exit(bool({'jinja2', 'torch'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x"])
def test_messages_are_plain_values(value):
    with pytest.raises(RequestError, match=r"the messages are no plain JSON values .*; give texts, numbers and lists"):
        ChatTemplate(TEMPLATE, {}, "here").render([{"role": "user", "content": "hi", "name": value}])


def test_messages_that_hold_what_marks_are_made_of():
    every = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    made = ChatTemplate("{{ messages[0].content }}<|a|>", {}, "here")
    for one in every:
        assert made.pieces(("<|a|>",), [{"role": "user", "content": one}]) == [one, "<|a|>", ""]
    with pytest.raises(RequestError, match="hold every noncharacter of U"):
        made.pieces(("<|a|>",), [{"role": "user", "content": every}])


def test_a_token_that_is_cut_is_refused():
    made = ChatTemplate("{{ '<|a|>'[1:] }}", {}, "here")
    assert made.render(ASK) == "|a|>"
    with pytest.raises(RequestError, match="cuts a control token in two"):
        ChatTemplate("{% set a = '<|a|>' %}{{ a[:1] }}", {}, "here").pieces(("<|a|>",), ASK)


def test_a_template_that_waits_for_a_processor_ends_by_the_clock(monkeypatch):
    monkeypatch.setattr(template, "WALL_SECONDS", 1.0)
    made = ChatTemplate("{{ messages[0].content }}", {}, "here")
    assert made.render(ASK) == "hi"
    os.kill(template._process._process.pid, signal.SIGSTOP)  # as one that is never scheduled: it takes no time
    with pytest.raises(RequestError, match="the chat template takes more than 2 s"):  # it would hang
        made.render(ASK)
    assert works()
