"""The process that runs chat templates: Jinja in a sandbox, with bounds that hold whatever a template does.

A template is a program of the model's directory. The kernel bounds what it may take: a render beyond CPU_SECONDS ends
the process, one beyond MEMORY_BYTES fails. Reads two lines for each request, a template and what to render it with,
both JSON, and answers with one line. What it writes, it writes for :mod:`edge_dflash.text.template`, which starts it.

Control tokens that the template itself writes are marked: each stands in the answer as a mark that no message can
hold, so that it is told from text which only looks like it.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.optimizer import optimize
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edge_dflash.common.processes import limit_memory, limited_time, obey_timers
from edge_dflash.errors import one_line
from edge_dflash.text.template import CPU_SECONDS, MEMORY_BYTES, TEXT_CHARS, mark

_TEMPLATES = 64  # compiled ones that are kept


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that asks
    obey_timers()
    limit_memory(MEMORY_BYTES)
    compiled: dict[bytes, _Template] = {}
    while head := sys.stdin.buffer.readline():
        body = sys.stdin.buffer.readline()
        with limited_time(CPU_SECONDS):
            answer = _answer(compiled, head, body)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _answer(compiled: dict[bytes, _Template], head: bytes, body: bytes) -> bytes:
    try:
        if (template := compiled.get(head)) is None:
            if len(compiled) == _TEMPLATES:
                compiled.clear()
            template = compiled[head] = _Template(**json.loads(head))
    except MemoryError:
        return _said("bound", "")
    except Exception as error:  # of Jinja's parser, or of Python's, which compiles what Jinja made
        return _said("invalid", one_line(error))
    try:
        given = json.loads(body)
        return _said("names", sorted(template.names)) if given is None else _said("text", template.render(given))
    except MemoryError:
        return _said("bound", "")
    except Exception as error:  # whatever a template raises is about this request
        return _said("refused", one_line(error))


class _Template:
    """A compiled template; ``names`` are the variables that it reads.

    ``tokens`` are the control tokens, ``marks`` the two characters that marks are made of.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], tokens: list[str], marks: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: datetime.now().strftime(format),
        }
        self._marks = {token: mark(index, len(token), marks) for index, token in enumerate(tokens)}
        marked = self._marker()
        tree = environment.parse(source)
        self.names = jinja2.meta.find_undeclared_variables(tree)
        joined = optimize(tree, environment)  # literals that stand side by side are one
        assert isinstance(joined, nodes.Template)
        for constant in joined.find_all(nodes.Const):
            if isinstance(constant.value, str):
                constant.value = marked(constant.value)
        for words in joined.find_all(nodes.TemplateData):
            words.data = marked(words.data)
        self._parses_thinking = "</think>" in source
        # those that transformers always gives, and the special tokens
        self._variables: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        self._variables |= {
            name: marked(value) if isinstance(value, str) else [*map(marked, value)]
            for name, value in variables.items()
        }
        self._template = jinja2.Template.from_code(
            environment, environment.compile(joined), environment.make_globals({})
        )

    def render(self, given: dict[str, Any]) -> str:
        """The prompt, control tokens of the template as their marks."""
        messages = [self._with_thinking(message) for message in given.pop("messages")]
        text = self._template.render({**self._variables, "messages": messages, **given})
        if len(text) > TEXT_CHARS:
            raise ValueError(f"it writes {len(text)} characters, at most {TEXT_CHARS} are taken")
        return text

    def _marker(self) -> Callable[[str], str]:
        """What replaces control tokens in a text by their marks: the longest at each place, as a tokenizer does."""
        if not self._marks:
            return str
        longest = sorted(self._marks, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest)))
        return lambda text: pattern.sub(lambda found: self._marks[found[0]], text)

    def _with_thinking(self, message: dict[str, Any]) -> dict[str, Any]:
        """An answer that holds its thinking span, as templates take it apart: only the span's two ends are tokens.

        The span begins with the answer, and ends at the first ``</think>``; its beginning may have been the prompt's.
        """
        content, closing = message.get("content"), self._marks.get("</think>")
        if closing is None or not self._parses_thinking or not isinstance(content, str):
            return message
        if message.get("role") != "assistant" or isinstance(message.get("reasoning_content"), str):
            return message
        thinking, closed, said = content.partition("</think>")
        if not closed:
            return message
        if thinking.lstrip().startswith("<think>"):
            thinking = thinking.replace("<think>", self._marks.get("<think>", "<think>"), 1)
        return {**message, "content": thinking + closing + said}


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, with which templates for training say what the model writes."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """What stands between the tags, as it is."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: Jinja's own filter would escape <, > and &."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    """What a template calls to refuse a conversation."""
    raise jinja2.TemplateError(message)


def _said(kind: str, value: object) -> bytes:
    return json.dumps({kind: value}, ensure_ascii=False).encode(errors="surrogatepass")
