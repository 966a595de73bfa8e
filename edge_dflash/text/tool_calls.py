"""Tool calls that a model wrote, in the form of the OpenAI API, and the dialect in which its template writes them.

Two dialects of the Qwen family stand between ``<tool_call>`` and ``</tool_call>``: a JSON object with ``name`` and
``arguments`` (Qwen2.5, Qwen3), and ``<function=name>`` with ``<parameter=name>`` blocks (Qwen3-Coder, Qwen3.5,
Qwen3.6). What stands between their parts is the chat template's. Text only, no tokens.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from edge_dflash.errors import RequestError

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
    the tool's schema gives them; without a type they stay text. Nothing that was written is left out: a call with
    something else than a name and its arguments is malformed, as is one without arguments of a tool that needs some.
    """
    body = text.strip()
    try:
        name, arguments = _json_call(body, tools) if body.startswith("{") else _tagged_call(body, tools)
        if tools is not None and name not in (names := [str(function_of(tool).get("name")) for tool in tools]):
            raise _MalformedError(f"there is no tool {name!r}; there are {', '.join(names)}")
        return ToolCall(call_id, name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (_MalformedError, ValueError, RecursionError) as error:  # ValueError: NaN, or digits beyond Python's limit
        return MalformedToolCall(text, " ".join(str(error).split()))


_ARGUMENTS = ("arguments", "parameters")  # as models of the family name them, and some that were trained on others


def _json_call(body: str, tools: Sequence[Tool] | None) -> tuple[str, dict[str, Any]]:
    try:
        call = json.loads(body, object_pairs_hook=_once)
    except ValueError as error:
        raise _MalformedError(f"the call is no JSON: {error}") from None
    name, given = call.pop("name", None), [key for key in _ARGUMENTS if key in call]
    if not isinstance(name, str) or not name:
        raise _MalformedError("the call has no name")
    if unknown := [key for key in call if key not in given[:1]]:
        raise _MalformedError(f"the call has {unknown[0][:40]!r} besides its name and arguments")
    if not given and _needs_arguments(name, tools):
        raise _MalformedError("the call has no arguments")
    arguments = call[given[0]] if given else {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, object_pairs_hook=_once)
        except ValueError as error:
            raise _MalformedError(f"the arguments are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise _MalformedError(f"the arguments are of type {type(arguments).__name__}, wanted an object")
    return name, arguments


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:40]!r} comes twice")
    return made


def _needs_arguments(name: str, tools: Sequence[Tool] | None) -> bool:
    """Whether a call without arguments cannot be run: the tool is known and requires some."""
    for function in map(function_of, tools or ()):
        if function.get("name") == name:
            parameters = function.get("parameters")
            return isinstance(parameters, Mapping) and bool(parameters.get("required"))
    return False


_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*(.*)</function>", re.DOTALL)
# A value may hold any text, "</parameter>" too: it ends where the next parameter or the end of the call follows.
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)


def _tagged_call(body: str, tools: Sequence[Tool] | None) -> tuple[str, dict[str, Any]]:
    found = _FUNCTION.fullmatch(body)
    if found is None:
        raise _MalformedError("the call is neither a JSON object nor <function=...>...</function>")
    name, rest = found[1].strip(), found[2]
    schemas, shared = _parameter_schemas(name, tools)
    arguments: dict[str, Any] = {}
    while rest:
        match = _PARAMETER.match(rest)
        if match is None:
            raise _MalformedError(f"text that is no parameter: {rest[:40]!r}")
        key, rest = match[1].strip(), rest[match.end() :]
        if key in arguments:
            raise _MalformedError(f"the parameter {key!r} comes twice")
        value = match[2].removeprefix("\n").removesuffix("\n")  # the newlines belong to the tags
        arguments[key] = _typed(key, value, types_of(schemas.get(key), shared))
    return name, arguments


def _typed(key: str, text: str, kinds: set[str]) -> Any:
    """The value of a parameter written as plain text: strings as they are, everything else as JSON."""
    if not kinds or kinds == {"string"}:
        return text
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
        if type_names(value) & kinds and not isinstance(value, str):
            return value
    if "string" in kinds:
        return text
    raise _MalformedError(f"the parameter {key!r} is {text[:40]!r}, wanted {' or '.join(sorted(kinds))}")


