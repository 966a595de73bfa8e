"""Tool calls that a model wrote, in the form of the OpenAI API, and the dialect in which its template writes them.

Two dialects of the Qwen family stand between ``<tool_call>`` and ``</tool_call>``: a JSON object with ``name`` and
``arguments`` (Qwen2.5, Qwen3), and ``<function=name>`` with ``<parameter=name>`` blocks (Qwen3-Coder, Qwen3.5,
Qwen3.6). What stands between their parts is the chat template's. Text only, no tokens.

What a tool's schema says of a parameter, its types and its values where it names them, is read from any schema, also
from one that no grammar is made of: what is not understood says nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from edge_dflash.common.pointer import resolve
from edge_dflash.common.tables import repeated
from edge_dflash.errors import RequestError

# What a schema without a type says all the same: keywords that mean nothing for values of other types.
_IMPLIED = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
               "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems",
              "maxItems", "uniqueItems", "unevaluatedItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("pattern", "minLength", "maxLength", "contentEncoding", "contentMediaType"),
}  # fmt: skip
_READ = frozenset(("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"))
_WORTH = 1000  # schemas that are looked at for one: branches multiply
_DEPTH = 32


@dataclass(frozen=True)
class Meaning:
    """What a schema says of its values."""

    kinds: set[str] | None = None  # their types; None where it says nothing
    named: bool = True  # no value of another type satisfies it; False: its keywords imply the types
    values: list[Any] | None = None  # there are no others; None where it does not name them
    exact: bool = True  # it says nothing else


_UNKNOWN = Meaning(exact=False)


def parameter(root: Mapping[str, Any], name: str) -> object:
    """The schema of one parameter of the schema of all, whose references it shares."""
    return _parameter(root, root, name, [_WORTH])


def _parameter(node: object, root: Mapping[str, Any], name: str, left: list[int]) -> object:
    said: list[object] = []
    for part in parts_of(node, root, left):
        named = part.get("properties")
        if isinstance(named, Mapping) and name in named:
            said.append(named[name])
        elif "additionalProperties" in part and not part.get("patternProperties"):
            said.append(part["additionalProperties"])
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list):
                said.append({"anyOf": [_parameter(option, root, name, left) for option in part[key]]})
    return said[0] if len(said) == 1 else {"allOf": said} if said else {}


def parts_of(
    node: object, root: Mapping[str, Any] | None = None, left: list[int] | None = None
) -> Iterator[Mapping[str, Any]]:
    """Schemas that all hold where one does: itself, what it refers to and its ``allOf``."""
    left = [_WORTH] if left is None else left
    left[0] -= 1
    if not isinstance(node, Mapping) or left[0] < 0:
        return
    root = node if root is None else root
    yield node
    inside = node["allOf"] if isinstance(node.get("allOf"), list) else []
    for child in (*inside, _target(node.get("$ref"), root)):
        yield from parts_of(child, root, left)


def meaning(schema: object, root: Mapping[str, Any]) -> Meaning:
    """What a schema says, whose references are those of ``root``."""
    return _read(schema, root, _DEPTH, [_WORTH])


def _read(schema: object, root: Mapping[str, Any], depth: int, left: list[int]) -> Meaning:
    """Every keyword narrows what the others leave."""
    left[0] -= 1
    if isinstance(schema, bool):
        return Meaning() if schema else Meaning(set(), values=[])
    if not isinstance(schema, Mapping) or not depth or left[0] < 0:
        return _UNKNOWN
    inside = partial(_read, root=root, depth=depth - 1, left=left)
    said = list(_own(schema, left))
    if "$ref" in schema:
        said.append(inside(_target(schema["$ref"], root)))
    if isinstance(schema.get("allOf"), list):
        said += map(inside, schema["allOf"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            said.append(_either([inside(option) for option in schema[key]]))
    made = reduce(_both, said, Meaning())
    if made.kinds is None:
        implied = {kind for kind, keywords in _IMPLIED.items() if not schema.keys().isdisjoint(keywords)}
        made = replace(made, kinds=implied or None, named=not implied)
    elif made.values is not None:
        made = replace(made, values=[value for value in made.values if type_names(value) & made.kinds])
    return replace(made, exact=made.exact and schema.keys() <= _READ)


def _own(schema: Mapping[str, Any], left: list[int]) -> Iterator[Meaning]:
    """What the keywords say that hold no schemas."""
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            left[0] -= len(values) // 20
            yield Meaning(set[str]().union(*map(type_names, values)), values=values)
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    if kinds:
        null = {"null"} if schema.get("nullable") is True else set()  # OpenAPI's
        yield Meaning(kinds | null, values=[None] if kinds == {"null"} else None)


def _either(options: list[Meaning]) -> Meaning:
    kinds: set[str] | None = set()
    values: list[Any] | None = []
    for option in options:
        kinds = None if kinds is None or option.kinds is None else kinds | option.kinds
        values = None if values is None or option.values is None else [*values, *option.values]
    return Meaning(kinds, all(one.named for one in options), values, all(one.exact for one in options))


def _both(some: Meaning, other: Meaning) -> Meaning:
    exact = some.exact and other.exact
    values = some.values if other.values is None else other.values
    if some.values is not None and other.values is not None:
        known = set(map(written, other.values))
        values = [value for value in some.values if written(value) in known]
    if some.kinds is None or other.kinds is None:
        one = some if other.kinds is None else other
        return Meaning(one.kinds, one.named, values, exact)
    # a whole number is a number
    left, right = (kinds | {"integer"} if "number" in kinds else kinds for kinds in (some.kinds, other.kinds))
    kinds = left & right
    named = (some.named and (other.named or left <= kinds)) or (other.named and right <= kinds)
    return Meaning(kinds, named, values, exact)


def _target(reference: object, root: Mapping[str, Any]) -> object:
    try:
        return resolve(root, reference) if isinstance(reference, str) else None
    except RequestError:
        return None


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


def written(value: Any) -> str:
    """A value as it stands between the tags of a parameter."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
        twice = repeated(name for name, _ in pairs) or ""
        raise ValueError(f"{twice[:40]!r} comes twice")
    return made


