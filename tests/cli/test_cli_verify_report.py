"""``verify --report``: one file that says what was checked, by what, on what; written when something differs, too."""

import json
from dataclasses import replace

import pytest
from cli_support import last_json

from edge_dflash.checks.lossless import Difference
from edge_dflash.cli import verify as command


def test_a_report_holds_checks_benchmark_machine_and_bundle(cli, ids_bundle, tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    monkeypatch.setattr(command, "REPORT_TOKENS", 8)
    monkeypatch.setattr(command, "REPORT_CONTEXT", 32)
    code, out, _ = cli("verify", ids_bundle, "--count", 1, "--max-new-tokens", 8, "--report", file, "--json")
    assert code == 0
    found = json.loads(file.read_text())
    assert found["verify"] == last_json(out)
    assert found["ok"] is True
    assert found["bundle"]["backend"] == "reference"
    assert found["bundle"]["plans"] is None
    assert found["bench"]["plain"]["tokens_per_second"] > 0
    assert {check["code"] for check in found["doctor"]["checks"]} >= {"D001", "D014", "D017"}
    assert found["machine"]["edge_dflash"]
    assert not list(tmp_path.glob("*.new"))


def test_a_difference_is_in_the_report_and_nothing_is_timed(cli, ids_bundle, tmp_path, monkeypatch):
    original = command.verify_lossless

    def differing(*arguments, **options):
        result = original(*arguments, **options)
        return replace(result, differences=(Difference(0, "own", 0.0, "tokens", 3, 1, 2),))

    monkeypatch.setattr(command, "verify_lossless", differing)
    file = tmp_path / "report.json"
    code, _, err = cli("verify", ids_bundle, "--count", 1, "--max-new-tokens", 8, "--report", file)
    assert code == 9
    assert "speculative differs from plain" in err
    found = json.loads(file.read_text())
    assert (found["ok"], found["bench"]) == (False, None)
    assert found["verify"]["differences"][0]["position"] == 3


@pytest.mark.parametrize("place", ["nowhere/report.json", "."])
def test_a_report_that_cannot_be_written_is_refused_before_any_work(refused, ids_bundle, tmp_path, place, monkeypatch):
    monkeypatch.setattr(command, "_verify_bundle", None)
    code, line = refused("verify", ids_bundle, "--report", tmp_path / place)
    assert code == 8
    assert "is no file in a directory that exists" in line


def test_a_golden_file_has_no_report(refused, tmp_path):
    argv = ("--checkpoint", "t", "--drafter", "d", "--golden", "g", "--report", tmp_path / "r.json")
    code, line = refused("verify", *argv)
    assert code == 8
    assert "--report belongs to BUNDLE" in line