def type_names(value: object) -> set[str]:
    """JSON Schema's names for the type of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return {names[type(value)]}


def followed(schema: object, shared: Mapping[str, Any]) -> object:
    """What a schema stands for that is only a reference, or an ``allOf`` of one; itself when it is neither.

    ``shared`` holds ``$defs`` and ``definitions``.
    """
    for _ in range(64):
        rules = set(schema) & _ASSERTIONS if isinstance(schema, Mapping) else set()
        if not isinstance(schema, Mapping) or len(rules) != 1:
            break
        if rules == {"allOf"} and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            schema = schema["allOf"][0]
        elif rules == {"$ref"}:
            if (found := _referred(schema["$ref"], shared)) is None:
                break
            schema = found
        else:
            break
    return schema


_ASSERTIONS = frozenset(("$ref", "allOf", "anyOf", "oneOf", "type", "enum", "const", "properties", "items"))


# What a schema without a type says all the same: keywords that mean nothing for values of other types.
_IMPLIED = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
               "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems",
              "maxItems", "uniqueItems", "unevaluatedItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("pattern", "minLength", "maxLength", "contentEncoding", "contentMediaType"),
}  # fmt: skip
_WORTH = 1000  # schemas that are looked at for one: branches multiply


def types_of(schema: object, shared: Mapping[str, Any]) -> set[str]:
    """Types that a value may have by its schema, named or implied; empty when it says nothing of them."""
    return _types(schema, shared, 32, [_WORTH]) or set()


def _types(schema: object, shared: Mapping[str, Any], depth: int, left: list[int]) -> set[str] | None:
    """None where it says nothing. Every keyword narrows what the others leave."""
    left[0] -= 1
    if not isinstance(schema, Mapping) or not depth or left[0] < 0:
        return None
    said: list[set[str] | None] = []
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        said.append(set().union(*map(type_names, values)) if isinstance(values, list) else None)
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        said.append({kind for kind in named if isinstance(kind, str)} or None)
    if "$ref" in schema:
        said.append(_types(_referred(schema["$ref"], shared), shared, depth - 1, left))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            options = [_types(option, shared, depth - 1, left) for option in schema[key]]
            said.append(None if None in options else set().union(*(option or () for option in options)))
    if isinstance(schema.get("allOf"), list):
        said += [_types(part, shared, depth - 1, left) for part in schema["allOf"]]
    known = [kinds for kinds in said if kinds is not None]
    if not known:
        return {kind for kind, keywords in _IMPLIED.items() if not schema.keys().isdisjoint(keywords)} or None
    return reduce(_both, known)


def _both(some: set[str], others: set[str]) -> set[str]:
    """Types that are among both; a whole number is a number."""
    some, others = (kinds | {"integer"} if "number" in kinds else kinds for kinds in (some, others))
    return some & others


def _referred(place: object, shared: Mapping[str, Any]) -> object:
    """The definition that a ``$ref`` names; None for an unknown one."""
    folder, _, name = str(place).removeprefix("#/").partition("/")
    return shared.get(folder, {}).get(name)


def definitions_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """``$defs`` and ``definitions`` of a schema."""
    return {key: parameters[key] for key in ("$defs", "definitions") if isinstance(parameters.get(key), Mapping)}


def _parameter_schemas(name: str, tools: Sequence[Tool] | None) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Schemas of a function's parameters by name, and the definitions that they refer to."""
    for tool in tools or ():
        function = function_of(tool)
        parameters = function.get("parameters")
        if function.get("name") == name and isinstance(parameters, Mapping):
            properties = parameters.get("properties")
            return properties if isinstance(properties, Mapping) else {}, definitions_of(parameters)
    return {}, {}


def function_of(tool: Tool) -> Mapping[str, Any]:
    """The description inside ``function``, or the tool itself when it is written without that level."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def is_strict(tool: Tool) -> bool:
    """Whether its calls are to satisfy its schema, forced or not."""
    return function_of(tool).get("strict") is True


def chosen_tools(tools: Sequence[Tool], choice: str) -> tuple[Tool, ...]:
    """The tools of which one must be called: all for "required", one for a name, none for "auto" and "none".

    Raises RequestError for another choice, and where there are no tools to choose from.
    """
    if choice in ("auto", "none"):
        return ()
    if not tools:
        raise RequestError(f"tool_choice is {choice[:60]!r}, and there are no tools; give tools, or auto")
    names = [str(function_of(tool).get("name")) for tool in tools]
    if choice != "required" and choice not in names:
        known = ", ".join(("auto", "none", "required", *names))
        raise RequestError(f"tool_choice is {choice[:60]!r}; give one of {known}")
    return tuple(tools) if choice == "required" else (tools[names.index(choice)],)


# The dialect of a chat template --------------------------------------------------------------------------------------

PROBE = "zqcall"  # name of the call that a template is made to write
PROBE_ARGUMENTS = {"zqfirst": "zqone", "zqsecond": "zqtwo"}


@dataclass(frozen=True)
class JsonCalls:
    """``head NAME middle ARGUMENTS tail``, with both as JSON."""

    head: str
    middle: str
    tail: str


@dataclass(frozen=True)
class TaggedCalls:
    """``head NAME opened``, for each parameter ``<parameter=KEY key_end VALUE </parameter> gap``, then ``tail``."""

    head: str
    opened: str
    key_end: str
    value_end: str  # before </parameter>
    gap: str  # behind </parameter>
    tail: str


def dialect_in(body: str) -> JsonCalls | TaggedCalls | None:
    """The dialect in which a template wrote the probe between the markers of a call; None for an unknown one."""
    return _json_dialect(body) if body.strip().startswith("{") else _tagged_dialect(body)


def _json_dialect(body: str) -> JsonCalls | None:
    head, _, rest = body.partition(json.dumps(PROBE))
    start = rest.find("{")
    try:
        arguments, end = json.JSONDecoder().raw_decode(rest, max(start, 0))
        call = json.loads(body)
    except ValueError:
        return None
    if arguments != PROBE_ARGUMENTS or call != {"name": PROBE, "arguments": PROBE_ARGUMENTS}:
        return None
    return JsonCalls(head, rest[:start], rest[end:])


def _tagged_dialect(body: str) -> TaggedCalls | None:
    head, _, rest = body.partition(PROBE)
    opened, first, rest = rest.partition("<parameter=zqfirst")
    key_end, one, rest = rest.partition("zqone")
    value_end, closed, rest = rest.partition("</parameter>")
    gap, second, rest = rest.partition("<parameter=zqsecond")
    _, two, rest = rest.partition("zqtwo")
    tail = rest.removeprefix(f"{value_end}</parameter>{gap}")
    if not (first and one and closed and second and two) or tail == rest:
        return None
    if head.strip() != "<function=" or not key_end.startswith(">") or tail.strip() != "</function>":
        return None
    return TaggedCalls(head, opened, key_end, value_end, gap, tail)
