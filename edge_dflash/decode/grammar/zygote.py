"""The process that has built one vocabulary, and forks a process for each grammar, which it compiles within bounds.

Started anew (``python -c``), so that a fork copies neither a device nor threads: this process has one thread and
imports the library and little else. It compiles nothing itself. It ends when the planner's end of its socket is closed,
by whatever that was, and its children end with it. A child may die at any moment, by its own limits or because the
planner no longer waits: nothing else is lost with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import select
import signal
import socket
import threading
from pathlib import Path

from edge_dflash.common.processes import limit_memory, limited_time, obey_timers
from edge_dflash.decode.grammar import wire
from edge_dflash.decode.grammar.child import GrammarServer
from edge_dflash.decode.grammar.library import Vocabulary
from edge_dflash.decode.grammar.walker import Compiled, compiled
from edge_dflash.errors import RequestError, one_line

PROMPT_SECONDS = 0.1  # a grammar that takes longer to compile gives way to others: the loops of a robot, the planner
NICE = 10
_STACK_BYTES = 16 << 20  # of the thread that compiles: the library follows rules by recursion
_OOM_SCORE = 1000  # when memory runs out, a child goes before anything else
_PR_SET_PDEATHSIG = 1
_M_ARENA_MAX = -8


def main(link: int, text: int, size: int, stop_token_ids: tuple[int, ...]) -> None:
    """Build the vocabulary and serve the planner.

    ``link`` is a socket to it, ``text`` an open file that holds tokenizer.json, of ``size`` ids. What is wrong with the
    tokenizer is said in place of the first message of every child.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # they are for the planner, which ends us
        signal.signal(number, signal.SIG_IGN)
    obey_timers()
    # One heap for all threads: a second one would take 128 MB of the address space that a child may use.
    _libc().mallopt(_M_ARENA_MAX, 1)
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
    _libc().malloc_trim(0)
    _Zygote(socket.socket(fileno=link), vocabulary, stop_token_ids).run()


class _Zygote:
    def __init__(self, link: socket.socket, vocabulary: Vocabulary | str, stop_token_ids: tuple[int, ...]) -> None:
        self._link = link
        self._vocabulary = vocabulary
        self._stop = stop_token_ids
        self._children: dict[int, tuple[int, socket.socket]] = {}  # pid: its number, the control socket's child end
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._woken.fileno():
                    self._woken.recv(4096)
                    self._reap()
                    continue
                message, fds, _, _ = socket.recv_fds(self._link, wire.MESSAGE_BYTES, 2)
                if not message:
                    return
                (number,) = wire.unpacked(message[1:])
                if message[:1] == wire.FORK:
                    self._fork(number, socket.socket(fileno=fds[0]), fds[1])
                else:
                    self._kill(number)

    def _fork(self, number: int, control: socket.socket, page: int) -> None:
        if isinstance(self._vocabulary, str):
            _tell(control, wire.REFUSED + self._vocabulary.encode())
            os.close(page)
            return
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _tell(control, wire.REFUSED + f"the grammar cannot be compiled now ({error.strerror}); try again".encode())
            os.close(page)
            return
        if pid:
            self._children[pid] = (number, control)
            os.close(page)
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (self._link, self._woken, self._wake, *(other for _, other in self._children.values())):
                one.close()
            _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == parent:
                _live(control, wire.Page(page), self._vocabulary, self._stop)
            code = 0
        finally:
            os._exit(code)

    def _kill(self, number: int) -> None:
        for pid, (other, _) in self._children.items():
            if other == number:
                os.kill(pid, signal.SIGKILL)  # not reaped: it is that process

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _, control = self._children.pop(pid)
            _tell(control, wire.DIED + bytes([os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0]))


def _live(control: socket.socket, page: wire.Page, vocabulary: Vocabulary, stop_token_ids: tuple[int, ...]) -> None:
    """A child: compile the grammar of the page and serve its constraints, until the control socket is closed."""
    source, bounds = page.read()
    shared = wire.resident_bytes()
    limit_memory(int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + bounds.nbytes + _STACK_BYTES)
    with contextlib.suppress(OSError):  # where /proc is hidden
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    control.send(wire.BEGUN)

    def make() -> Compiled:
        with limited_time(bounds.compile_seconds):
            return _compile(source, vocabulary, stop_token_ids)

    try:
        server = GrammarServer(control, make, bounds.step_seconds, lambda: page.note(shared))
    except RequestError as error:
        control.send(wire.REFUSED + str(error).encode(errors="replace"))
        return
    page.note(shared)
    control.send(wire.COMPILED)
    server.run()


def _compile(source: wire.Source, vocabulary: Vocabulary, stop_token_ids: tuple[int, ...]) -> Compiled:
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


def _tell(control: socket.socket, message: bytes) -> None:
    """The last message of a child, in its place."""
    with contextlib.suppress(OSError):  # nobody listens any more
        control.send(message, socket.MSG_DONTWAIT)
    control.close()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
