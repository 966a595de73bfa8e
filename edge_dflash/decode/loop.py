"""The loop: fill the state with the prompt, then cycles, until one ends the answer.

A cycle (:mod:`edge_dflash.decode.cycle`) is an optimistic transaction: it proposes, verifies and accepts; what of it
becomes real is committed here. The loop works on token ids and the Backend protocol; text, models and devices are
elsewhere. Who runs it makes its cycles, so that several sequences can share a pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.backend import Asked, Cycle, Outcome, Rows
from edge_dflash.decode.controls import NO_CONTROLS, Controls, Interrupted, Pace
from edge_dflash.decode.gaze import Gaze
from edge_dflash.decode.logprobs import TokenLogprob, token_logprobs
from edge_dflash.decode.options import Request
from edge_dflash.decode.sampling import GREEDY, choose
from edge_dflash.decode.session import Session
from edge_dflash.decode.steering import Steered, Told
from edge_dflash.errors import BackendError


@dataclass(frozen=True)
class Step:
    """Tokens that became final together: the first token after prefill, then one Step per cycle.

    Between two chunks of a prompt there is a Step without tokens, and a request that ends by its deadline or by being
    cancelled closes with one.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None  # set on the last step
    propose_seconds: float = 0.0  # 0 for the first step and in plain decoding
    verify_seconds: float = 0.0  # of the first token: prefill; 0 between chunks
    relaxed: int = 0  # drafts that stand only because acceptance was relaxed
    first: bool = False  # the token after the prompt
    logprobs: tuple[TokenLogprob, ...] = ()  # of each token, if they were asked for
    drafts: int = 0  # verified
    accepted: int = 0  # of them, though fewer may be among the tokens
    told: bool = False  # a part of the prompt was verified, for its log-probabilities
    prompt: tuple[TokenLogprob, ...] = ()  # of the whole prompt, with the first step, if they were asked for

    @property
    def chunk(self) -> bool:
        """Whether a part of the prompt was computed, and more of it comes."""
        return not self.tokens and self.finish_reason is None and not self.first


NO_TOKENS = Step((), None)  # a chunk of a prompt, or other work that delivers nothing, was done
TOLD = Step((), None, told=True)

DecodeSteps: TypeAlias = Generator[Step | Asked, Any, None]
"""Steps of a request, and between them each cycle that it asks for: it is sent what the backend found."""


def decode_steps(session: Session, request: Request, controls: Controls = NO_CONTROLS) -> DecodeSteps:
    """Answer a request in a session: fill, then cycles.

    Every Step is committed before it is yielded; its last token, the next anchor, is not in the caches yet. A consumer
    may stop at any Step: the session is then at that commit. Between two Steps other sessions may use the backend;
    between what is asked and what is sent, other lanes only. It ends when its session has no such request any more.
    """
    answer, backend = _Answer(session, request, controls), session.backend
    pace = answer.pace
    prompt, chunk, entered, seconds = request.filled, backend.shape.prefill_chunk, False, 0.0
    done = session.begin(request)
    gaze = Gaze(request.pictured, backend, session.manager.seen) if request.pictures else None
    try:
        while True:  # fill: chunk by chunk, and before each the pictures that it shows
            if reason := pace.refuse(controls, partial(answer.fill_seconds, gaze, done)):
                yield Step((), reason, verify_seconds=seconds)
                return
            end = min(end for end in (done + chunk, len(prompt), *session.cuts) if end > done)
            if gaze is not None and (unseen := gaze.unseen(done, end)) is not None:
                began = time.perf_counter()
                gaze.see(unseen)
                pace.towers.append(unseen.picture.tokens, took := time.perf_counter() - began)
                seconds += took
            else:
                lane, began, entered = session.acquire_lane(), time.perf_counter(), True
                rows = backend.prefill(prompt[done:end], lane, gaze.sight(done, end) if gaze is not None else None)
                rows.argmax()  # wait: no more than one chunk is ever under way
                pace.prefills.append(end - done, took := time.perf_counter() - began)
                done, seconds = end, seconds + took
                if done == len(prompt):
                    break
                session.chunk(lane, done)
            yield NO_TOKENS
            if not session.answers(request):
                return
            if not entered:  # others may have used the lanes
                done = session.begin(request, again=True)
        if request.options.prompt_logprobs:
            yield from answer.prompt(rows, lane, seconds)
        else:
            yield answer.first(rows, lane, seconds)
        while answer.reason is None and session.answers(request):
            yield from answer.cycle()
    except Interrupted as interrupted:  # while it waited for the grammar: nothing of this cycle was committed
        yield Step((), interrupted.reason)
    except BaseException as error:
        if not isinstance(error, GeneratorExit):  # left between two passes
            session.manager.failed(error)
        raise
    finally:
        session.resting = True


