"""Cycles pass by pass, for who looks at every pass: the recording of a self-test, its replay, golden files.

Where the loop asks its backend for whole cycles, the replay makes them of propose, verify and commit and hands over the
rows of each, along the choices of the rows or along recorded tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from edge_dflash.decode.accept import accepted
from edge_dflash.decode.backend import Asked, Backend, Rows
from edge_dflash.decode.cycle import drafted
from edge_dflash.decode.logprobs import token_logprobs
from edge_dflash.pictures.pictured import Sight

T = TypeVar("T")


@dataclass(frozen=True)
class Recorded:
    """A continuation that is known."""

    tokens: Sequence[int]  # behind the prompt; the first is the prefill's
    drafts: Sequence[Sequence[int]]  # that each cycle verifies
    accept_lengths: Sequence[int]  # tokens that each cycle commits


@dataclass(frozen=True)
class Passed(Generic[T]):
    """The passes of a cycle; of the prompt: its last row, which chooses the first token."""

    start: int  # committed tokens before it
    own: T | None  # what was seen in the drafter's rows; None: it was not asked
    drafts: Sequence[int]  # that were verified
    rows: Rows  # of the anchor and the drafts; the next pass replaces them
    tokens: Sequence[int]  # that it commits; as many rows chose them


def replay(
    backend: Backend,
    prompt: Sequence[int],
    recorded: Recorded | None = None,
    *,
    see: Callable[[Rows], T],
    propose: bool = True,
    threshold: float = 0.0,
    sight: Sight | None = None,
) -> Iterator[Passed[T]]:
    """The prompt, then cycles: those that were recorded, or greedy ones without end.

    ``see`` takes from the drafter's rows what is to be known of them, before the verify pass replaces them.
    ``propose``: ask the drafter. ``threshold``: its own drafts from the first on that it is less sure of are not
    verified. A cycle is committed when the next one is asked for. The backend is reset before.
    """
    backend.reset()
    rows = backend.prefill(prompt, sight=sight)
    tokens = list(recorded.tokens if recorded else rows.argmax())
    yield Passed(0, None, (), rows, tokens[:1])
    cycle, at = 0, 0  # of the anchor
    while recorded is None or cycle < len(recorded.drafts):
        start, anchor = backend.length(), tokens[at]
        drafting = propose and backend.shape.drafts and (recorded is None or recorded.drafts[cycle])
        proposed = backend.propose(anchor) if drafting else None
        if recorded is not None:
            drafts = recorded.drafts[cycle]
        else:
            drafts = drafted(Asked(anchor, threshold=threshold), proposed, start + 1) if proposed is not None else []
        own = see(proposed) if proposed is not None else None
        rows = backend.verify([anchor, *drafts])
        if recorded is not None:
            count = recorded.accept_lengths[cycle]
        else:
            choices = rows.argmax()
            count = accepted(drafts, choices) + 1
            tokens += [*drafts[: count - 1], choices[count - 1]]
        yield Passed(start, own, drafts, rows, tokens[at + 1 : at + 1 + count])
        backend.commit(count)
        cycle, at = cycle + 1, at + count


def forced(backend: Backend, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[Passed[int]]:
    """The prompt, then a known continuation, in verifies of all their rows; each token has a row."""
    rows = backend.shape.verify_rows
    ahead = [tokens[at : at + rows] for at in range(1, len(tokens), rows)]
    known = Recorded(tokens, [one[:-1] for one in ahead], [len(one) for one in ahead])
    return replay(backend, prompt, known, see=len, propose=False)


def scored(backend: Backend, line: Sequence[int]) -> list[float]:
    """Log-probability of each token of a line (two at least) after those before it."""
    passes = forced(backend, line[:1], line[1:])
    return [one.logprob for each in passes for one in token_logprobs(each.rows.logits, each.tokens, 0)]
