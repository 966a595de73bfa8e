"""Calls of tools as a grammar, in Lark: an answer is one, may be some, or holds them.

A call stands in the model's own dialect, with arguments of the tool's schema. In the tagged dialect a text stands as it
is, up to ``</parameter>``; everything else is JSON. What of a schema could not be enforced there is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

from edge_dflash.common.pointer import resolve
from edge_dflash.common.tables import repeated
from edge_dflash.decode.grammar.formats import ENCODINGS, FORMATS
from edge_dflash.decode.grammar.keywords import kinds_of
from edge_dflash.decode.grammar.library import MAX_BYTES, MAX_RULES
from edge_dflash.decode.grammar.schema import MAX_BYTES as MAX_SCHEMA_BYTES
from edge_dflash.decode.grammar.schema import alone, plain
from edge_dflash.errors import RequestError
from edge_dflash.text import tool_calls

_WHOLE = frozenset(("type", "properties", "required", "additionalProperties", "$defs"))
_TEXT = frozenset(("type", "pattern", "format", "contentEncoding", "minLength", "maxLength"))
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a regex: escape, class, character

Dialect: TypeAlias = tool_calls.JsonCalls | tool_calls.TaggedCalls
HELD, WHERE_IT_CAN, FREE = "held", "where it can", "free"


@dataclass(frozen=True)
class AnswerForm:
    """The form of an answer that may be calls instead: ``text`` is a schema as JSON, or a regular expression."""

    kind: Literal["schema", "regex"]
    text: str

    def rules(self) -> str:
        """Rule ``form``. Raises RequestError for a schema that could not be enforced."""
        if self.kind == "regex":
            return f"form: FORM\nFORM: /(?:{_slashed(self.text)})/"
        return f"form: {_json(json.loads(self.text))}"


@dataclass(frozen=True)
class Calls:
    """Calls in an answer: it is one ("forced"), may be some ("beside" a form), or holds them ("strict").

    A value of JSON: the grammar of it is made where grammars are compiled, within bounds of time and memory.
    """

    which: Literal["forced", "beside", "strict"]
    tools: tuple[dict[str, Any], ...]  # name, parameters, and how its calls are held to these: HELD, WHERE_IT_CAN, FREE
    dialect: Dialect
    form: AnswerForm | None = None

    @classmethod
    def of(
        cls,
        which: Literal["forced", "beside", "strict"],
        tools: Sequence[tool_calls.Tool],
        dialect: Dialect,
        form: AnswerForm | None = None,
    ) -> Calls:
        """Raises RequestError for schemas that are too large, those of strict tools if there is a choice."""
        slim = [_slim(tool, which) for tool in tools]
        sizes = {index: len(json.dumps(tool)) for index, tool in enumerate(slim)}
        for index in sorted(sizes, key=lambda index: -sizes[index]):
            if sum(sizes.values()) > MAX_SCHEMA_BYTES and slim[index]["held"] == WHERE_IT_CAN:
                slim[index] = {"name": slim[index]["name"], "held": FREE}
                sizes[index] = len(json.dumps(slim[index]))
        if (size := sum(sizes.values())) > MAX_SCHEMA_BYTES:
            raise RequestError(
                f"the tools have schemas of {size} bytes, at most {MAX_SCHEMA_BYTES} are taken; give fewer tools"
            )
        return cls(which, tuple(slim), dialect, form)

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads."""
        return json.dumps({**asdict(self), "json": isinstance(self.dialect, tool_calls.JsonCalls)})

    @classmethod
    def from_json(cls, text: str) -> Calls:
        """What :meth:`to_json` wrote."""
        given = json.loads(text)
        dialect = (tool_calls.JsonCalls if given["json"] else tool_calls.TaggedCalls)(**given["dialect"])
        form = None if given["form"] is None else AnswerForm(**given["form"])
        return cls(given["which"], tuple(given["tools"]), dialect, form)

    def where_it_can(self) -> tuple[dict[str, Any], ...]:
        """Tools whose calls are held to their schemas only where that works."""
        return tuple(tool for tool in self.tools if tool["held"] == WHERE_IT_CAN)

    def grammar(self, free: Collection[str] = ()) -> str:
        """The grammar, as Lark; calls of the tools named in ``free`` may have any arguments. Raises RequestError."""
        names = [tool["name"] for tool in self.tools]
        if twice := repeated(names):
            raise RequestError(f"two tools are called {twice!r}, so a call could mean either; give each its own name")
        rules = [self._rules(f"c{index}", tool, free) for index, tool in enumerate(self.tools)]
        start = self._start(" | ".join(f"c{index}" for index in range(len(rules))))
        sizes = {index: _size(rules[index]) for index, tool in enumerate(self.tools) if tool["held"] == WHERE_IT_CAN}
        for index in sorted(sizes, key=lambda index: -sizes[index]):
            if _fits([*start, *chain.from_iterable(rules)]):
                break
            rules[index] = self._rules(f"c{index}", self.tools[index], names)
        made = [*start, *chain.from_iterable(rules)]
        if not _fits(made):
            what, remedy = {
                "forced": ("a forced call", " choose one by name, or"),
                "beside": (f"calls beside a {self.form.kind if self.form else 'form'}", " leave it out, or"),
                "strict": ("strict calls", " leave strict out, or"),
            }[self.which]
            raise RequestError(
                f"the tools are too large for {what}: {_size(made)} bytes and {len(made)} rules, at most {MAX_BYTES} "
                f"and {MAX_RULES // 2} are taken;{remedy} give fewer"
            )
        return "\n".join(made)

    def _start(self, bodies: str) -> list[str]:
        if self.which == "forced":
            return [f"start: <tool_call> ({bodies}) </tool_call>"]
        if self.form is None:
            return [f"start: ({bodies}) </tool_call>"]
        start = f'start: call ("\\n"? call)* | form\ncall: <tool_call> ({bodies}) </tool_call>'
        return [start, self.form.rules()]

    def _rules(self, rule: str, tool: dict[str, Any], free: Collection[str]) -> list[str]:
        """Rules of a call of one tool."""
        name, held = tool["name"], tool["held"]
        anything = [f"{rule}: {_literal(_opening(name, self.dialect))} /(?s:.*)/"]
        if held == FREE or name in free:
            return anything
        try:
            return _call(rule, name, tool, self.dialect)
        except RequestError as error:
            if held == WHERE_IT_CAN:
                return anything
            raise RequestError(f"a call of the tool {name!r} cannot be forced: {error}") from None


