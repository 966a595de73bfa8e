"""The cycle: propose, verify, accept, commit.

One function, :func:`stream`, is speculative decoding with a DFlash drafter (arXiv 2602.06036) as an optimistic
transaction. Plain decoding is the same function with no drafts: a verify pass with one row. The loop knows token ids
and the Backend protocol, nothing of text, models or devices.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.backend import Asked, Backend, PairShape, Rows
from edge_dflash.decode.controls import NO_CONTROLS, Controls, CycleTime, Interrupted, Pace
from edge_dflash.decode.sampling import Sampling, TokenLogprob, token_logprobs
from edge_dflash.decode.steering import Path
from edge_dflash.errors import ContextError, RequestError


@dataclass(frozen=True)
class DecodeOptions:
    """What a request may set."""

    max_new_tokens: int | None = None  # None: until a stop token or the end of the usable context
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # 1: no limit
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # so many alternatives of each token; None: no log-probabilities

    @property
    def sampling(self) -> Sampling:
        """The part that chooses tokens; raises RequestError on a bad value."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


@dataclass(frozen=True)
class Step:
    """Tokens that became final together: the first token after prefill, then one Step per cycle.

    Between two chunks of a prompt there is a Step without tokens, and a request that ends by its deadline or by being
    cancelled closes with one.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None  # set on the last step
    propose_seconds: float  # 0 for the first step and in plain decoding
    verify_seconds: float  # of the first token: prefill; 0 between chunks
    relaxed: int = 0  # drafts that stand only because acceptance was relaxed
    first: bool = False  # the token behind the prompt
    logprobs: tuple[TokenLogprob, ...] = ()  # of each token, if they were asked for

    @property
    def chunk(self) -> bool:
        """Whether a part of the prompt was computed, and more of it comes."""
        return not self.tokens and self.finish_reason is None


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
    yield from decode(
        backend,
        prompt,
        options,
        admit(backend.shape, backend.length(), prompt, options),
        speculative=speculative,
        controls=controls,
    )


def decode(
    backend: Backend,
    prompt: Sequence[int],
    options: DecodeOptions,
    admitted: Admitted,
    *,
    speculative: bool = True,
    controls: Controls = NO_CONTROLS,
) -> Iterator[Step]:
    """:func:`stream` for a request that was admitted: what of ``prompt`` the sequence lacks, then the cycles."""
    try:
        yield from _decode(backend, prompt, options, admitted, speculative, controls)
    except Interrupted as interrupted:  # while it waited for the grammar: nothing of this cycle was committed
        yield Step((), interrupted.reason, 0.0, 0.0)


def _decode(
    backend: Backend,
    prompt: Sequence[int],
    options: DecodeOptions,
    admitted: Admitted,
    speculative: bool,
    controls: Controls,
) -> Iterator[Step]:
    path = Path(options.sampling, controls.constraint, controls.relaxation, options.stop_token_ids)
    pace = controls.pace or Pace()
    budget, at_budget = admitted.budget, admitted.at_budget
    rows, prefill_seconds = yield from _prefill(backend, prompt, controls, pace)
    if rows is None:
        return
    began = time.perf_counter()
    tokens, reason = controls.cut([path.first(rows, backend.length())], options.stop_token_ids, budget, at_budget)
    logprobs = token_logprobs(rows.logits, tokens, options.logprobs, controls.spell)
    path.commit(tokens)
    seconds = prefill_seconds + time.perf_counter() - began
    yield Step(tuple(tokens), reason, 0.0, seconds, first=True, logprobs=logprobs)

    while reason is None:
        drafting = speculative and (controls.pace is None or pace.drafting)
        if refused := controls.refuse(partial(pace.cycle_seconds, speculative=drafting)):
            pace.record_refusal(refused)
            yield Step((), refused, 0.0, 0.0)
            return
        if controls.hold is not None:
            controls.hold()
        budget -= len(tokens)
        began = time.perf_counter()
        cycle = backend.cycle(
            Asked(tokens[-1], path.sampling, path.steering, drafting=drafting, logits=options.logprobs is not None)
        )
        tokens, reason = controls.cut(cycle.tokens, options.stop_token_ids, budget, at_budget)
        logprobs = token_logprobs(cycle.logits, tokens, options.logprobs, controls.spell)
        path.commit(tokens)  # may be interrupted: then nothing of the cycle is committed
        backend.commit(len(tokens))  # the anchor and all new tokens but the last
        verify_seconds = time.perf_counter() - began - cycle.propose_seconds
        pace.record(CycleTime(cycle.propose_seconds, verify_seconds, len(tokens)))
        relaxed = sum(cycle.relaxed[: len(tokens)])
        yield Step(tuple(tokens), reason, cycle.propose_seconds, verify_seconds, relaxed, logprobs=logprobs)


def _prefill(
    backend: Backend, prompt: Sequence[int], controls: Controls, pace: Pace
) -> Generator[Step, None, tuple[Rows | None, float]]:
    """Compute a prompt chunk by chunk, with a Step between two: logits of its last row, and seconds.

    None for the logits when it was refused: before the first chunk nothing is touched.
    """
    done, seconds = 0, 0.0
    while True:
        if reason := controls.refuse(partial(pace.prefill_seconds, len(prompt) - done, backend.shape.prefill_chunk)):
            pace.record_refusal(reason)
            yield Step((), reason, 0.0, seconds)
            return None, seconds
        if controls.hold is not None:
            controls.hold()
        length = backend.length()
        ends = [length + len(prompt) - done, length + backend.shape.prefill_chunk, *controls.cuts]
        chunk = min(end for end in ends if end > length) - length
        began = time.perf_counter()
        rows = backend.prefill(prompt[done : done + chunk])
        rows.argmax()  # wait: no more than one chunk is ever under way
        took = time.perf_counter() - began
        pace.record_prefill(chunk, took)
        done, seconds = done + chunk, seconds + took
        if done == len(prompt):
            return rows, seconds
        yield Step((), None, 0.0, 0.0)


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
    first, *cycles = [step for step in steps if not step.chunk]
    propose = sum(step.propose_seconds for step in cycles)
    verify = sum(step.verify_seconds for step in cycles)
    prefill = first.verify_seconds
    return Generation(
        tokens=tuple(token for step in steps for token in step.tokens),
        finish_reason=reason,
        accept_lengths=tuple(len(step.tokens) for step in cycles if step.tokens),
        timings=Timings(prefill, propose, verify, prefill + propose + verify),
        relaxed=sum(step.relaxed for step in steps),
    )


@dataclass(frozen=True)
class Admitted:
    """What a request may generate."""

    budget: int  # tokens
    at_budget: FinishReason  # why it ends when they are used up


def admit(shape: PairShape, length: int, prompt: Sequence[int], options: DecodeOptions) -> Admitted:
    """Check a request whose ``prompt`` goes on behind ``length`` rows.

    Raises RequestError for an empty prompt or an id outside the vocabulary, ContextError when prompt and budget do
    not fit the usable context (maximum context minus one block).
    """
    if not prompt:
        raise RequestError("the prompt has no tokens; give at least one")
    for token in prompt:
        if not 0 <= token < shape.vocab_size:
            raise RequestError(f"token id {token} is outside the vocabulary of {shape.vocab_size}")
    for token in options.stop_token_ids:
        if not 0 <= token < shape.vocab_size:
            raise RequestError(f"stop token id {token} is outside the vocabulary of {shape.vocab_size}")
    used = length + len(prompt)
    room = shape.usable_context - used
    limits = f"{shape.usable_context} tokens (context {shape.max_context} minus block {shape.block_size})"
    if room < 1:
        raise ContextError(f"the prompt ends at token {used}, the usable context is {limits}; shorten the prompt")
    wanted = options.max_new_tokens
    if wanted is None:
        return Admitted(room, "context")
    if type(wanted) is not int or wanted < 1:
        raise RequestError(f"max_new_tokens is {wanted!r}; give a whole number of at least 1")
    if wanted > room:
        raise ContextError(
            f"{used} prompt tokens and {wanted} new tokens exceed the usable context of {limits}; "
            f"at most {room} new tokens fit"
        )
    return Admitted(wanted, "length")
