"""Messages, prompts and tools of the OpenAI API, read: one text a message, roles that templates know."""

from __future__ import annotations

from typing import Any, TypeAlias

from edge_dflash.decode.options import PlanOptions
from edge_dflash.errors import RequestError
from edge_dflash.serve.fields import Fields, Refusal
from edge_dflash.serve.openapi import TEXT
from edge_dflash.text.template import Message, content_text

Prompt: TypeAlias = str | list[Message] | tuple[int, ...]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {"anyOf": [TEXT, {"type": "array", "items": _PART}]}
_CALLS = {"description": "The calls of an earlier answer."}
_SAID = {"required": ["role", "content"], "properties": {"content": {"not": {"type": "null"}}}}
_CALLED = {"required": ["role", "tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_ONE = {"anyOf": [{"type": "string", "minLength": 1}, _IDS]}
_PROMPT = {"anyOf": [*_ONE["anyOf"], {"type": "array", "items": _ONE, "minItems": 1, "maxItems": 1}]}
_PROMPT_WHY = "give one text, or one list of token ids"
_FUNCTION = {
    "type": "object",
    "properties": {"name": TEXT, "parameters": {"type": ["object", "null"]}},
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["function"],
}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["auto", "none", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": TEXT},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    ]
}


def read_messages(fields: Fields, needed: str = "give at least one message") -> list[Message]:
    """The ``messages`` of a request, as chat templates want them. Raises Refusal."""
    given = fields.array("messages", facts={"minItems": 1}, needed=needed)
    if not given:
        raise Refusal("messages is empty; give at least one message", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(given: Any, path: str) -> Message:
    if not isinstance(given, dict):
        raise Refusal(f"{path} is of type {type(given).__name__}; give an object with role and content", param=path)
    fields = Fields(given, path)
    role = fields.kind("role", *_ROLES)
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    assistant = role == "assistant"
    calls = fields.array("tool_calls", facts=_CALLS) if assistant else None
    if not assistant:
        fields.only("tool_calls", why="only an assistant calls tools")
    try:
        content = content_text(fields.take("content", _CONTENT), fields.name("content"))
    except RequestError as error:
        raise Refusal(str(error), param=fields.name("content")) from None
    fields.also({"anyOf": [_SAID, _CALLED]} if assistant else _SAID)
    if content is None and not calls:
        raise Refusal(f"{path} has no content; give a text", param=f"{path}.content")
    made["content"] = content or ""
    if assistant:
        if calls:
            made["tool_calls"] = calls
        if (thinking := fields.text("reasoning_content")) is not None:
            made["reasoning_content"] = thinking
        fields.take("refusal")  # OpenAI's own answers carry these, null or empty
        fields.take("annotations")
        fields.only("audio", why="audio cannot be read")
        fields.only("function_call", why="give tool_calls instead")
    if role == "tool":
        made["tool_call_id"] = fields.text("tool_call_id") or ""
    if (name := fields.text("name")) is not None:
        made["name"] = name
    fields.done()
    return made


def read_prompt(fields: Fields) -> str | tuple[int, ...]:
    """The ``prompt`` of a completion: a text or token ids. Raises Refusal."""
    prompt = fields.take("prompt", _PROMPT, needed=_PROMPT_WHY)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        fields.fail("prompt", prompt, _PROMPT_WHY)
    ids = tuple(int(token) if type(token) is float and token.is_integer() else token for token in prompt)
    if not all(type(token) is int and token >= 0 for token in ids):
        fields.fail("prompt", prompt, _PROMPT_WHY)
    return ids


def read_tools(fields: Fields) -> PlanOptions:
    """The options that ``tools`` and ``tool_choice`` mean. Raises Refusal."""
    tools = fields.array("tools", facts={"items": _TOOL})
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            fields.fail(f"tools[{index}]", tool, 'give {"type": "function", "function": {"name": ...}}')
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters"), dict | None):
            fields.fail(f"tools[{index}].function", function, "give it a name, and an object as parameters")
    choice = _tool_choice(fields)
    names = [tool["function"]["name"] for tool in tools or ()]
    if choice not in ("auto", "none") and not names:
        fields.fail("tool_choice", choice, "no tools are given: give tools, or auto")
    if choice not in ("auto", "none", "required") and choice not in names:
        fields.fail("tool_choice", choice, f"give auto, none, required, or the name of a tool that is given: {names}")
    accepted = (True,) if choice in ("auto", "none") else (True, False)  # a forced call is one call
    fields.only("parallel_tool_calls", *accepted, why="the model decides how many tools it calls; leave it out")
    fields.only("functions", why="give tools instead")
    fields.only("function_call", why="give tool_choice instead")
    return PlanOptions(tools=tools or None, tool_choice=choice)


def _tool_choice(fields: Fields) -> str:
    """A word of the API, or the name of a tool."""
    choice = fields.take("tool_choice", _TOOL_CHOICE)
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto"
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice != {"type": "function", "function": {"name": name}}:
        wanted = 'give auto, none, required, or {"type": "function", "function": {"name": ...}}'
        fields.fail("tool_choice", choice, wanted)
    if name in ("auto", "none", "required"):
        fields.fail("tool_choice", choice, "a tool of this name cannot be chosen; name it otherwise")
    return name
