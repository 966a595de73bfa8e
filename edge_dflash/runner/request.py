"""From a task and its options to a request: the prompt of a conversation, checked, its form compiled, ready to run.

Everything that can be wrong with a request is found here, on the caller's thread, before the engine hears of it. The
chat template is known by what it writes, never by its name.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from edge_dflash.decode.accept import Relaxation
from edge_dflash.decode.backend import Backend
from edge_dflash.decode.controls import Controls, Interrupted, Pace, Patience
from edge_dflash.decode.grammar.compiled import Grammar
from edge_dflash.decode.options import Options, Request, Task, admit, as_messages, token_ids
from edge_dflash.decode.pictured import Picture, Placed
from edge_dflash.errors import RequestError
from edge_dflash.result import Plan
from edge_dflash.runner.answer import StopFinder
from edge_dflash.runner.form import constraint_of, ends_of_form, form_of
from edge_dflash.runner.images import ImageReader, encode_shown, name_of, read_images
from edge_dflash.runner.recording import AnswerLog, Said
from edge_dflash.text.chat import Answer, Markers, thinking_is_open
from edge_dflash.text.images import marked, sources_of, without
from edge_dflash.text.template import Message
from edge_dflash.text.tokenizer import Tokenizer

_PROBE = "\ue000"  # private use: no message begins with it
_MARK = "\ue000\ue001\ue002"  # stands for an answer when the text behind it is looked for
_KNOWN_PREFIXES = 16
_NO_FORM = "an answer cannot be given a form; leave schema, regex and grammar out"
_NO_TEXT = "give token ids instead of text"

Ended: TypeAlias = Literal["deadline", "cancelled"]


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

    def ends_of_form(self) -> tuple[int, ...]:
        """The stop tokens that end an answer with a form. Raises RequestError when there are none."""
        return ends_of_form(self.need_tokenizer(_NO_FORM), self.stop_token_ids)


@dataclass(frozen=True)
class Conversation:
    """A conversation before its next turn. The messages are never changed: a turn that ends makes another list."""

    messages: Sequence[Message] = ()  # of the tokens, the last answer at the end; or what comes before the first turn
    tokens: tuple[int, ...] = ()
    pictures: tuple[Placed, ...] = ()  # of the tokens
    tools: str = ""  # with which the tokens were made, as JSON
    thinking: bool = False  # the last answer was cut inside a thinking span


@dataclass(frozen=True)
class Prompt:
    """Ids of a prompt, its length up to the first user's words if it begins with something to share, its pictures."""

    ids: tuple[int, ...]
    shared: int = 0
    pictures: tuple[Placed, ...] = ()  # in their order, on the placeholders of their rows
    said: Said | None = None  # what it was made of; None: token ids
    turn: Sequence[Message] = ()  # what it adds to its conversation


@dataclass(frozen=True, kw_only=True)
class Prepared(Request):
    """A request that may run, with all that its answer needs."""

    model: Model
    turn: Sequence[Message]  # what it adds to its conversation
    form: Grammar | None
    relaxation: Relaxation | None  # None: strict
    began: float  # time.perf_counter() of the call
    deadline: float | None  # time.perf_counter()
    ended: Ended | None = None  # while its images were read or its form was compiled: nothing of it runs
    record: Callable[[Plan], None] | None = None  # takes its plan

    def controls(self, pace: Pace, cancelled: Callable[[], bool]) -> Controls:
        """Controls of a fresh run."""
        controls = Controls(deadline=self.deadline, cancelled=cancelled, relaxation=self.relaxation, pace=pace)
        tokenizer, options = self.model.tokenizer, self.options
        if tokenizer is None:
            return controls
        controls = replace(controls, spell=tokenizer.token_bytes)
        if self.form is not None:
            form = constraint_of(self.form, options, self.prompt, tokenizer, controls)
            controls = replace(controls, constraint=form)
        if options.stops:
            controls = replace(controls, ends=StopFinder(tokenizer, self.prompt, options.stops))
        return controls


