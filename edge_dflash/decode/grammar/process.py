"""The planner's end of the processes of grammars: one for each vocabulary, one for each grammar.

Whoever waits here waits in slices, so that a deadline or a cancelled request is answered at once, whatever the other
process does; it is killed then. Nothing here holds a lock while it waits. See :mod:`edge_dflash.decode.grammar.worker`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from signal import SIGABRT, SIGKILL, SIGPROF, SIGSEGV
from typing import Any

import numpy as np

from edge_dflash.common.processes import command
from edge_dflash.decode.controls import ENDLESS, Patience
from edge_dflash.decode.grammar.walker import Source
from edge_dflash.decode.grammar.worker import MESSAGE_BYTES, ROWS, Bounds, mask_offset, message, resident_bytes
from edge_dflash.decode.sampling import Packed
from edge_dflash.decode.steering import Ask
from edge_dflash.errors import RequestError
from edge_dflash.text.tokenizer import Tokenizer

SLICE = 0.02  # seconds between two looks at whether somebody still waits
START_SECONDS = 120.0  # for the vocabulary: 3 s with 248,000 tokens on one core, more on a busy board
WALL_SECONDS = 4.0  # of waiting for each second of processor time: others may keep the cores busy
SPIN_SECONDS = 0.0004  # of looking again and again before a wait sleeps: to be woken takes 0.1 ms, twice a cycle
SEND_MICROSECONDS = 2_000_000  # while the buffer of a long history is full
_TOKENS_AT_ONCE = 4096  # of a long history


class Died(Exception):
    """A grammar's process has ended, by this signal; 0: by another cause, None: it was given up."""

    def __init__(self, signal: int | None) -> None:
        super().__init__(signal)
        self.signal = signal


class OverBounds(RequestError):
    """A grammar went over its bounds while it was compiled, ``since`` by the monotonic clock."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.since = time.monotonic()


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """Raise RequestError where the system has no process, file or memory left for what is done inside."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"the grammar cannot be compiled now ({error.strerror}); try again") from None


