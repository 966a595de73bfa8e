"""What the process of one grammar does: it walks along the grammar for each constraint.

Every piece of work runs under a timer of processor time that kills, so that it is bounded even if nobody looks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial

from edge_dflash.common.processes import limited_time
from edge_dflash.decode.grammar import wire
from edge_dflash.decode.grammar.walker import Compiled, Walker
from edge_dflash.errors import RequestError


class GrammarServer:
    """A grammar, which can be compiled again, and its constraints, each with its socket.

    The library limits the states of its lexer, and all walks along a compiled grammar add to the same ones: those of
    wrong drafts and of other requests, too. A mask that is refused may be given by the grammar compiled anew, as to a
    request that is alone and decodes plainly.
    """

    def __init__(
        self, control: socket.socket, make: Callable[[], Compiled], step_seconds: float, note: Callable[[], None]
    ) -> None:
        """``make`` compiles the grammar; ``note`` is called when a constraint has ended. Raises RequestError."""
        self.grammar = make()
        self._control, self._make, self._step_seconds, self._note = control, make, step_seconds, note

    def renew(self) -> Compiled:
        """Compile the grammar again, inside a step, for the constraints that begin from now on, too."""
        try:
            self.grammar = self._make()
        finally:
            signal.setitimer(signal.ITIMER_PROF, self._step_seconds)  # of what the step still has to do
        return self.grammar

    def run(self) -> None:
        """Serve until the control socket is closed."""
        constraints: dict[int, _Constraint] = {}
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._control.fileno():
                    message, fds, _, _ = socket.recv_fds(self._control, wire.MESSAGE_BYTES, 2)
                    if not message:
                        return
                    with limited_time(self._step_seconds):
                        constraints[fds[0]] = _Constraint(socket.socket(fileno=fds[0]), fds[1], self)
                    poll.register(fds[0], select.POLLIN)
                    continue
                message = _received(constraints[fd].socket)
                with limited_time(self._step_seconds):
                    alive = bool(message) and constraints[fd].answer(message)
                if not alive:
                    poll.unregister(fd)
                    constraints.pop(fd).socket.close()
                    self._note()


class _Constraint:
    """The grammar behind the tokens of one request."""

    def __init__(self, connection: socket.socket, memory: int, server: GrammarServer) -> None:
        self.socket = connection
        self._server = server
        self._layout = wire.MaskLayout((server.grammar.vocab_size + 31) // 32)
        self._memory = mmap.mmap(memory, self._layout.nbytes)
        os.close(memory)
        self._half = self._received = 0  # messages
        self._walker = Walker(server.grammar)
        self._advanced: list[int] = []
        self._refused = False  # the mask of this position, by the grammar compiled anew
        self._failure = ""  # why no token can be taken any more
        self._prepare()

    def answer(self, message: bytes) -> bool:
        """Do what a message asks. False when nobody waits for the answer any more."""
        kind, tokens = message[:1], wire.unpacked(message[1:])
        self._received += 1
        self._count(0)
        try:
            if kind == wire.ADVANCE:
                self._half ^= 1
                self._advance(tokens)
            elif kind == wire.WALK:
                free = [] if self._failure else tokens[: wire.ROWS - 1]
                self._look(walk(self._walker, free, self._asking(), self._tell))
            else:
                self._look(tokens)
        except OSError:
            return False
        return True

    def _advance(self, tokens: list[int]) -> None:
        self._advanced += tokens
        self._refused = False
        with contextlib.suppress(RequestError):  # the mask is asked for next, and says it again
            self._push(tokens)
        self._prepare()

    def _push(self, tokens: list[int]) -> None:
        for token in tokens:
            if not self._walker.push(token):
                self._failure = self._failure or f"the grammar does not take token {token}, which was chosen"
                return

    def _prepare(self) -> None:
        """The mask of this position, before anyone asks; where it is refused, by the grammar compiled anew."""
        if self._failure or self._refused:
            return
        with contextlib.suppress(RequestError):
            self._walker.packed()
            return
        self._refused = True
        with contextlib.suppress(RequestError):
            self._walker = Walker(self._server.renew())
            self._push(self._advanced)
            self._walker.packed()
            self._refused = False

    def _asking(self) -> Callable[[int], int | None]:
        """Asks the planner once: behind the first draft that is replaced the block has mostly parted from the text."""
        asked = False

        def ask(row: int) -> int | None:
            nonlocal asked
            if asked:
                return None
            asked = True
            self._put(row, self._walker.packed())
            self.socket.send(wire.ASK + wire.packed([row]))
            answer = wire.soon(partial(self.socket.recv, wire.MESSAGE_BYTES, socket.MSG_DONTWAIT))
            chosen = wire.unpacked((_received(self.socket) if answer is None else answer)[1:])
            return chosen[0] if chosen else None

        return ask

    def _tell(self, path: list[int]) -> None:
        self.socket.send(wire.PATH + wire.packed(path))

    def _look(self, drafts: list[int]) -> None:
        if self._failure:
            self.socket.send(wire.MASKS + wire.packed([0]) + self._failure.encode())
            return
        self._prepare()
        count = 0

        def put(row: int, mask: bytes) -> None:
            nonlocal count
            self._put(row, mask)
            count = row + 1
            self._count(count)

        error = look(self._walker, drafts[: wire.ROWS - 1], put)
        self.socket.send(wire.MASKS + wire.packed([count]) + ("" if error is None else str(error)).encode())

    def _count(self, rows: int) -> None:
        self._memory[:8] = wire.packed([self._received, rows])

    def _put(self, row: int, mask: bytes) -> None:
        at = self._layout.row(self._half, row)
        self._memory[at : at + len(mask)] = mask


def walk(
    walker: Walker,
    free: Sequence[int],
    ask: Callable[[int], int | None],
    tell: Callable[[list[int]], object] = lambda path: None,
) -> list[int]:
    """Drafts that the grammar allows, made from the ``free`` ones; the walker is where it was afterwards.

    A draft that is refused is replaced by what is forced, and where nothing is, by what ``ask`` of its row gives, while
    the walker stands before it; None ends the path. So does a grammar that becomes too complex. ``tell`` is told the
    path before the walker goes back, which takes a while.
    """

    def instead(row: int) -> Sequence[int]:
        if forced := walker.forced():
            return forced
        chosen = ask(row)
        return () if chosen is None else (chosen,)

    path: list[int] = []
    try:
        with contextlib.suppress(RequestError):
            _along(walker, free, path, instead, lambda: None)
        tell(path)
    finally:
        walker.pop(len(path))
    return path


def look(walker: Walker, drafts: Sequence[int], put: Callable[[int, bytes], None]) -> RequestError | None:
    """Give ``put`` the masks before the first draft, behind it, ...; the walker is where it was afterwards.

    Returns why it gave up on the way, if it did. It also ends, without a reason, at a draft that is not allowed.
    """
    path: list[int] = []
    try:
        _along(walker, drafts, path, lambda row: (), lambda: put(len(path), walker.packed()))
    except RequestError as error:
        return error
    finally:
        walker.pop(len(path))
    return None


def _along(
    walker: Walker,
    drafts: Sequence[int],
    path: list[int],
    instead: Callable[[int], Sequence[int]],
    here: Callable[[], None],
) -> None:
    """Push drafts and append them to ``path``; call ``here`` before the first and behind each.

    In place of a refused draft, and of those behind it, come the tokens that ``instead`` gives for its row; without
    any the walk ends.
    """
    others: list[int] = []
    here()
    for row, draft in enumerate(drafts):
        token = others.pop(0) if others else draft
        if not walker.push(token):
            others = [*instead(row)]
            if not others or not walker.push(token := others.pop(0)):
                return
        path.append(token)
        here()
        if walker.ended:
            return


def _received(connection: socket.socket) -> bytes:
    """The next message; empty when the other end is closed."""
    try:
        return connection.recv(wire.MESSAGE_BYTES)
    except OSError:
        return b""
