"""How work that takes seconds or minutes tells how far it is; how that is shown is the caller's affair, or one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]  # (stage, done, total); total 0: begun, its length is not known

# Stages of a bundle that is opened; those of a build are named where they begin.
CHECKING, LOADING, SELF_TEST = "checking files", "loading", "self-test"
IN_BYTES = frozenset({"weights", "checking", CHECKING})  # count bytes; of other stages only the share has a meaning


def unheard(stage: str, done: int, total: int) -> None:
    """The progress when nobody listens."""


LINE_SECONDS = 10.0  # between two lines, where stderr is no terminal
_TURN_SECONDS = 0.1  # between two states of the line of a terminal


@contextmanager
def shown(progress: Progress | bool) -> Iterator[Progress]:
    """The function to tell: the given one; True: a line on stderr, rewritten on a terminal; False: nobody."""
    if not isinstance(progress, bool):
        yield progress
    elif progress:
        with _line() as told:
            yield told
    else:
        yield unheard


@contextmanager
def _line() -> Iterator[Progress]:
    terminal, width, told_at, last = sys.stderr.isatty(), 0, time.monotonic(), ""

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal width, told_at, last
        now = time.monotonic()
        if now - told_at < (_TURN_SECONDS if terminal else LINE_SECONDS) and (stage == last or not terminal):
            return
        told_at, last = now, stage
        text = f"{stage}: {100 * done // total} %" if total else stage
        width = max(width, len(text))
        print(f"\r{text:<{width}}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if terminal and width:
            print(f"\r{'':<{width}}", end="\r", file=sys.stderr, flush=True)


class Stage:
    """Progress of one stage, in bytes or as a share. The total is an estimate, so what is done is kept within it."""

    def __init__(self, report: Progress, name: str, total: int) -> None:
        self._report, self._name, self._total, self._done = report, name, total, 0
        report(name, 0, total)

    def advance(self, count: int) -> None:
        """Count bytes."""
        self._done += count
        self._report(self._name, min(self._done, self._total), self._total)

    def share(self, done: int, total: int) -> None:
        """Set the part that is done."""
        self._done = 0
        self.advance(self._total * done // max(1, total))

    def finish(self) -> None:
        """Report that all is done."""
        self._report(self._name, self._total, self._total)
