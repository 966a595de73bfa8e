"""``edge-dflash doctor``: whether this machine is fit to serve a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from edge_dflash.checks.doctor import Check, examine, gather, healthy, report
from edge_dflash.cli.output import Json, emit_json, show
from edge_dflash.cli.usage import switch

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    bundle: Annotated[
        Path | None, typer.Argument(metavar="BUNDLE", help="Directory that a build made; default: the installed one.")
    ] = None,
    hashes: Annotated[bool, switch("--hash", "Compare all files of the bundle with their hashes.")] = False,
    json: Json = False,
) -> int:
    """Check board, software, GPU, power, memory, disk, service and bundle; each with a code, a finding and a remedy.

    Changes nothing. docs/troubleshooting.md has a section for each code. The exit code is 1 when a check fails;
    warnings do not count.

    JSON keys: ok, counts (ok, warn, fail), checks (code, name, status, found, remedy), bundle, profile, board.
    """
    facts = gather(bundle, hashes=hashes)
    checks = examine(facts)
    if json:
        emit_json(report(checks, facts))
    else:
        show(_table(checks))
    return 0 if healthy(checks) else 1


def _table(checks: Sequence[Check]) -> Table:
    """For people: a line for each check, its remedy below what was found."""
    shown = Table("code", "", "about", "found", box=None, pad_edge=False)
    for column in shown.columns:
        column.overflow = "fold"
    for check in checks:
        text = check.found + (f"\n-> {check.remedy}" if check.remedy else "")
        shown.add_row(check.code, f"[{_STYLES[check.status]}]{check.status}[/]", check.name, escape(text))
    return shown
