"""What the bodies of the API hold, declared field by field: what is refused, and what ``/openapi.json`` says of them.

Everything that is sent is used or refused by name. Parameters that OpenAI and servers of other models define and that
have one meaning here (``best_of``, penalties) are taken at that meaning only. What has no word there stands under
``edge_dflash``: options by their own names, of the table in :mod:`edge_dflash.decode.options`, and three keys more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from edge_dflash.common.nested import Items, Object, Tagged, ValueReader, as_json, only
from edge_dflash.common.rules import FLAG as PYTHON_FLAG
from edge_dflash.common.rules import TEXT, Rule, Schema, number, one_of, such, whole
from edge_dflash.decode.logprobs import MOST_ALTERNATIVES
from edge_dflash.decode.options import DECLARED
from edge_dflash.runner.planning import MOST_CANDIDATES

Body = partial(Object, lenient=True)
FLAG = as_json(PYTHON_FLAG)
EFFORTS = {"none": False, "minimal": False, "low": True, "medium": True, "high": True, "xhigh": True}  # does it think?
CHOICES = ("auto", "none", "required")


def exactly(optional: Schema | None = None, **properties: Any) -> Schema:
    """Schema of an object that has these properties, perhaps the optional ones, and no others."""
    return {
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": sorted(properties),
        "additionalProperties": False,
    }


OBJECT = such(lambda value: isinstance(value, dict), "a JSON object", {"type": "object"})
STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}

# Sessions -------------------------------------------------------------------------------------------------------------

_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # of a session: a file of the state directory, no path
NAME = such(
    lambda value: re.fullmatch(_NAME[1:-1], value) is not None,  # raises TypeError where it is no text
    "1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit",
    {"type": "string", "pattern": _NAME},
)
FORK = Body({"to": NAME}, {"to": "give the name of the new session"})
SAVE = Body({"to": NAME, "replace": FLAG})

# Messages -------------------------------------------------------------------------------------------------------------

_URL = {"type": "string", "pattern": "^data:"}  # nothing is fetched
_IMAGE = exactly({"detail": {"enum": ["auto", "low", "high"]}}, url=_URL)
_PARTS = [exactly(type={"const": "text"}, text=STRING), exactly(type={"const": "image_url"}, image_url=_IMAGE)]
_CONTENT = such(lambda value: True, "", {"anyOf": [STRING, {"type": "array", "items": {"anyOf": _PARTS}}]})
_SAID = {"required": ["role", "content"], "properties": {"content": {"not": {"type": "null"}}}}
_CALLED = {"required": ["role", "tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}}
_CALL_FORM = 'give {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
_CALL = Body(
    {
        "id": TEXT,
        "type": only("only functions are called", "function"),
        "index": whole(),  # its place in a stream that it came in
        "function": Body(
            {"name": TEXT, "arguments": such(lambda value: True, "", {"type": ["string", "object"]})},
            {"name": _CALL_FORM, "arguments": _CALL_FORM},
        ),
    },
    {"function": _CALL_FORM},
)
_SHARED: dict[str, ValueReader] = {"content": _CONTENT, "name": TEXT}
_OTHER = Body({**_SHARED, "tool_calls": only("only an assistant calls tools")}, also=_SAID)
MESSAGE = Tagged(
    "role",
    {
        **dict.fromkeys(("system", "developer", "user"), _OTHER),
        "assistant": Body(
            {
                **_SHARED,
                "tool_calls": Items(_CALL),
                "reasoning_content": TEXT,
                "reasoning": TEXT,
                "refusal": only("give what was said as content", ""),  # OpenAI's own answers carry these, empty
                "annotations": only("they cannot be told to the model; leave them out", []),
                "audio": only("audio cannot be read"),
                "function_call": only("give tool_calls instead"),
            },
            also={"anyOf": [_SAID, _CALLED]},
        ),
        "tool": Body(
            {
                **_OTHER.fields,
                "tool_call_id": Rule(TEXT.take, TEXT.wanted, {**STRING, "description": "The id of an earlier call."}),
            },
            {"tool_call_id": "give the id of the call that it answers"},
            also=_SAID,
        ),
    },
)
_MESSAGES = Items(MESSAGE, least=1)
ENCODE = Body(
    {
        "text": Rule(TEXT.take, TEXT.wanted, {**STRING, "pattern": r"\S"}),
        "messages": _MESSAGES,
        "thinking": FLAG,
        "raw": FLAG,
    },
    also={
        "oneOf": [
            {"required": [one], "properties": {one: {"type": kind}, other: {"type": "null"}}}
            for one, kind, other in (("text", "string", "messages"), ("messages", "array", "text"))
        ]
    },
)

# Tools ----------------------------------------------------------------------------------------------------------------

_TOOL_FORM = 'give {"type": "function", "function": {"name": ...}}'
_FUNCTION = Body({"name": TEXT, "description": TEXT, "parameters": OBJECT, "strict": FLAG}, {"name": "give it a name"})
_TOOL = Body({"type": only(_TOOL_FORM, "function"), "function": _FUNCTION}, {"function": _TOOL_FORM})
_NAMED = exactly(type={"const": "function"}, function=exactly(name=STRING))


def _tool_choice(value: Any) -> str:
    """A word of the API, or the name of a tool."""
    if isinstance(value, str) and value in CHOICES:
        return value
    name = value["function"]["name"]
    if not isinstance(name, str) or name in CHOICES or value != {"type": "function", "function": {"name": name}}:
        raise ValueError
    return name


_CHOICE = Rule(
    _tool_choice,
    'give auto, none, required, or {"type": "function", "function": {"name": ...}} with another name than these',
    {"anyOf": [{"enum": list(CHOICES)}, _NAMED]},
)

# Answers --------------------------------------------------------------------------------------------------------------

_STOP = {"type": "string", "minLength": 1, "maxLength": 999}


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    good = isinstance(texts, list) and len(texts) <= 16
    if not good or not all(isinstance(text, str) and 0 < len(text) < 1000 for text in texts):
        raise ValueError
    return tuple(texts)


STOP = Rule(
    _stop,
    "give a text or at most 16, each of 1 to 999 characters",
    {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": 16}]},
)
_ONE = [{"type": "string", "minLength": 1}, {"type": "array", "items": COUNT, "minItems": 1}]


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError
    ids = tuple(int(token) if type(token) is float and token.is_integer() else token for token in prompt)
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError
    return ids


_PROMPT_WHY = "give one text, or one list of token ids"
PROMPT = Rule(
    _prompt, _PROMPT_WHY, {"anyOf": [*_ONE, {"type": "array", "items": {"anyOf": _ONE}, "minItems": 1, "maxItems": 1}]}
)
_SCHEMA_FORM = 'give {"name": ..., "schema": {...}}'
_SCHEMA = Body({"name": TEXT, "description": TEXT, "schema": OBJECT, "strict": FLAG}, {"schema": _SCHEMA_FORM})
FORM = Tagged(
    "type",
    {
        "text": Body({}),
        "json_object": Body({}),
        "json_schema": Body({"json_schema": _SCHEMA}, {"json_schema": _SCHEMA_FORM}),
    },
)
EXTENSION = Body(
    {
        **{name: as_json(place.rule) for name, place in DECLARED.items() if place.http},
        "session": NAME,
        "tokens": FLAG,
        "deadline_s": number(0, 86400),
    }
)
_STREAM = Body(
    {
        "include_usage": FLAG,
        "include_obfuscation": only("nothing is padded here; give false", False),
        "continuous_usage_stats": only("the usage comes last; give false", False),
    }
)
# Parameters of OpenAI and of servers of other models: why they are refused, and at which values they change nothing.
_NEUTRAL: dict[str, dict[str, Sequence[Any]]] = {
    "it would change what the model says": {
        **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), (0,)),
        **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p"), (1,)),
        "logit_bias": [{}],
        "verbosity": ["medium"],
    },
    "the model ends an answer": {"min_tokens": [0], "ignore_eos": [False], "include_stop_str_in_output": [False]},
    "as many answers are made as n says": {"best_of": [1], "use_beam_search": [False]},
    "templates and control tokens are the model's own": {
        **{"chat_template": [], "add_generation_prompt": [True], "continue_final_message": [False]},
        **{
            "add_special_tokens": [False],
            "skip_special_tokens": [True],
            "spaces_between_special_tokens": [True, False],
        },
    },
    "an answer has no prompt": {"prompt_logprobs": []},
    "nothing is stored": {"store": [False]},
    "there is one tier": {"service_tier": ["auto", "default"]},
    "answers are text": {"modalities": [["text"]]},
    "thinking is told": {"include_reasoning": [True]},
    "known prompts are always kept": {"cache_prompt": [True]},
    "write them into a message": {"documents": [[]]},
    "give edge_dflash.tokens": {"return_token_ids": [False], "return_tokens_as_token_ids": [False]},
    "give response_format": {"guided_json": [], "json_schema": []},
    "give edge_dflash.regex": {"guided_regex": [], "guided_choice": [], "regex": []},
    "give edge_dflash.grammar": {"guided_grammar": [], "grammar": []},
    "give edge_dflash.regex or .grammar, or response_format": {"structured_outputs": [{}]},
    "give reasoning_effort": {"think": []},
}
NEUTRAL = {
    name: (f"{why}; leave it out", *accepted) for why, names in _NEUTRAL.items() for name, accepted in names.items()
}


BUDGETS = ("max_tokens", "max_completion_tokens")
_SOME_ANSWER = [  # a budget of 0 is for a prompt that is echoed with log-probabilities
    {"properties": {name: {"not": {"const": 0}} for name in BUDGETS}},
    {"required": ["echo", "logprobs"], "properties": {"echo": {"const": True}, "logprobs": {"type": "integer"}}},
]


def _answer(new_tokens: int) -> dict[str, ValueReader]:
    budget = whole(1, new_tokens or 2**31)
    return {
        "model": TEXT,
        "stream": FLAG,
        "stream_options": _STREAM,
        "response_format": FORM,
        "temperature": number(0, 2),
        "top_p": number(0, 1),
        "top_k": whole(-1, 2**31),  # -1 and 0: no limit
        "seed": whole(-(2**63), 2**64 - 1),
        **dict.fromkeys(BUDGETS, budget),
        "stop": STOP,
        "n": whole(1, MOST_CANDIDATES),
        "user": TEXT,
        "edge_dflash": EXTENSION,
        **{name: only(why, *accepted) for name, (why, *accepted) in NEUTRAL.items()},
        "metadata": OBJECT,  # the caller's own notes
        **dict.fromkeys(("safety_identifier", "prompt_cache_key", "prompt_cache_retention"), TEXT),
    }


@cache
def chat(new_tokens: int) -> Object:
    """The body of ``/v1/chat/completions``; answers have at most ``new_tokens`` tokens, if that is not 0."""
    fields: dict[str, ValueReader] = {
        "messages": _MESSAGES,
        "tools": Items(_TOOL),
        "tool_choice": _CHOICE,
        "parallel_tool_calls": FLAG,
        "echo": only("an answer has no prompt; leave it out", False),
        "functions": only("give tools instead"),
        "function_call": only("give tool_choice instead"),
        "logprobs": FLAG,
        "top_logprobs": whole(0, MOST_ALTERNATIVES),
        "reasoning_effort": one_of(*EFFORTS),
        "enable_thinking": FLAG,
        "chat_template_kwargs": Body({"enable_thinking": FLAG}),
    }
    return Body({**fields, **_answer(new_tokens)}, {"messages": "give at least one message"})


@cache
def completion(new_tokens: int) -> Object:
    """The body of ``/v1/completions``."""
    fields: dict[str, ValueReader] = {
        "prompt": PROMPT,
        "suffix": only("text behind the answer cannot be given", ""),
        "echo": FLAG,
        "logprobs": whole(0, MOST_ALTERNATIVES),
        "top_logprobs": only("a completion has logprobs as a number of alternatives; leave it out", 0),
    }
    budget = dict.fromkeys(BUDGETS, whole(0, new_tokens or 2**31))
    return Body({**fields, **_answer(new_tokens), **budget}, {"prompt": _PROMPT_WHY}, also={"anyOf": _SOME_ANSWER})
