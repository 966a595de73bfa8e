"""Tool calls that a model wrote, in the form of the OpenAI API.

Knows the two forms of the Qwen family between ``<tool_call>`` and ``</tool_call>``: a JSON object with ``name`` and
``arguments`` (Qwen2.5, Qwen3), and ``<function=name>`` with ``<parameter=name>`` blocks (Qwen3-Coder, Qwen3.5,
Qwen3.6), as their chat templates write them. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": JSON Schema}}


@dataclass(frozen=True)
class ToolCall:
    """A call that can be run: ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str

    def openai(self) -> dict[str, Any]:
        """Return the entry of a message's ``tool_calls``."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class MalformedToolCall:
    """What the model wrote as a call and cannot be run, with the reason."""

    text: str
    reason: str


class _MalformedError(Exception):
    """Internal: the reason why a text is no call."""


def parse_tool_call(text: str, call_id: str, tools: Sequence[Tool] | None = None) -> ToolCall | MalformedToolCall:
    """Read the text between ``<tool_call>`` and ``</tool_call>``.

    With ``tools``, a call of another function is malformed, and parameters written as plain text get the types that
    the tool's schema gives them; without a type they stay text.
    """
    body = text.strip()
    try:
        name, arguments = _json_call(body) if body.startswith("{") else _tagged_call(body, tools)
        if tools is not None and name not in (names := [str(_function(tool).get("name")) for tool in tools]):
            raise _MalformedError(f"there is no tool {name!r}; there are {', '.join(names)}")
        return ToolCall(call_id, name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (_MalformedError, ValueError, RecursionError) as error:  # ValueError: NaN, or digits beyond Python's limit
        return MalformedToolCall(text, " ".join(str(error).split()))


def _json_call(body: str) -> tuple[str, dict[str, Any]]:
    try:
        call = json.loads(body)
    except ValueError as error:
        raise _MalformedError(f"the call is no JSON: {error}") from None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise _MalformedError("the call has no name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise _MalformedError(f"the arguments are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise _MalformedError(f"the arguments are of type {type(arguments).__name__}, wanted an object")
    return name, arguments


_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*(.*)</function>", re.DOTALL)
# A value may hold any text, "</parameter>" too: it ends where the next parameter or the end of the call follows.
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)


def _tagged_call(body: str, tools: Sequence[Tool] | None) -> tuple[str, dict[str, Any]]:
    found = _FUNCTION.fullmatch(body)
    if found is None:
        raise _MalformedError("the call is neither a JSON object nor <function=...>...</function>")
    name, rest = found[1].strip(), found[2]
    schemas = _parameter_schemas(name, tools)
    arguments: dict[str, Any] = {}
    while rest:
        match = _PARAMETER.match(rest)
        if match is None:
            raise _MalformedError(f"text that is no parameter: {rest[:40]!r}")
        key, rest = match[1].strip(), rest[match.end() :]
        if key in arguments:
            raise _MalformedError(f"the parameter {key!r} comes twice")
        value = match[2].removeprefix("\n").removesuffix("\n")  # the newlines belong to the tags
        arguments[key] = _typed(key, value, schemas.get(key))
    return name, arguments


def _typed(key: str, text: str, schema: object) -> Any:
    """The value of a parameter written as plain text: strings as they are, everything else as JSON."""
    kinds = _types(schema)
    if not kinds or kinds == {"string"}:
        return text
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        value = _NOTHING
    if value is not _NOTHING and _type_names(value) & kinds and not isinstance(value, str):
        return value
    if "string" in kinds:
        return text
    raise _MalformedError(f"the parameter {key!r} is {text[:40]!r}, wanted {' or '.join(sorted(kinds))}")


_NOTHING = object()


def _type_names(value: object) -> set[str]:
    """JSON Schema's names for the type of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return {names[type(value)]}


def _types(schema: object) -> set[str]:
    """Types that a parameter's schema names; empty when it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", [])
    kinds = {named} if isinstance(named, str) else {kind for kind in named if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key, ()):
            kinds |= _types(option)
    for value in schema.get("enum", ()):
        kinds |= _type_names(value) if not named else set()
    return kinds


def _parameter_schemas(name: str, tools: Sequence[Tool] | None) -> Mapping[str, Any]:
    for tool in tools or ():
        function = _function(tool)
        parameters = function.get("parameters")
        if function.get("name") == name and isinstance(parameters, Mapping):
            properties = parameters.get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _function(tool: Tool) -> Mapping[str, Any]:
    """The description inside ``function``, or the tool itself when it is written without that level."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool
