"""All checks in the order of their codes, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from edge_dflash.checks import doctor_bundle as of_bundle
from edge_dflash.checks import doctor_machine as machine
from edge_dflash.checks import doctor_system as system
from edge_dflash.checks.doctor_check import Check
from edge_dflash.checks.doctor_facts import Facts

_MACHINE = (
    machine.board,
    machine.jetson_linux,
    machine.driver,
    machine.gpu,
    machine.tensorrt,
    machine.power_mode,
    machine.clocks,
    machine.heat,
    system.memory,
    system.swap,
    system.disk,
    system.service,
    system.nodes,
)
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def examine(facts: Facts) -> tuple[Check, ...]:
    """One check for each code; those of a bundle only when there is one, and one that can be read."""
    found = [check(facts) for check in _MACHINE]
    if facts.bundle is not None:
        found.append(of_bundle.files(facts.bundle))
        if (manifest := facts.bundle.manifest) is not None:
            found += [of_bundle.architecture(manifest, facts), of_bundle.kernels(manifest, facts)]
            found.append(of_bundle.plans(facts.bundle, manifest, facts))
    return tuple(found)


def healthy(checks: Sequence[Check]) -> bool:
    """Whether none failed."""
    return all(check.status != "fail" for check in checks)


def report(checks: Sequence[Check], facts: Facts) -> dict[str, Any]:
    """The one object of ``--json``."""
    count = {status: sum(check.status == status for check in checks) for status in _STYLES}
    return {
        "ok": healthy(checks),
        "counts": count,
        "checks": [check.to_json() for check in checks],
        "bundle": None if facts.bundle is None else str(facts.bundle.path),
        "profile": None if facts.profile is None else facts.profile.name,
        "board": facts.board.to_json(),
    }


def table(checks: Sequence[Check]) -> Table:
    """For people: a line for each check, its remedy below what was found."""
    shown = Table(box=None, pad_edge=False)
    for name in ("code", "", "about", "found"):
        shown.add_column(name, overflow="fold")
    for check in checks:
        found = check.found + (f"\n-> {check.remedy}" if check.remedy else "")
        shown.add_row(check.code, f"[{_STYLES[check.status]}]{check.status}[/]", check.name, _plain(found))
    return shown


def _plain(text: str) -> str:
    """Text in which brackets are no markup."""
    return text.replace("[", "\\[")
