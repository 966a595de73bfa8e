"""``progress=True``: a line for people who wait, and nothing for a service."""

import pytest

from edge_dflash.common import progress
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner


def test_a_terminal_has_one_line_that_is_wiped(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress.shown(True) as tell:
        tell("checking files", 0, 0)
        tell("loading", 50, 100)
        for done in range(1000):
            tell("loading", done, 1000)
    out, err = capsys.readouterr()
    assert out == ""
    assert "\n" not in err
    assert "loading: 50 %" in err
    assert err.count("\r") < 20
    assert err.endswith("\r" + " " * len("checking files") + "\r")


def test_a_file_has_a_line_now_and_then(capsys, monkeypatch):
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.shown(True) as tell:
        for done in range(9):
            tell("weights", done, 9)
    assert capsys.readouterr().err == "weights: 22 %\nweights: 55 %\nweights: 88 %\n"


def test_a_planner_takes_true_a_function_or_nothing(ids_bundle, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    Planner.open(ids_bundle, progress=True).close()
    said = capsys.readouterr().err
    assert "checking files" in said
    assert "loading" in said
    Planner.open(ids_bundle).close()
    told = []
    Planner.open(ids_bundle, progress=lambda *stage: told.append(stage)).close()
    assert capsys.readouterr().err == ""
    assert {stage for stage, _, _ in told} >= {"checking files", "loading"}
    with pytest.raises(RequestError, match="progress is 5; give a function of"):
        Planner.open(ids_bundle, progress=5)
