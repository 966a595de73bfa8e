"""JSON Schemas of the parts of a request of the OpenAI API, as its reader checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
ARGUMENTS = {"type": ["string", "object"]}  # JSON as a text, as OpenAI writes it
CHOICES = ("auto", "none", "required")
TOOL_CHOICE = {"anyOf": [{"enum": list(CHOICES)}, _object(**FUNCTION, function=_object(name=TEXT))]}

EFFORTS = {
    "none": False,
    "minimal": False,
    "low": True,
    "medium": True,
    "high": True,
    "xhigh": True,
}  # whether it thinks
_SAYS_OTHER = "it would change what the model says; leave it out"
_FORM = "leave it out, and give edge_dflash."
# Parameters of OpenAI and of servers of other models: why, and at which values they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ("logits cannot be biased; leave it out", {}),
    "presence_penalty": ("it would change what the model says; give 0", 0),
    "frequency_penalty": ("it would change what the model says; give 0", 0),
    "repetition_penalty": ("it would change what the model says; give 1", 1),
    "length_penalty": ("it would change what the model says; give 1", 1),
    "min_p": ("tokens are drawn by temperature, top_k and top_p; give 0", 0),
    "typical_p": ("tokens are drawn by temperature, top_k and top_p; give 1", 1),
    "min_tokens": ("an answer ends where the model ends it; give 0", 0),
    "ignore_eos": ("an answer ends where the model ends it; give false", False),
    "best_of": ("as many answers are made as n says; leave it out", 1),
    "use_beam_search": ("as many answers are made as n says; leave it out", False),
    "echo": ("the prompt cannot be echoed; leave echo out", False),
    "store": ("nothing is stored; give false", False),
    "service_tier": ("there is one tier; leave it out", "auto", "default"),
    "modalities": ("answers are text", ["text"]),
    "verbosity": (_SAYS_OTHER, "medium"),
    "skip_special_tokens": ("texts are without them; give true", True),
    "spaces_between_special_tokens": ("texts are without them; leave it out", True, False),
    "include_stop_str_in_output": ("an answer ends before its stop text; give false", False),
    "add_generation_prompt": ("the model answers; give true", True),
    "continue_final_message": ("the model answers in a message of its own; give false", False),
    "add_special_tokens": ("the chat template writes them; give false", False),
    "include_reasoning": ("thinking is told; give true", True),
    "cache_prompt": ("known prompts are always kept; leave it out", True),
    "return_token_ids": ("leave it out, and give edge_dflash.tokens", False),
    "return_tokens_as_token_ids": ("leave it out, and give edge_dflash.tokens", False),
    "prompt_logprobs": ("only the answer has log-probabilities; leave it out",),
    "chat_template": ("the model's own is used; leave it out",),
    "documents": ("write them into a message", []),
    "guided_json": ("leave it out, and give response_format",),
    "guided_regex": (f"{_FORM}regex",),
    "guided_choice": (f"{_FORM}regex",),
    "guided_grammar": (f"{_FORM}grammar",),
    "structured_outputs": (f"{_FORM}regex or .grammar, or response_format", {}),
    "json_schema": ("leave it out, and give response_format",),
    "grammar": (f"{_FORM}grammar",),
    "regex": (f"{_FORM}regex",),
    "think": ("leave it out, and give reasoning_effort",),
}
