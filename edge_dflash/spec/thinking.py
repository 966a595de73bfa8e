"""A constraint that begins where the thinking ends.

Knows token ids only: the span is closed by a token, never by text that looks like it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from edge_dflash.spec.constraint import Constraint, Mask, Packed, pack, packed


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
        self._thinking: Mask | None = None
        self._words: Packed | None = None  # the same as words
        if stop_token_ids:
            self._thinking = np.ones(vocab_size, np.bool_)
            self._thinking[list(stop_token_ids)] = False
            self._thinking.flags.writeable = False
            self._words = pack(self._thinking)
        self._before: list[int] = []  # tokens of the span, with the one that closes it
        self._between = 0  # tokens of ``then`` that were pushed
        self._after = 0  # tokens that the inner constraint took

    @property
    def closed(self) -> bool:
        """Whether the span was closed."""
        return bool(self._before) and self._before[-1] in self._close

    def allowed(self) -> Mask | None:
        """Tokens that may come next, bool [vocab_size]; None when every token may."""
        if not self.closed:
            return self._thinking
        if self._between == len(self._then):
            return self._inner.allowed()
        mask: Mask = np.zeros(self._size, np.bool_)
        mask[self._then[self._between]] = True
        return mask

    def packed(self) -> Packed | None:
        """The same as words."""
        if not self.closed:
            return self._words
        if self._between == len(self._then):
            return packed(self._inner)
        mask = self.allowed()
        return None if mask is None else pack(mask)

    def push(self, token: int) -> bool:
        """Step over a token. False, and no step, when it is not allowed."""
        if not self.closed:
            if not 0 <= token < self._size or (self._thinking is not None and not self._thinking[token]):
                return False
            self._before.append(token)
        elif self._between < len(self._then):
            if token != self._then[self._between]:
                return False
            self._between += 1
        elif self._inner.push(token):
            self._after += 1
        else:
            return False
        return True

    def pop(self, count: int) -> None:
        """Step back over the last ``count`` tokens, across the border too. Raises ValueError when fewer were pushed."""
        pushed = self._after + self._between + len(self._before)
        if not 0 <= count <= pushed:
            raise ValueError(f"cannot step back over {count} of {pushed} tokens")
        inner = min(count, self._after)
        self._inner.pop(inner)
        self._after -= inner
        between = min(count - inner, self._between)
        self._between -= between
        if before := count - inner - between:
            del self._before[-before:]

    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next, in order; none inside the span."""
        return self._then[self._between :] + self._inner.forced() if self.closed else ()
