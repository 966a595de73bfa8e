"""Messages and tools of a request of the OpenAI API, as the planner takes them: each field used, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_dflash.decode.options import PlanOptions
from edge_dflash.errors import RequestError
from edge_dflash.serve.fields import BodyFields, Refusal
from edge_dflash.serve.shapes import ARGUMENTS, CALLED, CHOICES, CONTENT, ROLES, SAID, TOOL_CHOICE
from edge_dflash.text.images import read_content
from edge_dflash.text.template import Message


def read_messages(fields: BodyFields, needed: str = "give at least one message") -> list[Message]:
    """The ``messages`` of a request, as chat templates want them. Raises Refusal."""
    given = fields.array("messages", facts={"minItems": 1}, needed=needed)
    if not given:
        raise Refusal("messages is empty; give at least one message", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(given: Any, path: str) -> Message:
    if not isinstance(given, dict):
        raise Refusal(f"{path} is of type {type(given).__name__}; give an object with role and content", param=path)
    fields = BodyFields(given, path)
    role = fields.kind("role", *ROLES)
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls, assistant = None, role == "assistant"
    if assistant:
        calls = _earlier_calls(fields)
    else:
        fields.only("tool_calls", why="only an assistant calls tools")
    try:
        content = read_content(fields.take("content", CONTENT), role, fields.name("content"), only_urls=True)
    except RequestError as error:
        raise Refusal(str(error), param=fields.name("content")) from None
    fields.also({"anyOf": [SAID, CALLED]} if assistant else SAID)
    if content is None and not calls:
        raise Refusal(f"{path} has no content; give a text", param=f"{path}.content")
    made["content"] = content or ""
    if assistant:
        if calls:
            made["tool_calls"] = calls
        thought = [text for key in ("reasoning_content", "reasoning") if (text := fields.text(key)) is not None]
        if len(set(thought)) > 1:
            fields.fail(
                "reasoning", thought[1], "it differs from reasoning_content, which is the same; give one of them"
            )
        if thought:
            made["reasoning_content"] = thought[0]
        fields.only("refusal", "", why="give what was said as content")  # OpenAI's own answers carry these, empty
        fields.only("annotations", [], why="they cannot be told to the model; leave them out")
        fields.only("audio", why="audio cannot be read")
        fields.only("function_call", why="give tool_calls instead")
    if role == "tool":
        facts = {"description": "The id of an earlier call."}
        made["tool_call_id"] = fields.text(
            "tool_call_id", facts=facts, needed="give the id of the call that it answers"
        )
    if (name := fields.text("name")) is not None:
        made["name"] = name
    fields.done()
    return made


def _earlier_calls(fields: BodyFields) -> list[dict[str, Any]] | None:
    """The calls of an earlier answer."""
    calls = fields.array("tool_calls")
    return None if calls is None else [_earlier_call(one, f"tool_calls[{at}]", fields) for at, one in enumerate(calls)]


def _earlier_call(given: Any, key: str, fields: BodyFields) -> dict[str, Any]:
    wanted = 'give {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
    if not isinstance(given, dict):
        fields.fail(key, given, wanted)
    call = BodyFields(given, fields.name(key))
    call.only("type", "function", why="only functions are called")
    made = {"type": "function"} if (name := call.text("id")) is None else {"id": name, "type": "function"}
    call.take("index", {"type": "integer"})  # its place in a stream that it came in
    inner = call.inner("function", needed=wanted) or BodyFields({})
    function = {
        "name": inner.text("name", needed=wanted),
        "arguments": inner.take("arguments", ARGUMENTS, needed=wanted),
    }
    inner.done()
    call.done()
    return {**made, "function": function}


def check_results(messages: Sequence[Message], earlier: Sequence[Message] = ()) -> None:
    """Raise Refusal for a result that no call asked for; ``earlier``: messages before them."""
    asked = {call.get("id") for message in earlier for call in message.get("tool_calls") or ()}
    for index, message in enumerate(messages):
        asked |= {call.get("id") for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and message["tool_call_id"] not in asked:
            known = ", ".join(str(one)[:60] for one in asked if one) or "none"
            BodyFields({}, f"messages[{index}]").fail(
                "tool_call_id",
                message["tool_call_id"],
                f"give the id of a call of an earlier message; there are {known}",
            )


def read_tools(fields: BodyFields) -> PlanOptions:
    """The options that ``tools`` and ``tool_choice`` mean. Raises Refusal."""
    given = fields.array("tools")
    tools = None if given is None else [_tool(one, f"tools[{at}]", fields) for at, one in enumerate(given)]
    choice = _tool_choice(fields)
    names = [tool["function"]["name"] for tool in tools or ()]
    if choice not in ("auto", "none") and not names:
        fields.fail("tool_choice", choice, "no tools are given: give tools, or auto")
    if choice not in CHOICES and choice not in names:
        fields.fail("tool_choice", choice, f"give auto, none, required, or the name of a tool that is given: {names}")
    accepted = (True,) if choice in ("auto", "none") else (True, False)  # a forced call is one call
    fields.only("parallel_tool_calls", *accepted, why="the model decides how many tools it calls; leave it out")
    fields.only("functions", why="give tools instead")
    fields.only("function_call", why="give tool_choice instead")
    return PlanOptions(tools=tools or None, tool_choice=choice)


def _tool(given: Any, key: str, fields: BodyFields) -> dict[str, Any]:
    """A tool as it was given: templates write it as it is."""
    wanted = 'give {"type": "function", "function": {"name": ...}}'
    inner = given.get("function") if isinstance(given, dict) else None
    if not isinstance(inner, dict):
        fields.fail(key, given, wanted)
    if not isinstance(inner.get("name"), str):
        fields.fail(f"{key}.function", inner, "give it a name")
    tool = BodyFields(given, fields.name(key))
    tool.only("type", "function", why=wanted)
    function = tool.inner("function", needed=wanted) or BodyFields({})
    function.text("name", needed="give it a name")
    function.text("description")
    function.mapping("parameters")
    function.flag("strict")
    function.done()
    tool.done()
    made: dict[str, Any] = given
    return made


def _tool_choice(fields: BodyFields) -> str:
    """A word of the API, or the name of a tool."""
    choice = fields.take("tool_choice", TOOL_CHOICE)
    if choice is None or choice in CHOICES:
        return choice or "auto"
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice != {"type": "function", "function": {"name": name}}:
        wanted = 'give auto, none, required, or {"type": "function", "function": {"name": ...}}'
        fields.fail("tool_choice", choice, wanted)
    if name in CHOICES:
        fields.fail("tool_choice", choice, "a tool of this name cannot be chosen; name it otherwise")
    return name
