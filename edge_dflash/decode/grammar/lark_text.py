"""Lark grammars as text: what is taken of the language, and a call of one of some tools written in it.

Of the llguidance dialect (https://github.com/guidance-ai/llguidance, docs/syntax.md) only the lexical shape is read:
comments, strings, regular expressions, ``<token>`` and ``%json {...}``; the library parses the rules.

A call stands in the model's own dialect, with arguments of the tool's schema. In the tagged dialect a text stands as it
is, up to ``</parameter>``; everything else is JSON. What of a schema could not be enforced there is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from edge_dflash.common.pointer import resolve
from edge_dflash.common.rules import refuse_surrogates
from edge_dflash.decode.grammar.schema_check import check, check_size
from edge_dflash.decode.grammar.schema_formats import ENCODINGS, FORMATS
from edge_dflash.decode.grammar.schema_keywords import kinds_of
from edge_dflash.decode.grammar.schema_plain import alone, plain
from edge_dflash.decode.grammar.schema_rewrite import rewrite
from edge_dflash.errors import RequestError
from edge_dflash.text.parameters import Meaning, meaning, parameter, written
from edge_dflash.text.tool_calls import JsonCalls, TaggedCalls, Tool, function_of, is_strict

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

_WHOLE = frozenset(("type", "properties", "required", "additionalProperties", "$defs"))
_TEXT = frozenset(("type", "pattern", "format", "contentEncoding", "minLength", "maxLength"))
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a regex: escape, class, character


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
    check(schema)
    return schema, end


def _special(name: str, token_id: Callable[[str], int | None]) -> str:
    found = token_id(f"<{name}>")
    if found is None:
        raise RequestError(
            f"the grammar names the token <{name[:40]}>, which the tokenizer lacks; write text in quotes"
        )
    return f"<[{found}]>"


# A call of one of some tools -----------------------------------------------------------------------------------------


Dialect: TypeAlias = JsonCalls | TaggedCalls


def tool_grammar(tools: Sequence[Tool], dialect: Dialect) -> str:
    """The grammar of one call of one of the tools. Raises RequestError for a schema that could not be enforced."""
    bodies, rules = _calls(tools, dialect)
    return _checked(f"start: <tool_call> ({bodies}) </tool_call>", rules, "a forced call; choose one by name, or")


def beside_form(tools: Sequence[Tool], dialect: Dialect, form: AnswerForm) -> str:
    """The grammar of one or more calls, as a model writes them in a row, or of the form. Raises RequestError.

    A call of a tool that is not strict is held to its name alone where its schema could not be enforced.
    """
    bodies, rules = _calls(tools, dialect, free=lambda tool, fails: fails and not is_strict(tool))
    start = f'start: call ("\\n"? call)* | form\ncall: <tool_call> ({bodies}) </tool_call>'
    return _checked(start, [*rules, form.rules()], f"calls beside a {form.kind}; leave it out, or")


def call_grammar(tools: Sequence[Tool], dialect: Dialect) -> str:
    """What follows ``<tool_call>``: a strict tool's call is held to its schema, that of another to its name alone."""
    bodies, rules = _calls(tools, dialect, free=lambda tool, fails: not is_strict(tool))
    return _checked(f"start: ({bodies}) </tool_call>", rules, "strict calls; leave strict out, or")


@dataclass(frozen=True)
class AnswerForm:
    """The form of an answer that may be calls instead: ``text`` is a schema as JSON, or a regular expression."""

    kind: Literal["schema", "regex"]
    text: str

    def rules(self) -> str:
        """Rule ``form``. Raises RequestError for a schema that could not be enforced."""
        if self.kind == "regex":
            return f"form: FORM\nFORM: /(?:{_slashed(self.text)})/"
        schema = json.loads(self.text)
        check(schema)
        if not isinstance(schema, dict):
            schema = {} if schema else {"not": {}}
        return f"form: {_json(schema)}"


