"""What a request may ask for, and the request that it becomes: checked, encoded, ready to run.

Everything that can be wrong with a request is found here, on the caller's thread, before the engine hears of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, Literal, TypeAlias, TypedDict

from edge_dflash.backends.base import Backend
from edge_dflash.characters import refuse_surrogates
from edge_dflash.chat import Markers, thinking_is_open
from edge_dflash.errors import RequestError
from edge_dflash.grammar.compiled import Grammar, compile_lark, compile_regex, compile_schema, compile_tools
from edge_dflash.grammar.tool_form import tool_grammar
from edge_dflash.request import rules
from edge_dflash.request.rules import Rule
from edge_dflash.spec.constraint import Constraint, Interrupted, Patience
from edge_dflash.spec.logprobs import MOST_ALTERNATIVES
from edge_dflash.spec.loop import Controls, DecodeOptions, admit
from edge_dflash.spec.pace import Pace
from edge_dflash.spec.relaxed import Relaxation
from edge_dflash.spec.sampling import Sampling
from edge_dflash.spec.thinking import AfterThinking
from edge_dflash.text import Message, Tokenizer, with_text
from edge_dflash.tool_calls import Tool, chosen_tools
from edge_dflash.tool_dialect import dialect_of

Task: TypeAlias = str | Sequence[Message] | Sequence[int]
UNWANTED: ContextVar[Callable[[], bool]] = ContextVar("UNWANTED", default=lambda: False)
"""Whether who asks has gone: set around a call that prepares a request on another thread."""
_BEFORE_ANSWER = "\n\n"  # what the chat templates of the Qwen family write between thinking and answer


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
    logprobs: int | None
    priority: int
    caller: str


PRIORITIES = (-100, 100)  # lowest and highest


def _relaxed(value: Any) -> Any:
    return value if isinstance(value, Relaxation) else rules.flag(value)


def _tools(value: Any) -> Any:
    tools = rules.sequence_of(Mapping)(value)
    json.dumps(tools, default=dict)  # templates write them
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
    "tools": Rule(rules.optional(_tools), "a list of tools in OpenAI form, of plain JSON values, or None"),
    "tool_choice": Rule(rules.text, "auto, none, required, or the name of one of the tools"),
    "speculative": _FLAG,
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
    temperature: float = 0.0  # 0: the best token each time
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
    logprobs: int | None = None  # log-probabilities of the tokens, each with so many alternatives; None: none
    priority: int = 0  # of PRIORITIES; higher ones go first
    caller: str = ""  # callers of one priority take turns; "account/name": so do accounts, and then their callers

    def __post_init__(self) -> None:
        """Take each value by its rule; refuse what does not go together."""
        given_values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in rules.checked(OPTIONS, given_values).items():
            object.__setattr__(self, name, value)
        Sampling(self.temperature, self.top_k, self.top_p, self.seed)
        if len(given := [name for name in ("schema", "regex", "grammar") if getattr(self, name) is not None]) > 1:
            raise RequestError(f"{' and '.join(given)} are given; give one of schema, regex and grammar")
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
        return cls(**rules.checked(OPTIONS, given))

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def forced_tools(self) -> tuple[Tool, ...]:
        """Tools of which one must be called; none when the model is free. Raises RequestError for a choice of none."""
        return chosen_tools(self.tools or (), self.tool_choice)

    @property
    def constrained(self) -> bool:
        """Whether the answer has a form."""
        return bool(self.forced_tools) or any(form is not None for form in (self.schema, self.regex, self.grammar))


@dataclass(frozen=True)
class Model:
    """What of an open engine a request needs to know. ``backend`` is asked for its shape only."""

    backend: Backend
    tokenizer: Tokenizer | None
    stop_token_ids: tuple[int, ...]

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer. Raises RequestError, naming ``what`` cannot be done, when the bundle has none."""
        if self.tokenizer is None:
            raise RequestError(
                f"this bundle has no tokenizer: {what}, or build it again from a checkpoint with tokenizer.json"
            )
        return self.tokenizer


