"""From a task and its options to a request: the prompt of a conversation, checked, its form compiled, ready to run.

Everything that can be wrong with a request is found here, on the caller's thread, before the engine hears of it. The
chat template is known by what it writes, never by its name.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edge_dflash.decode.accept import Relaxation
from edge_dflash.decode.backend import Backend
from edge_dflash.decode.controls import Controls, Interrupted, Pace, Patience
from edge_dflash.decode.grammar.calls import AnswerForm, Calls
from edge_dflash.decode.grammar.compiled import Grammar, compile_form
from edge_dflash.decode.grammar.schema_check import schema_json
from edge_dflash.decode.grammar.wire import Source
from edge_dflash.decode.options import Options, Request, Task, admit, as_messages, token_ids
from edge_dflash.decode.pictured import Picture, Placed
from edge_dflash.decode.steering import AfterThinking, Constraint, InCalls
from edge_dflash.errors import RequestError
from edge_dflash.result import Plan
from edge_dflash.runner.looking import Ended, ImageReader, Placing, Shown, read_images
from edge_dflash.runner.recording import AnswerLog, Said
from edge_dflash.runner.stream import UNWANTED, StopFinder
from edge_dflash.text.chat import (
    Answer,
    Markers,
    dialect_of,
    encode_conversation,
    render_conversation,
    thinking_is_open,
)
from edge_dflash.text.template import Message
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.text.tool_calls import Tool

_PROBE = "\ue000"  # private use: no message begins with it
_MARK = "\ue000\ue001\ue002"  # stands for an answer when the text behind it is looked for
_KNOWN_PREFIXES = 16
_BEFORE_ANSWER = "\n\n"  # what the chat templates of the Qwen family write between thinking and answer


@dataclass(frozen=True)
class Model:
    """The parts of an open engine that requests are checked against. ``backend`` is asked for its shape only."""

    backend: Backend
    tokenizer: Tokenizer | None
    stop_token_ids: tuple[int, ...]
    images: ImageReader | None = None  # None: the target does not see
    recorder: AnswerLog | None = None  # of finished answers

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer. Raises RequestError, naming ``what`` cannot be done, when the bundle has none."""
        if self.tokenizer is None:
            raise RequestError(
                f"this bundle has no tokenizer: {what}, or build it again from a checkpoint with tokenizer.json"
            )
        return self.tokenizer


@dataclass(frozen=True)
class Prompt:
    """Ids of a prompt, its length up to the first user's words if it begins with something to share, its pictures."""

    ids: tuple[int, ...]
    shared: int = 0
    pictures: tuple[Placed, ...] = ()  # in their order, on the placeholders of their rows
    said: Said | None = None  # what it was made of; None: token ids
    ended: Ended | None = None  # while its images were read: nothing of it runs


class Encoder:
    """Encodes tasks; remembers what it found out about system prompts. May be used from any thread."""

    def __init__(self, model: Model, room: Callable[[int, str], None] = lambda priority, caller: None) -> None:
        """``room`` raises QueueFullError where no request of this priority and caller would be queued now."""
        self._model, self._room = model, room
        self._probed: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def prompt(self, task: Task, options: Options, began: float | None = None, shown: Shown | None = None) -> Prompt:
        """The prompt of a task outside a session. ``began``: see :meth:`read`; ``shown``: the task, read already.

        Raises RequestError when it is of another kind, empty, or cannot be turned into ids.
        """
        messages = as_messages(task)
        if messages is None:
            return Prompt(without_images(self._model, token_ids(task)))
        tokenizer = self._model.need_tokenizer("give token ids instead of text")
        if (text := _without_template(tokenizer, task, options)) is not None:
            return Prompt(without_images(self._model, text), said=task if isinstance(task, str) else None)
        shown = shown or self.read(messages, {}, options, began)
        return replace(self.conversation(shown, options), ended=shown.ended)

    def read(
        self, messages: list[Message], known: Mapping[str, Picture], options: Options, began: float | None = None
    ) -> Shown:
        """:func:`read_images` of a request, for as long as it may wait and there is room in the queue for it.

        ``began``: time.perf_counter() of its call, from which its deadline counts; None: now.
        """
        patience = _patience(options, time.perf_counter() if began is None else began)

        def check() -> None:
            patience.check()
            self._room(options.priority, options.caller)

        return read_images(self._model.images, messages, known, check)

    def conversation(self, shown: Shown, options: Options) -> Prompt:
        """The prompt of a conversation. Raises as :meth:`prompt` does."""
        tokenizer, placing = self._model.need_tokenizer("give token ids instead of text"), Placing.of(shown)
        _without_template(tokenizer, placing.messages, options)
        variables: dict[str, Any] = {"tools": options.tools, "enable_thinking": options.thinking}
        pieces = render_conversation(tokenizer, placing.messages, **variables)
        ids, placed = placing.encode(tokenizer, pieces, self._model.images)
        return Prompt(ids, self._shared(tokenizer, placing.messages, ids, options), placed, shown.messages)

    def _shared(self, tokenizer: Tokenizer, messages: Sequence[Message], ids: tuple[int, ...], options: Options) -> int:
        """How many ids do not depend on what the user says: system messages and tools, and what frames them."""
        system = [message for message in messages if message.get("role") == "system"]
        if messages[: len(system)] != system or len(system) == len(messages) or not (system or options.tools):
            return 0
        key = json.dumps([system, options.tools, options.thinking], default=repr)
        if (probe := self._probed.get(key)) is None:
            other = [*system, {"role": "user", "content": _PROBE}]
            probe = encode_conversation(tokenizer, other, tools=options.tools, enable_thinking=options.thinking)
            self._probed[key] = probe
            while len(self._probed) > _KNOWN_PREFIXES:
                self._probed.popitem(last=False)
        pairs = enumerate(zip(ids, probe, strict=False))
        return next((at for at, (one, another) in pairs if one != another), 0)


