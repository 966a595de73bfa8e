"""What a request may ask for: its task and its options, each checked by a rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, TypeAlias, TypedDict

from edge_dflash.common import rules
from edge_dflash.common.rules import Rule, refuse_surrogates
from edge_dflash.decode.accept import FinishReason, Relaxation
from edge_dflash.decode.backend import PairShape
from edge_dflash.decode.pictured import Pictured, Placed, check_pictures
from edge_dflash.decode.sampling import MOST_ALTERNATIVES, Sampling
from edge_dflash.errors import ContextError, RequestError
from edge_dflash.text.images import with_parts
from edge_dflash.text.template import Message
from edge_dflash.text.tool_calls import Tool, chosen_tools, function_of, is_strict

Task: TypeAlias = str | Sequence[Message] | Sequence[int]


class PlanOptions(TypedDict, total=False):
    """Keywords of a request; :class:`Options` says what they mean and what holds without them."""

    schema: object
    regex: str | None
    grammar: str | None
    whitespace: bool
    deadline: float | None
    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: str | Sequence[str]
    thinking: bool
    raw: bool
    relaxed: bool | Relaxation
    tools: Sequence[Tool] | None
    tool_choice: str
    speculative: bool
    draft_confidence: float
    logprobs: int | None
    priority: int
    caller: str


PRIORITIES = (-100, 100)  # lowest and highest
CONFIDENCES = (0.0, 1.0)


def _relaxed(value: Any) -> Any:
    return value if isinstance(value, Relaxation) else rules.flag(value)


def _tools(value: Any) -> Any:
    tools = rules.sequence_of(Mapping)(value)
    for tool in tools:  # one by one, so that other threads run between
        json.dumps(tool, default=dict)  # templates write them
        if not isinstance(function_of(tool).get("strict"), bool | None):
            raise TypeError
    return tools


def _schema(value: Any) -> Any:
    if not (isinstance(value, str | Mapping) or callable(getattr(value, "model_json_schema", None))):
        raise TypeError
    return value


_TEXT = Rule(rules.optional(rules.text), "a text, or None")
_FLAG = Rule(rules.flag, "True or False")
_NUMBER = Rule(rules.any_number, "a number")  # Sampling checks the ranges
_WHOLE = Rule(rules.whole(), "a number without a fraction")
OPTIONS = {
    "schema": Rule(rules.optional(_schema), "a JSON object (mapping or text), a Pydantic model, or None"),
    "regex": _TEXT,
    "grammar": _TEXT,
    "whitespace": _FLAG,
    "deadline": Rule(rules.optional(rules.number()), "seconds from now, or None"),
    "max_new_tokens": Rule(rules.optional(rules.whole(1)), "a whole number of at least 1, or None"),
    "temperature": _NUMBER,
    "top_k": _WHOLE,
    "top_p": _NUMBER,
    "seed": _WHOLE,
    "stop": Rule(rules.texts, "a text, or several, none of them empty; leave stop out for none"),
    "thinking": _FLAG,
    "raw": _FLAG,
    "relaxed": Rule(_relaxed, "True, False or a Relaxation"),
    "tools": Rule(
        rules.optional(_tools), "a list of tools in OpenAI form, of plain JSON values, strict True or False, or None"
    ),
    "tool_choice": Rule(rules.text, "auto, none, required, or the name of one of the tools"),
    "speculative": _FLAG,
    "draft_confidence": Rule(rules.number(*CONFIDENCES), "a number from 0 to 1"),
    "logprobs": Rule(
        rules.optional(rules.whole(0, MOST_ALTERNATIVES)),
        f"a whole number of alternatives from 0 to {MOST_ALTERNATIVES}, or None for no log-probabilities",
    ),
    "priority": Rule(rules.whole(*PRIORITIES), f"a whole number from {PRIORITIES[0]} to {PRIORITIES[1]}"),
    "caller": Rule(rules.text, "a text"),
}


@dataclass(frozen=True)
class Options:
    """Options of one request, checked by OPTIONS.

    Raises RequestError for values of another type or range, and for those that contradict each other.
    """

    schema: object = None  # JSON Schema (text or mapping) or Pydantic model: the answer is JSON of it
    regex: str | None = None  # the answer matches it; syntax of Rust's regex crate
    grammar: str | None = None  # the answer matches its rule "start"; Lark, dialect of llguidance
    whitespace: bool = False  # True: JSON may have blanks outside strings
    deadline: float | None = None  # seconds from the call, waiting in the queue included; None: no bound
    max_new_tokens: int | None = None  # None: until a stop token or the end of the usable context
    temperature: float = 0.0  # 0, and below 0.0001: the best token each time
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # 1: no limit
    seed: int = 0  # makes a drawn answer repeatable
    stop: str | Sequence[str] = ()  # the answer ends before the first of these texts; thinking is not searched
    thinking: bool = False  # handed to the chat template as enable_thinking
    raw: bool = False  # the task is one text that goes on as it is: no chat template, control tokens by their spelling
    relaxed: bool | Relaxation = False  # lossy acceptance inside the thinking span; True: with the usual bounds
    tools: Sequence[Tool] | None = None  # in OpenAI form, for the chat template and the types of the arguments
    tool_choice: str = "auto"  # "none": tools are not told of; "required": a call of one of them; a name: of this one
    speculative: bool = True  # False decodes plainly: the same tokens, one by one
    draft_confidence: float = (
        0.0  # drafts from the first on that the drafter is less sure of are not verified; 0: all are
    )
    logprobs: int | None = None  # log-probabilities of the tokens, each with so many alternatives; None: none
    priority: int = 0  # of PRIORITIES; higher ones go first
    caller: str = ""  # callers of one priority take turns; "account/name": so do accounts, and then their callers

    def __post_init__(self) -> None:
        """Take each value by its rule; refuse what does not go together."""
        given_values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in rules.checked(OPTIONS, given_values).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "temperature", self.sampling.temperature)  # refuses bad values
        if len(given := [name for name in ("schema", "regex", "grammar") if getattr(self, name) is not None]) > 1:
            raise RequestError(f"{' and '.join(given)} are given; give one of schema, regex and grammar")
        if self.grammar is not None and self.tools and self.tool_choice == "auto" and "<tool_call>" not in self.grammar:
            raise RequestError(
                "grammar and tools are given, but the grammar leaves no call: name <tool_call> and </tool_call> in it, "
                "or give tool_choice none"
            )
        if self.raw and self.thinking:
            raise RequestError("raw and thinking are given, but only a chat template opens thinking; give one of them")
        if self.raw and self.tools:
            raise RequestError("raw and tools are given, but only a chat template describes tools; give one of them")
        if self.tool_choice == "none":
            object.__setattr__(self, "tools", None)
        if self.forced_tools:
            given.append("tool_choice")
        if len(given) > 1:
            raise RequestError(
                f"{given[0]} and tool_choice {self.tool_choice!r} are given; give one form of the answer"
            )
        if given and self.stops:
            raise RequestError(f"{given[0]} and stop are given, but a cut answer would not match; give one of them")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Options by name. Raises RequestError also for a name that is unknown."""
        rules.refuse_unknown(OPTIONS, given)
        return cls(**given)

    @property
    def sampling(self) -> Sampling:
        """The part that chooses tokens. Raises RequestError on a value outside its range."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def forced_tools(self) -> tuple[Tool, ...]:
        """Tools of which one must be called; none when the model is free. Raises RequestError for a choice of none."""
        return chosen_tools(self.tools or (), self.tool_choice)

    @property
    def strict_calls(self) -> bool:
        """Whether the answer is free but for its calls: that of a strict tool satisfies its schema."""
        return not self.formed and any(map(is_strict, self.tools or ()))

    @property
    def formed(self) -> bool:
        """Whether the answer has a form as a whole."""
        return bool(self.forced_tools) or any(form is not None for form in (self.schema, self.regex, self.grammar))

    @property
    def constrained(self) -> bool:
        """Whether a grammar takes part in the answer."""
        return self.formed or self.strict_calls


def token_ids(task: Sequence[Any]) -> tuple[int, ...]:
    """Token ids must be integers; the loop checks their number and range."""
    for token in task:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"{token!r} is no token id; give text, a list of messages or a list of integer ids")
    return tuple(int(token) for token in task)


def as_messages(task: Task) -> list[Message] | None:
    """The task as messages, each content one text or a list of texts and images; None when it is token ids.

    Raises RequestError when it is of another kind, or empty.
    """
    if isinstance(task, str):
        if not task.strip():
            raise RequestError("the task is empty; say what is to be done")
        refuse_surrogates(task, "the task")
        return [{"role": "user", "content": task}]
    try:
        first: Any = None if isinstance(task, bytes | bytearray | Mapping) else task[0] if len(task) else 0
    except (TypeError, IndexError, KeyError):  # no sequence
        first = None
    if first is None:
        raise RequestError(f"the task is of type {type(task).__name__}; give text, a list of messages or token ids")
    if isinstance(first, Mapping):
        refuse_surrogates(task, "messages")
        return [with_parts(message, index) for index, message in enumerate(task)]  # type: ignore[arg-type]  # no ids
    return None


@dataclass(frozen=True)
class Request:
    """What may run on a loaded pair: a prompt and its options, checked by :func:`admit`."""

    prompt: tuple[int, ...]  # the whole sequence that is to be answered
    options: Options
    stop_token_ids: tuple[int, ...]
    budget: int  # most new tokens
    at_budget: FinishReason  # why it ends when they are used up
    keep: tuple[int, ...] = ()  # lengths of the prompt whose state is worth keeping, ascending
    pictures: tuple[Placed, ...] = ()  # of the prompt, in their order, on their placeholders

    @property
    def pictured(self) -> Pictured:
        """The prompt with its pictures."""
        return Pictured(self.prompt, self.pictures)


def admit(
    shape: PairShape,
    prompt: Sequence[int],
    options: Options,
    stop_token_ids: Sequence[int] = (),
    keep: Sequence[int] = (),
    pictures: Sequence[Placed] = (),
) -> Request:
    """Check a request against the pair that is to run it.

    ``keep`` names lengths of the prompt whose state goes to the prefix store on the way: the end of the system prompt,
    and the end of the last message before the tokens that open the answer (chat templates write earlier answers in
    another form than they were generated in, so the next prompt parts from this one there). Raises RequestError for an
    empty prompt, an id outside the vocabulary, or ``pictures`` that do not stand on their placeholders, ContextError
    when prompt and budget do not fit the usable context (maximum context minus one block). Without a drafter the
    request decodes plainly.
    """
    if not prompt:
        raise RequestError("the prompt has no tokens; give at least one")
    for kind, ids in (("token id", prompt), ("stop token id", stop_token_ids)):
        for token in ids:
            if not 0 <= token < shape.vocab_size:
                raise RequestError(f"{kind} {token} is outside the vocabulary of {shape.vocab_size}")
    check_pictures(Pictured(prompt, tuple(pictures)), shape.image_token_id)
    used = len(prompt)
    if odd := [at for at in keep if not 0 < at < used]:
        raise RequestError(f"keep names length {odd[0]} of a prompt of {used}; give 1 to {used - 1}")
    room = shape.usable_context - used
    kept = shape.max_context - shape.usable_context
    limits = f"{shape.usable_context} tokens (context {shape.max_context} minus block {kept})"
    if room < 1:
        raise ContextError(f"the prompt ends at token {used}, the usable context is {limits}; shorten the prompt")
    wanted = options.max_new_tokens
    if wanted is not None and wanted > room:
        raise ContextError(
            f"{used} prompt tokens and {wanted} new tokens exceed the usable context of {limits}; "
            f"at most {room} new tokens fit"
        )
    if not shape.drafts:
        options = replace(options, speculative=False)
    at_budget: FinishReason = "context" if wanted is None else "length"
    return Request(
        *(tuple(prompt), options, tuple(stop_token_ids), wanted or room, at_budget, tuple(sorted(keep))),
        pictures=tuple(pictures),
    )