@dataclass(frozen=True)
class Request:
    """A request that may run."""

    model: Model
    options: Options
    prompt: tuple[int, ...]  # the whole sequence that is to be answered
    keep: tuple[int, ...]  # lengths of the prompt whose state is worth keeping
    decode: DecodeOptions
    form: Grammar | None
    relaxation: Relaxation | None  # None: strict
    began: float  # time.perf_counter() of the call
    deadline: float | None  # time.perf_counter()
    ended: Literal["deadline", "cancelled"] | None = None  # while its form was compiled: nothing of it runs

    def controls(
        self, pace: Pace, cancelled: Callable[[], bool], ends: Callable[[Sequence[int]], int | None] | None
    ) -> Controls:
        """Controls of a fresh run."""
        constraint = self._constraint(Patience(self.deadline, cancelled))
        controls = Controls(constraint, self.relaxation, self.deadline, cancelled, pace=pace)
        if self.model.tokenizer is not None:
            controls = replace(controls, spell=self.model.tokenizer.token_bytes)
        return controls if ends is None else replace(controls, ends=ends)

    def _constraint(self, patience: Patience) -> Constraint | None:
        if self.form is None or self.model.tokenizer is None:
            return None
        inner, tokenizer = self.form.constraint(patience), self.model.tokenizer
        if not thinking_is_open(self.prompt, tokenizer):
            return inner
        close = Markers.of(tokenizer).end_think
        return AfterThinking(
            inner,
            () if close is None else (close,),
            self.form.vocab_size,
            then=tokenizer.encode(_BEFORE_ANSWER),
            stop_token_ids=self.form.stop_token_ids,
        )


def prepare(model: Model, options: Options, prompt: Sequence[int], began: float, keep: tuple[int, ...] = ()) -> Request:
    """Check a request, and compile its form. Raises RequestError and ContextError for what cannot run."""
    stop = ends_of_form(model) if options.constrained else model.stop_token_ids
    decode = DecodeOptions(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_token_ids=stop,
        logprobs=options.logprobs,
    )
    _ = decode.sampling  # refuse bad values now
    admit(model.backend.shape, 0, prompt, decode)
    if options.stops:
        model.need_tokenizer("stop texts cannot be found; leave stop out")
    deadline = None if options.deadline is None else began + options.deadline
    form, ended = None, None
    try:
        form = _form(model, options, stop, Patience(deadline, UNWANTED.get()))
    except Interrupted as interrupted:
        ended = interrupted.reason
    return Request(
        model=model,
        options=options,
        prompt=tuple(prompt),
        keep=tuple(at for at in keep if 0 < at < len(prompt)),
        decode=decode,
        form=form,
        relaxation=_relaxation(model, options, prompt),
        began=began,
        deadline=deadline,
        ended=ended,
    )


def token_ids(task: Sequence[Any]) -> tuple[int, ...]:
    """Token ids must be integers; the loop checks their number and range."""
    for token in task:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"{token!r} is no token id; give text, a list of messages or a list of integer ids")
    return tuple(int(token) for token in task)


def as_messages(task: Task) -> list[Message] | None:
    """The task as messages, each content one text; None when it is token ids.

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
        return [with_text(message, index) for index, message in enumerate(task)]  # type: ignore[arg-type]  # no ids
    return None


def ends_of_form(model: Model) -> tuple[int, ...]:
    """The stop tokens that no text is written with: a comma that ends other answers is a comma inside a form."""
    tokenizer = model.need_tokenizer("an answer cannot be given a form; leave schema, regex and grammar out")
    stop = tuple(token for token in model.stop_token_ids if not tokenizer.is_ordinary(token))
    if not stop:
        found = f"; its stop tokens {list(model.stop_token_ids)} are ordinary text" if model.stop_token_ids else ""
        raise RequestError(
            f"this model has no end-of-text token, which a form needs{found}; leave schema, regex, grammar out"
        )
    return stop


def _form(model: Model, options: Options, stop: tuple[int, ...], patience: Patience) -> Grammar | None:
    """``stop`` ends the form."""
    if not options.constrained:
        return None
    tokenizer = model.need_tokenizer("an answer cannot be given a form; leave schema, regex and grammar out")
    size, caller = model.backend.shape.vocab_size, options.caller
    if tools := options.forced_tools:
        text = tool_grammar(tools, dialect_of(tokenizer))
        return compile_tools(text, tokenizer, size, stop, patience=patience, caller=caller)
    if options.regex is not None:
        return compile_regex(options.regex, tokenizer, size, stop, patience=patience, caller=caller)
    blanks = options.whitespace
    if options.grammar is not None:
        return compile_lark(options.grammar, tokenizer, size, stop, whitespace=blanks, patience=patience, caller=caller)
    return compile_schema(options.schema, tokenizer, size, stop, whitespace=blanks, patience=patience, caller=caller)


def _relaxation(model: Model, options: Options, prompt: Sequence[int]) -> Relaxation | None:
    """The relaxation, where there is a thinking span for it: strict acceptance everywhere else."""
    if options.relaxed is False:
        return None
    tokenizer = model.need_tokenizer("thinking cannot be told from the answer; leave relaxed out")
    close = Markers.of(tokenizer).end_think
    relaxation = Relaxation(() if close is None else (close,)) if options.relaxed is True else options.relaxed
    return relaxation if thinking_is_open(prompt, tokenizer) else None
