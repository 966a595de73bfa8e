"""Panics of libraries in Rust: no Exception of Python's, so that they would end whatever thread they meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from edge_dflash.errors import EdgeDflashError, one_line


@contextlib.contextmanager
def refused(kind: Callable[[str], EdgeDflashError], what: str, remedy: str) -> Iterator[None]:
    """Raise ``kind`` for a panic, and for the bare Exception that such a library raises otherwise."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what} ({one_line(error)}); {remedy}") from None
