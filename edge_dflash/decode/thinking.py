"""A constraint that begins where the thinking ends.

Knows token ids only: the span is closed by a token, never by text that looks like it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from edge_dflash.decode.constraint import Ask, Constraint, Mask, Packed, pack
from edge_dflash.errors import RequestError


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


def _read_only(allowed: Mask) -> Packed:
    words = pack(allowed)
    words.flags.writeable = False
    return words
