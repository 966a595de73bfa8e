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
from typing import Any

from edge_dflash.common.rules import refuse_surrogates
from edge_dflash.decode.grammar.schema_check import check
from edge_dflash.decode.grammar.schema_formats import ENCODINGS, FORMATS
from edge_dflash.decode.grammar.schema_plain import plain
from edge_dflash.decode.grammar.schema_rewrite import rewrite
from edge_dflash.errors import RequestError
from edge_dflash.text.tool_calls import (
    JsonCalls,
    TaggedCalls,
    Tool,
    definitions_of,
    followed,
    function_of,
    type_names,
    types_of,
)

MAX_BYTES = 64 * 1024
MAX_RULES = 500  # the library follows rules by recursion: a long chain of them would exhaust the stack

_LEXICON = re.compile(
    r"""
      (?P<skip> //[^\n]* | \#[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/ )
    | %json \s* (?P<json> (?=\{) )
    | < (?P<name> [^<>\s"\[\]]+ ) >
    | \[ [^\]\n]* (?P<option> \b(?:temperature|max_tokens|stop)\b ) \s* =
    | (?P<rule> : )
    """,
    re.VERBOSE,
)

_WHOLE = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))
_TEXT = frozenset(("type", "enum", "const", "pattern", "format", "contentEncoding", "minLength", "maxLength"))
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a regex: escape, class, character
_UNTYPED = frozenset(("type", "anyOf"))


