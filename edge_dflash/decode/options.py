"""What a request may ask for: its options, each declared once; and what of it runs on a loaded pair.

:class:`Options` is the table: type, default, rule and meaning of each option, and where else it stands. Flags of
``edge-dflash generate``, what stands under ``edge_dflash`` of a request over HTTP, the OpenAPI document, what a
recording holds and a table of docs/python.md are made of it. :class:`PlanOptions` names the keywords for type
checkers, which cannot derive them; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from edge_dflash.common import rules
from edge_dflash.common.rules import FLAG, TEXT, TEXTS, Rule
from edge_dflash.decode.accept import FinishReason, Relaxation
from edge_dflash.decode.logprobs import MOST_ALTERNATIVES
from edge_dflash.decode.sampling import Sampling
from edge_dflash.decode.shape import PairShape
from edge_dflash.errors import ContextError, RequestError
from edge_dflash.pictures.pictured import Pictured, Placed, check_pictures
from edge_dflash.text.tool_calls import Tool, chosen_tools, function_of, is_strict

MOST_TOLD = 1 << 18  # log-probabilities of a prompt, alternatives included: 50 MB


class PlanOptions(TypedDict, total=False):
    """Keywords of a request; :class:`Options` says what they mean and what holds without them."""

    schema: object
    regex: str | None
    grammar: str | None
    whitespace: bool
    thinking: bool
    raw: bool
    relaxed: bool | Relaxation
    tools: Sequence[Tool] | None
    tool_choice: str
    speculative: bool
    draft_confidence: float
    deadline: float | None
    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: str | Sequence[str]
    logprobs: int | None
    prompt_logprobs: bool
    priority: int
    caller: str


def _tools(value: Any) -> Any:
    tools = rules.sequence_of(Mapping, "").take(value)
    for tool in tools:  # one by one, so that other threads run between
        json.dumps(tool, default=dict)  # templates write them
        if not isinstance(function_of(tool).get("strict"), bool | None):
            raise TypeError
    return tools


def _schema(value: Any) -> Any:
    if not (isinstance(value, str | Mapping) or callable(getattr(value, "model_json_schema", None))):
        raise TypeError
    return value


@dataclass(frozen=True)
class Declaration:
    """What of an option its rule and default do not say."""

    rule: Rule
    doc: str  # a sentence: help of its flag, and the docs' table
    flag: str | None  # how ``generate`` writes its value, "": a switch; None: it has no flag
    http: bool  # whether it stands under ``edge_dflash`` of a request by its own name
    recorded: bool  # whether it says what a recorded answer had to be


def option(
    default: Any, rule: Rule, doc: str, *, flag: str | None = None, http: bool = False, recorded: bool = False
) -> Any:
    """An option of a request; see :class:`Declaration`."""
    return field(default=default, metadata={"declared": Declaration(rule, doc, flag, http, recorded)})


_RELAXATION = rules.instance_of(Relaxation, "")
_TOOLS = "a list of tools in OpenAI form, of plain JSON values, strict true or false"
_LOGPROBS = rules.whole(0, MOST_ALTERNATIVES).saying(f"a whole number of alternatives from 0 to {MOST_ALTERNATIVES}")


@dataclass(frozen=True)
class Options:
    """Options of one request, each checked by its rule.

    Raises RequestError for values of another type or range, and for those that contradict each other.
    """

    schema: object = option(
        None,
        Rule(_schema, "give a JSON object (mapping or text), a Pydantic model").or_none(),
        "The answer is JSON of this JSON Schema.",
        flag="FILE|JSON",
    )
    regex: str | None = option(
        None, TEXT.or_none(), "The answer matches this regular expression as a whole (syntax of Rust's regex crate).",
        flag="REGEX", http=True, recorded=True,
    )  # fmt: skip
    grammar: str | None = option(
        None, TEXT.or_none(), "The answer matches the rule 'start' of this Lark grammar (dialect of llguidance).",
        flag="FILE|TEXT", http=True, recorded=True,
    )  # fmt: skip
    whitespace: bool = option(False, FLAG, "JSON may have blanks outside strings.", http=True, recorded=True)
    thinking: bool = option(False, FLAG, "Let the chat template ask for thinking.", flag="", http=True, recorded=True)
    raw: bool = option(
        False, FLAG, "Use the text as it is: no chat template, control tokens by name.", flag="", http=True
    )
    relaxed: bool | Relaxation = option(
        False, rules.either(_RELAXATION, FLAG, "True, False or a Relaxation"),
        "Lossy acceptance inside the thinking span; True: with the usual bounds.", http=True,
    )  # fmt: skip
    tools: Sequence[Tool] | None = option(
        None, Rule(_tools, f"give {_TOOLS}").or_none(), "Tools, for the chat template and the types of the arguments."
    )
    tool_choice: str = option(
        "auto", TEXT.saying("auto, none, required, or the name of one of the tools"),
        "none: tools are not told of; required: a call of one of them; a name: of this one.", recorded=True,
    )  # fmt: skip
    speculative: bool = option(True, FLAG, "False decodes plainly: the same tokens, one by one.", http=True)
    draft_confidence: float = option(
        0.0, rules.number(0, 1), "Verify no draft from the first on that the drafter is less sure of, 0 to 1.",
        flag="C", http=True,
    )  # fmt: skip
    deadline: float | None = option(
        None, rules.number().saying("seconds from now").or_none(),
        "End in so many seconds, waiting in the queue included, with what is there by then.", flag="SECONDS",
    )  # fmt: skip
    max_new_tokens: int | None = option(
        None, rules.whole(0).or_none(), "Token budget; without it, what the context holds.", flag="N"
    )
    temperature: float = option(
        0.0, rules.number(0), "0, and below 0.0001, takes the best token each time.", flag="T", recorded=True
    )
    top_k: int = option(
        0, rules.whole(0, 2**31), "Draw from the K best tokens; 0: from all.", flag="K", http=True, recorded=True
    )
    top_p: float = option(
        1.0, rules.number(), "Draw from the best tokens of this probability mass.", flag="P", recorded=True
    )
    seed: int = option(0, rules.whole(0, 2**64 - 1), "Makes a drawn answer repeatable.", flag="N")
    stop: str | Sequence[str] = option(
        (), TEXTS.saying("a text, or several, none of them empty; leave stop out for none"),
        "The answer ends before the first of these texts; thinking is not searched.", recorded=True,
    )  # fmt: skip
    logprobs: int | None = option(
        None, _LOGPROBS.or_none(), "Say how likely each token was, next to N others; 0: it alone.", flag="N"
    )
    prompt_logprobs: bool = option(
        False, FLAG, "Say it of the prompt's tokens, too (with logprobs); a budget of 0 then makes no answer."
    )
    priority: int = option(0, rules.whole(-100, 100), "Requests of a higher one go first.", http=True)
    caller: str = option(
        "", TEXT, "Callers of one priority take turns; ACCOUNT/NAME: so do accounts, then their callers.", http=True
    )

    def __post_init__(self) -> None:
        """Take each value by its rule; refuse what does not go together."""
        for name, value in rules.checked(RULES, {name: getattr(self, name) for name in RULES}).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "temperature", self.sampling.temperature)  # refuses bad values
        if self.prompt_logprobs and self.logprobs is None:
            raise RequestError("prompt_logprobs is given without logprobs; give logprobs too, 0 to 20 alternatives")
        if self.max_new_tokens == 0 and not self.prompt_logprobs:
            raise RequestError(
                "max_new_tokens is 0; give a whole number of at least 1, or prompt_logprobs, which needs no answer"
            )
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
        rules.refuse_unknown(RULES, given)
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
        return () if self.tool_choice in ("auto", "none") else chosen_tools(self.tools or (), self.tool_choice)

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


DECLARED: Mapping[str, Declaration] = {one.name: one.metadata["declared"] for one in fields(Options)}
RULES: Mapping[str, Rule] = {name: place.rule for name, place in DECLARED.items()}


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

    @property
    def filled(self) -> tuple[int, ...]:
        """What prefill computes of the prompt: all, or the first token where cycles verify the rest for its logits."""
        return self.prompt[:1] if self.options.prompt_logprobs else self.prompt

    @property
    def identities(self) -> tuple[int, ...]:
        """What prompts are compared by: see :attr:`~edge_dflash.pictures.pictured.Pictured.identities`."""
        return self.pictured.identities if self.pictures else self.prompt


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
    if pictures:
        check_pictures(Pictured(prompt, tuple(pictures)), shape.image_token_id)
    used = len(prompt)
    if options.prompt_logprobs and (pictures or used == 1):
        what = "shows images" if pictures else "is one token"
        raise RequestError(f"log-probabilities of a prompt need a text of two tokens at least; this prompt {what}")
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
    if options.prompt_logprobs and (told := used * (1 + (options.logprobs or 0))) > MOST_TOLD:
        why = f"{used} tokens with {options.logprobs} alternatives each"
        raise RequestError(f"{why} are {told} log-probabilities, at most {MOST_TOLD} are told; ask for less")
    if not shape.drafts:
        options = replace(options, speculative=False)
    at_budget: FinishReason = "context" if wanted is None else "length"
    return Request(
        *(
            tuple(prompt),
            options,
            tuple(stop_token_ids),
            room if wanted is None else wanted,
            at_budget,
            tuple(sorted(keep)),
        ),
        pictures=tuple(pictures),
    )
