"""From a task and its options to a request: the prompt of a conversation, checked, its form compiled, ready to run.

Everything that can be wrong with a request is found here, on the caller's thread, before the engine hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from edge_dflash.decode.accept import Relaxation
from edge_dflash.decode.controls import Controls, Interrupted, Pace, Patience
from edge_dflash.decode.grammar.compiled import Grammar
from edge_dflash.decode.options import Options, Request, admit
from edge_dflash.decode.shape import PairShape
from edge_dflash.errors import RequestError
from edge_dflash.result import Plan
from edge_dflash.runner.answer import StopFinder
from edge_dflash.runner.form import constraint_of, ends_of_form, form_of
from edge_dflash.runner.recording import AnswerLog
from edge_dflash.text.chat import Markers, thinking_is_open
from edge_dflash.text.images import ImageReader, without
from edge_dflash.text.prompt import Conversation, Prompter, Task, as_messages, need_tokenizer
from edge_dflash.text.template import Message
from edge_dflash.text.tokenizer import Tokenizer

_NO_FORM = "an answer cannot be given a form; leave schema, regex and grammar out"

Ended: TypeAlias = Literal["deadline", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Prepared(Request):
    """A request that may run, with all that its answer needs."""

    tokenizer: Tokenizer | None
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
        tokenizer, options = self.tokenizer, self.options
        if tokenizer is None:
            return controls
        controls = replace(controls, spell=tokenizer.token_bytes)
        if self.form is not None:
            controls = replace(controls, constraint=constraint_of(self.form, options, self.prompt, tokenizer, controls))
        if options.stops:
            controls = replace(controls, ends=StopFinder(tokenizer, self.prompt, options.stops))
        return controls


class Preparer:
    """The parts of an open engine that requests are checked against. May be used from any thread."""

    def __init__(
        self,
        shape: PairShape,
        tokenizer: Tokenizer | None,
        stop_token_ids: tuple[int, ...],
        images: ImageReader | None = None,
        recorder: AnswerLog | None = None,
        room: Callable[[int, str], None] = lambda priority, caller: None,
    ) -> None:
        """``images``: None for a target that does not see; ``recorder``: of finished answers.

        ``room`` raises QueueFullError where no request of this priority and caller would be queued now.
        """
        self.tokenizer, self.stop_token_ids, self.recorder = tokenizer, stop_token_ids, recorder
        self.prompter = Prompter(tokenizer, stop_token_ids, images)
        self._shape, self._room = shape, room

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
        if known is not None and options.prompt_logprobs:
            raise RequestError("prompt_logprobs is given in a session, which computes what is new; ask without session")
        patience = Patience(None if options.deadline is None else began + options.deadline, unwanted)
        ended: Ended | None = None
        form, constrained = None, options.constrained

        def check() -> None:
            patience.check()
            self._room(options.priority, options.caller)

        try:
            prompt = self.prompter.prompt(task, options, known, check)
        except Interrupted as interrupted:  # while its images were read
            ended, prompt = interrupted.reason, self.prompter.prompt(without(as_messages(task) or []), options, known)
        stop = self.ends_of_form() if constrained else self.stop_token_ids
        keep = (prompt.shared,) if prompt.shared else ()
        admitted = admit(self._shape, prompt.ids, options, stop, keep, prompt.pictures)
        if options.stop:
            need_tokenizer(self.tokenizer, "stop texts cannot be found; leave stop out")
        if constrained and ended is None:
            try:
                tokenizer = need_tokenizer(self.tokenizer, _NO_FORM)
                form = form_of(options, tokenizer, stop, self._shape.vocab_size, patience)
            except Interrupted as interrupted:
                ended = interrupted.reason
        record = None
        if self.recorder is not None and not (prompt.pictures or ended or options.prompt_logprobs):
            record = self.recorder.of(prompt.said, options)
        return Prepared(
            **vars(admitted),
            tokenizer=self.tokenizer,
            turn=prompt.turn,
            form=form,
            relaxation=None if options.relaxed is False else self._relaxation(options, prompt.ids),
            began=began,
            deadline=patience.deadline,
            ended=ended,
            record=record,
        )

    def ends_of_form(self) -> tuple[int, ...]:
        """The stop tokens that end an answer with a form. Raises RequestError when there are none."""
        return ends_of_form(need_tokenizer(self.tokenizer, _NO_FORM), self.stop_token_ids)

    def _relaxation(self, options: Options, prompt: Sequence[int]) -> Relaxation | None:
        """The relaxation, where there is a thinking span for it: strict acceptance everywhere else."""
        tokenizer = need_tokenizer(self.tokenizer, "thinking cannot be told from the answer; leave relaxed out")
        close = Markers.of(tokenizer).end_think
        relaxation = Relaxation(() if close is None else (close,)) if options.relaxed is True else options.relaxed
        return relaxation if relaxation and thinking_is_open(prompt, tokenizer) else None