@contextlib.contextmanager
def _file(text: str) -> Iterator[int]:
    """A file without a name that holds a text; its descriptor."""
    with os.fdopen(os.memfd_create("grammar"), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        file.seek(0)
        yield file.fileno()


class Link:
    """A socket to another process, and how to wait for it."""

    def __init__(self, give: Callable[[int], object]) -> None:
        """``give`` passes the other end on."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.close = weakref.finalize(self, self._socket.close)
        for option, microseconds in ((socket.SO_SNDTIMEO, SEND_MICROSECONDS), (socket.SO_RCVTIMEO, int(1e6 * SLICE))):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(microseconds, 1_000_000)))
        _links.add(self)
        with theirs:
            give(theirs.fileno())

    def send(self, *said: object, fds: Sequence[int] = ()) -> None:
        """Send a message. Raises Died when the other end is closed."""
        try:
            socket.send_fds(self._socket, [message(*said)], list(fds))
        except OSError:
            raise Died(0) from None

    def receive(self, patience: Patience, seconds: float) -> list[Any]:
        """The next message. Raises Died when there will be none or none came in time, Interrupted."""
        began, said = time.monotonic(), None
        while said is None:
            waited = time.monotonic() - began
            try:
                said = self._socket.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT if waited < SPIN_SECONDS else 0)
            except BlockingIOError:
                if waited > SPIN_SECONDS:
                    patience.check()
                if waited > seconds:
                    raise Died(None) from None
            except OSError:
                break
        if not said:
            raise Died(0)
        return list(json.loads(said))


class Zygote:
    """The process that has built a vocabulary. Starting it does not wait for that."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...]) -> None:
        """Raise RequestError when no process can be started now."""

        def start(link: int) -> None:
            with _file(tokenizer.to_json()) as text:
                self._process = subprocess.Popen(
                    command("edge_dflash.decode.grammar.worker", link, text, tokenizer.size, stop_token_ids),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(link, text),
                )

        with _room():
            self.link = Link(start)
        self.close = weakref.finalize(self, _end, self._process)  # with all its forks; again: does nothing

    @property
    def alive(self) -> bool:
        """Whether it can still fork."""
        return self.close.alive and self._process.poll() is None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # its forks follow
    process.wait()


class Child:
    """The process of a grammar, compiled. :meth:`end` it, or drop it."""

    def __init__(self, zygote: Zygote, source: Source, bounds: Bounds, patience: Patience) -> None:
        """Compile. Raises RequestError, which names a bound, Died when it can be tried again, Interrupted."""
        self.bounds = bounds
        self.channels: weakref.WeakSet[Channel] = weakref.WeakSet()  # of open constraints
        self._zygote = zygote
        self._lock = threading.Lock()
        self._cause: int | None = None
        self._pid = self._shared = 0
        with _room(), _file(json.dumps([asdict(source), asdict(bounds)])) as file:
            self.link = Link(lambda control: zygote.link.send("fork", fds=(control, file)))
        self.end = self.link.close
        try:
            self._compile(source.kind, patience)
        except BaseException:
            self.end()
            raise

    def _compile(self, kind: str, patience: Patience) -> None:
        said, *given = self.link.receive(patience, START_SECONDS)
        if said == "begun":
            self._pid, self._shared = given
            try:
                said, *given = self.link.receive(patience, WALL_SECONDS * self.bounds.compile_seconds)
            except Died as death:
                if death.signal is not None:
                    raise
                said, given = "died", [SIGPROF]  # it waits for a core
        if said == "refused":
            raise RequestError(given[0])
        if said == "died":
            over = given[0] in (SIGPROF, SIGABRT, SIGSEGV)  # else by another's hand
            why = self.why(given[0], f"the {kind}", self.bounds.compile_seconds, "to compile")
            raise (OverBounds if over else RequestError)(why)

    @property
    def alive(self) -> bool:
        """Whether it was not ended from here; it may have died by itself."""
        return self.end.alive and self._zygote.alive and self._cause is None

    @property
    def private_bytes(self) -> int:
        """Memory that it has for itself."""
        return max(0, resident_bytes(self._pid) - self._shared)

    def kill(self) -> None:
        """End it, and remember that it was too slow."""
        self._cause = SIGPROF
        self.end()

    def cause(self) -> int:
        """The signal that it died of; 0 when it is not known. To be asked when it was found dead, and ends it."""
        with self._lock:
            if self._cause is None:
                self._cause = 0
                with contextlib.suppress(Died):
                    said, *given = self.link.receive(ENDLESS, 1.0)
                    self._cause = given[0] if said == "died" else 0
        self.end()
        return self._cause

    def why(self, signal: int, what: str, seconds: float, doing: str) -> str:
        """Why it died, and the remedy."""
        if signal == SIGPROF:
            return f"{what} needs more than {seconds:g} s {doing}; make it simpler"
        if signal == SIGKILL:  # by the kernel, or by hand
            return f"{what} needs its process {doing}, which was killed: memory may have run out; try again"
        if signal:
            most = self.bounds.nbytes >> 20
            return f"{what} needs more than {most} MB {doing}, or is nested too deep; make it simpler"
        return f"{what} needs its process {doing}, which has ended; try again"


class Channel:
    """A constraint of a grammar's process: a socket, and memory where the process puts masks.

    A cycle costs one round trip, with the drafts; the masks are made while the verify pass runs.
    """

    def __init__(self, child: Child, words: int) -> None:
        """``words`` of a mask. Raises Died, RequestError."""
        self.child = child
        self._words = words
        self._owed = False  # masks of amended drafts are on their way
        self._walked: list[int] | None = None  # the drafts that they are of, while these are the next ones
        with _room(), os.fdopen(os.memfd_create("masks"), "rb") as file:
            memory = file.fileno()
            os.ftruncate(memory, mask_offset(words, ROWS))
            self._memory = mmap.mmap(memory, mask_offset(words, ROWS), prot=mmap.PROT_READ)
            self._link = Link(lambda theirs: child.link.send("open", fds=(theirs, memory)))
        child.channels.add(self)

    def advance(self, tokens: Sequence[int]) -> None:
        """See Constraint. Raises Died, as the other methods."""
        for at in range(0, len(tokens), _TOKENS_AT_ONCE):
            self._send("advance", tokens[at : at + _TOKENS_AT_ONCE])
        self._walked = None

    def amend(self, free: Sequence[int], ask: Ask, patience: Patience) -> list[int]:
        """See Constraint. Raises Interrupted.

        It asks once: after the first draft that is replaced the block is mostly wrong.
        """
        self._settle(patience)
        self._send("amend", free)
        _, path, asks = self._receive(patience)
        if asks:
            self._walked = None
            if (chosen := ask(len(path), self._mask(len(path)))) is None:
                return list(path)
            self._send("finish", [*path, chosen, *free[len(path) + 1 :]])
            _, path, _ = self._receive(patience)
        self._owed, self._walked = True, path
        return list(path)

    def masks(self, drafts: Sequence[int], patience: Patience) -> list[Packed]:
        """See Constraint. Raises RequestError, Interrupted."""
        if self._walked is None or list(drafts) != self._walked[: len(drafts)]:
            self._settle(patience)
            self._send("look", drafts)
        self._owed, self._walked = False, None
        _, count, why = self._receive(patience)
        if not count:
            raise RequestError(why)
        return [self._mask(row) for row in range(min(count, len(drafts) + 1))]

    def _send(self, what: str, tokens: Sequence[int]) -> None:
        try:
            self._link.send(what, list(map(int, tokens)))
        except Died:  # it is not asked again: a grammar's next constraint has another process
            raise Died(self.child.cause()) from None

    def _settle(self, patience: Patience) -> None:
        """Take the answer that nobody wanted."""
        if self._owed:
            self._owed, self._walked = False, None
            self._receive(patience)

    def _receive(self, patience: Patience) -> list[Any]:
        """The next message. Raises Died with the signal, as far as it is known, Interrupted."""
        try:
            return self._link.receive(patience, WALL_SECONDS * self.child.bounds.step_seconds)
        except Died as death:
            if death.signal is None:
                self.child.kill()
            raise Died(self.child.cause()) from None

    def _mask(self, row: int) -> Packed:
        """A copy: the process puts others in its place."""
        mask = np.frombuffer(self._memory, np.uint32, self._words, mask_offset(self._words, row)).copy()
        mask.flags.writeable = False
        return mask


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget() -> None:
    """In a fork of the planner's process: the other processes are its parent's."""
    for link in tuple(_links):
        link.close()


os.register_at_fork(after_in_child=_forget)