class Preparer:
    """Makes requests of tasks; remembers what it found out about system prompts. May be used from any thread."""

    def __init__(self, model: Model, room: Callable[[int, str], None] = lambda priority, caller: None) -> None:
        """``room`` raises QueueFullError where no request of this priority and caller would be queued now."""
        self._model, self._room = model, room
        self._probed: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def prepare(
        self,
        task: Task,
        options: Options,
        began: float,
        unwanted: Callable[[], bool] = lambda: False,
        known: Conversation | None = None,
    ) -> Prepared:
        """The request of a task, the next turn of a conversation if one is ``known``.

        ``began``: time.perf_counter() of its call, from which its deadline counts; ``unwanted``: whether nobody waits
        for it any more. Raises RequestError and ContextError for what cannot run, QueueFullError while an image waits
        for memory and there is no room in the queue.
        """
        model = self._model
        patience = Patience(None if options.deadline is None else began + options.deadline, unwanted)

        def check() -> None:
            patience.check()
            self._room(options.priority, options.caller)

        ended: Ended | None = None
        try:
            prompt = self.prompt(task, options, known, check)
        except Interrupted as interrupted:  # while its images were read
            ended, prompt = interrupted.reason, self.prompt(without(as_messages(task) or []), options, known)
        stop = model.ends_of_form() if options.constrained else model.stop_token_ids
        keep = (prompt.shared,) if prompt.shared else ()
        admitted = admit(model.backend.shape, prompt.ids, options, stop, keep, prompt.pictures)
        if options.stops:
            model.need_tokenizer("stop texts cannot be found; leave stop out")
        form = None
        if options.constrained and ended is None:
            try:
                form = form_of(options, model.need_tokenizer(_NO_FORM), stop, model.backend.shape.vocab_size, patience)
            except Interrupted as interrupted:
                ended = interrupted.reason
        records = model.recorder is not None and not prompt.pictures and ended is None
        return Prepared(
            **vars(admitted),
            model=model,
            turn=prompt.turn,
            form=form,
            relaxation=None if options.relaxed is False else self._relaxation(options, prompt.ids),
            began=began,
            deadline=patience.deadline,
            ended=ended,
            record=model.recorder.of(prompt.said, options) if model.recorder is not None and records else None,
        )

    def prompt(
        self,
        task: Task,
        options: Options,
        known: Conversation | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Prompt:
        """The prompt of a task, after the conversation if one is ``known``: that as it was generated if that can be.

        ``check`` is asked while images are read. Raises RequestError for a task of another kind, an empty one, and one
        that cannot be turned into ids.
        """
        model, before = self._model, known or Conversation()
        messages = as_messages(task)
        ids = token_ids(task) if messages is None else self._without_template(task, options)
        resumes = bool(before.tokens) and before.tools == tools_of(options)
        if messages is None:
            assert ids is not None
            spelled = "" if known is None or model.tokenizer is None else model.tokenizer.decode(ids)
            messages = [{"role": "user", "content": spelled}]
        elif known is not None:
            messages = [dict(message) if isinstance(message, Mapping) else message for message in messages]
        if ids is not None and (resumes or not before.messages):
            if model.images is not None and (token := model.images.vision.image_token_id) in ids:
                raise RequestError(
                    f"token {token} of the prompt stands for a row of an image; give messages with images"
                )
            if resumes:
                return Prompt((*before.tokens, *ids), pictures=before.pictures, turn=messages)
            return Prompt(ids, said=task if isinstance(task, str) else None, turn=messages)
        pictures = {name_of(placed.picture): placed.picture for placed in before.pictures}
        if sources_of(messages):
            messages, read = read_images(model.images, messages, pictures, check)
            pictures |= read
        if resumes and (prompt := self._next_turn(before, messages, pictures, options)) is not None:
            return prompt
        return self._conversation(before.messages, messages, pictures, options)

    def _without_template(self, task: Task | Sequence[Message], options: Options) -> tuple[int, ...] | None:
        """Ids of a text that no chat template takes; None for a task that one does."""
        tokenizer = self._model.need_tokenizer(_NO_TEXT)
        if options.raw:
            if not isinstance(task, str):
                raise RequestError("raw is given with messages; give one text, or leave raw out")
            return tokenizer.encode(task)
        template = tokenizer.tool_template if options.tools else tokenizer.template
        if not isinstance(task, str) or template is not None:
            return None
        if options.tools:
            raise RequestError("this model has no chat template, which describes tools; leave tools out")
        return tokenizer.encode_text(task)

    def _conversation(
        self, before: Sequence[Message], turn: list[Message], pictures: Mapping[str, Picture], options: Options
    ) -> Prompt:
        """The prompt of a whole conversation."""
        said = [*before, *turn]
        self._without_template(said, options)
        messages, mark = marked(said)
        pieces = self._rendered(messages, options)
        ids, placed = self._encoded(pieces, mark, said, pictures)
        return Prompt(ids, self._shared(messages, ids, options), placed, said, turn)

    def _rendered(self, messages: Sequence[Message], options: Options) -> list[str]:
        tokenizer = self._model.need_tokenizer(_NO_TEXT)
        return tokenizer.render_pieces(messages, tools=options.tools, enable_thinking=options.thinking)

    def _encoded(
        self, pieces: Sequence[str], mark: str, said: Sequence[Message], pictures: Mapping[str, Picture], first: int = 0
    ) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """Ids of a template's pieces behind ``first`` tokens, and where the pictures that ``mark`` stands for are."""
        tokenizer = self._model.need_tokenizer(_NO_TEXT)
        if not mark or self._model.images is None:
            return tokenizer.encode_pieces(pieces), ()
        shown = [pictures[str(name)] for name in sources_of(said)]
        return encode_shown(tokenizer, pieces, mark, shown, self._model.images.vision, first)

    def _shared(self, messages: Sequence[Message], ids: tuple[int, ...], options: Options) -> int:
        """How many ids do not depend on what the user says: system messages and tools, and what frames them."""
        system = [message for message in messages if message.get("role") == "system"]
        if messages[: len(system)] != system or len(system) == len(messages) or not (system or options.tools):
            return 0
        key = json.dumps([system, options.tools, options.thinking], default=repr)
        if (probe := self._probed.get(key)) is None:
            other = [*system, {"role": "user", "content": _PROBE}]
            tokenizer = self._model.need_tokenizer(_NO_TEXT)
            probe = tokenizer.encode_chat(other, tools=options.tools, enable_thinking=options.thinking)
            self._probed[key] = probe
            while len(self._probed) > _KNOWN_PREFIXES:
                self._probed.popitem(last=False)
        pairs = enumerate(zip(ids, probe, strict=False))
        return next((at for at, (one, another) in pairs if one != another), 0)

    def _next_turn(
        self, before: Conversation, turn: list[Message], pictures: Mapping[str, Picture], options: Options
    ) -> Prompt | None:
        """The prompt of one more turn: the tokens as they are, and what the template writes from an answer to the next.

        The conversation only grows: earlier answers stay as they were generated, thinking included, so nothing is
        computed twice; a thinking span in which the last one was cut is closed here. None when the template does not
        write answers as they are: then all has to be encoded anew.
        """
        tokenizer, tokens = self._model.need_tokenizer(_NO_TEXT), before.tokens
        said = [*before.messages[:-1], {"role": "assistant", "content": _MARK}, *turn]
        messages, mark = marked(said)
        pieces = self._rendered(messages, options)
        places = [at for at, piece in enumerate(pieces) if _MARK in piece]
        if len(places) != 1 or pieces[places[0]].count(_MARK) != 1:
            return None
        after = [pieces[places[0]].partition(_MARK)[2], *pieces[places[0] + 1 :]]
        ended = tokens[-1] in self._model.stop_token_ids
        if ended and after[:2] == ["", tokenizer.token(tokens[-1])]:  # it is there already
            after = after[2:]
        if before.thinking and Markers.of(tokenizer).end_think is not None:
            after = ["\n", "</think>", "\n\n" + after[0], *after[1:]]
        ids, placed = self._encoded(after, mark, said, pictures, len(tokens))
        whole = [*before.messages, *turn]
        return Prompt((*tokens, *ids), pictures=(*before.pictures, *placed), said=whole, turn=turn)

    def _relaxation(self, options: Options, prompt: Sequence[int]) -> Relaxation | None:
        """The relaxation, where there is a thinking span for it: strict acceptance everywhere else."""
        tokenizer = self._model.need_tokenizer("thinking cannot be told from the answer; leave relaxed out")
        close = Markers.of(tokenizer).end_think
        relaxation = Relaxation(() if close is None else (close,)) if options.relaxed is True else options.relaxed
        return relaxation if relaxation and thinking_is_open(prompt, tokenizer) else None


def tools_of(options: Options) -> str:
    """The tools of a request, as a conversation remembers them."""
    return json.dumps(options.tools or [], default=dict)


def as_message(answer: Answer) -> Message:
    """An answer as the message that templates take back."""
    message: dict[str, object] = {"role": "assistant", "content": answer.content}
    if answer.thinking or "</think>" in answer.content:  # which stands behind the thinking, so it is text
        message["reasoning_content"] = answer.thinking
    if answer.tool_calls:
        message["tool_calls"] = [call.openai() for call in answer.tool_calls]
    return message
