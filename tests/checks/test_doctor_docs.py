"""docs/troubleshooting.md and docs/thor.md say what the program does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

import edge_dflash.cli
from edge_dflash.checks.doctor import CODES
from edge_dflash.common.files import directory

DOCS = directory("deploy").parent / "docs"
TROUBLES = (DOCS / "troubleshooting.md").read_text()
THOR = (DOCS / "thor.md").read_text()
COMMANDS = [
    shlex.split(line.strip().removeprefix("sudo "), comments=True)[1:]
    for text in (TROUBLES, THOR)
    for body in re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for line in body.splitlines()
    if line.strip().removeprefix("sudo ").startswith("edge-dflash ")
]


def test_every_code_has_a_section_in_order_and_no_other_has():
    assert re.findall(r"^## (D\d+) (.+)$", TROUBLES, flags=re.MULTILINE) == list(CODES.items())


def test_every_section_says_something_of_a_status():
    for section in re.split(r"^## ", TROUBLES, flags=re.MULTILINE)[1:]:
        assert re.search(r"\*(warn|fail)\*", section), section[:20]


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_commands_parse(argv):
    command = typer.main.get_command(edge_dflash.cli.app).commands[argv[0]]
    if argv[0] == "service":
        argv = argv[1:]
        command = command.commands[argv[0]]
    command.make_context(argv[0], list(argv[1:]))


def test_paths_of_links_exist():
    for text in (TROUBLES, THOR):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (DOCS / target).exists(), target


def test_paths_are_those_of_the_units():
    unit = (directory("deploy") / "edge-dflash.service").read_text()
    for path in ("/etc/edge-dflash/config.toml", "/opt/edge-dflash"):
        assert path in THOR
        assert path in unit
    socket = (directory("deploy") / "edge-dflash.socket").read_text()
    for path in set(re.findall(r"--unix-socket (\S+)", THOR)):
        assert f"ListenStream={path}\n" in socket


def test_figures_are_those_of_the_unit():
    unit = dict(
        line.split("=", 1)
        for line in Path(directory("deploy") / "edge-dflash.service").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    assert f"`WatchdogSec` ({unit['WatchdogSec']} s)" in THOR
    assert f"after {unit['RestartSec']} s" in THOR
    assert f"OOMScoreAdjust={unit['OOMScoreAdjust']}" in THOR
    assert (unit["StartLimitBurst"], unit["StartLimitIntervalSec"]) == ("4", "15min")
    assert "four times in 15 minutes" in THOR
