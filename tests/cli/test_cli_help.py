"""The help of every command, as it stands on a terminal of 80 and of 120 columns; and completion in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import typer

import edge_dflash.cli
from edge_dflash.cli import COMMANDS

PATHS = [(name,) for name in COMMANDS] + [("service", name) for name in ("install", "rollback", "remove")]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("path", [(), *PATHS], ids=" ".join)
def test_help_reads_well(cli, path, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = cli(*path, "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= columns
    options = out[out.index("\nOptions:") :]
    assert not re.search(r"<|range>|\\{[A-Z]", out.partition("JSON keys")[0].partition("\nOptions:")[0].splitlines()[0])
    assert not re.search(r"<[a-z ]+>", out)  # a type is no name
    assert "{" not in out.splitlines()[0]
    assert "[[" not in out
    for line in re.findall(r"^  (--.*?)(?:  |$)", options, flags=re.MULTILINE):
        assert re.fullmatch(r"--[a-z-]+( / --[a-z-]+)?( [A-Z][A-Z|,:]*| none)?", line.strip()), line


def test_every_command_is_walked():
    group = typer.main.get_command(edge_dflash.cli.app)
    walked = {(name,) for name in group.commands} | {("service", name) for name in group.commands["service"].commands}
    assert walked == set(PATHS)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ("build", "--target", "t"),
            "Missing option '--output' (or give --finish BUNDLE) (see edge-dflash build --help)",
        ),
        (("train-drafter",), "Missing option '--target' (see edge-dflash train-drafter --help)"),
    ],
    ids=["build", "train-drafter"],
)
def test_a_missing_option_is_said_as_such(refused, argv, line):
    assert refused(*argv) == (2, f"error: {line}")


def test_completion_is_shown_and_completes(tmp_path):
    """As a shell asks for it; installing writes below HOME alone."""
    program = [sys.executable, "-m", "edge_dflash"]
    home = {**os.environ, "HOME": str(tmp_path)}

    def said(*argv, **more):
        done = subprocess.run([*program, *argv], capture_output=True, text=True, env=home | more, timeout=120)
        return done.stdout

    assert "_EDGE_DFLASH_COMPLETE" in said(
        "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    asked = {"_EDGE_DFLASH_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert said(**asked, COMP_WORDS="edge-dflash ve").split() == ["verify"]
    assert "--report" in said(**(asked | {"COMP_CWORD": "3"}), COMP_WORDS="edge-dflash verify bundle --re").split()
