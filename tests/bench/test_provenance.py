"""What a benchmark says of its machine, and its results file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from edge_dflash.bench import provenance
from edge_dflash.bench.provenance import append, check_record
from edge_dflash.errors import RequestError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "NVIDIA H200, 580.65.06, 1980, 3201, 1980, 356.71, 700.00\n",
            ("NVIDIA H200", "580.65.06", 1980.0, 3201.0, 1980.0, 356.71, 700.0),
        ),
        ("Orin (nvgpu), 540.4.0, [N/A], [N/A], [N/A], [N/A], [Not Supported]", ("Orin (nvgpu)", "540.4.0")),
        ("", ()),
        ("\n", ()),
    ],
)
def test_clocks_are_what_nvidia_smi_reports(line, found):
    names = ("name", "driver", "sm_mhz", "memory_mhz", "most_sm_mhz", "watts", "watt_limit")
    assert provenance.parse_clocks(line) == dict(zip(names, found, strict=False))


def test_without_nvidia_smi_there_are_no_clocks(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(provenance.subprocess, "Popen", missing)
    sample = provenance.ClockSample()
    assert not sample.pending
    assert sample.result() == {}


def test_power_mode_of_a_jetson():
    assert provenance.power_mode("NV Power Mode: MAXN\n0\n") == "MAXN"
    assert provenance.power_mode("NVPM ERROR: no such mode\n") is None
    assert provenance.power_mode(None) is None


def test_the_commit_says_when_files_were_changed(tmp_path):
    def git(*words):
        names = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        subprocess.run(["git", "-C", str(tmp_path), *names, *words], check=True, capture_output=True)

    assert provenance.commit(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = provenance.commit(tmp_path)
    (tmp_path / "file").write_text("2")
    assert clean.isalnum()
    assert provenance.commit(tmp_path) == clean + "+"
    assert {"date", "edge_dflash", "python", "system"} <= provenance.describe().keys()


def test_results_files_grow_by_one_run_a_line(tmp_path):
    file = tmp_path / "results.json"
    check_record(file)
    append(file, {"pair": "a"})
    append(file, {"pair": "b"})
    assert json.loads(file.read_text())["runs"] == [{"pair": "a"}, {"pair": "b"}]
    assert len(file.read_text().splitlines()) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_what_a_results_file_says_besides_its_runs_stays(tmp_path):
    file = tmp_path / "results.json"
    file.write_text('{"what": "runs of a rainy day", "runs": [{"pair": "a"}], "note": "by hand"}')
    append(file, {"pair": "b"})
    found = json.loads(file.read_text())
    assert found == {"what": "runs of a rainy day", "note": "by hand", "runs": [{"pair": "a"}, {"pair": "b"}]}


def test_the_runs_of_record_are_what_their_file_says():
    text = (ROOT / "docs" / "results" / "bench-h200.json").read_text()
    runs = json.loads(text)["runs"]
    dates = [run["machine"]["date"] for run in runs]
    assert "oldest first, one a line" in text
    assert dates == sorted(dates)
    assert len(text.splitlines()) == len(runs) + 5
    assert all(run["machine"][key] for run in runs for key in ("device", "commit", "clocks"))


@pytest.mark.parametrize("text", ["", "[1]", '{"runs": 3}', "\xff"])
def test_other_files_are_not_written_over(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(RequestError, match="give another --record"):
        append(file, {})
    assert file.read_bytes() == text.encode("latin-1")


def test_a_results_file_in_no_directory_is_refused(tmp_path):
    with pytest.raises(RequestError, match="is no directory; make it first"):
        check_record(tmp_path / "no" / "file.json")
