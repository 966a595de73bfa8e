"""Messages and prompts of the OpenAI API, read: one text a message, roles that templates know, nothing dropped.

Knows nothing of the other parameters of a request.
"""

from __future__ import annotations

from typing import Any

from edge_dflash.errors import RequestError
from edge_dflash.serve.fields import Fields
from edge_dflash.serve.refusal import Refusal
from edge_dflash.text import Message, content_text

_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(given: list[Any] | None) -> list[Message]:
    """The ``messages`` of a request, as chat templates want them. Raises Refusal."""
    if not given:
        raise Refusal("messages is missing or empty; give at least one message", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(given: Any, path: str) -> Message:
    if not isinstance(given, dict):
        raise Refusal(f"{path} is of type {type(given).__name__}; give an object with role and content", param=path)
    fields = Fields(given, path)
    role = fields.text("role")
    if role not in _ROLES:
        fields.fail("role", role, f"accepted are {', '.join(_ROLES)}")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = fields.array("tool_calls")
    try:
        content = content_text(fields.take("content"), fields.name("content"))
    except RequestError as error:
        raise Refusal(str(error), param=fields.name("content")) from None
    if content is None and not (role == "assistant" and calls):
        raise Refusal(f"{path} has no content; give a text", param=f"{path}.content")
    made["content"] = content or ""
    if role == "assistant":
        if calls:
            made["tool_calls"] = calls
        if (thinking := fields.text("reasoning_content")) is not None:
            made["reasoning_content"] = thinking
        fields.take("refusal")  # OpenAI's own answers carry these, null or empty
        fields.take("annotations")
        fields.only("audio", why="audio cannot be read")
        fields.only("function_call", why="give tool_calls instead")
    elif calls is not None:
        fields.fail("tool_calls", calls, "only an assistant calls tools")
    if role == "tool":
        made["tool_call_id"] = fields.text("tool_call_id") or ""
    if (name := fields.text("name")) is not None:
        made["name"] = name
    fields.done()
    return made


def read_prompt(fields: Fields) -> str | tuple[int, ...]:
    """The ``prompt`` of a completion: a text or token ids. Raises Refusal."""
    prompt = fields.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        fields.fail("prompt", prompt, "give one text, or one list of token ids")
    return tuple(prompt)
