"""How a model writes tool calls: found from what its chat template writes for one, never from the model's name.

The two dialects are those that :mod:`edge_dflash.text.tool_calls` reads; what stands between their parts is the
template's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from edge_dflash.errors import RequestError
from edge_dflash.text.chat import Markers, render_conversation
from edge_dflash.text.tokenizer import Tokenizer

_NAME, _OTHER = "zqcall", "zqlisted"
_ARGUMENTS = {"zqfirst": "zqone", "zqsecond": "zqtwo"}
_OPENS, _CLOSES = "<tool_call>", "</tool_call>"


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


def dialect_of(tokenizer: Tokenizer) -> JsonCalls | TaggedCalls:
    """The dialect of a model's chat template. Raises RequestError when it writes no calls, or unknown ones."""
    markers = Markers.of(tokenizer)
    if markers.tool_call is None or markers.end_tool_call is None:
        raise RequestError(f"this tokenizer has no tokens {_OPENS} and {_CLOSES}, so no call can be forced; give auto")
    body = _written(tokenizer)
    found = _json(body) if body.strip().startswith("{") else _tagged(body)
    if found is None:
        raise RequestError("the chat template writes tool calls in a form that is not known; give tool_choice auto")
    return found


def _written(tokenizer: Tokenizer) -> str:
    """What the template writes between the markers of a call; "" when it writes none."""
    call = {"type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    messages: list[Mapping[str, object]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tool = {"type": "function", "function": {"name": _OTHER, "description": "x", "parameters": {"type": "object"}}}
    text = "".join(render_conversation(tokenizer, messages, tools=[tool]))
    before, called, after = text.rpartition(_NAME)
    if not called or _OPENS not in before or _CLOSES not in after:
        return ""
    return before.rpartition(_OPENS)[2] + called + after.partition(_CLOSES)[0]


def _json(body: str) -> JsonCalls | None:
    head, _, rest = body.partition(json.dumps(_NAME))
    start = rest.find("{")
    try:
        arguments, end = json.JSONDecoder().raw_decode(rest, max(start, 0))
        call = json.loads(body)
    except ValueError:
        return None
    if arguments != _ARGUMENTS or call != {"name": _NAME, "arguments": _ARGUMENTS}:
        return None
    return JsonCalls(head, rest[:start], rest[end:])


def _tagged(body: str) -> TaggedCalls | None:
    head, _, rest = body.partition(_NAME)
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
