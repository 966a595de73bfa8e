"""A backend of a few lines: a toy target whose next token is a hash of all tokens before it, and a drafter that is
right for as long as it is told. It checks the protocol as it goes, so a loop that misuses it fails here."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace

import numpy as np

from edge_dflash.decode.backend import Snapshot
from edge_dflash.decode.cycle import host_cycle, host_cycles
from edge_dflash.decode.grammar.walker import amend, masks
from edge_dflash.decode.sampling import pack
from edge_dflash.decode.shape import PairShape
from edge_dflash.decode.tree import branch, check_commit
from edge_dflash.errors import RequestError

SHAPE = PairShape(vocab_size=64, block_size=4, mask_token_id=63, max_context=64, prefill_chunk=8, drafts=3)
TEXT_SHAPE = replace(SHAPE, vocab_size=258, max_context=256, mask_token_id=257)  # of text_support's tokenizer


class FakeRows:
    def __init__(self, logits):
        self._logits = np.asarray(logits, dtype=np.float32)

    def __len__(self):
        return len(self._logits)

    def argmax(self):
        return [int(i) for i in self._logits.argmax(axis=-1)]

    def logits(self):
        return self._logits


class FakeSeen:
    nbytes = 1000

    def __init__(self, picture):
        self.numbers = [-1 - zlib.crc32(picture.digest, row) for row in range(picture.tokens)]

    def __len__(self):
        return len(self.numbers)

    def host(self):
        return np.array(self.numbers, np.float32)[:, None]


class FakeBackend:
    """``right(position)`` says how many drafts of the block at that position are the target's own (default: all).

    ``script`` maps a context length to the token that must come next, whatever the hash says.
    """

    def __init__(
        self,
        shape: PairShape = SHAPE,
        right: Callable[[int], int] = lambda position: SHAPE.block_size - 1,
        script: Sequence[int] = (),
        script_at: int = 0,
    ):
        self.shape = shape
        self.closed = False
        self.passes = []  # names of the passes, in order
        self._right = right
        self._script = {script_at + i: token for i, token in enumerate(script)}
        self.committed = []  # ids; of a picture's rows, numbers made of what is seen
        self.delta = 0
        self.towers = []  # digests of the pictures that were seen
        self._flight = None

    def length(self, lane=0):
        return len(self.committed)

    def reset(self, lane=0):
        self.committed, self._flight, self.delta = [], None, 0

    def see(self, picture):
        assert not self.closed
        self.towers.append(picture.digest)
        return FakeSeen(picture)

    def prefill(self, ids, lane=0, sight=None):
        assert len(ids) > 0
        assert not self.closed
        self.passes.append("prefill")
        ids = list(ids)
        if sight is not None:
            assert sight.positions.shape == (3, len(ids))
            for one in sight.rows:
                ids[one.row : one.row + one.count] = one.seen.numbers[one.first : one.first + one.count]
            self.delta = sight.delta
        self.committed = [*self.committed, *ids]
        return FakeRows([self._logits(self.committed)])

    def cycle(self, asked):
        return host_cycle(self, asked)

    def cycles(self, asked):
        return host_cycles(self, asked)

    def propose(self, anchor, lane=0):
        self.passes.append("propose")
        context = [*self.committed, anchor]
        right, rows = self._right(len(self.committed)), []
        for i in range(self.shape.block_size - 1):
            row = self._logits(context)
            if i >= right:
                row = np.roll(row, 1)
            rows.append(row)
            context.append(int(row.argmax()))
        return FakeRows(rows)

    def verify(self, ids, lane=0, parents=None):
        assert 1 <= len(ids) <= self.shape.block_size
        assert len(self.committed) + len(ids) <= self.shape.max_context
        self.passes.append("verify")
        self._flight, self._parents = list(ids), parents or list(range(-1, len(ids) - 1))
        branches = ([ids[one] for one in branch(self._parents, row)] for row in range(len(ids)))
        return FakeRows([self._logits([*self.committed, *one]) for one in branches])

    def commit(self, rows, lane=0, path=None):
        assert self._flight is not None
        chosen = check_commit(rows, len(self._flight), path, self._parents)
        self.committed, self._flight = [*self.committed, *(self._flight[row] for row in chosen)], None

    def flush(self, lane=0):
        pass

    def snapshot(self, lane=0):
        return Snapshot(self.length(), {"committed": np.array(self.committed)}, self.delta)

    def restore(self, snapshot, lane=0):
        self.committed, self._flight = snapshot.arrays["committed"].tolist(), None
        self.delta = snapshot.delta

    def close(self):
        self.closed = True

    def _logits(self, context):
        seed = zlib.crc32(np.array(context, dtype=np.int64).tobytes(), -self.delta)
        row = np.random.default_rng(seed).standard_normal(self.shape.vocab_size).astype(np.float32)
        if len(context) in self._script:
            row[self._script[len(context)]] = 20.0
        return row


class Stepped:
    """A constraint made of one that steps token by token: ``allowed``, ``push``, ``forced``; ``copy`` or ``pop``."""

    ended = False
    steps = 0

    def __init__(self, inner):
        self.inner = inner

    @contextmanager
    def trying(self):
        """What drafts are tried on: a copy, or itself, which steps back afterwards."""
        tried = copy(self)
        if hasattr(self.inner, "copy"):
            tried.inner = self.inner.copy()
            yield tried
        else:
            try:
                yield tried
            finally:
                self.inner.pop(tried.steps)

    def amend(self, free, ask):
        while True:
            with self.trying() as tried:
                path, asks = amend(tried, free)
                chosen = ask(len(path), tried.packed()) if asks else None
            if chosen is None:
                return path
            free = [*path, chosen, *free[len(path) + 1 :]]

    def masks(self, drafts):
        found = []
        with self.trying() as tried:
            try:
                found.extend(masks(tried, drafts))
            except RequestError:
                if not found:
                    raise
        return found

    def advance(self, tokens):
        for token in tokens:
            if not self.inner.push(token):
                raise RequestError(f"the grammar does not take token {token}")

    def packed(self):
        mask = self.inner.allowed()
        return None if mask is None else pack(mask)

    def push(self, token):
        taken = self.inner.push(token)
        self.steps += taken
        return taken

    def forced(self):
        return self.inner.forced()


class Grammar:
    """A grammar by the tokens so far, in ``path``: subclasses say what may come next, and what must."""

    def __init__(self):
        self.path = []

    def allowed(self):
        return None

    def forced(self):
        return ()

    def push(self, token):
        mask = self.allowed()
        if mask is not None and not mask[token]:
            return False
        self.path.append(token)
        return True

    def pop(self, count):
        del self.path[len(self.path) - count :]
