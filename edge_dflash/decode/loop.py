"""The cycle: propose, verify, accept, commit.

One function, :func:`turns`, is speculative decoding with a DFlash drafter (arXiv 2602.06036) as an optimistic
transaction. Plain decoding is the same function with no drafts: a verify pass with one row. The loop works on token ids
and the Backend protocol; text, models and devices are elsewhere. Who runs it makes its cycles, so that several
sequences can share a pass; :func:`decode` runs one alone.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from edge_dflash.decode.accept import FinishReason, cut
from edge_dflash.decode.backend import Asked, Backend, Cycle, Outcome
from edge_dflash.decode.controls import NO_CONTROLS, Controls, CycleTime, Interrupted, Pace
from edge_dflash.decode.drafts import NO_DRAFTING, Drafting
from edge_dflash.decode.options import Options, Request, admit
from edge_dflash.decode.pictured import Placed
from edge_dflash.decode.sampling import TokenLogprob, token_logprobs
from edge_dflash.decode.session import Session, SessionManager
from edge_dflash.decode.sights import Gaze
from edge_dflash.decode.steering import Path


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
    first: bool = False  # the token behind the prompt
    logprobs: tuple[TokenLogprob, ...] = ()  # of each token, if they were asked for
    drafts: int = 0  # verified
    accepted: int = 0  # of them, though fewer may be among the tokens

    @property
    def chunk(self) -> bool:
        """Whether a part of the prompt was computed, and more of it comes."""
        return not self.tokens and self.finish_reason is None


Turns: TypeAlias = Generator[Step | Asked, Any, None]
"""Steps of a request, and between them each cycle that it asks for: it is sent what the backend found."""


def turns(session: Session, request: Request, controls: Controls = NO_CONTROLS) -> Turns:
    """Answer a request in a session: what of its prompt the state lacks, chunk by chunk, then the cycles.

    Every Step is committed before it is yielded; its last token, the next anchor, is not in the caches yet. A consumer
    may stop at any Step: the session is then at that commit. Between two Steps other sessions may use the backend;
    between what is asked and what is sent, other lanes only. It ends when its session has no such request any more.
    """
    backend, options, pace = session.backend, request.options, controls.pace or Pace()
    path = Path(options.sampling, controls.constraint, controls.relaxation, request.stop_token_ids)
    prompt, chunk, seconds, begun = request.prompt, backend.shape.prefill_chunk, 0.0, False
    done, gaze = session.begin(request), session.gaze(request)
    try:
        while True:
            if refused := pace.refuse(controls, partial(_fill_seconds, pace, len(prompt) - done, chunk, gaze, done)):
                yield Step((), refused, verify_seconds=seconds)
                return
            end = min(end for end in (done + chunk, len(prompt), *session.cuts) if end > done)
            if (unseen := gaze.unseen(done, end)) is not None:
                seconds += _see(gaze, unseen, pace)
            else:
                lane, began, begun = session.enter(), time.perf_counter(), True
                rows = backend.prefill(prompt[done:end], lane, gaze.sight(done, end))
                rows.argmax()  # wait: no more than one chunk is ever under way
                pace.record_prefill(end - done, took := time.perf_counter() - began)
                done, seconds = end, seconds + took
                if done == len(prompt):
                    break
                session.chunk(lane, done)
            yield Step((), None)
            if not session.answers(request):
                return
            if not begun:
                done = session.begin(request, again=True)
        began = time.perf_counter()
        tokens, reason = _kept([path.first(rows, len(prompt))], request.budget, request, controls)
        logprobs = token_logprobs(rows.logits, tokens, options.logprobs, controls.spell)
        path.commit(tokens)
        session.advance(lane, tokens, first=True)
        took = seconds + time.perf_counter() - began
        yield Step(tuple(tokens), reason, verify_seconds=took, first=True, logprobs=logprobs)
        if reason is None:
            yield from _cycles(session, request, controls, pace, path, tokens)
    except Interrupted as interrupted:  # while it waited for the grammar: nothing of this cycle was committed
        yield Step((), interrupted.reason)
    except BaseException as error:
        if not isinstance(error, GeneratorExit):  # left between two passes
            session.fail(error)
        raise
    finally:
        session.resting = True


def _cycles(session: Session, request: Request, controls: Controls, pace: Pace, path: Path, tokens: list[int]) -> Turns:
    """The cycles behind the first token, until one ends the answer."""
    options, budget, reason = request.options, request.budget, None
    while reason is None and session.answers(request):
        drafts = pace.drafts if options.speculative else 0
        if refused := pace.refuse(controls, partial(pace.cycle_seconds, speculative=drafts != 0)):
            yield Step((), refused)
            break
        lane, began = session.enter(), time.perf_counter()
        cycle: Cycle = yield _asked(tokens[-1], path, drafts, options, lane)
        budget -= len(tokens)
        tokens, reason = _kept(cycle.tokens, budget, request, controls)
        logprobs = token_logprobs(cycle.logits, tokens, options.logprobs, controls.spell, cycle.logprobs)
        path.commit(tokens)  # may be interrupted: then nothing is committed
        session.backend.commit(len(tokens), lane, cycle.path)  # the anchor and all new tokens but the last
        session.advance(lane, tokens)
        propose_seconds, chosen = cycle.propose_seconds, drafts if options.speculative else None
        verify_seconds = time.perf_counter() - began - propose_seconds
        pace.record(CycleTime(propose_seconds, verify_seconds, chosen, cycle.drafts, cycle.accepted))
        yield _step(cycle, tokens, reason, verify_seconds, logprobs)


def _see(gaze: Gaze, unseen: Placed, pace: Pace) -> float:
    """Run the tower over a picture; its seconds."""
    began = time.perf_counter()
    gaze.see(unseen)
    pace.record_tower(unseen.picture.tokens, took := time.perf_counter() - began)
    return took


def _fill_seconds(pace: Pace, tokens: int, chunk: int, gaze: Gaze, done: int) -> float:
    """Estimate for what a prompt lacks: so many tokens in chunks, and the pictures that were not seen among them."""
    return pace.prefill_seconds(tokens, chunk) + pace.tower_seconds(gaze.left(done))


def given(steps: Turns, outcome: Outcome | None) -> Step | Asked:
    """What comes next of a request that is given what became of the cycle it asked for; None: it asked for none."""
    return steps.throw(outcome) if isinstance(outcome, BaseException) else steps.send(outcome)


def decode(session: Session, request: Request, controls: Controls = NO_CONTROLS) -> Iterator[Step]:
    """:func:`turns` of one request that has the backend to itself."""
    steps = turns(session, request, controls)
    outcome: Outcome | None = None
    with closing(steps):
        while True:
            try:
                found = given(steps, outcome)
            except StopIteration:
                return
            outcome = None
            if isinstance(found, Step):
                yield found
                continue
            try:
                outcome = session.backend.cycle(found)
            except BaseException as error:
                outcome = error


def _asked(anchor: int, path: Path, drafts: int | None, options: Options, lane: int) -> Asked:
    """What the next cycle is asked."""
    read_logits, threshold = options.logprobs is not None, options.draft_confidence
    return Asked(anchor, path.sampling, path.steering, drafts, read_logits, threshold=threshold, lane=lane)


def _step(
    cycle: Cycle,
    tokens: Sequence[int],
    reason: FinishReason | None,
    verify_seconds: float,
    logprobs: tuple[TokenLogprob, ...],
) -> Step:
    """The step of a cycle of which ``tokens`` were committed."""
    relaxed = sum(cycle.relaxed[: len(tokens)])
    return Step(
        *(tuple(tokens), reason, cycle.propose_seconds, verify_seconds, relaxed),
        logprobs=logprobs,
        drafts=cycle.drafts,
        accepted=cycle.accepted,
    )


def _kept(
    tokens: Sequence[int], budget: int, request: Request, controls: Controls
) -> tuple[list[int], FinishReason | None]:
    """Cut what may be committed by stop tokens and budget, then by ``controls.ends``; why it ends, if it does."""
    kept, reason = cut(tokens, request.stop_token_ids, budget, request.at_budget)
    end = controls.ends(kept)
    return (kept, reason) if end is None else (kept[:end], "stop")


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one generation."""

    prefill_seconds: float  # prompt to first token
    propose_seconds: float
    verify_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class Generation:
    """A finished generation. ``accept_lengths`` holds the tokens committed by each verify, bonus token included."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    accept_lengths: tuple[int, ...]
    timings: Timings
    relaxed: int = 0  # tokens that stand only because acceptance was relaxed: not 0 means that the output is lossy
    drafting: Drafting = NO_DRAFTING

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per verify; 0 when the first token ended the generation."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 0.0


def stream(
    backend: Backend,
    prompt: Sequence[int],
    options: Options,
    *,
    stop_token_ids: Sequence[int] = (),
    controls: Controls = NO_CONTROLS,
    pictures: Sequence[Placed] = (),
) -> Iterator[Step]:
    """:func:`decode` on a backend without sessions: ``prompt`` goes on behind the rows that its first lane holds.

    ``pictures`` are those of a prompt that goes on behind nothing. Raises RequestError and ContextError before the
    backend is touched.
    """
    manager, held = SessionManager(backend), backend.length()
    request = admit(backend.shape, (*[0] * held, *prompt) if prompt else (), options, stop_token_ids, pictures=pictures)
    session = manager.open()
    if held:
        session.stand_in(request.pictured, held)  # whatever the tokens of the rows are
        manager.lanes.occupy(session, 0)
    return decode(session, request, controls)


def generate(
    backend: Backend,
    prompt: Sequence[int],
    options: Options,
    *,
    stop_token_ids: Sequence[int] = (),
    controls: Controls = NO_CONTROLS,
    pictures: Sequence[Placed] = (),
) -> Generation:
    """Run :func:`stream` to its end."""
    run = stream(backend, prompt, options, stop_token_ids=stop_token_ids, controls=controls, pictures=pictures)
    return collect(list(run))


def collect(steps: Sequence[Step]) -> Generation:
    """Sum up the steps of one finished stream."""
    reason = steps[-1].finish_reason
    if reason is None:
        raise ValueError("the stream was not finished: its last step has no finish reason")
    first, *cycles = [step for step in steps if not step.chunk]
    propose = sum(step.propose_seconds for step in cycles)
    verify = sum(step.verify_seconds for step in cycles)
    prefill = first.verify_seconds
    verified = [step for step in cycles if step.tokens]
    return Generation(
        tokens=tuple(token for step in steps for token in step.tokens),
        finish_reason=reason,
        accept_lengths=tuple(len(step.tokens) for step in verified),
        timings=Timings(prefill, propose, verify, prefill + propose + verify),
        relaxed=sum(step.relaxed for step in steps),
        drafting=Drafting(tuple(step.drafts for step in verified), tuple(step.accepted for step in verified)),
    )
