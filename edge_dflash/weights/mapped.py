"""Giving back the memory of mapped arrays: pages that were read once count as used until something drops them."""

from __future__ import annotations

import mmap

from edge_dflash.weights.tensor import Array


def forget_pages(array: Array) -> None:
    """Drop the whole pages under a C-contiguous view of a mapped file from this process; it stays readable.

    An array that is not mapped, or not contiguous, is left alone.
    """
    owner: object = array
    while getattr(owner, "base", None) is not None:
        parent = owner
        owner = parent.base  # type: ignore[attr-defined]
        if isinstance(owner, mmap.mmap) and array.flags.c_contiguous:
            offset = _address(array) - _address(parent) // mmap.PAGESIZE * mmap.PAGESIZE  # a map starts on a page
            start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (offset + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                owner.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _address(array: object) -> int:
    return int(array.__array_interface__["data"][0])  # type: ignore[attr-defined]
