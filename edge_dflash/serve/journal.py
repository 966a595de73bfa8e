"""The lines of the log as systemd's journal takes them: each with its priority before it, ``<6>`` for INFO.

Where stderr is the journal, systemd says so in JOURNAL_STREAM, as device and inode of that stream (systemd.exec(5));
the priority is then read from each line (sd-daemon(3)), and ``journalctl -p warning`` finds what went wrong.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

FORMAT = "%(levelname)s %(name)s: %(message)s"
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


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
    handler = logging.StreamHandler()
    handler.setFormatter((JournalFormatter if is_journal(descriptor, environ) else logging.Formatter)(FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("edge_dflash").setLevel(logging.INFO)
