"""How a process that lives long gives memory back."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
LARGE = 4 << 20  # bytes


def return_large_blocks() -> None:
    """Blocks of LARGE bytes and more go back to the system when they are freed, whatever thread had them.

    glibc else raises that bound to 32 MB by itself, and keeps what is below for each of many threads: half a gigabyte
    after twenty large pictures. For a process that is ours alone; other C libraries are left as they are.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE)
