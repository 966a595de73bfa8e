"""Messages and prompts of the OpenAI API, read: one text a message, roles that templates know, nothing dropped.

Knows nothing of the other parameters of a request.
"""

from __future__ import annotations

from typing import Any

from edge_dflash.errors import RequestError
from edge_dflash.serve.fields import Fields
from edge_dflash.serve.refusal import Refusal
from edge_dflash.text.template import Message, content_text

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_CALLS = {"description": "The calls of an earlier answer."}
_SAID = {"required": ["role", "content"], "properties": {"content": {"not": {"type": "null"}}}}
_CALLED = {"required": ["role", "tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_ONE = {"anyOf": [{"type": "string", "minLength": 1}, _IDS]}
_PROMPT = {"anyOf": [*_ONE["anyOf"], {"type": "array", "items": _ONE, "minItems": 1, "maxItems": 1}]}
_PROMPT_WHY = "give one text, or one list of token ids"


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