def next_turn(
    model: Model,
    tokens: Sequence[int],
    messages: Sequence[Message],
    task: Task,
    options: Options,
    *,
    thinking: bool,
    shown: Shown | None = None,
    placed: tuple[Placed, ...] = (),
) -> Prompt | None:
    """The prompt of one more turn: ``tokens`` as they are, and what the template writes between an answer and the next.

    The conversation only grows: earlier answers stay as they were generated, thinking included, so nothing is computed
    twice. ``messages`` are those of ``tokens``, the answer last; ``thinking``: it was cut inside a thinking span, which
    is closed here. ``shown``: the task's messages and all pictures; ``placed``: where those of ``tokens`` stand. None
    when the template does not write answers as they are: then all has to be encoded anew.
    """
    new = as_messages(task)
    if new is None:
        return Prompt((*tokens, *without_images(model, token_ids(task))), pictures=placed)
    tokenizer = model.need_tokenizer("give token ids instead of text")
    if (text := _without_template(tokenizer, task, options)) is not None:
        return Prompt((*tokens, *without_images(model, text)), pictures=placed)
    shown = shown or Shown(new)
    whole = [*messages[:-1], {"role": "assistant", "content": _MARK}, *shown.messages]
    placing = Placing.of(Shown(whole, shown.pictures))
    pieces = render_conversation(tokenizer, placing.messages, tools=options.tools, enable_thinking=options.thinking)
    places = [at for at, piece in enumerate(pieces) if _MARK in piece]
    if len(places) != 1 or pieces[places[0]].count(_MARK) != 1:
        return None
    after = [pieces[places[0]].partition(_MARK)[2], *pieces[places[0] + 1 :]]
    if tokens[-1] in model.stop_token_ids and after[:2] == ["", tokenizer.token(tokens[-1])]:  # it is there already
        after = after[2:]
    if thinking and Markers.of(tokenizer).end_think is not None:
        after = ["\n", "</think>", "\n\n" + after[0], *after[1:]]
    ids, more = placing.encode(tokenizer, after, model.images, len(tokens))
    return Prompt((*tokens, *ids), pictures=(*placed, *more), said=[*messages, *shown.messages])


