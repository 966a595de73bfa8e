"""What the host decides along a path of drafts: a grammar, the thinking before it, acceptance that is relaxed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from edge_dflash.decode.accept import Relaxation, ThinkingSpan
from edge_dflash.decode.backend import Rows, Steering
from edge_dflash.decode.sampling import Mask, Packed, Sampling, choose, pack
from edge_dflash.errors import RequestError

Ask = Callable[[int, Packed | None], int | None]
"""Row and its mask: the token that the row chooses under it; None: no more drafts are wanted."""


class Constraint(Protocol):
    """A grammar standing behind the tokens that were committed. Not thread-safe.

    A mask is a function of the tokens before it alone. Masks are read-only, and stay as they are until the ``advance``
    after the next one. Every method may raise Interrupted, and RequestError when the grammar cannot go on at this
    point: plain decoding fails there, too.
    """

    def walk(self, free: Sequence[int], ask: Ask) -> list[int]:
        """Drafts that the grammar allows, made from the ``free`` ones; fewer where it ends or becomes too complex.

        A draft that is refused is replaced by what is forced there, or else by what ``ask`` gives.
        """
        ...

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """Tokens that may come next, and behind each draft; None where every one may.

        Fewer than drafts + 1, but at least one, where the grammar becomes too complex on the way. The drafts are those
        that the last ``walk`` gave, the first of them, or none.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens that were committed. RequestError, here or at the next call, for one not allowed."""
        ...


class Path:
    """The choices of one request.

    With a grammar, drafts that it forbids are replaced before they are verified and tokens that it forces are
    proposed without asking the drafter; both only raise the accept length. The target's own choice at every row is
    made among the tokens that the grammar allows there, whatever was drafted, so constrained speculative decoding
    equals constrained plain decoding. A grammar that becomes too complex along the drafts ends the path there: plain
    decoding may never come that way, and where it does, it fails in the same place.
    """

    def __init__(
        self,
        sampling: Sampling,
        constraint: Constraint | None,
        relaxation: Relaxation | None,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self._stop = frozenset(stop_token_ids)
        self._thinking = ThinkingSpan(relaxation, stop_token_ids) if relaxation is not None else None

    @property
    def steering(self) -> Steering | None:
        """What a cycle asks the host; None where logits and sampling alone make every choice."""
        return None if self._constraint is None and self._thinking is None else self

    @property
    def tolerant(self) -> bool:
        """Whether acceptance is relaxed."""
        return self._thinking is not None

    def first(self, rows: Rows, position: int) -> int:
        """The choice behind the prompt, for ``position``; ``rows`` has one row."""
        masks = self.masks(()) if self._constraint is not None else None
        return choose(rows, self.sampling, position, masks)[0]

    def drafts(self, rows: Rows, position: int) -> list[int]:
        """Draft tokens for positions ``position``, ...; fewer than rows when the grammar ends or gives up before.

        The drafter is asked once more at the first draft that is refused where nothing is forced; at the second the
        path ends. Behind the first the block has mostly parted from what was drafted (out of its domain the demo pair
        commits 3.74 tokens a cycle asked once, as asked each time, and 3.58 not asked), and each asking is a wait.
        """
        free = choose(rows, self.sampling, position)
        if self._constraint is None:
            return free
        asked = False

        def ask(row: int, mask: Packed | None) -> int | None:
            nonlocal asked
            if asked:
                return None
            asked = True
            return choose(rows, self.sampling, position + row, [mask], first=row)[0]

        path = self._constraint.walk(free, ask)
        return path[: self._stops_at(path) + 1]

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """What may follow the anchor and each draft; fewer where the grammar gives up on the way."""
        if self._constraint is None:
            return [None] * (len(drafts) + 1)
        end = self._stops_at(drafts)  # nothing follows a stop token, and nothing is chosen there
        masks = self._constraint.masks(drafts[:end])
        return masks + [None] * (len(drafts) - end) if len(masks) > end else masks

    def _stops_at(self, tokens: Sequence[int]) -> int:
        """Where the first stop token is; behind all tokens when none is."""
        return next((at for at, token in enumerate(tokens) if token in self._stop), len(tokens))

    def tolerated(self, rows: Rows, drafts: Sequence[int], choices: Sequence[int]) -> list[bool]:
        """Which drafts are nearly as good as the choices (lossy)."""
        return [] if self._thinking is None else self._thinking.tolerated(rows.logits(), drafts, choices)

    def commit(self, tokens: Sequence[int]) -> None:
        """Walk over tokens that became final."""
        if self._constraint is not None:
            self._constraint.advance(tokens)
        if self._thinking is not None:
            self._thinking.commit(tokens)


class AfterThinking:
    """Everything may come until one of ``close_ids`` was pushed; then ``then`` must come; then ``inner`` begins.

    ``then`` is what the chat template writes between the thinking and the answer (a blank line), so that the model
    answers where it was trained to. ``stop_token_ids`` are not allowed inside the span: an answer that ends there
    would not satisfy the inner constraint. ``vocab_size`` is the model's.
    """

    def __init__(
        self,
        inner: Constraint,
        close_ids: Collection[int],
        vocab_size: int,
        *,
        then: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """Raise ValueError when there is no token that closes the span, or it is one that is not allowed in it."""
        if not close_ids or not set(close_ids).isdisjoint(stop_token_ids):
            raise ValueError(f"the thinking span ends at {tuple(close_ids)}; give tokens that are no stop tokens")
        self._inner = inner
        self._close = frozenset(close_ids)
        self._then = tuple(then)
        self._size = vocab_size
        self._stop = frozenset(stop_token_ids)
        self._words: Packed | None = None  # of the span
        if stop_token_ids:
            allowed = np.ones(vocab_size, np.bool_)
            allowed[list(stop_token_ids)] = False
            self._words = _read_only(allowed)
        self._closed = False
        self._between = 0  # tokens of ``then`` that came

    @property
    def closed(self) -> bool:
        """Whether the span was closed."""
        return self._closed

    def walk(self, free: Sequence[int], ask: Ask) -> list[int]:
        """See Constraint."""
        path: list[int] = []
        closed, between = self._closed, self._between
        for row, token in enumerate(free):
            if closed and between == len(self._then):
                return path + self._inner.walk(free[row:], lambda inner, mask: ask(len(path) + inner, mask))
            if closed:
                path.append(self._then[between])
                between += 1
                continue
            chosen = ask(row, self._words) if token in self._stop else token
            if chosen is None:
                break
            path.append(chosen)
            closed = chosen in self._close
        return path

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """See Constraint."""
        masks: list[Packed | None] = []
        closed, between = self._closed, self._between
        for row in range(len(drafts) + 1):
            if closed and between == len(self._then):
                return masks + self._inner.masks(drafts[row:])
            masks.append(self._only(self._then[between]) if closed else self._words)
            if closed:
                between += 1
            elif row < len(drafts):
                closed = drafts[row] in self._close
        return masks

    def advance(self, tokens: Sequence[int]) -> None:
        """See Constraint."""
        for row, token in enumerate(tokens):
            if self._closed and self._between == len(self._then):
                self._inner.advance(tokens[row:])
                return
            if token in self._stop or (self._closed and token != self._then[self._between]):
                raise RequestError(f"the grammar does not take token {token}, which was chosen")
            if self._closed:
                self._between += 1
            else:
                self._closed = token in self._close

    def _only(self, token: int) -> Packed:
        allowed = np.zeros(self._size, np.bool_)
        allowed[token] = True
        return _read_only(allowed)


class InCalls:
    """Everything may come until a token opens a call: ``call`` begins there, and ends with the token that closes it.

    Inside a thinking span, which ``thinks`` opens and closes, the tokens of calls are text.
    """

    def __init__(
        self, call: Callable[[], Constraint], opens: int, closes: int, thinks: tuple[int, int] | None, *, thinking: bool
    ) -> None:
        """``call`` gives a constraint at its start; ``thinking``: the answer begins inside a thinking span."""
        self._make = call
        self._call: Constraint | None = None  # that of the call that is open, or of the next one
        self._opens, self._closes, self._thinks = opens, closes, thinks
        self._state = _THINKING if thinking else _FREE

    def walk(self, free: Sequence[int], ask: Ask) -> list[int]:
        """See Constraint. Drafts behind the end of a call come with the next cycle."""
        row, state = 0, self._state
        while row < len(free) and state != _CALLING:
            state = self._next(state, free[row])
            row += 1
        if row == len(free):
            return list(free)
        inner = self._inner().walk(free[row:], lambda at, mask: ask(row + at, mask))
        return [*free[:row], *inner[: self._end(inner)]]

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """See Constraint."""
        state = self._state
        masks: list[Packed | None] = []
        for row in range(len(drafts) + 1):
            if state == _CALLING:
                inner = drafts[row:][: self._end(drafts[row:])]
                ended = bool(inner) and inner[-1] == self._closes
                masks += self._inner().masks(inner[:-1] if ended else inner)
                return [*masks, None] if ended and len(masks) == row + len(inner) else masks
            masks.append(None)
            if row < len(drafts):
                state = self._next(state, drafts[row])
        return masks

    def advance(self, tokens: Sequence[int]) -> None:
        """See Constraint."""
        at = 0
        while at < len(tokens):
            if self._state != _CALLING:
                self._state = self._next(self._state, tokens[at])
                at += 1
                continue
            inner = tokens[at:][: self._end(tokens[at:])]
            self._inner().advance(inner)
            at += len(inner)
            if inner[-1] == self._closes:
                self._state, self._call = _FREE, None

    def _inner(self) -> Constraint:
        self._call = self._call or self._make()
        return self._call

    def _next(self, state: str, token: int) -> str:
        """The state behind a token that is no part of a call."""
        if self._thinks is not None and token == self._thinks[state == _THINKING]:
            return _FREE if state == _THINKING else _THINKING
        return _CALLING if token == self._opens and state == _FREE else state

    def _end(self, tokens: Sequence[int]) -> int:
        """How many of the tokens belong to the call: those up to the one that closes it."""
        return next((at + 1 for at, token in enumerate(tokens) if token == self._closes), len(tokens))


_FREE, _THINKING, _CALLING = "free", "thinking", "calling"


def _read_only(allowed: Mask) -> Packed:
    words = pack(allowed)
    words.flags.writeable = False
    return words