def _calls(
    tools: Sequence[Tool], dialect: Dialect, free: Callable[[Tool, bool], bool] = lambda tool, fails: False
) -> tuple[str, list[str]]:
    """Names of the rules of a call of each tool, between ``|``, and the rules.

    ``free``: whether a tool's arguments may be anything, now that its schema could or (True) could not be enforced.
    """
    rules: list[str] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = str(function_of(tool).get("name"))
        if name in names:
            raise RequestError(f"two tools are called {name!r}, so a call could mean either; give each its own name")
        names.add(name)
        anything = [f"c{index}: {_literal(_opening(name, dialect))} /(?s:.*)/"]
        try:
            rules += anything if free(tool, False) else _call(f"c{index}", name, tool, dialect)
        except RequestError as error:
            if not free(tool, True):
                raise RequestError(f"a call of the tool {name!r} cannot be forced: {error}") from None
            rules += anything
    return " | ".join(f"c{index}" for index in range(len(tools))), rules


def _checked(start: str, rules: Sequence[str], what: str) -> str:
    made = "\n".join((start, *rules))
    if len(made.encode()) > MAX_BYTES or len(rules) > MAX_RULES // 2:  # some are of two lines
        raise RequestError(
            f"the tools are too large for {what.partition(';')[0]}: {len(made.encode())} bytes and {len(rules)} rules, "
            f"at most {MAX_BYTES} and {MAX_RULES // 2} are taken;{what.partition(';')[2]} give fewer"
        )
    return made


def _opening(name: str, dialect: Dialect) -> str:
    """What a call begins with, up to its arguments."""
    if isinstance(dialect, JsonCalls):
        return dialect.head + json.dumps(name, ensure_ascii=False) + dialect.middle
    _need_plain(name, "the name of a tool")
    return dialect.head + name + dialect.opened


