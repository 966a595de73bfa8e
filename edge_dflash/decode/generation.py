"""A request alone on a backend, run to its end; and what the steps of any request add up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.backend import Backend, Outcome
from edge_dflash.decode.controls import NO_CONTROLS, Controls
from edge_dflash.decode.drafts import NO_DRAFTING, Drafting
from edge_dflash.decode.loop import Step, decode_steps, resume
from edge_dflash.decode.options import Options, Request, admit
from edge_dflash.decode.session import Session, SessionManager
from edge_dflash.pictures.pictured import Placed


def decode(session: Session, request: Request, controls: Controls = NO_CONTROLS) -> Iterator[Step]:
    """:func:`decode_steps` of one request that has the backend to itself."""
    steps = decode_steps(session, request, controls)
    outcome: Outcome | None = None
    with closing(steps):
        while True:
            try:
                found = resume(steps, outcome)
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


@dataclass(frozen=True)
class Generation:
    """A finished generation. ``accept_lengths`` holds the tokens committed by each verify, bonus token included."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    accept_lengths: tuple[int, ...]
    prefill_seconds: float  # prompt to first token
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
    """:func:`decode` on a backend without sessions: ``prompt`` continues after the rows that its first lane holds.

    ``pictures`` are those of a prompt that continues nothing. Raises RequestError and ContextError before the
    backend is touched.
    """
    manager, held = SessionManager(backend), backend.length()
    request = admit(backend.shape, (*[0] * held, *prompt) if prompt else (), options, stop_token_ids, pictures=pictures)
    session = manager.open()
    if held:
        session.hold_prompt(request.pictured, held)  # whatever the tokens of the rows are
        manager.lanes.assign(session, 0)
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
    verified = [step for step in cycles if step.tokens]
    return Generation(
        tokens=tuple(token for step in steps for token in step.tokens),
        finish_reason=reason,
        accept_lengths=tuple(len(step.tokens) for step in verified),
        prefill_seconds=first.verify_seconds,
        relaxed=sum(step.relaxed for step in steps),
        drafting=Drafting(tuple(step.drafts for step in verified), tuple(step.accepted for step in verified)),
    )
