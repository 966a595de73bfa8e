"""Lark grammars as text: what is taken of the language.

Of the llguidance dialect (https://github.com/guidance-ai/llguidance, docs/syntax.md) only the lexical shape is read:
comments, strings, regular expressions, ``<token>`` and ``%json {...}``; the library parses the rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from edge_dflash.common.rules import refuse_surrogates
from edge_dflash.decode.grammar.rewrite import rewrite
from edge_dflash.errors import RequestError

MAX_BYTES = 64 * 1024
MAX_RULES = 500  # the library follows rules by recursion: a long chain of them would exhaust the stack

_LEXICON = re.compile(
    r"""
      (?P<skip> //[^\n]* | \#[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/ )
    | (?P<form> ^form: \s* )? %json \s* (?P<json> (?=\{) )
    | < (?P<name> [^<>\s"\[\]]+ ) >
    | \[ [^\]\n]* (?P<option> \b(?:temperature|max_tokens|stop)\b ) \s* =
    | (?P<rule> : )
    """,
    re.VERBOSE | re.MULTILINE,
)


def prepare(
    text: str,
    token_id: Callable[[str], int | None],
    json_options: Mapping[str, object],
    form_options: Mapping[str, object] | None = None,
) -> str:
    """Return the grammar with token names as ids and with ``json_options`` in each inline schema.

    ``form_options``: those of a rule ``form`` that is a schema, if they are others. Raises RequestError for a grammar
    that is too big, names an unknown token, holds a schema that is refused, or uses an option of lexemes that decoding
    here would not obey.
    """
    size = len(text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise RequestError(f"the grammar has {size} bytes, at most {MAX_BYTES} are taken; make it smaller")
    parts: list[str] = []
    position, rules = 0, 0
    while found := _LEXICON.search(text, position):
        parts.append(text[position : found.start()])
        position = found.end()
        if found["json"] is not None:
            schema, position = _inline_schema(text, position)
            options = json_options if found["form"] is None or form_options is None else form_options
            parts.append(f"{found['form'] or ''}%json {json.dumps({**rewrite(schema), 'x-guidance': dict(options)})}")
        elif found["name"] is not None:
            parts.append(_special(found["name"], token_id))
        elif found["option"] is not None:
            raise RequestError(
                f"the grammar sets {found['option']}, which would not be enforced; use lazy or suffix on the rule"
            )
        else:
            rules += found["rule"] is not None
            parts.append(found[0])
    if rules > MAX_RULES:
        raise RequestError(f"the grammar has {rules} rules, at most {MAX_RULES} are taken; use fewer rules")
    return "".join((*parts, text[position:]))


def _inline_schema(text: str, start: int) -> tuple[dict[str, object], int]:
    """The schema that begins at ``start``, and where it ends."""
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the grammar's %json is no JSON ({error}); give a JSON object") from None
    refuse_surrogates(schema, "the grammar's %json")
    return schema, end


def _special(name: str, token_id: Callable[[str], int | None]) -> str:
    found = token_id(f"<{name}>")
    if found is None:
        raise RequestError(
            f"the grammar names the token <{name[:40]}>, which the tokenizer lacks; write text in quotes"
        )
    return f"<[{found}]>"
