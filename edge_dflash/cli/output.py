"""What the command line prints and where: results on stdout, everything else on stderr.

With ``--json`` stdout holds one JSON object on its last line and nothing else. Progress is a bar when stderr is a
terminal and a few plain lines when it is a file.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, DownloadColumn, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from edge_dflash.common.progress import IN_BYTES, Progress

Json = Annotated[bool, typer.Option("--json", help="One JSON object on the last line of stdout.")]
PLAIN_LINE_SECONDS = 10.0  # least time between two plain progress lines
_UNBOUNDED = 1000  # columns
_SPEED_SECONDS = 600.0  # over which a bar's speed is taken: steps of a training may be half a minute apart


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
        _fit(renderable, console)
        console.print(renderable)


def _fit(renderable: RenderableType, console: Console) -> None:
    """Take the frames from tables that are wider than the console: words are cut and broken up only then."""
    if isinstance(renderable, Group):
        for part in renderable.renderables:
            _fit(part, console)
    elif isinstance(renderable, Table):
        for column in renderable.columns:
            column.overflow = "fold"  # a figure is never shortened
        wanted = Measurement.get(console, console.options.update(max_width=_UNBOUNDED), renderable)
        if wanted.maximum > console.width:
            renderable.box, renderable.pad_edge, renderable.padding = box.SIMPLE_HEAD, False, (0, 0)


def size(nbytes: int) -> str:
    """Bytes in words, such as 14.45 GB."""
    for unit, name, digits in ((1e9, "GB", 2), (1e6, "MB", 1), (1e3, "kB", 1)):
        if nbytes >= unit:
            return f"{nbytes / unit:,.{digits}f} {name}"
    return f"{nbytes} B"


def named_table(title: str, *left: str, right: Sequence[str]) -> Table:
    """An empty table with a title; columns of words, then of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


Columns = dict[str, tuple[str | Callable[[Any], Any], str] | tuple[str | Callable[[Any], Any], str, float]]
"""Columns by name: an attribute (or index) of a row or a function of it, a format, and the unit of a number."""


def tabled(title: str, rows: Iterable[Any], columns: Columns, *, sections: Sequence[int] = ()) -> Table:
    """A table of ``rows``, words in the first column; a value that is None is a dash. ``sections`` begin at a row."""
    first, *others = columns
    table, every = named_table(title, first, right=others), list(rows)
    for at, row in enumerate(every):
        if at in sections or at - len(every) in sections:
            table.add_section()
        table.add_row(*(_cell(row, *column) for column in columns.values()))
    return table


def _cell(row: Any, get: str | Callable[[Any], Any], form: str, unit: float = 1.0) -> str:
    value = get(row) if callable(get) else row[int(get)] if get.isdigit() else getattr(row, get)
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    return f"{value / unit:z{form}}" if isinstance(value, float) or unit != 1 else f"{value:{form}}"


@contextmanager
def stages(first: str = "starting") -> Iterator[Progress]:
    """Show how far a work of several stages is; on a terminal from now on: ``first`` says what precedes the first."""
    if not sys.stderr.isatty():
        yield _PlainLines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _Amount(), TimeElapsedColumn(), _Left())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, speed_estimate_period=_SPEED_SECONDS) as bars:
        yield _Shown(bars, first)


class _Shown:
    """Progress as bars, one for each stage; one whose length is not known moves to and fro."""

    def __init__(self, bars: Bars, first: str) -> None:
        self.bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._done: dict[str, int] = {}
        self._endless = bars.add_task(first, total=None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self.bars.update(self._endless, visible=False)
            self._tasks[stage] = self.bars.add_task(stage, total=None)
            if not total:
                self._endless = self._tasks[stage]
        if done < self._done.get(stage, 0):  # begun again
            self.bars.reset(self._tasks[stage])
        self._done[stage] = done
        self.bars.update(self._tasks[stage], completed=done, total=total or None)


class _Amount(DownloadColumn):
    """Bytes of a stage that counts bytes, the share of others."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        return super().render(task) if task.description in IN_BYTES else Text(f"{task.percentage:.0f} %")


class _Left(TimeRemainingColumn):
    """The time left of a stage, once it can be known."""

    def render(self, task: Task) -> Text:
        if task.finished or task.time_remaining is None:
            return Text("")
        return Text(left(task.time_remaining), style="progress.remaining")


class _PlainLines:
    """Progress as lines: at most one in PLAIN_LINE_SECONDS, none for work that is done before the first."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PLAIN_LINE_SECONDS
        self._begun: dict[str, tuple[float, int]] = {}  # when a stage was first heard, and how far it was then

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        began, first = self._begun.get(stage, (now, done))
        if done <= first:  # begun, perhaps again
            began, first = self._begun[stage] = now, done
        if now >= self._next:
            self._next = now + PLAIN_LINE_SECONDS
            known = first < done < total
            estimate = f", {left((now - began) * (total - done) / (done - first))}" if known else ""
            say(amount(stage, done, total) + estimate)


def amount(stage: str, done: int, total: int) -> str:
    """How far a stage is, in a line."""
    if not total:
        return stage
    if stage in IN_BYTES:
        return f"{stage}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
    return f"{stage}: {100 * done // total} %"


def left(seconds: float) -> str:
    """The time left, such as "3:20 left"."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02} left" if hours else f"{minute}:{second:02} left"
