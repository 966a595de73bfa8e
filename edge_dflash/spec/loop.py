"""The cycle: propose, verify, accept, commit.

One function, :func:`stream`, is speculative decoding with a DFlash drafter (arXiv 2602.06036) as an optimistic
transaction. Plain decoding is the same function with no drafts: a verify pass with one row. The loop knows token ids
and the Backend protocol, nothing of text, models or devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edge_dflash.backends.base import Backend, Cycling
from edge_dflash.errors import ContextError, RequestError
from edge_dflash.spec.accept import FinishReason, accepted, cut
from edge_dflash.spec.constraint import Constraint
from edge_dflash.spec.pace import CycleTime, Pace
from edge_dflash.spec.path import Path
from edge_dflash.spec.relaxed import Relaxation
from edge_dflash.spec.sampling import Sampling


@dataclass(frozen=True)
class DecodeOptions:
    """What a request may set."""

    max_new_tokens: int | None = None  # None: until a stop token or the end of the usable context
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # 1: no limit
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def sampling(self) -> Sampling:
        """The part that chooses tokens; raises RequestError on a bad value."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


def _never() -> bool:
    return False


def _nowhere(tokens: Sequence[int]) -> int | None:
    return None


@dataclass(frozen=True)
class Controls:
    """What steers a running request. Only ``relaxation`` changes which tokens come; the rest decides when to end."""

    constraint: Constraint | None = None  # grammar, standing at the beginning of the answer
    relaxation: Relaxation | None = None  # lossy acceptance inside the thinking span
    deadline: float | None = None  # time.perf_counter() by which the last step must have ended
    cancelled: Callable[[], bool] = _never  # asked between cycles
    # Told all tokens in order, before they are committed: how many of them the answer still takes; None: it goes on.
    ends: Callable[[Sequence[int]], int | None] = _nowhere
    pace: Pace | None = None  # the engine's measured times; None: nothing is known, and drafting never rests

    def cut(
        self, tokens: Sequence[int], stop_token_ids: Sequence[int], budget: int, at_budget: FinishReason
    ) -> tuple[list[int], FinishReason | None]:
        """Cut what may be committed by stop tokens and budget, then by ``ends``."""
        kept, reason = cut(tokens, stop_token_ids, budget, at_budget)
        end = self.ends(kept)
        return (kept, reason) if end is None else (kept[:end], "stop")

    def refuse(self, seconds: float) -> FinishReason | None:
        """Why a pass of ``seconds`` must not start now; None when it may."""
        if self.cancelled():
            return "cancelled"
        if self.deadline is not None and time.perf_counter() + seconds > self.deadline:
            return "deadline"
        return None


NO_CONTROLS = Controls()


@dataclass(frozen=True)
class Step:
    """Tokens that became final together: the first token after prefill, then one Step per cycle.

    A request that ends by its deadline or by being cancelled closes with a Step without tokens.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None  # set on the last step
    propose_seconds: float  # 0 for the first step and in plain decoding
    verify_seconds: float  # of the first step: prefill
    relaxed: int = 0  # drafts that stand only because acceptance was relaxed


@dataclass(frozen=True)
class Offer:
    """What one propose-verify-accept found: n accepted drafts and the target's own choice after them."""

    tokens: list[int]
    relaxed: list[bool]  # for each token, whether it stands only because acceptance was relaxed
    propose_seconds: float


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

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per verify; 0 when the first token ended the generation."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 0.0


def stream(
    backend: Backend,
    prompt: Sequence[int],
    options: DecodeOptions,
    *,
    speculative: bool = True,
    controls: Controls = NO_CONTROLS,
) -> Iterator[Step]:
    """Append ``prompt`` to the backend's sequence and decode.

    Every Step is committed before it is yielded, and the last committed token is always the next anchor: it is not in
    the caches yet. A consumer may stop at any Step; the backend is then at that commit. Raises RequestError before
    the backend is touched.
    """
    budget, at_budget = admit(backend, prompt, options)
    path = Path(options.sampling, controls.constraint, controls.relaxation, options.stop_token_ids)
    pace = controls.pace or Pace()
    if reason := controls.refuse(pace.prefill_seconds(len(prompt))):
        pace.record_refusal(reason)
        yield Step((), reason, 0.0, 0.0)
        return

    began = time.perf_counter()
    choices, _ = path.choices(backend.prefill(prompt), (), backend.length)
    tokens, reason = controls.cut(choices, options.stop_token_ids, budget, at_budget)
    path.commit(tokens)
    step = Step(tuple(tokens), reason, 0.0, time.perf_counter() - began)
    pace.record_prefill(len(prompt), step.verify_seconds)
    yield step

    while reason is None:
        drafting = speculative and (controls.pace is None or pace.drafting)
        if reason := controls.refuse(pace.cycle_seconds(speculative=drafting)):
            pace.record_refusal(reason)
            yield Step((), reason, 0.0, 0.0)
            return
        budget -= len(tokens)
        began = time.perf_counter()
        offer = speculate(backend, path, tokens[-1], drafting=drafting)
        tokens, reason = controls.cut(offer.tokens, options.stop_token_ids, budget, at_budget)
        backend.commit(len(tokens))  # the anchor and all new tokens but the last
        path.commit(tokens)
        verify_seconds = time.perf_counter() - began - offer.propose_seconds
        pace.record(CycleTime(offer.propose_seconds, verify_seconds, len(tokens)))
        relaxed = sum(offer.relaxed[: len(tokens)])
        yield Step(tuple(tokens), reason, offer.propose_seconds, verify_seconds, relaxed)


