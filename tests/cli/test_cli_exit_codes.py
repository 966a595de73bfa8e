"""The exit codes that docs/cli.md states are those of the errors, and of the commands that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from edge_dflash import errors
from edge_dflash.cli import INTERRUPTED, run

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \| (?:`edge-dflash ([^`]*)`)? ?\|$", (ROOT / "docs/cli.md").read_text(), re.M)


def classes(base=errors.EdgeDflashError):
    return [base, *(one for kind in base.__subclasses__() for one in classes(kind))]


def test_each_code_of_an_error_is_in_the_table_and_no_other():
    stated = [int(code) for code, _, _ in ROWS]
    assert stated == sorted({0, 2, INTERRUPTED, *(one.exit_code for one in classes())})
    assert all(command for code, _, command in ROWS if int(code) not in (9, INTERRUPTED))


@pytest.mark.parametrize(("code", "what", "command"), [row for row in ROWS if row[2]], ids=lambda word: str(word)[:24])
def test_a_command_of_the_table_exits_with_its_code(demo_bundle, monkeypatch, tmp_path, capsys, code, what, command):
    monkeypatch.chdir(ROOT)
    words = [str(demo_bundle) if word == "demo-bundle" else word for word in shlex.split(command)]
    words = [str(tmp_path / word) if word == "new-bundle" else word for word in words]
    assert run(words) == int(code), capsys.readouterr().err


def test_a_code_that_does_not_heal_is_not_tried_again():
    """Of those that the service's own page lists; a backend or a socket may come back."""
    unit = (ROOT / "deploy/edge-dflash.service").read_text()
    page = (ROOT / "docs/troubleshooting.md").read_text()
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", unit, re.M)[1].split()
    assert prevented == ["2", "4", "6", "9"]
    assert f"{', '.join(prevented[:-1])} and {prevented[-1]} are not tried again" in page


@pytest.mark.parametrize("setting", ["drafts = 99", "lanes = 8\ndrafts = 99"])
def test_a_service_with_a_setting_that_its_bundle_does_not_take_exits_with_8(demo_bundle, tmp_path, setting, capsys):
    file = tmp_path / "config.toml"
    file.write_text(f'[service]\nself_test = "off"\n[engine]\n{setting}\n')
    words = ["serve", str(demo_bundle), "--config", str(file), "--socket", str(tmp_path / "s")]
    assert run([*words, "--state-dir", str(tmp_path / "state")]) == errors.RequestError.exit_code
    assert "drafts is 99" in capsys.readouterr().err
