"""The process of one grammar: compiles it within bounds, then walks along it for each constraint.

It may die at any moment, by its own limits or because the planner no longer waits: nothing else is lost with it. Every
piece of work runs under a timer of processor time that kills, so that it is bounded even if nobody looks.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from edge_dflash.common.processes import limit_memory, limited_time
from edge_dflash.decode.grammar import stepping, wire
from edge_dflash.decode.grammar.vocabulary import Vocabulary
from edge_dflash.decode.grammar.walker import Compiled, Source, Walker, compiled
from edge_dflash.errors import RequestError, one_line

PROMPT_SECONDS = 0.1  # a grammar that takes longer to compile gives way to others: the loops of a robot, the planner
NICE = 10
_STACK_BYTES = 16 << 20  # of the thread that compiles: the library follows rules by recursion
_OOM_SCORE = 1000  # when memory runs out, this goes before anything else


@dataclass(frozen=True)
class Bounds:
    """What one grammar may take."""

    compile_seconds: float = 5.0  # of one core; forms of robots take 0.01, the largest schemas that are taken 1
    step_seconds: float = 2.0  # of a walk along drafts with its masks; 16 of the most fuel take 0.25 on a fast core
    nbytes: int = 256 << 20  # beyond the vocabulary; forms of robots take 1 to 5 MB


class Page:
    """Memory that a child shares with the planner: the source until it is compiled, then how large the child is."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def of(cls, source: Source, bounds: Bounds) -> Page:
        """A new page."""
        page = cls(os.memfd_create("grammar"))
        os.pwrite(page._fd, json.dumps([asdict(source), asdict(bounds)]).encode(), 0)
        return page

    def fileno(self) -> int:
        """Its file."""
        return self._fd

    def read(self) -> tuple[Source, Bounds]:
        """What :meth:`of` wrote."""
        source, bounds = json.loads(os.pread(self._fd, os.fstat(self._fd).st_size, 0))
        return Source(**source), Bounds(**bounds)

    @property
    def private_bytes(self) -> int:
        """Memory that the child took for itself, when it last looked."""
        return int.from_bytes(os.pread(self._fd, 8, 0), "little")

    def note(self, shared_bytes: int) -> None:
        """Measure it, in the child, which shares so many bytes with its parent."""
        private = max(0, _resident_bytes() - shared_bytes)
        os.pwrite(self._fd, private.to_bytes(8, "little"), 0)


def live(control: socket.socket, page: Page, vocabulary: Vocabulary, stop_token_ids: tuple[int, ...]) -> None:
    """Compile the grammar of the page and serve its constraints, until the control socket is closed."""
    source, bounds = page.read()
    shared = _resident_bytes()
    _limit(bounds)
    control.send(wire.BEGUN)

    def make() -> Compiled:
        with limited_time(bounds.compile_seconds):
            return _compile(source, vocabulary, stop_token_ids)

    try:
        grammar = _Grammar(make, bounds)
    except RequestError as error:
        control.send(wire.REFUSED + str(error).encode(errors="replace"))
        return
    page.note(shared)
    control.send(wire.COMPILED)
    _Server(control, grammar, bounds, lambda: page.note(shared)).run()


class _Grammar:
    """A grammar, which can be compiled again.

    The library limits the states of its lexer, and all walks along a compiled grammar add to the same ones: those of
    wrong drafts and of other requests, too. A mask that is refused may be given by the grammar compiled anew, as to a
    request that is alone and decodes plainly.
    """

    def __init__(self, make: Callable[[], Compiled], bounds: Bounds) -> None:
        self._make, self._bounds = make, bounds
        self.compiled = make()

    def renew(self) -> Compiled:
        """Compile it again, inside a step, for the constraints that begin from now on, too."""
        try:
            self.compiled = self._make()
        finally:
            signal.setitimer(signal.ITIMER_PROF, self._bounds.step_seconds)  # of what the step still has to do
        return self.compiled


class _Server:
    """The grammar's constraints, each with its socket."""

    def __init__(self, control: socket.socket, grammar: _Grammar, bounds: Bounds, note: Callable[[], None]) -> None:
        self._control, self._grammar, self._bounds, self._note = control, grammar, bounds, note
        self._constraints: dict[int, _Constraint] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._control.fileno():
                    message, fds, _, _ = socket.recv_fds(self._control, wire.MESSAGE_BYTES, 2)
                    if not message:
                        return
                    with limited_time(self._bounds.step_seconds):
                        self._constraints[fds[0]] = _Constraint(socket.socket(fileno=fds[0]), fds[1], self._grammar)
                    self._poll.register(fds[0], select.POLLIN)
                    continue
                constraint = self._constraints[fd]
                message = _received(constraint.socket)
                with limited_time(self._bounds.step_seconds):
                    alive = bool(message) and constraint.answer(message)
                if not alive:
                    self._poll.unregister(fd)
                    del self._constraints[fd]
                    constraint.socket.close()
                    self._note()


class _Constraint:
    """The grammar behind the tokens of one request."""

    def __init__(self, connection: socket.socket, memory: int, grammar: _Grammar) -> None:
        self.socket = connection
        self._grammar = grammar
        self._layout = wire.Layout((grammar.compiled.vocab_size + 31) // 32)
        self._memory = mmap.mmap(memory, self._layout.nbytes)
        os.close(memory)
        self._half = self._received = 0  # messages
        self._walker = Walker(grammar.compiled)
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
                self._look(stepping.walk(self._walker, free, self._asking(), self._tell))
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
            self._walker = Walker(self._grammar.renew())
            self._push(self._advanced)
            self._walker.packed()
            self._refused = False

    def _asking(self) -> stepping.Ask:
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

        error = stepping.look(self._walker, drafts[: wire.ROWS - 1], put)
        self.socket.send(wire.MASKS + wire.packed([count]) + ("" if error is None else str(error)).encode())

    def _count(self, rows: int) -> None:
        self._memory[:8] = wire.packed([self._received, rows])

    def _put(self, row: int, mask: bytes) -> None:
        at = self._layout.row(self._half, row)
        self._memory[at : at + len(mask)] = mask


def _compile(source: Source, vocabulary: Vocabulary, stop_token_ids: tuple[int, ...]) -> Compiled:
    """Compile on another thread, because priority is a thread's, and cannot be raised again."""
    found: list[Compiled | RequestError] = []

    def run() -> None:
        try:
            found.append(compiled(source, vocabulary, stop_token_ids))
        except RequestError as error:
            found.append(error)
        except MemoryError:
            os.abort()  # as the library does
        except BaseException as error:  # a panic of the library is no Exception
            found.append(RequestError(f"the {source.kind} cannot be used ({one_line(error)}); change it"))

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PROMPT_SECONDS)
    if thread.is_alive():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, NICE)
        thread.join()
    if isinstance(found[0], RequestError):
        raise found[0]
    return found[0]


def _received(connection: socket.socket) -> bytes:
    """The next message; empty when the other end is closed."""
    try:
        return connection.recv(wire.MESSAGE_BYTES)
    except OSError:
        return b""


def _limit(bounds: Bounds) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit_memory(pages * mmap.PAGESIZE + bounds.nbytes + _STACK_BYTES)
    with contextlib.suppress(OSError):  # where /proc is hidden
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