def _slim(tool: tool_calls.Tool, which: str) -> dict[str, Any]:
    """What of a tool its calls depend on."""
    function = tool_calls.function_of(tool)
    held = HELD if which == "forced" or tool_calls.is_strict(tool) else WHERE_IT_CAN if which == "beside" else FREE
    made: dict[str, Any] = {"name": str(function.get("name")), "held": held}
    if held != FREE:
        made["parameters"] = json.loads(json.dumps(function.get("parameters"), default=dict))
    return made


def _size(rules: Sequence[str]) -> int:
    return sum(len(rule.encode()) + 1 for rule in rules)


def _fits(rules: Sequence[str]) -> bool:
    return _size(rules) <= MAX_BYTES and len(rules) <= MAX_RULES // 2  # some are of two lines


def _opening(name: str, dialect: Dialect) -> str:
    """What a call begins with, up to its arguments."""
    if isinstance(dialect, tool_calls.JsonCalls):
        return dialect.head + json.dumps(name, ensure_ascii=False) + dialect.middle
    _need_plain(name, "the name of a tool")
    return dialect.head + name + dialect.opened


def _call(rule: str, name: str, tool: dict[str, Any], dialect: Dialect) -> list[str]:
    """Rules of a call whose arguments satisfy the tool's schema."""
    parameters = _parameters(tool)
    if isinstance(dialect, tool_calls.JsonCalls):
        return [f"{rule}: {_literal(_opening(name, dialect))} {_json(parameters)} {_literal(dialect.tail)}"]
    rules: list[str] = []
    size = 0
    for made in _tagged_call(rule, name, parameters, dialect):
        rules.append(made)
        size += len(made)
        if size > MAX_BYTES or len(rules) > MAX_RULES:
            raise RequestError("its grammar would be too large; give it fewer parameters, or simpler ones")
    return rules


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments in plain form."""
    given = tool["parameters"]
    if given is None or given == {}:
        given = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(given, dict):
        raise RequestError("its parameters are not of type object; give one")
    root = plain(given)
    made = {key: value for key, value in root.items() if key != "$defs"}
    if made.get("type") == "object" and not made.keys().isdisjoint(("$ref", "allOf")):
        del made["type"]
    found = _followed(made, root)
    if not isinstance(found, dict) or "object" not in kinds_of({"type": "object", **found}):
        raise RequestError("its parameters are not of type object; give one")
    return alone({**found, "type": "object"}, root)


def _followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema stands for that is only a reference, or an ``allOf`` or ``anyOf`` of one; itself when it is not."""
    for _ in range(64):
        if not isinstance(schema, dict) or len(schema) != 1:
            break
        if "$ref" in schema:
            schema = resolve(root, schema["$ref"])
        elif not schema.keys().isdisjoint(("allOf", "anyOf")) and len(next(iter(schema.values()))) == 1:
            schema = next(iter(schema.values()))[0]
        else:
            break
    return schema


def _tagged_call(rule: str, name: str, parameters: dict[str, Any], dialect: tool_calls.TaggedCalls) -> Iterator[str]:
    before = _opening(name, dialect)
    if other := next((key for key in parameters if key not in _WHOLE), None):
        raise RequestError(f"{other!r} of its parameters would not be enforced in this model's dialect; remove it")
    required = parameters.get("required", [])
    parts = []
    for index, key in enumerate(dict.fromkeys((*parameters.get("properties", {}), *required))):
        schema = _followed(tool_calls.parameter(parameters, key), parameters)
        said = tool_calls.meaning(schema, parameters)
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
    rule: str, key: str, schema: Any, said: tool_calls.Meaning, root: dict[str, Any], dialect: tool_calls.TaggedCalls
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


def _patterns(schema: dict[str, Any], key: str, dialect: tool_calls.TaggedCalls) -> Iterator[str]:
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
    text = tool_calls.written(value)
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
