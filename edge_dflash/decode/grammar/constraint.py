"""The grammar behind the tokens of one request: the planner's end of what a child walks along.

A cycle costs one round trip, with the drafts; the masks are made while the verify pass runs, and read where the child
wrote them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from edge_dflash.decode.controls import Interrupted, Patience
from edge_dflash.decode.grammar import wire
from edge_dflash.decode.grammar.process import WALL_SECONDS, Child, Died, Link, room, why
from edge_dflash.decode.sampling import Packed
from edge_dflash.decode.steering import Ask
from edge_dflash.errors import RequestError

_TRIES = 3  # to open a process that was alive when it was last looked at


class _Channel:
    """A child's constraint: a socket and memory that both see."""

    def __init__(self, child: Child, layout: wire.MaskLayout) -> None:
        """Raises Died, RequestError."""
        self.child = child
        self._layout = layout
        with room():
            self.link = Link()
            with os.fdopen(os.memfd_create("masks"), "rb") as memory:
                memory_fd = memory.fileno()
                os.ftruncate(memory_fd, layout.nbytes)
                self._memory = mmap.mmap(memory_fd, layout.nbytes, prot=mmap.PROT_READ)
                child.open(self.link.theirs, memory_fd)
        self.link.theirs.close()
        child.channels.add(self)
        self._half = self._sent = 0  # messages
        self._owed = False  # masks of a walk are on their way
        self._walked: list[int] | None = None  # the drafts that they are of, while these are the next ones

    def advance(self, tokens: Sequence[int]) -> None:
        for at in range(0, len(tokens), wire.TOKENS_AT_ONCE):
            self._send(wire.ADVANCE, tokens[at : at + wire.TOKENS_AT_ONCE])
            self._half ^= 1
        self._walked = None

    def walk(self, free: Sequence[int], ask: Ask, patience: Patience) -> list[int]:
        self._settle(patience)
        self._send(wire.WALK, free)
        while True:
            message = self._receive(patience)
            tokens = wire.unpacked(message[1:])
            if message[:1] == wire.PATH:
                self._owed, self._walked = True, tokens
                return tokens
            chosen = ask(tokens[0], self._mask(tokens[0]))
            self.link.send(wire.CHOSEN + wire.packed([] if chosen is None else [chosen]))

    def masks(self, drafts: Sequence[int], patience: Patience) -> list[Packed]:
        if self._walked is None or list(drafts) != self._walked[: len(drafts)]:
            self._settle(patience)
            self._send(wire.LOOK, drafts)
        self._owed, self._walked = False, None
        message = self._receive(patience)
        (count,) = wire.unpacked(message[1:5])
        if not count:
            raise RequestError(message[5:].decode())
        return [self._mask(row) for row in range(min(count, len(drafts) + 1))]

    def made(self) -> list[Packed]:
        """The masks that the last message asked for, as far as they were made."""
        number, count = wire.unpacked(self._memory[:8])
        return [self._mask(row) for row in range(count)] if number == self._sent else []

    def _send(self, kind: bytes, tokens: Sequence[int]) -> None:
        self.link.send(kind + wire.packed(tokens))
        self._sent += 1

    def _settle(self, patience: Patience) -> None:
        """Take the answer that nobody wanted."""
        if self._owed:
            self._owed, self._walked = False, None
            self._receive(patience)

    def _receive(self, patience: Patience) -> bytes:
        """The next message. Raises Died with the signal, as far as it is known, Interrupted."""
        try:
            return self.link.receive(patience, WALL_SECONDS * self.child.bounds.step_seconds)
        except Died as death:
            if death.signal is None:
                self.child.kill()
            raise Died(self.child.cause()) from None

    def _mask(self, row: int) -> Packed:
        at = self._layout.row(self._half, row)
        return np.frombuffer(self._memory, np.uint32, self._layout.words, at)


class GrammarConstraint:
    """A :class:`~edge_dflash.decode.steering.Constraint` at the start of a grammar.

    Stop tokens are allowed where the text so far is whole, and nothing but them after one. Special tokens are never
    allowed, unless a Lark grammar names them. When the process dies below it, by its bounds or by accident, another one
    is brought to where it stood, and no drafts are tried any more: masks come as in plain decoding. The second death is
    a RequestError.
    """

    def __init__(self, words: int, child: Callable[[Patience], Child], patience: Patience) -> None:
        """``words`` of a mask; ``child`` gives the grammar's process, compiled again where it must be."""
        self._layout = wire.MaskLayout(words)
        self._child = child
        self._patience = patience
        self._advanced: list[int] = []
        self._died = False
        self._channel: _Channel | None = None
        with contextlib.suppress(RequestError, Interrupted):  # they come again with the first mask
            self._open()

    def walk(self, free: Sequence[int], ask: Ask) -> list[int]:
        """See Constraint."""
        if not free or self._died:
            return []
        channel = self._open()
        try:
            return channel.walk(free, ask, self._patience)
        except Died as death:
            self._lose(channel, death)
            return []
        except BaseException:
            self._channel = None  # it waits for what was asked
            raise

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """See Constraint."""
        while True:
            channel = self._open()
            try:
                return [*channel.masks(drafts, self._patience)]
            except Died as death:
                self._lose(channel, death)
                if made := channel.made():
                    return [*made[: len(drafts) + 1]]
            except BaseException:
                self._channel = None
                raise

    def advance(self, tokens: Sequence[int]) -> None:
        """See Constraint."""
        self._advanced += tokens
        if self._channel is not None:
            try:
                self._channel.advance(tokens)
            except Died:
                self._channel = None  # as if it had died before

    def _open(self) -> _Channel:
        """A channel that stands behind all tokens so far."""
        for _ in range(_TRIES):
            if self._channel is not None:
                return self._channel
            child = self._child(self._patience)
            try:
                channel = _Channel(child, self._layout)
                channel.advance(self._advanced)
                self._channel = channel
            except Died:  # before anything was asked of it
                child.cause()
        raise RequestError("the grammar's processes end as soon as they begin; look for who ends them")

    def _lose(self, channel: _Channel, death: Died) -> None:
        """The process died of what was asked of it."""
        self._channel = None
        if self._died:
            bounds, doing = channel.child.bounds, f"for the next token after {len(self._advanced)}"
            raise RequestError(why(death.signal or 0, "the grammar", bounds, bounds.step_seconds, doing))
        self._died = True
