"""The lines of the log as systemd's journal takes them: each with its priority before it, ``<6>`` for INFO.

Where stderr is the journal, systemd says so in JOURNAL_STREAM, as device and inode of that stream (systemd.exec(5));
the priority is then read from each line (sd-daemon(3)), and ``journalctl -p warning`` finds what went wrong.

Nobody who logs waits for stderr: another thread writes. Where the stream takes nothing, lines are dropped, and the
next one that finds a place says how many.
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Mapping
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener

FORMAT = "%(levelname)s %(name)s: %(message)s"
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_WAITING = 4096  # lines that wait for the stream
_LAST_LINES = 2.0  # seconds that the end of the process waits for them


class JournalFormatter(logging.Formatter):
    """A record as lines, each with its priority."""

    def format(self, record: logging.LogRecord) -> str:
        """Also of a traceback every line: the journal makes an entry of each."""
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines() or [""])


def is_journal(descriptor: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an open stream is the journal's own."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def log_to(descriptor: int, environ: Mapping[str, str] = os.environ) -> None:
    """Log to stderr, whose descriptor this is: INFO of edge-dflash, WARNING of everything else."""
    stream = _Stream(descriptor)
    stream.setFormatter((JournalFormatter if is_journal(descriptor, environ) else logging.Formatter)(FORMAT))
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_WAITING)
    QueueListener(lines, stream).start()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Lines(lines)])
    logging.getLogger("edge_dflash").setLevel(logging.INFO)


class _Stream(logging.Handler):
    """Writes to a descriptor, on one thread alone. It has no lock, so the process can end while the stream is stuck."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def createLock(self) -> None:
        """None; see above."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; one that the stream refuses is lost."""
        rest = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


class _Lines(QueueHandler):
    """Hands records to the thread that writes, and never waits for it but at the end."""

    queue: queue.Queue[logging.LogRecord]
    dropped = 0  # since the last that found a place

    def enqueue(self, record: logging.LogRecord) -> None:
        """Put a record where the other thread finds it, if there is room."""
        try:
            if self.dropped:
                why = f"{self.dropped} lines of the log were dropped: stderr took none"
                self.queue.put_nowait(logging.makeLogRecord({**_WARNING, "msg": why}))
                self.dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait a while until all is written. Called by :func:`logging.shutdown`."""
        with self.queue.all_tasks_done:
            self.queue.all_tasks_done.wait_for(lambda: not self.queue.unfinished_tasks, _LAST_LINES)


_WARNING = {"name": "edge_dflash.serve", "levelname": "WARNING", "levelno": logging.WARNING}