def _call(rule: str, name: str, tool: Tool, dialect: Dialect) -> list[str]:
    """Rules of a call whose arguments satisfy the tool's schema."""
    parameters = _parameters(tool)
    if isinstance(dialect, JsonCalls):
        return [f"{rule}: {_literal(_opening(name, dialect))} {_json(parameters)} {_literal(dialect.tail)}"]
    rules: list[str] = []
    size = 0
    for made in _tagged_call(rule, name, parameters, dialect):
        rules.append(made)
        size += len(made)
        if size > MAX_BYTES or len(rules) > MAX_RULES:
            raise RequestError("its grammar would be too large; give it fewer parameters, or simpler ones")
    return rules


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments in plain form."""
    given = function_of(tool).get("parameters")
    if given is None or given == {}:
        given = {"type": "object", "properties": {}, "additionalProperties": False}
    text = json.dumps(given, default=dict)
    check_size(text)
    parameters = json.loads(text)
    if not isinstance(parameters, dict):
        raise RequestError("its parameters are not of type object; give one")
    check(parameters)
    root = plain(parameters)
    made = {key: value for key, value in root.items() if key != "$defs"}
    if made.get("type") == "object" and not made.keys().isdisjoint(("$ref", "allOf")):
        del made["type"]
    found = _followed(made, root)
    if not isinstance(found, dict) or "object" not in kinds_of({"type": "object", **found}):
        raise RequestError("its parameters are not of type object; give one")
    return alone({**found, "type": "object"}, root)


def _followed(schema: object, root: Mapping[str, Any]) -> object:
    """What a schema stands for that is only a reference, or an ``allOf`` of one; itself when it is neither."""
    for _ in range(64):
        if not isinstance(schema, dict) or len(schema) != 1:
            break
        if "$ref" in schema:
            schema = resolve(root, schema["$ref"])
        elif len(schema.get("allOf", ())) == 1:
            schema = schema["allOf"][0]
        else:
            break
    return schema


def _tagged_call(rule: str, name: str, parameters: dict[str, Any], dialect: TaggedCalls) -> Iterator[str]:
    before = _opening(name, dialect)
    if other := next((key for key in parameters if key not in _WHOLE), None):
        raise RequestError(f"{other!r} of its parameters would not be enforced in this model's dialect; remove it")
    required = parameters.get("required", [])
    parts = []
    for index, key in enumerate(dict.fromkeys((*parameters.get("properties", {}), *required))):
        schema = _followed(parameter(parameters, key), parameters)
        said = meaning(schema, parameters)
        if said.kinds == set() or (said.exact and said.values == []):
            if key in required:
                raise RequestError(f"nothing satisfies parameter {key!r}; make it optional")
            continue
        _need_plain(key, f"the name of parameter {key!r}")
        part = f"{rule}p{index}"
        parts.append(part if key in required else f"{part}?")
        yield f"{part}: {_literal(f'<parameter={key}{dialect.key_end}')} {part}v"
        yield from _value(part, key, schema, said, parameters, dialect)
    yield f"{rule}: {_literal(before)} {' '.join(parts)} {_literal(dialect.tail)}"


def _value(
    rule: str, key: str, schema: Any, said: Meaning, root: dict[str, Any], dialect: TaggedCalls
) -> Iterator[str]:
    """Rules of the value of one parameter, and what stands behind it."""
    after = f"{dialect.value_end}</parameter>{dialect.gap}"
    kinds = said.kinds or set()
    if said.exact and said.values is not None:
        values = dict.fromkeys(map(_untagged, said.values))
        yield f"{rule}v: ({' | '.join(map(_literal, values))}) {_literal(after)}"
    elif kinds == {"string"}:
        text = " & ".join(_patterns(schema, key, dialect))
        yield f'{rule}v: {rule}t {_literal(dialect.gap)}\n{rule}t[suffix="</parameter>"]: {rule.upper()}'
        yield f"{rule.upper()}: {text}"
    elif kinds and "string" not in kinds:
        whole = schema if said.named else {**schema, "type": sorted(kinds)}
        yield f"{rule}v: {_json(alone(whole, root))} {_literal(after)}"
    elif said.exact:
        yield f'{rule}v: {rule}t {_literal(dialect.gap)}\n{rule}t[suffix="</parameter>"]: /(?s:.*)/'
    else:
        raise RequestError(
            f"parameter {key!r} may be a text or something else, with rules that cannot be told apart in this "
            "model's dialect; give it one type"
        )


def _patterns(schema: dict[str, Any], key: str, dialect: TaggedCalls) -> Iterator[str]:
    """What the raw text must match, each with what stands before the closing tag."""
    if other := next((word for word in schema if word not in _TEXT), None):
        raise RequestError(f"{other!r} of parameter {key!r} would not be enforced in this model's dialect; remove it")
    low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
    whole = [f"(?s:.{{{low},{'' if high is None else int(high)}}})"]
    whole += [*FORMATS.get(schema.get("format", ""), ()), *ENCODINGS.get(schema.get("contentEncoding", ""), ())]
    if "pattern" in schema:
        whole.append(_unanchored(schema["pattern"], key))
    end = re.escape(dialect.value_end).replace("\\\n", "\\n")
    yield from (f"/(?:{_slashed(regex)}){end}/" for regex in whole)


def _unanchored(pattern: str, key: str) -> str:
    """A pattern, which may be found anywhere in a text, as one that the whole text matches, without anchors."""
    pieces = _PIECE.findall(pattern)
    starts, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = [_in_ascii(piece) for piece in pieces[starts : len(pieces) - ends]]
    depth, alternatives = 0, False
    for piece in inner:
        depth += (piece == "(") - (piece == ")")
        alternatives |= piece == "|" and depth == 0
    if "^" in inner or "$" in inner or (alternatives and (starts or ends)):
        raise RequestError(f"pattern of parameter {key!r} has an anchor inside or beside |; write it as ^(...)$")
    return f"{'' if starts else '(?s:.*)'}(?:{''.join(inner)}){'' if ends else '(?s:.*)'}"


def _in_ascii(piece: str) -> str:
    """Digits and letters of JSON Schema's regexes are ASCII; those of the library's are Unicode."""
    if piece.startswith("["):
        return piece.replace("\\d", "0-9").replace("\\w", "a-zA-Z0-9_")
    return {"\\d": "[0-9]", "\\D": "[^0-9]", "\\w": "[a-zA-Z0-9_]", "\\W": "[^a-zA-Z0-9_]"}.get(piece, piece)


def _untagged(value: Any) -> str:
    """A value as it stands between the tags."""
    text = written(value)
    if "</parameter>" in text:
        raise RequestError(f"the value {text[:40]!r} holds a closing tag; leave it out")
    return text


def _json(schema: Mapping[str, Any] | bool) -> str:
    return f"%json {json.dumps(schema if isinstance(schema, dict) else {}, ensure_ascii=True)}"


def _literal(text: str) -> str:
    """A text in the grammar's syntax."""
    return json.dumps(text, ensure_ascii=False)


def _slashed(regex: str) -> str:
    """A regex for the place between two slashes."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), regex, flags=re.DOTALL)


def _need_plain(name: str, what: str) -> None:
    if not name or name != name.strip() or re.search(r"[>\n]", name):
        raise RequestError(f"{what} is {name[:40]!r}, which cannot stand in a tag; use letters, digits and _")
