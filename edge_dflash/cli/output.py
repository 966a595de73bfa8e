"""What the command line prints and where: results on stdout, everything else on stderr.

With ``--json`` stdout holds one JSON object on its last line and nothing else. Progress is a bar when stderr is a
terminal and a few plain lines when it is a file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

PLAIN_LINE_SECONDS = 10.0  # least time between two plain progress lines

Report = Callable[[int, int], None]  # (done, in all), bytes
StageReport = Callable[[str, int, int], None]  # (what is done, done, in all), bytes


def emit_json(value: Mapping[str, Any]) -> None:
    """Print the one object of ``--json``."""
    print(json.dumps(value, allow_nan=False), flush=True)


def say(line: str) -> None:
    """Print a line for people on stderr."""
    print(line, file=sys.stderr, flush=True)


def show(*renderables: RenderableType) -> None:
    """Print tables and text on stdout; as wide as they need to be when stdout is not a terminal."""
    console = Console() if sys.stdout.isatty() else Console(width=120)
    for renderable in renderables:
        console.print(renderable)


@contextmanager
def stages() -> Iterator[StageReport]:
    """Show how far a work of several named stages is."""
    if not sys.stderr.isatty():
        yield _PlainLines()
        return
    with _bar() as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


@contextmanager
def progress(label: str) -> Iterator[Report]:
    """Show how far one piece of work is."""
    with stages() as report:
        yield lambda done, total: report(label, done, total)


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


class _PlainLines:
    """Progress as lines: at most one in PLAIN_LINE_SECONDS, none for work that is done before the first."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PLAIN_LINE_SECONDS

    def __call__(self, stage: str, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PLAIN_LINE_SECONDS
            say(f"{stage}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")
