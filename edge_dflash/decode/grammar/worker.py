"""The processes that compile and walk grammars, which may be killed at any moment: nothing else is lost with one.

One process for each vocabulary is started anew (``python -c``), so that a fork copies neither a device nor threads: it
has one thread and imports the library and little else. It compiles nothing itself but forks a process for each grammar,
whose work runs under timers of processor time that kill and under a limit of memory. It ends with the planner's end of
its socket, and its forks with it; a fork is killed when the planner closes the end of its control socket.

Messages are JSON lists in datagrams, each a word and what belongs to it:

- to the vocabulary's process: fork, with a control socket and a file of Source and Bounds;
- from a fork: begun (pid, resident bytes), compiled; refused (why); from its parent in its place: died (signal or 0);
- to a fork: open, with a constraint's socket and its memory, where masks are put;
- to a constraint: advance (tokens); look (drafts), answered by masks; amend (free drafts) and finish (the same with one
  more), answered by path (drafts, and after amend whether one is to be chosen next, whose mask is put), else masks too;
- masks (number, why): so many rows are put, from the first on; why there are no more, if that is an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import select
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_dflash.common.processes import limit_memory, limited_time, obey_timers
from edge_dflash.decode.grammar.library import Vocabulary, in_our_words
from edge_dflash.decode.grammar.walker import Compiled, Source, Walker, amend, compiled, masks
from edge_dflash.errors import RequestError, one_line

MESSAGE_BYTES = 64 * 1024  # longest datagram
ROWS = 64  # masks of one path; a longer one ends there
PROMPT_SECONDS = 0.1  # a grammar that takes longer to compile gives way to others: the loops of a robot, the planner
NICE = 10
_STACK_BYTES = 16 << 20  # of the thread that compiles: the library follows rules by recursion
_OOM_SCORE = 1000  # when memory runs out, a fork goes before anything else
_PR_SET_PDEATHSIG = 1
_M_ARENA_MAX = -8
_PIDFD_OPEN = 434  # the system call, on every machine; os.pidfd_open is missing from portable builds of Python


@dataclass(frozen=True)
class Bounds:
    """What one grammar may take."""

    compile_seconds: float = 5.0  # of one core; forms of robots take 0.01, the largest schemas that are taken 1
    step_seconds: float = 2.0  # of a walk along drafts with its masks; 16 of the most fuel take 0.25 on a fast core
    nbytes: int = 256 << 20  # beyond the vocabulary; forms of robots take 1 to 5 MB


def message(*parts: object) -> bytes:
    """A message as it is sent."""
    return json.dumps(parts).encode()


def mask_offset(words: int, row: int) -> int:
    """Where the mask of a row, of 32-bit words, lies in a constraint's memory; of row ROWS: the size of the memory."""
    return row * -(-4 * words // 64) * 64


def resident_bytes(pid: int) -> int:
    """Memory of a process, shared or not; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def main(link: int, text: int, size: int, stop_token_ids: tuple[int, ...]) -> None:
    """Build the vocabulary and serve the planner.

    ``link`` is a socket to it, ``text`` an open file that holds tokenizer.json, of ``size`` ids. What is wrong with the
    tokenizer is said in place of the first message of every fork.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # they are for the planner, which ends us
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where the planner's process ignores it, no fork could be waited for
    obey_timers()
    # One heap for all threads: a second one would take 128 MB of the address space that a fork may use.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mallopt(_M_ARENA_MAX, 1)
    vocabulary: Vocabulary | str
    try:
        with open(text, encoding="utf-8") as file:
            vocabulary = Vocabulary(file.read(), size, stop_token_ids)
    except RequestError as error:
        vocabulary = str(error)
    except Exception as error:  # a library that cannot be imported, or a file that it does not read
        vocabulary = f"structured output does not work here ({type(error).__name__}: {one_line(error)})"
    gc.collect()
    gc.freeze()
    libc.malloc_trim(0)
    _Forks(socket.socket(fileno=link), vocabulary, libc).run()


class _Forks:
    """The processes of grammars, in their parent."""

    def __init__(self, link: socket.socket, vocabulary: Vocabulary | str, libc: ctypes.CDLL) -> None:
        self._link, self._vocabulary, self._libc = link, vocabulary, libc
        self._running: dict[int, tuple[int, int, socket.socket]] = {}  # by both descriptors: pid, its pidfd, control
        self._poll = select.poll()

    def run(self) -> None:
        self._poll.register(self._link, select.POLLIN)
        while True:
            fd, _ = self._poll.poll()[0]  # one at a time: the number of a socket that is closed may be given again
            if fd == self._link.fileno():
                said, fds, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 2)
                if not said:
                    return
                self._fork(socket.socket(fileno=fds[0]), fds[1])
                os.close(fds[1])
            elif fd == self._running[fd][1]:
                self._reap(*self._running[fd])
            else:  # the planner has closed its end
                self._poll.unregister(fd)
                os.kill(self._running[fd][0], signal.SIGKILL)  # not reaped: it is that process

    def _fork(self, control: socket.socket, file: int) -> None:
        parent, pid = os.getpid(), 0
        if isinstance(self._vocabulary, str):
            _end(control, "refused", self._vocabulary)
            return
        try:
            if pid := os.fork():
                ended = self._libc.syscall(_PIDFD_OPEN, pid, 0)
                if ended < 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        except OSError as error:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            _end(control, "refused", f"the grammar cannot be compiled now ({error.strerror}); try again")
            return
        if pid:
            self._running[ended] = self._running[control.fileno()] = pid, ended, control
            self._poll.register(ended, select.POLLIN)
            self._poll.register(control, 0)
            return
        try:
            self._link.close()
            for fd in self._running:
                os.close(fd)
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == parent:
                _live(control, file, self._vocabulary)
        finally:
            os._exit(0)

    def _reap(self, pid: int, ended: int, control: socket.socket) -> None:
        _, status = os.waitpid(pid, 0)
        for fd in (ended, control.fileno()):
            del self._running[fd]
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
        os.close(ended)
        _end(control, "died", os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _end(control: socket.socket, *said: object) -> None:
    """The last message of a fork, in its place."""
    with control, contextlib.suppress(OSError):  # nobody listens any more
        control.send(message(*said), socket.MSG_DONTWAIT)


def _live(control: socket.socket, file: int, vocabulary: Vocabulary) -> None:
    """A fork: compile the grammar in the file and serve its constraints, until the control socket is closed."""
    with open(file, encoding="utf-8") as text:
        source, bounds = json.load(text)
    grammar = _Grammar(control, Source(**source), Bounds(**bounds), vocabulary)
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    limit_memory(address_space + grammar.bounds.nbytes + _STACK_BYTES)
    with contextlib.suppress(OSError):  # where /proc is hidden
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    control.send(message("begun", os.getpid(), resident_bytes(os.getpid())))
    try:
        grammar.compile()
    except RequestError as error:
        control.send(message("refused", str(error)))
        return
    control.send(message("compiled"))
    grammar.serve()


class _Grammar:
    """A grammar and its constraints, each with its socket.

    The library limits the states of its lexer, and all walks along a compiled grammar add to the same ones: those of
    wrong drafts and of other requests, too. A mask that is refused may be given by the grammar compiled anew, as to a
    request that is alone and decodes plainly.
    """

    compiled: Compiled

    def __init__(self, control: socket.socket, source: Source, bounds: Bounds, vocabulary: Vocabulary) -> None:
        self.bounds = bounds
        self._control, self._source, self._vocabulary = control, source, vocabulary

    def compile(self) -> None:
        """Compile it, for the constraints that begin from now on, too. Raises RequestError.

        On another thread, because priority is a thread's, and cannot be raised again.
        """
        found: list[Compiled | RequestError] = []

        def run() -> None:
            try:
                found.append(compiled(self._source, self._vocabulary))
            except RequestError as error:
                found.append(error)
            except MemoryError:
                os.abort()  # as the library does
            except BaseException as error:  # a panic of the library is no Exception
                found.append(RequestError(f"the {self._source.kind} cannot be used: {in_our_words('', str(error))}"))

        with limited_time(self.bounds.compile_seconds):
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
        self.compiled = found[0]

    def renew(self) -> Compiled:
        """Compile it again, inside a step."""
        try:
            self.compile()
        finally:
            signal.setitimer(signal.ITIMER_PROF, self.bounds.step_seconds)  # of what the step still has to do
        return self.compiled

    def serve(self) -> None:
        """Serve until the control socket is closed."""
        constraints: dict[int, _Constraint] = {}
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._control.fileno():
                    said, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 2)
                    if not said:
                        return
                    with limited_time(self.bounds.step_seconds):
                        constraints[fds[0]] = _Constraint(socket.socket(fileno=fds[0]), fds[1], self)
                    poll.register(fds[0], select.POLLIN)
                    continue
                try:
                    kind, tokens = constraints[fd].receive()
                    with limited_time(self.bounds.step_seconds):
                        constraints[fd].answer(kind, tokens)
                except OSError:  # nobody waits for the answer any more
                    poll.unregister(fd)
                    constraints.pop(fd).socket.close()


