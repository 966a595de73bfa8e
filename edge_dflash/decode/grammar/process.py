"""The planner's end of its grammar processes: one zygote for each vocabulary, one child for each grammar.

Whoever waits here waits in slices, so that a deadline or a cancelled request is answered at once, whatever the other
process does; it is killed then. Nothing here holds a lock while it waits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from signal import SIGABRT, SIGKILL, SIGPROF, SIGSEGV

from edge_dflash.common.processes import command
from edge_dflash.decode.controls import Patience
from edge_dflash.decode.grammar import wire
from edge_dflash.decode.grammar.wire import Bounds, Page, Source
from edge_dflash.errors import RequestError
from edge_dflash.text.tokenizer import Tokenizer

SLICE = 0.02  # seconds between two looks at whether somebody still waits
START_SECONDS = 120.0  # for the vocabulary: 3 s with 248,000 tokens on one core, more on a busy board
WALL_SECONDS = 4.0  # of waiting for each second of processor time: others may keep the cores busy
SEND_SECONDS = 2.0  # while the buffer of a long history is full


class Died(Exception):
    """A grammar's process has ended, by this signal; 0: by another cause, None: it was given up."""

    def __init__(self, signal: int | None) -> None:
        super().__init__(signal)
        self.signal = signal


class OverBounds(RequestError):
    """A grammar went over its bounds while it was compiled."""


@contextlib.contextmanager
def room() -> Iterator[None]:
    """Raise RequestError where the system has no process, file or memory left for what is done inside."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"the grammar cannot be compiled now ({error.strerror}); try again") from None


class Link:
    """A socket to another process, and how to wait for it."""

    def __init__(self) -> None:
        self.socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(SLICE)
        weakref.finalize(self, _close, self.socket, self.theirs)
        _links.add(self)

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message. Raises Died when the other end is closed."""
        until = time.monotonic() + SEND_SECONDS
        while True:
            try:
                socket.send_fds(self.socket, [message], list(fds))
                return
            except TimeoutError:
                if time.monotonic() > until:
                    raise Died(0) from None
            except OSError:
                raise Died(0) from None

    def receive(self, patience: Patience, seconds: float) -> bytes:
        """The next message. Raises Died when there will be none or none came in time, Interrupted."""
        until = time.monotonic() + seconds
        try:
            message = wire.soon(partial(os.read, self.socket.fileno(), wire.MESSAGE_BYTES))
            while message is None:
                try:
                    message = self.socket.recv(wire.MESSAGE_BYTES)
                except TimeoutError:
                    patience.check()
                    if time.monotonic() > until:
                        raise Died(None) from None
        except OSError:
            raise Died(0) from None
        if not message:
            raise Died(0)
        return message


class Zygote:
    """The process that has built a vocabulary. Starting it does not wait for that."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...]) -> None:
        """Raise RequestError when no process can be started now."""
        self._numbers = itertools.count()
        with room():
            self._link = Link()
            with os.fdopen(os.memfd_create("tokenizer"), "wb") as text:
                text.write(tokenizer.to_json().encode())
                text.flush()
                text.seek(0)
                fds = (self._link.theirs.fileno(), text.fileno())
                self._process = subprocess.Popen(
                    command("edge_dflash.decode.grammar.zygote", *fds, tokenizer.size, stop_token_ids),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=fds,
                )
        self._link.theirs.close()
        self.close = weakref.finalize(self, _end, self._process)  # with all its children; again: does nothing

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can still fork."""
        return self.close.alive and self._process.poll() is None

    def fork(self, control: socket.socket, page: Page) -> int:
        """Have it fork a child with this end of its control socket; returns the child's number. Raises Died."""
        number = next(self._numbers)
        self._link.send(wire.FORK + wire.packed([number]), [control.fileno(), page.fileno()])
        return number

    def kill(self, number: int) -> None:
        """Have it kill a child, if that still runs."""
        with contextlib.suppress(Died):
            self._link.send(wire.KILL + wire.packed([number]))


class Child:
    """The process of a grammar, compiled. :meth:`end` it, or drop it."""

    def __init__(self, zygote: Zygote, source: Source, bounds: Bounds, patience: Patience) -> None:
        """Compile. Raises RequestError, which names a bound, Died when it can be tried again, Interrupted."""
        self._zygote = zygote
        with room():
            self._link = Link()
            self._page = Page.of(source, bounds)
        weakref.finalize(self, os.close, self._page.fileno())
        self._lock = threading.Lock()
        self._cause: int | None = None
        self.bounds = bounds
        self.channels: weakref.WeakSet[object] = weakref.WeakSet()  # of open constraints
        number = zygote.fork(self._link.theirs, self._page)
        self._link.theirs.close()
        self.end = weakref.finalize(self, zygote.kill, number)
        try:
            self._compile(source, bounds, patience)
        except BaseException:
            self.end()
            raise

    def _compile(self, source: Source, bounds: Bounds, patience: Patience) -> None:
        message = self._link.receive(patience, START_SECONDS)
        if message == wire.BEGUN:
            try:
                message = self._link.receive(patience, WALL_SECONDS * bounds.compile_seconds)
            except Died as death:
                if death.signal is None:  # it waits for a core
                    message = wire.DIED + bytes([SIGPROF])
                else:
                    raise
        if message[:1] == wire.REFUSED:
            raise RequestError(message[1:].decode(errors="replace"))
        if message[:1] == wire.DIED:
            kind = OverBounds if message[1] in (SIGPROF, SIGABRT, SIGSEGV) else RequestError  # else by another's hand
            raise kind(why(message[1], f"the {source.kind}", bounds, bounds.compile_seconds, "to compile"))

    @property
    def alive(self) -> bool:
        """Whether it was not ended from here; it may have died by itself."""
        return self.end.alive and self._zygote.alive and self._cause is None

    @property
    def private_bytes(self) -> int:
        """Its memory, as it was when it last had something to do."""
        return self._page.private_bytes

    def open(self, connection: socket.socket, memory: int) -> None:
        """Give it a constraint's end of its socket and its memory. Raises Died."""
        self._link.send(wire.OPEN, [connection.fileno(), memory])

    def kill(self) -> None:
        """End it, and remember that it was too slow."""
        self._cause = SIGPROF
        self.end()

    def cause(self) -> int:
        """The signal that it died of; 0 when it is not known. To be asked when it was found dead, and ends it."""
        with self._lock:
            if self._cause is None:
                self._cause = 0
                try:
                    message = self._link.receive(Patience(), 1.0)
                    self._cause = message[1] if message[:1] == wire.DIED else 0
                except Died:
                    pass
        self.end()
        return self._cause


def why(signal: int, what: str, bounds: Bounds, seconds: float, doing: str) -> str:
    """Why the process of a grammar died, and the remedy."""
    if signal == SIGPROF:
        return f"{what} needs more than {seconds:g} s {doing}; make it simpler"
    if signal == SIGKILL:  # by the kernel, or by hand
        return f"{what} needs its process {doing}, which was killed: memory may have run out; try again"
    if signal:
        return f"{what} needs more than {bounds.nbytes >> 20} MB {doing}, or is nested too deep; make it simpler"
    return f"{what} needs its process {doing}, which has ended; try again"


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget() -> None:
    """In a fork: the processes are the parent's."""
    for link in tuple(_links):
        _close(link.socket, link.theirs)


os.register_at_fork(after_in_child=_forget)


def _close(*sockets: socket.socket) -> None:
    for one in sockets:
        one.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # its children follow
    process.wait()
