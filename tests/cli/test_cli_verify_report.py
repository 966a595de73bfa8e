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
    assert list(tmp_path.iterdir()) == [file]


def test_a_difference_is_in_the_report_and_nothing_is_timed(cli, ids_bundle, tmp_path, monkeypatch):
    original = command.verify_lossless

    def differing(*arguments, **options):
        result = original(*arguments, **options)
        return replace(result, differences=(Difference(0, "own", 0.0, "tokens", 3, 1, 2),))

    monkeypatch.setattr(command, "verify_lossless", differing)
    file = tmp_path / "report.json"
    code, out, err = cli("verify", ids_bundle, "--count", 1, "--max-new-tokens", 8, "--report", file)
    assert code == 9
    assert "speculative differs from plain" in err
    assert f"wrote {file}" in err.splitlines()
    assert out.splitlines()[-1].startswith("lossless: no, speculative output differs from plain output in ")
    found = json.loads(file.read_text())
    assert (found["ok"], found["bench"]) == (False, None)
    assert found["verify"]["differences"][0]["position"] == 3


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("nowhere/report.json", "is no file in a directory that exists"),
        (".", "is no file in a directory that exists"),
        ("/proc/report.json", "--report /proc/report.json cannot be written: "),  # rights are tried, not read
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_any_work(
    refused, ids_bundle, tmp_path, place, words, monkeypatch
):
    monkeypatch.setattr(command, "_verify_bundle", None)
    code, line = refused("verify", ids_bundle, "--report", tmp_path / place)
    assert code == 8
    assert words in line


def test_what_was_found_is_printed_also_when_the_report_cannot_be_written_after_all(
    cli, ids_bundle, tmp_path, monkeypatch
):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "_bench", lambda bundle: None)
    monkeypatch.setattr("edge_dflash.bench.provenance.write_whole", full)
    argv = ("--count", 1, "--max-new-tokens", 4, "--report", tmp_path / "r.json")
    code, out, err = cli("verify", ids_bundle, *argv)
    assert code == 1
    assert out.splitlines()[-1] == "lossless: yes"
    assert "No space left" in err


def test_a_golden_file_has_no_report(refused, tmp_path):
    argv = ("--checkpoint", "t", "--drafter", "d", "--golden", "g", "--report", tmp_path / "r.json")
    code, line = refused("verify", *argv)
    assert code == 8
    assert "--report belongs to BUNDLE" in line
