"""The walks of propose passes in plain NumPy, float32: rows whose tokens are chosen one after the other.

What they compute is said at :class:`~edge_dflash.model.ops.SelectorWalk` and
:class:`~edge_dflash.model.ops.MarkovWalk`. A choice is that of :mod:`edge_dflash.decode.sampling` among the row's
candidates, so it depends on seed and position as the target's does. Proposals alone depend on all of this, never the
output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edge_dflash.decode.sampling import GREEDY, Packed, Sampling, choose_row, unpack
from edge_dflash.model.ops import MarkovWalk, SelectorWalk, Walk

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
Weights = Callable[[str], Floats]
"""A weight by its canonical name."""


class SelectorStep:
    """One walk; see :class:`~edge_dflash.model.ops.SelectorWalk`."""

    def __init__(self, op: SelectorWalk, weights: Weights, hidden: Floats, logits: Floats) -> None:
        self._candidates = [best(row, op.top_k) for row in logits]
        self._logits = logits
        self._g = hidden @ weights(op.projection).T
        self._predecessor, self._successor = weights(op.predecessor), weights(op.successor)

    def scores(self, row: int, before: int) -> tuple[Ids, Floats]:
        """Candidates of the row and their scores, after the token ``before``; the earlier one wins a tie."""
        ids = self._candidates[row]
        return ids, self._logits[row, ids] + self._successor[ids] @ (self._predecessor[before] * self._g[row])


class MarkovStep:
    """One walk; see :class:`~edge_dflash.model.ops.MarkovWalk`."""

    def __init__(self, op: MarkovWalk, weights: Weights, hidden: Floats, logits: Floats) -> None:
        self._op = op
        self._candidates = [None if op.top_k is None else np.sort(best(row, op.top_k)) for row in logits]
        self._logits, self._hidden = logits, hidden
        self._w1, self._w2 = weights(op.predecessor), weights(op.successor)
        self._mix = tuple(weights(name) for name in op.mix or ())
        self._judge = tuple(weights(name) for name in op.judge or ())
        self._state = np.zeros(op.rank, np.float32)
        self.confidence: list[float] = []  # of the rows so far

    def scores(self, row: int, before: int) -> tuple[Ids, Floats]:
        """See :class:`SelectorStep`; rows are asked in their order."""
        h, e = self._hidden[row], self._w1[before]
        if self._judge:
            read = np.concatenate((h, e)) if self._op.confidence == "markov" else h
            self.confidence.append(float(sigmoid(self._judge[0] @ read + self._judge[1])[0]))
        ids = self._candidates[row]
        w2, logits = (self._w2, self._logits[row]) if ids is None else (self._w2[ids], self._logits[row, ids])
        return np.arange(len(logits)) if ids is None else ids, logits + w2 @ self._bias(h, e)

    def _bias(self, h: Floats, e: Floats) -> Floats:
        """What W2 multiplies."""
        if self._op.kind == "vanilla":
            return e
        matrix, bias = self._mix
        if self._op.kind == "gated":
            return sigmoid(matrix @ np.concatenate((h, e)) + bias) * e
        g, c, o = np.split(matrix @ np.concatenate((self._state, e, h)) + bias, 3)
        keep = sigmoid(g)
        self._state = keep * self._state + (1 - keep) * np.tanh(c)
        out: Floats = np.tanh(o)
        return out


class WalkRows:
    """Draft rows of a walk; see :class:`edge_dflash.decode.backend.Rows`.

    The last walk stands until another one replaces it, whole or from some row on: ``logits`` and ``confidence`` are
    those along it, and a row that is asked again has the predecessor that it had there.
    """

    def __init__(self, op: Walk, weights: Weights, hidden: Floats, logits: Floats, anchor: int) -> None:
        self.op, self._weights, self._hidden, self._anchor = op, weights, hidden, anchor
        self.base = logits  # the head's, before the walk
        self._path: list[int] = []
        self._scores: list[tuple[Ids, Floats]] = []
        self._confidence: list[float] = []

    def __len__(self) -> int:
        return len(self.base)

    def argmax(self) -> list[int]:
        """Tokens of the greedy walk."""
        return self.choose(GREEDY, 0, [None] * len(self))

    def choose(self, sampling: Sampling, position: int, masks: Sequence[Packed | None], first: int = 0) -> list[int]:
        """Walk on from row ``first``, after the tokens that the last walk chose before it."""
        if len(self._path) < first:
            self.argmax()
        path, step = self._path[:first], self._step()
        scores = [step.scores(row, self._before(path, row)) for row in range(first)]
        for row, mask in enumerate(masks, first):
            scores.append(step.scores(row, self._before(path, row)))
            path.append(self._choice(row, *scores[-1], sampling, position + row - first, mask))
        self._path, self._scores = path, scores
        self._confidence = step.confidence if isinstance(step, MarkovStep) else []
        return path[first:]

    def logits(self) -> Floats:
        """Scores along the walk [K, V]; -inf for tokens that are no candidates."""
        rows = np.full(self.base.shape, -np.inf, np.float32)
        for row, (ids, scores) in zip(rows, self.candidates(), strict=True):
            row[ids] = scores
        return rows

    def candidates(self) -> list[tuple[Ids, Floats]]:
        """Candidates of each row and their scores along the walk."""
        self._finish()
        return self._scores

    def confidence(self) -> list[float]:
        """How sure the drafter is of each row, from 0 to 1; empty where it has no confidence head."""
        self._finish()
        return self._confidence

    def _finish(self) -> None:
        """Go to the last row, greedily."""
        if len(self._path) < len(self):
            self.choose(GREEDY, 0, [None] * (len(self) - len(self._path)), len(self._path))

    def _step(self) -> SelectorStep | MarkovStep:
        if isinstance(self.op, SelectorWalk):
            return SelectorStep(self.op, self._weights, self._hidden, self.base)
        if isinstance(self.op, MarkovWalk):
            return MarkovStep(self.op, self._weights, self._hidden, self.base)
        raise TypeError(f"{type(self.op).__name__} is no walk that the host has")

    def _before(self, path: Sequence[int], row: int) -> int:
        return path[row - 1] if row else self._anchor

    def _choice(
        self, row: int, ids: Ids, scores: Floats, sampling: Sampling, position: int, mask: Packed | None
    ) -> int:
        """Choice among the candidates; where a mask leaves none of them, among all tokens by the row's logits."""
        if mask is not None:
            allowed = unpack(mask, self.base.shape[1])[ids]
            if not allowed.any():
                return choose_row(self.base[row], sampling, position, mask)
            ids, scores = ids[allowed], scores[allowed]
        if sampling.temperature == 0.0:
            return int(ids[scores.argmax()])
        wide = np.full(self.base.shape[1], -np.inf, np.float32)
        wide[ids] = scores
        return choose_row(wide, sampling, position)


def best(row: Floats, count: int) -> Ids:
    """Ids of the largest values, in their order; the lower id first on a tie."""
    ids: Ids = np.argsort(-row, kind="stable")[:count]
    return ids


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)) without overflow."""
    found: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return found
