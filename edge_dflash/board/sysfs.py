"""Small files of the kernel that may be missing, or refuse an answer just now: then there is no value, never a guess.

A sensor of a part that is switched off answers EAGAIN (Jetson: the GPU's thermal zone while the GPU sleeps); others
need root (EACCES), lost their bus (EIO) or their driver (ENODEV). All of that is "absent" here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

MOST = 1 << 20  # bytes of a file that are read


def read_text(path: Path) -> str | None:
    """Text of a file without the white space and NUL bytes around it; None when it cannot be read or is empty."""
    try:  # not by the io module: it waits for, or swallows, the EAGAIN that is an answer here
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = b""
            while part := os.read(descriptor, MOST - len(data)):
                data += part
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return data.decode("utf-8", "replace").strip("\0 \t\r\n") or None


def read_int(path: Path) -> int | None:
    """The integer that a file holds, with a unit behind it or not; None when there is none."""
    text = read_text(path)
    found = re.match(r"-?\d{1,19}(?!\S)", text) if text else None
    return int(found.group()) if found else None


def numbered(folder: Path, prefix: str) -> list[Path]:
    """Entries ``prefix0, prefix1, ...`` of a folder in the order of their numbers; empty when there is none."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    found = sorted((int(match.group(1)), name) for name in names if (match := pattern.fullmatch(name)))
    return [folder / name for _, name in found]