def without_images(model: Model, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that nobody placed pictures among. Raises RequestError for placeholders."""
    if model.images is not None and (token := model.images.vision.image_token_id) in ids:
        raise RequestError(f"token {token} of the prompt stands for a row of an image; give messages with images")
    return ids


def _without_template(tokenizer: Tokenizer, task: Task, options: Options) -> tuple[int, ...] | None:
    """Ids of a text that no chat template takes; None for a task that one does."""
    if options.raw:
        if not isinstance(task, str):
            raise RequestError("raw is given with messages; give one text, or leave raw out")
        return tokenizer.encode(task)
    if not isinstance(task, str) or (tokenizer.tool_template if options.tools else tokenizer.template) is not None:
        return None
    if options.tools:
        raise RequestError("this model has no chat template, which describes tools; leave tools out")
    return tokenizer.encode_text(task)


def as_said(model: Model, task: Task) -> list[Message]:
    """The task as messages to remember; ids as their text."""
    messages = as_messages(task)
    if messages is None:
        ids = token_ids(task)
        return [{"role": "user", "content": "" if model.tokenizer is None else model.tokenizer.decode(ids)}]
    return [dict(message) for message in messages]


def as_message(answer: Answer) -> Message:
    """An answer as the message that templates take back."""
    message: dict[str, object] = {"role": "assistant", "content": answer.content}
    if answer.thinking or "</think>" in answer.content:  # which stands behind the thinking, so it is text
        message["reasoning_content"] = answer.thinking
    if answer.tool_calls:
        message["tool_calls"] = [call.openai() for call in answer.tool_calls]
    return message


@dataclass(frozen=True, kw_only=True)
class Prepared(Request):
    """A request that may run, with all that its answer needs."""

    model: Model
    form: Grammar | None
    relaxation: Relaxation | None  # None: strict
    began: float  # time.perf_counter() of the call
    deadline: float | None  # time.perf_counter()
    ended: Ended | None = None  # while its images were read or its form was compiled: nothing of it runs
    record: Callable[[Plan], None] | None = None  # takes its plan

    def finished(self, plan: Plan) -> Plan:
        """The plan, after the recorder has seen it."""
        if self.record is not None:
            self.record(plan)
        return plan

    def controls(self, pace: Pace, cancelled: Callable[[], bool]) -> Controls:
        """Controls of a fresh run."""
        controls = Controls(deadline=self.deadline, cancelled=cancelled, relaxation=self.relaxation, pace=pace)
        tokenizer, stops = self.model.tokenizer, self.options.stops
        if tokenizer is None:
            return controls
        controls = replace(controls, constraint=self._constraint(controls, tokenizer), spell=tokenizer.token_bytes)
        return replace(controls, ends=StopFinder(tokenizer, self.prompt, stops)) if stops else controls

    def _constraint(self, patience: Patience, tokenizer: Tokenizer) -> Constraint | None:
        if self.form is None:
            return None
        markers, thinking = Markers.of(tokenizer), thinking_is_open(self.prompt, tokenizer)
        if self.options.strict_calls:
            assert markers.tool_call is not None
            assert markers.end_tool_call is not None
            ends = (markers.think, markers.end_think)
            return InCalls(
                partial(self.form.constraint, patience),
                markers.tool_call,
                markers.end_tool_call,
                None if ends[0] is None or ends[1] is None else (ends[0], ends[1]),
                thinking=thinking,
            )
        inner = self.form.constraint(patience)
        if not thinking:
            return inner
        close = markers.end_think
        return AfterThinking(
            inner,
            () if close is None else (close,),
            self.form.vocab_size,
            then=tokenizer.encode(_BEFORE_ANSWER),
            stop_token_ids=self.form.stop_token_ids,
        )


def prepare(model: Model, options: Options, prompt: Prompt, began: float) -> Prepared:
    """Check a request, and compile its form. Raises RequestError and ContextError for what cannot run."""
    stop = ends_of_form(model) if options.constrained else model.stop_token_ids
    keep = (prompt.shared,) if prompt.shared else ()
    admitted = admit(model.backend.shape, prompt.ids, options, stop, keep, prompt.pictures)
    if options.stops:
        model.need_tokenizer("stop texts cannot be found; leave stop out")
    patience = _patience(options, began)
    form, ended = None, prompt.ended
    try:
        form = None if ended else _form(model, options, stop, patience)
    except Interrupted as interrupted:
        ended = interrupted.reason
    relaxation = _relaxation(model, options, prompt.ids)
    record = None if model.recorder is None or prompt.pictures or ended else model.recorder.of(prompt.said, options)
    made: dict[str, Any] = {"form": form, "relaxation": relaxation, "record": record, "ended": ended}
    return Prepared(**vars(admitted), **made, model=model, began=began, deadline=patience.deadline)


def _patience(options: Options, began: float) -> Patience:
    """How long the caller waits for a request that began then, while it is prepared."""
    return Patience(None if options.deadline is None else began + options.deadline, UNWANTED.get())


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
    if options.tools and options.grammar is None:
        try:
            source = Source("calls", _calls(options, options.tools, tokenizer), options.whitespace, size)
            return compile_form(source, tokenizer, stop, patience, options.caller)
        except RequestError as error:
            raise _beside(options, error) from None
    if options.regex is not None:
        source = Source("regex", options.regex, False, size)
    elif options.grammar is not None:
        source = Source("grammar", options.grammar, options.whitespace, size)
    else:
        source = Source("schema", schema_json(options.schema), options.whitespace, size)
    return compile_form(source, tokenizer, stop, patience, options.caller)


def _calls(options: Options, tools: Sequence[Tool], tokenizer: Tokenizer) -> str:
    """The form of an answer that is a call, or may be one or hold some."""
    try:
        dialect = dialect_of(tokenizer)
    except RequestError as error:
        if options.forced_tools:
            raise
        raise RequestError(str(error).rpartition(";")[0]) from None  # its remedy is that of a forced call
    if forced := options.forced_tools:
        calls = Calls.of("forced", forced, dialect)
    elif options.regex is not None:
        calls = Calls.of("beside", tools, dialect, AnswerForm("regex", options.regex))
    elif options.schema is not None:
        calls = Calls.of("beside", tools, dialect, AnswerForm("schema", schema_json(options.schema)))
    else:
        calls = Calls.of("strict", tools, dialect)
    return calls.to_json()


def _beside(options: Options, error: RequestError) -> RequestError:
    """The error, with what else there is to leave out."""
    if options.forced_tools:
        return error
    what = "regex" if options.regex is not None else "schema" if options.schema is not None else "strict"
    remedy = "leave strict out" if what == "strict" else f"leave tools or {what} out, or give tool_choice none"
    return RequestError(f"{what} and tools are given: {error}; {remedy}")


def _relaxation(model: Model, options: Options, prompt: Sequence[int]) -> Relaxation | None:
    """The relaxation, where there is a thinking span for it: strict acceptance everywhere else."""
    if options.relaxed is False:
        return None
    tokenizer = model.need_tokenizer("thinking cannot be told from the answer; leave relaxed out")
    close = Markers.of(tokenizer).end_think
    relaxation = Relaxation(() if close is None else (close,)) if options.relaxed is True else options.relaxed
    return relaxation if thinking_is_open(prompt, tokenizer) else None