def _needs_arguments(name: str, tools: Sequence[Tool] | None) -> bool:
    """Whether a call without arguments cannot be run: the tool is known and requires some."""
    return any(part.get("required") for part in parts_of(_parameters(name, tools)))


_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*(.*)</function>", re.DOTALL)
# A value may hold any text, "</parameter>" too: it ends where the next parameter or the end of the call follows.
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)


def _tagged_call(body: str, tools: Sequence[Tool] | None) -> tuple[str, dict[str, Any]]:
    found = _FUNCTION.fullmatch(body)
    if found is None:
        raise _MalformedError("the call is neither a JSON object nor <function=...>...</function>")
    name, rest = found[1].strip(), found[2]
    root = _parameters(name, tools)
    arguments: dict[str, Any] = {}
    while rest:
        match = _PARAMETER.match(rest)
        if match is None:
            raise _MalformedError(f"text that is no parameter: {rest[:40]!r}")
        key, rest = match[1].strip(), rest[match.end() :]
        if key in arguments:
            raise _MalformedError(f"the parameter {key!r} comes twice")
        value = match[2].removeprefix("\n").removesuffix("\n")  # the newlines belong to the tags
        arguments[key] = _typed(key, value, meaning(parameter(root, key), root))
    return name, arguments


def _typed(key: str, text: str, said: Meaning) -> Any:
    """The value of a parameter written as plain text: strings as they are, everything else as JSON."""
    for value in said.values or ():
        if written(value) == text:
            return value
    kinds = said.kinds
    if not kinds or kinds == {"string"}:
        return text
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
        json.dumps(value, allow_nan=False)
        if type_names(value) & kinds and not isinstance(value, str):
            return value
    if "string" in kinds:
        return text
    raise _MalformedError(f"the parameter {key!r} is {text[:40]!r}, wanted {' or '.join(sorted(kinds))}")


def _parameters(name: str, tools: Sequence[Tool] | None) -> Mapping[str, Any]:
    """The schema of a function's parameters."""
    for function in map(function_of, tools or ()):
        if function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def function_of(tool: Tool) -> Mapping[str, Any]:
    """The description inside ``function``, or the tool itself when it is written without that level."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def is_strict(tool: Tool) -> bool:
    """Whether its calls are to satisfy its schema, forced or not."""
    return function_of(tool).get("strict") is True


def chosen_tools(tools: Sequence[Tool], choice: str) -> tuple[Tool, ...]:
    """The tools of which one must be called: all for "required", one for a name.

    Raises RequestError for another choice, and where there are no tools to choose from.
    """
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
