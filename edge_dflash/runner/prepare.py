"""The request that a task and its options become: checked, its form compiled, ready to run.

Everything that can be wrong with a request is found here, on the caller's thread, before the engine hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

from edge_dflash.decode.accept import Relaxation
from edge_dflash.decode.backend import Backend
from edge_dflash.decode.controls import Controls, Interrupted, Pace, Patience
from edge_dflash.decode.grammar.compiled import Grammar, compile_form
from edge_dflash.decode.grammar.lark_text import tool_grammar
from edge_dflash.decode.grammar.schema_check import schema_json
from edge_dflash.decode.grammar.wire import Source
from edge_dflash.decode.loop import DecodeOptions, admit
from edge_dflash.decode.options import Options
from edge_dflash.decode.steering import AfterThinking, Constraint
from edge_dflash.errors import RequestError
from edge_dflash.text.chat import Markers, dialect_of, thinking_is_open
from edge_dflash.text.tokenizer import Tokenizer

UNWANTED: ContextVar[Callable[[], bool]] = ContextVar("UNWANTED", default=lambda: False)
"""Whether who asks has gone: set around a call that prepares a request on another thread."""
_BEFORE_ANSWER = "\n\n"  # what the chat templates of the Qwen family write between thinking and answer


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
    size = model.backend.shape.vocab_size
    if tools := options.forced_tools:
        source = Source("tools", tool_grammar(tools, dialect_of(tokenizer)), False, size)
    elif options.regex is not None:
        source = Source("regex", options.regex, False, size)
    elif options.grammar is not None:
        source = Source("grammar", options.grammar, options.whitespace, size)
    else:
        source = Source("schema", schema_json(options.schema), options.whitespace, size)
    return compile_form(source, tokenizer, stop, patience, options.caller)


def _relaxation(model: Model, options: Options, prompt: Sequence[int]) -> Relaxation | None:
    """The relaxation, where there is a thinking span for it: strict acceptance everywhere else."""
    if options.relaxed is False:
        return None
    tokenizer = model.need_tokenizer("thinking cannot be told from the answer; leave relaxed out")
    close = Markers.of(tokenizer).end_think
    relaxation = Relaxation(() if close is None else (close,)) if options.relaxed is True else options.relaxed
    return relaxation if thinking_is_open(prompt, tokenizer) else None