def speculate(backend: Backend, path: Path, anchor: int, *, drafting: bool) -> Offer:
    """Propose, verify, accept: the tokens that may be committed behind ``anchor``. Commits nothing.

    Where logits and sampling alone choose, a backend may run all three by itself.
    """
    if drafting and path.free and isinstance(backend, Cycling):
        cycle = backend.cycle(anchor, path.sampling)
        return Offer(list(cycle.tokens), [False] * len(cycle.tokens), cycle.propose_seconds)
    position = backend.length + 1
    began = time.perf_counter()
    drafts = path.drafts(backend.propose(anchor), position) if drafting else []
    propose_seconds = time.perf_counter() - began if drafting else 0.0
    choices, tolerated = path.choices(backend.verify([anchor, *drafts]), drafts, position)
    n = accepted(drafts[: len(choices) - 1], choices, tolerated)
    relaxed = [draft != choice for draft, choice in zip(drafts[:n], choices, strict=False)]
    return Offer([*drafts[:n], choices[n]], [*relaxed, False], propose_seconds)


def generate(
    backend: Backend,
    prompt: Sequence[int],
    options: DecodeOptions,
    *,
    speculative: bool = True,
    controls: Controls = NO_CONTROLS,
) -> Generation:
    """Run :func:`stream` to its end."""
    return collect(list(stream(backend, prompt, options, speculative=speculative, controls=controls)))


def collect(steps: Sequence[Step]) -> Generation:
    """Sum up the steps of one finished stream."""
    reason = steps[-1].finish_reason
    if reason is None:
        raise ValueError("the stream was not finished: its last step has no finish reason")
    prefill = steps[0].verify_seconds
    propose = sum(step.propose_seconds for step in steps[1:])
    verify = sum(step.verify_seconds for step in steps[1:])
    return Generation(
        tokens=tuple(token for step in steps for token in step.tokens),
        finish_reason=reason,
        accept_lengths=tuple(len(step.tokens) for step in steps[1:] if step.tokens),
        timings=Timings(prefill, propose, verify, prefill + propose + verify),
        relaxed=sum(step.relaxed for step in steps),
    )


def admit(backend: Backend, prompt: Sequence[int], options: DecodeOptions) -> tuple[int, FinishReason]:
    """Check a request; return its token budget and the reason to give when the budget is used up.

    Raises RequestError for an empty prompt or an id outside the vocabulary, ContextError when prompt and budget do
    not fit the usable context (maximum context minus one block).
    """
    shape = backend.shape
    if not prompt:
        raise RequestError("the prompt has no tokens; give at least one")
    for token in prompt:
        if not 0 <= token < shape.vocab_size:
            raise RequestError(f"token id {token} is outside the vocabulary of {shape.vocab_size}")
    for token in options.stop_token_ids:
        if not 0 <= token < shape.vocab_size:
            raise RequestError(f"stop token id {token} is outside the vocabulary of {shape.vocab_size}")
    used = backend.length + len(prompt)
    room = shape.usable_context - used
    limits = f"{shape.usable_context} tokens (context {shape.max_context} minus block {shape.block_size})"
    if room < 1:
        raise ContextError(f"the prompt ends at token {used}, the usable context is {limits}; shorten the prompt")
    wanted = options.max_new_tokens
    if wanted is None:
        return room, "context"
    if type(wanted) is not int or wanted < 1:
        raise RequestError(f"max_new_tokens is {wanted!r}; give a whole number of at least 1")
    if wanted > room:
        raise ContextError(
            f"{used} prompt tokens and {wanted} new tokens exceed the usable context of {limits}; "
            f"at most {room} new tokens fit"
        )
    return wanted, "length"
