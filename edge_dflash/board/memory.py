"""Main memory: what is there, what can be had, and how to give back what reading files took.

On a Jetson CPU and GPU share it, so MemAvailable of /proc/meminfo (Documentation/filesystems/proc.rst) is what a model
can have: free pages and those that the kernel takes back without swapping. NVIDIA's "CUDA for Tegra" says the same of
estimating what can be allocated there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edge_dflash.board.sysfs import read_text


@dataclass(frozen=True)
class MemoryState:
    """Bytes."""

    total: int
    available: int
    swap_total: int
    swap_free: int

    @property
    def swap_used(self) -> int:
        """Bytes that were moved out of memory."""
        return self.swap_total - self.swap_free


def read_memory(root: Path) -> MemoryState | None:
    """State of /proc/meminfo; None when it lacks a line."""
    return parse_meminfo(read_text(root / "proc/meminfo") or "")


def parse_meminfo(text: str) -> MemoryState | None:
    """The four lines of interest, in kB there and bytes here."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    try:
        return MemoryState(*(found[name] for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")))
    except KeyError:
        return None


def drop_page_cache(folder: Path) -> int:
    """Ask the kernel to forget the pages of every file under ``folder`` (posix_fadvise(2), DONTNEED); bytes of files.

    Pages that a process still maps, or that are not written yet, stay. Files that cannot be opened are left alone.
    """
    nbytes = 0
    for path in sorted(folder.rglob("*")):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                nbytes += os.fstat(descriptor).st_size if path.is_file() else 0
            finally:
                os.close(descriptor)
    return nbytes