class _Constraint:
    """The grammar after the tokens of one request."""

    def __init__(self, connection: socket.socket, memory: int, grammar: _Grammar) -> None:
        self.socket = connection
        self._grammar = grammar
        self._words = (grammar.compiled.vocab_size + 31) // 32
        self._memory = mmap.mmap(memory, mask_offset(self._words, ROWS))
        os.close(memory)
        self._walker = Walker(grammar.compiled)
        self._advanced: list[int] = []
        self._failure = ""  # why no token can be taken any more
        self._stand([])

    def receive(self) -> list[Any]:
        """The next message. Raises OSError when the other end is closed."""
        said = self.socket.recv(MESSAGE_BYTES)
        if not said:
            raise ConnectionError
        return list(json.loads(said))

    def answer(self, kind: str, tokens: list[int]) -> None:
        """Do what a message asks."""
        if kind == "advance":
            self._advanced += tokens
            self._stand(tokens)
            return
        if kind != "look":
            walker = self._walker.copy()
            tokens, open_end = amend(walker, [] if self._failure else tokens[: ROWS - 1])
            asks = open_end and kind == "amend"
            if asks:
                self._put(len(tokens), walker.packed())
            self._send("path", tokens, asks)
            if asks:
                return
        self._look(tokens[: ROWS - 1])

    def _send(self, *said: object) -> None:
        self.socket.send(message(*said))

    def _stand(self, tokens: list[int]) -> None:
        """Step over tokens, and make the mask there; by the grammar compiled anew, where this one refuses."""
        if self._failure:
            return
        try:
            self._push(tokens)
        except RequestError:
            try:
                self._walker = Walker(self._grammar.renew())
                self._push(self._advanced)
            except RequestError as error:
                self._failure = str(error)

    def _push(self, tokens: list[int]) -> None:
        refused = next((token for token in tokens if not self._walker.push(token)), None)
        if refused is not None:
            self._failure = f"the grammar does not take token {refused}, which was chosen"
        self._walker.packed()

    def _look(self, drafts: list[int]) -> None:
        self._stand([])
        rows, why = 0, self._failure
        try:
            for rows, mask in enumerate(() if why else masks(self._walker.copy(), drafts), 1):
                self._put(rows - 1, mask)
        except RequestError as error:
            why = str(error)
            self._walker.forget()  # the states of the lexer may be used up
        self._send("masks", rows, why)

    def _put(self, row: int, mask: bytes) -> None:
        at = mask_offset(self._words, row)
        self._memory[at : at + len(mask)] = mask
