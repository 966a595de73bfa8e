"""Finished answers, written to a file that a drafter can be trained on: one JSON object a line.

A line holds the prompt, what shaped it, the answer and how it was decoded; never who asked, with what key, or a
picture. The worker only leaves a plan here: a second thread makes the line and writes it, so no cycle waits for a
disk. What a disk refuses is counted and told once in the log, and the request has its plan all the same.

The file and the one before it (``NAME.1``) have at most the bytes of the limit together: when the newer one is half of
it, it becomes the older one, and what that held is gone. Others may rename, remove or cut the file at any time (as
logrotate does): the next line goes to the file that has the name then.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_dflash.decode.grammar.schema import schema_json
from edge_dflash.decode.options import DECLARED, Options
from edge_dflash.result import Plan
from edge_dflash.text.template import Message

log = logging.getLogger("edge_dflash.runner")

LIMIT = 64 << 20  # bytes
LEAST = 4096  # bytes of a limit
WAITING = 256  # answers that wait for the disk; more are dropped
_TRIES = 8  # to write a line to a file that others remove meanwhile
_CLOSE_SECONDS = 5.0  # that a close waits for them
_TAIL = 1 << 16  # bytes that are read at a time, backwards, to find a whole line

Said = Sequence[Message] | str


@dataclass(frozen=True)
class Recording:
    """Where finished answers are recorded, and how much of them is kept."""

    path: Path  # of the newer file; the older one has ".1" behind its name
    limit: int = LIMIT  # bytes of both


@dataclass(frozen=True)
class RecordStats:
    """What became of the answers of a planner that records."""

    written: int = 0
    dropped: int = 0  # not written, because too many waited for the disk or one alone is larger than half the limit
    failed: int = 0  # not written, because the disk refused
    error: str = ""  # what it said, until it takes answers again


class AnswerLog:
    """Writes answers behind the requests. May be used from any thread; nothing here raises."""

    def __init__(self, recording: Recording) -> None:
        self._path, self._half = recording.path, recording.limit // 2
        self._waiting: deque[tuple[str, Options, Plan]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.stats = RecordStats()  # what became of the answers so far
        self._file = -1  # descriptor
        self._size = 0  # bytes of whole lines in it
        self._writer = threading.Thread(target=self._write_all, name="edge-dflash record", daemon=True)
        self._writer.start()

    def of(self, said: Said | None, options: Options) -> Callable[[Plan], None] | None:
        """What is to be told of the plan of a request; None for a prompt that no text says.

        Takes the prompt as it is now: whoever asked may change it later.
        """
        if said is None:
            return None
        prompt = {"prompt": said, "raw": True} if isinstance(said, str) else {"messages": said}
        head = json.dumps({**prompt, **({"tools": options.tools} if options.tools else {})}, default=dict)
        return lambda plan: self._take(head, options, plan)

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and let go of the file. Closing twice does no harm."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._writer:  # which may collect the planner that is left open
            self._writer.join(_CLOSE_SECONDS)

    def _take(self, head: str, options: Options, plan: Plan) -> None:
        """Leave a plan for the writer, if it is one to learn from: whole words of this target, as it chose them."""
        if plan.finish_reason == "cancelled" or not plan.tokens or plan.text is None or plan.malformed or plan.lossy:
            return
        with self._changed:
            if len(self._waiting) >= WAITING or self._closed:
                self._count("dropped")
                return
            self._waiting.append((head, options, plan))
            self._changed.notify()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    break
                head, options, plan = self._waiting.popleft()
            try:
                self._append(_line(head, options, plan))
            except Exception as error:  # also of a schema that is not JSON: the next answer is written all the same
                self._fail(error)
        self._release()

    def _append(self, line: bytes) -> None:
        """Write one line, whole or not at all. Raises OSError."""
        if len(line) > self._half:
            self._count("dropped")
            return
        for _ in range(_TRIES):
            self._find()
            if self._size + len(line) > self._half:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._find()
            if os.write(self._file, line) != len(line):
                if os.fstat(self._file).st_size > self._size:
                    os.ftruncate(self._file, self._size)
                raise OSError("the disk took a part of a line")
            self._size += len(line)
            if os.fstat(self._file).st_nlink:
                break  # else the file was removed meanwhile, and the line with it
        else:
            raise OSError("it is removed as soon as it is written to")
        if self.stats.error:
            log.info("answers are recorded again in %s", self._path)
        self._count("written", error="")

    def _find(self) -> None:
        """Have the file open that the path names now, its size known: others rename, remove, replace and cut it."""
        if self._file >= 0:
            mine = os.fstat(self._file)
            with suppress(FileNotFoundError):
                if os.path.samestat(mine, self._path.lstat()):
                    if mine.st_size != self._size:
                        self._size = mend(self._file)
                    return
            self._release()
        self._open()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(self._path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError("it is no regular file")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets it go when the process ends
            os.fchmod(file, 0o600)
            self._size = mend(file)
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def _release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _fail(self, error: Exception) -> None:
        if isinstance(error, BlockingIOError):
            what = "another process records in it; give each its own file"
        else:
            what = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        if not self.stats.error:
            log.error("answers are not recorded in %s: %s; requests go on, this is told once", self._path, what)
        self._count("failed", error=what)
        if isinstance(error, OSError):
            self._release()  # the file may be another one by then

    def _count(self, outcome: str, error: str | None = None) -> None:
        changed: dict[str, Any] = {outcome: getattr(self.stats, outcome) + 1}
        self.stats = replace(self.stats, **changed, error=self.stats.error if error is None else error)


def _line(head: str, options: Options, plan: Plan) -> bytes:
    """The line of an answer, a newline at its end."""
    body: dict[str, Any] = json.loads(head)
    if options.schema is not None:
        body["schema"] = json.loads(schema_json(options.schema))
    usual = Options()
    shaping = {name: getattr(options, name) for name, place in DECLARED.items() if place.recorded}
    body |= {name: value for name, value in shaping.items() if value != getattr(usual, name)}
    body["answer"] = plan.text
    if plan.thinking:
        body["reasoning"] = plan.thinking
    if plan.tool_calls:
        body["tool_calls"] = [call.openai() for call in plan.tool_calls]
    body["finish_reason"] = plan.finish_reason
    body["accept_length"] = round(plan.accept_length, 3) if plan.speculative and plan.accept_lengths else None
    return json.dumps(body, ensure_ascii=False).encode() + b"\n"


def mend(file: int) -> int:
    """Cut what a crash left behind the last whole line of an open file; the bytes that are left. Raises OSError."""
    end = size = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _TAIL)
        if (at := os.pread(file, end - start, start).rfind(b"\n")) >= 0:
            end = start + at + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
    return end
