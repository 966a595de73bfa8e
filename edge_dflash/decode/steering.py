"""What the host decides along a path of drafts: a grammar, free text around it, acceptance that is relaxed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from edge_dflash.decode.accept import Relaxation, ThinkingSpan
from edge_dflash.decode.backend import Rows
from edge_dflash.decode.sampling import Packed, Sampling, choose, pack
from edge_dflash.errors import RequestError

Ask = Callable[[int, Packed | None], int | None]
"""Row and its mask: the token that the row chooses under it; None: no more drafts are wanted."""


class Constraint(Protocol):
    """A grammar standing after the tokens that were committed. Not thread-safe.

    A mask is a function of the tokens before it alone. Masks are read-only, and stay as they are until the ``advance``
    after the next one. Every method may raise Interrupted, and RequestError when the grammar cannot continue at this
    point: plain decoding fails there, too.
    """

    def amend(self, free: Sequence[int], ask: Ask) -> list[int]:
        """Drafts that the grammar allows, made from the ``free`` ones; fewer where it ends or becomes too complex.

        A draft that is refused is replaced by what is forced there, or else by what ``ask`` gives.
        """
        ...

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """Tokens that may come next, and after each draft; None where every one may.

        Fewer than drafts + 1, but at least one, where the grammar becomes too complex on the way. The drafts are those
        that the last ``amend`` gave, the first of them, or none.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance over tokens that were committed. RequestError, here or at the next call, for one not allowed."""
        ...


class Steered:
    """The choices of one request that has a grammar or is relaxed (:class:`~edge_dflash.decode.backend.Steering`).

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
    def tolerant(self) -> bool:
        """Whether acceptance is relaxed."""
        return self._thinking is not None

    def drafts(self, rows: Rows, position: int) -> list[int]:
        """Draft tokens for positions ``position``, ...; fewer than rows when the grammar ends or gives up before.

        The drafter is asked once more at the first draft that is refused where nothing is forced; at the second the
        path ends. After the first the block has mostly parted from what was drafted (out of its domain the demo pair
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

        path = self._constraint.amend(free, ask)
        return path[: self._stops_at(path) + 1]

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """What may follow the anchor and each draft; fewer where the grammar gives up on the way."""
        if self._constraint is None:
            return [None] * (len(drafts) + 1)
        end = self._stops_at(drafts)  # nothing follows a stop token, and nothing is chosen there
        masks = self._constraint.masks(drafts[:end])
        return masks + [None] * (len(drafts) - end) if len(masks) > end else masks

    def _stops_at(self, tokens: Sequence[int]) -> int:
        """Index of the first stop token; the number of tokens without one."""
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


class GivenDrafts:
    """Steers a cycle to given drafts (:class:`~edge_dflash.decode.backend.Steering`), and nothing else."""

    tolerant = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._drafts = tokens

    def drafts(self, rows: Rows, position: int) -> list[int]:
        """See Steering."""
        return list(self._drafts)

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """See Steering."""
        return [None] * (len(drafts) + 1)

    def tolerated(self, rows: Rows, drafts: Sequence[int], choices: Sequence[int]) -> list[bool]:
        """See Steering."""
        return []


class Told(GivenDrafts):
    """Tells a cycle the tokens that follow: each row has one choice."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        """``tokens``: after the anchor; the cycle verifies all but the last of them as ``Asked.known``."""
        super().__init__(tokens[:-1])
        self._tokens, self._words = tokens, (vocab_size + 31) // 32

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """One token for each row."""
        masks = np.zeros((len(self._tokens), self._words), np.uint32)
        for mask, token in zip(masks, self._tokens, strict=True):
            mask[token // 32] = 1 << token % 32
        return list(masks)


INNER = -1
"""The state of :class:`_Around` in which the inner constraint holds."""


class _Around:
    """Free text around an inner constraint. Subclasses say by which tokens it begins and ends.

    The drafts of one cycle go no further than the end of the inner constraint.
    """

    _state = 0
    _must: Sequence[int | None] = (None, None)  # by state of the text: the token that must come; None: see _stop
    _masks: Sequence[Packed | None] = (None, None)  # by state: what may come
    _stop: frozenset[int] = frozenset()  # tokens that may not come in the text

    def _after(self, state: int, token: int) -> int:
        """The state after a token of the text."""
        raise NotImplementedError

    def _inner(self) -> Constraint:
        """The inner constraint, where it holds."""
        raise NotImplementedError

    def _inside(self, tokens: Sequence[int]) -> tuple[Sequence[int], bool]:
        """Those of ``tokens`` that belong to the inner constraint, and whether it ends with them."""
        return tokens, False

    def _end(self) -> None:
        """The inner constraint ended."""

    def _allows(self, state: int, token: int) -> bool:
        must = self._must[state]
        return token not in self._stop if must is None else token == must

    def amend(self, free: Sequence[int], ask: Ask) -> list[int]:
        """See Constraint."""
        path, state = list[int](), self._state
        for row, token in enumerate(free):
            if state == INNER:
                inner = self._inner().amend(free[row:], lambda at, mask: ask(len(path) + at, mask))
                return [*path, *self._inside(inner)[0]]
            chosen = token if self._allows(state, token) else self._must[state]
            if chosen is None and (chosen := ask(row, self._masks[state])) is None:
                break
            path.append(chosen)
            state = self._after(state, chosen)
        return path

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """See Constraint."""
        masks, state = list[Packed | None](), self._state
        for row in range(len(drafts) + 1):
            if state == INNER:
                inner, ended = self._inside(drafts[row:])
                masks += self._inner().masks(inner[:-1] if ended else inner)
                return [*masks, None] if ended and len(masks) == row + len(inner) else masks
            masks.append(self._masks[state])
            if row < len(drafts):
                state = self._after(state, drafts[row])
        return masks

    def advance(self, tokens: Sequence[int]) -> None:
        """See Constraint."""
        at = 0
        while at < len(tokens):
            if self._state == INNER:
                inner, ended = self._inside(tokens[at:])
                self._inner().advance(inner)
                at += len(inner)
                if ended:
                    self._end()
                continue
            if not self._allows(self._state, tokens[at]):
                raise RequestError(f"the grammar does not take token {tokens[at]}, which was chosen")
            self._state = self._after(self._state, tokens[at])
            at += 1


class AfterThinking(_Around):
    """Everything may come until one of ``close_ids`` came; then ``then`` must come; then ``inner`` begins.

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
        self._constraint, self._close = inner, frozenset(close_ids)
        self._must = (None, *then)
        self._stop = frozenset(stop_token_ids)
        span = _mask_of(vocab_size, self._stop, allow=False) if self._stop else None
        self._masks = (span, *(_mask_of(vocab_size, (token,), allow=True) for token in then))

    @property
    def closed(self) -> bool:
        """Whether the span was closed."""
        return self._state != 0

    def _after(self, state: int, token: int) -> int:
        """State 0: the span is open; state i: token i of ``then``, counted from 1, must come."""
        if state == 0 and token not in self._close:
            return 0
        return state + 1 if state + 1 < len(self._must) else INNER

    def _inner(self) -> Constraint:
        return self._constraint


class InCalls(_Around):
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
        self._state = int(thinking)

    def _after(self, state: int, token: int) -> int:
        """State 0: free text; 1: inside a thinking span."""
        if self._thinks is not None and token == self._thinks[state]:
            return 1 - state
        return INNER if token == self._opens and state == 0 else state

    def _inner(self) -> Constraint:
        self._call = self._call or self._make()
        return self._call

    def _inside(self, tokens: Sequence[int]) -> tuple[Sequence[int], bool]:
        end = next((at + 1 for at, token in enumerate(tokens) if token == self._closes), None)
        return tokens[:end], end is not None

    def _end(self) -> None:
        self._state, self._call = 0, None


def _mask_of(vocab_size: int, tokens: Collection[int], *, allow: bool) -> Packed:
    """A mask that allows these tokens alone, or all but these; read-only."""
    flags = np.full(vocab_size, not allow, np.bool_)
    flags[list(tokens)] = allow
    words = pack(flags)
    words.flags.writeable = False
    return words