class _Answer:
    """One request on its way through a session."""

    def __init__(self, session: Session, request: Request, controls: Controls) -> None:
        self.session, self.request, self.controls = session, request, controls
        self.pace = controls.pace or Pace()
        self.sampling, self.steered = request.options.sampling, None
        if controls.constraint is not None or controls.relaxation is not None:
            self.steered = Steered(self.sampling, controls.constraint, controls.relaxation, request.stop_token_ids)
        self.budget = request.budget  # tokens that may still come
        self.tokens: list[int] = []  # of the newest step that has some; the last one is the next anchor
        self.reason: FinishReason | None = None  # why it ended

    def first(self, rows: Rows, lane: int, seconds: float) -> Step:
        """The step of the token after the prompt, of whose last row ``rows`` has the logits."""
        began = time.perf_counter()
        masks = self.steered.masks(()) if self.steered is not None else None
        logprobs = self._keep(choose(rows, self.sampling, len(self.request.prompt), masks), rows.logits)
        self.session.advance(lane, self.tokens, first=True)
        seconds += time.perf_counter() - began
        return Step(tuple(self.tokens), self.reason, verify_seconds=seconds, first=True, logprobs=logprobs)

    def prompt(self, rows: Rows, lane: int, seconds: float) -> DecodeSteps:
        """Cycles that are told the prompt's tokens but the first, the second of which ``rows`` has the logits of.

        Their log-probabilities come with the last step. Stop tokens are tokens like others here.
        """
        session, request, pace = self.session, self.request, self.pace
        prompt, shape, spell = request.prompt, session.backend.shape, self.controls.spell
        of = partial(token_logprobs, alternatives=request.options.logprobs or 0, spell=spell)
        found = [TokenLogprob(prompt[0], math.nan, (), spell(prompt[0])), *of(rows.logits, prompt[1:2])]
        session.advance(lane, prompt[1:2], first=True)
        while (at := len(found)) < len(prompt):
            yield TOLD
            if not session.answers(request):
                return
            if reason := pace.refuse(self.controls, lambda: pace.told.longest):
                self.reason = reason
                yield Step((), reason, verify_seconds=seconds)
                return
            lane, began, told = session.acquire_lane(), time.perf_counter(), prompt[at : at + shape.verify_rows]
            steering = Told(told, shape.vocab_size)
            cycle: Cycle = yield Asked(prompt[at - 1], GREEDY, steering, 0, True, known=told[:-1], lane=lane)
            if cycle.tokens != told or cycle.logits is None:
                raise BackendError(
                    f"a row chose otherwise than it was told ({cycle.tokens}, {told}): logits are no numbers"
                )
            found += of(cycle.logits, told, known=cycle.logprobs)
            session.backend.commit(len(told), lane, cycle.path)
            session.advance(lane, told)
            pace.told.append(1, took := time.perf_counter() - began)
            seconds += took
        self.tokens, self.reason = [prompt[-1]], None if self.budget else request.at_budget
        yield Step((), self.reason, verify_seconds=seconds, first=True, prompt=tuple(found))

    def fill_seconds(self, gaze: Gaze | None, done: int) -> float:
        """Estimate for what the prompt lacks: its tokens in chunks, and the pictures among them that were not seen."""
        tokens, chunk = len(self.request.prompt) - done, self.session.backend.shape.prefill_chunk
        towers = self.pace.towers.estimate(gaze.left(done), None) if gaze is not None else 0.0
        return self.pace.prefill_seconds(tokens, chunk) + towers

    def cycle(self) -> DecodeSteps:
        """Propose from the newest token, verify and accept on the backend; commit what the answer takes."""
        session, options, pace = self.session, self.request.options, self.pace
        drafts = pace.drafts if options.speculative else 0
        self.reason = pace.refuse(self.controls, partial(pace.cycle_seconds, speculative=drafts != 0))
        if self.reason is not None:
            yield Step((), self.reason)
            return
        lane, began = session.acquire_lane(), time.perf_counter()
        cycle: Cycle = yield Asked(
            self.tokens[-1],
            self.sampling,
            self.steered,
            drafts,
            options.logprobs is not None,
            threshold=options.draft_confidence,
            lane=lane,
        )
        logprobs = self._keep(cycle.tokens, cycle.logits, cycle.logprobs)  # may be interrupted: nothing is committed
        session.backend.commit(len(self.tokens), lane, cycle.path)  # the anchor and all new tokens but the last
        session.advance(lane, self.tokens)
        verify_seconds = time.perf_counter() - began - cycle.propose_seconds
        chosen = drafts if options.speculative else None
        pace.record(cycle.propose_seconds, verify_seconds, chosen, cycle.drafts, cycle.accepted)
        yield Step(
            tuple(self.tokens),
            self.reason,
            cycle.propose_seconds,
            verify_seconds,
            sum(cycle.relaxed[: len(self.tokens)]),
            logprobs=logprobs,
            drafts=cycle.drafts,
            accepted=cycle.accepted,
        )

    def _keep(
        self,
        tokens: Sequence[int],
        logits: Callable[[], npt.NDArray[np.float32]] | None,
        logprobs: Callable[[], Sequence[float]] | None = None,
    ) -> tuple[TokenLogprob, ...]:
        """Take the tokens that stop tokens, budget and ``controls.ends`` leave; their log-probabilities."""
        request, controls = self.request, self.controls
        kept, self.reason = cut(tokens, request.stop_token_ids, self.budget, request.at_budget)
        if (end := controls.ends(kept)) is not None:
            kept, self.reason = kept[:end], "stop"
        found = tuple[TokenLogprob, ...]()
        if (alternatives := request.options.logprobs) is not None and logits is not None:
            found = token_logprobs(logits, kept, alternatives, controls.spell, logprobs)
        if self.steered is not None:
            self.steered.commit(kept)
        self.tokens, self.budget = kept, self.budget - len(kept)
        return found


def cut(
    tokens: Sequence[int], stop_token_ids: Collection[int], budget: int, at_budget: FinishReason
) -> tuple[list[int], FinishReason | None]:
    """Keep tokens up to the first stop token (kept) or the budget; return them and why generation ends, if it does."""
    for index, token in enumerate(tokens[:budget]):
        if token in stop_token_ids:
            return list(tokens[: index + 1]), "stop"
    if len(tokens) >= budget:
        return list(tokens[:budget]), at_budget
    return list(tokens), None


def resume(steps: DecodeSteps, outcome: Outcome | None) -> Step | Asked:
    """What comes next of a request that is given what became of the cycle it asked for; None: it asked for none."""
    return steps.throw(outcome) if isinstance(outcome, BaseException) else steps.send(outcome)
