"""JSON Schemas of the parts of a request of the OpenAI API, as its reader checks them."""

from __future__ import annotations

from collections.abc import Sequence

from edge_dflash.serve.openapi import COUNT, TEXT, Schema


def _object(needed: Sequence[str] = (), /, **properties: Schema) -> Schema:
    """An object of just these properties; with ``needed``, of those and perhaps more."""
    made: Schema = {"type": "object", "properties": properties, "required": list(needed or properties)}
    return made if needed else {**made, "additionalProperties": False}


STOP = {"type": "string", "minLength": 1, "maxLength": 999}
ROLES = ("system", "developer", "user", "assistant", "tool")
URL = {"type": "string", "pattern": "^data:"}  # nothing is fetched
IMAGE_URL = _object(["url"], url=URL, detail={"enum": ["auto", "low", "high"]}) | {"additionalProperties": False}
PARTS = [_object(type={"const": "text"}, text=TEXT), _object(type={"const": "image_url"}, image_url=IMAGE_URL)]
CONTENT = {"anyOf": [TEXT, {"type": "array", "items": {"anyOf": PARTS}}]}
SAID = {"required": ["role", "content"], "properties": {"content": {"not": {"type": "null"}}}}
CALLED = {"required": ["role", "tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}}
ONE = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": COUNT, "minItems": 1}]}
PROMPT = {"anyOf": [*ONE["anyOf"], {"type": "array", "items": ONE, "minItems": 1, "maxItems": 1}]}
PROMPT_WHY = "give one text, or one list of token ids"
FUNCTION = {"type": {"const": "function"}}
TOOL = _object(["function"], **FUNCTION, function=_object(["name"], name=TEXT, parameters={"type": ["object", "null"]}))
CHOICES = ("auto", "none", "required")
TOOL_CHOICE = {"anyOf": [{"enum": list(CHOICES)}, _object(**FUNCTION, function=_object(name=TEXT))]}