def prepare(text: str, token_id: Callable[[str], int | None], json_options: Mapping[str, object]) -> str:
    """Return the grammar with token names as ids and with ``json_options`` in each inline schema.

    Raises RequestError for a grammar that is too big, names an unknown token, holds a schema that is refused, or
    uses an option of lexemes that decoding here would not obey.
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
            parts.append(f"%json {json.dumps({**rewrite(schema), 'x-guidance': dict(json_options)})}")
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


def tool_grammar(tools: Sequence[Tool], dialect: JsonCalls | TaggedCalls) -> str:
    """The grammar of one call of one of the tools. Raises RequestError for a schema that could not be enforced."""
    rules: list[str] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name, parameters = _described(tool)
        if name in names:
            raise RequestError(f"two tools are called {name!r}, so a call could mean either; give each its own name")
        names.add(name)
        try:
            check(parameters)
            parameters = plain(parameters)
            if isinstance(dialect, JsonCalls):
                rules.append(_json_call(f"c{index}", name, parameters, dialect))
            else:
                rules += _tagged_call(f"c{index}", name, parameters, dialect)
        except RequestError as error:
            raise RequestError(f"a call of the tool {name!r} cannot be forced: {error}") from None
    calls = " | ".join(f"c{index}" for index in range(len(tools)))
    made = "\n".join((f"start: <tool_call> ({calls}) </tool_call>", *rules))
    if len(made.encode()) > MAX_BYTES or len(rules) > MAX_RULES // 2:  # some are of two lines
        raise RequestError(
            f"the tools are too large for a forced call: {len(made.encode())} bytes and {len(rules)} rules, at most "
            f"{MAX_BYTES} and {MAX_RULES // 2} are taken; choose one by name, or give fewer"
        )
    return made


def _described(tool: Tool) -> tuple[str, dict[str, Any]]:
    function = function_of(tool)
    given = function.get("parameters")
    if given is None or given == {}:
        given = {"type": "object", "properties": {}, "additionalProperties": False}
    parameters = json.loads(json.dumps(given, default=dict))
    if isinstance(parameters, dict):
        parameters.setdefault("type", "object")
    name = str(function.get("name"))
    if not isinstance(parameters, dict) or parameters["type"] != "object":
        raise RequestError(
            f"a call of the tool {name!r} cannot be forced: its parameters are not of type object; give one"
        )
    return name, parameters


def _json_call(rule: str, name: str, parameters: dict[str, Any], dialect: JsonCalls) -> str:
    before = dialect.head + json.dumps(name, ensure_ascii=False) + dialect.middle
    return f"{rule}: {_literal(before)} {_json(parameters)} {_literal(dialect.tail)}"


def _tagged_call(rule: str, name: str, parameters: dict[str, Any], dialect: TaggedCalls) -> Iterator[str]:
    _need_plain(name, "its name")
    if other := next((key for key in parameters if key not in _WHOLE), None):
        raise RequestError(f"{other!r} of its parameters would not be enforced in this model's dialect; remove it")
    properties: dict[str, Any] = dict(parameters.get("properties", {}))
    required = parameters.get("required", [])
    for key in required:
        properties.setdefault(key, parameters.get("additionalProperties", {}))
    shared = definitions_of(parameters)
    parts = []
    for index, (key, schema) in enumerate(properties.items()):
        if key not in required and (schema is False or _values(schema, shared) == []):
            continue
        _need_plain(key, f"the name of parameter {key!r}")
        part = f"{rule}p{index}"
        parts.append(part if key in required else f"{part}?")
        yield from _parameter(part, key, schema, shared, dialect)
    yield f"{rule}: {_literal(dialect.head + name + dialect.opened)} {' '.join(parts)} {_literal(dialect.tail)}"


def _parameter(rule: str, key: str, schema: Any, shared: dict[str, Any], dialect: TaggedCalls) -> Iterator[str]:
    """Rules of one parameter, tags and all."""
    before, after = f"<parameter={key}{dialect.key_end}", f"{dialect.value_end}</parameter>{dialect.gap}"
    found = followed(schema, shared)
    kinds = types_of(found, shared)
    yield f"{rule}: {_literal(before)} {rule}v"
    values = _values(found, shared)
    if found is False or values == []:
        raise RequestError(f"nothing satisfies parameter {key!r}; make it optional")
    if values is not None:
        yield f"{rule}v: ({' | '.join(_literal(_written(value)) for value in values)}) {_literal(after)}"
    elif kinds == {"string"}:
        assert isinstance(found, dict)
        text = " & ".join(_patterns(found, key, dialect))
        yield f'{rule}v: {rule}t {_literal(dialect.gap)}\n{rule}t[suffix="</parameter>"]: {rule.upper()}'
        yield f"{rule.upper()}: {text}"
    elif kinds and "string" not in kinds:
        whole = {**found, **shared} if isinstance(found, dict) else {}
        yield f"{rule}v: {_json(whole)} {_literal(after)}"
    elif _is_bare(found, shared):
        yield f'{rule}v: {rule}t {_literal(dialect.gap)}\n{rule}t[suffix="</parameter>"]: /(?s:.*)/'
    else:
        raise RequestError(
            f"parameter {key!r} may be a text or something else, with rules that cannot be told apart in this "
            "model's dialect; give it one type"
        )


def _values(schema: Any, shared: dict[str, Any]) -> list[Any] | None:
    """All values of a schema that names them; None when it does not."""
    schema = followed(schema, shared)
    if not isinstance(schema, dict):
        return None
    rules = set(schema)
    if rules <= {"enum", "type"} and "enum" in rules:
        kinds = types_of({"type": schema["type"]}, shared) if "type" in rules else None
        return [value for value in schema["enum"] if kinds is None or type_names(value) & kinds]
    if rules <= {"const", "type"} and "const" in rules:
        return [schema["const"]]
    if rules == {"type"} and schema["type"] == "null":
        return [None]
    if rules == {"anyOf"}:
        options = [_values(option, shared) for option in schema["anyOf"]]
        return None if None in options else [value for option in options for value in option or ()]
    return None


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


def _is_bare(schema: Any, shared: dict[str, Any]) -> bool:
    """Whether a schema says nothing but types."""
    schema = followed(schema, shared)
    if not isinstance(schema, dict):
        return schema is True
    return _UNTYPED.issuperset(schema) and all(_is_bare(option, shared) for option in schema.get("anyOf", ()))


def _written(value: Any) -> str:
    """A value as it stands between the tags."""
    if isinstance(value, str):
        if "</parameter>" in value:
            raise RequestError(f"the value {value[:40]!r} holds a closing tag; leave it out")
        return value
    return json.dumps(value, ensure_ascii=False)


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
