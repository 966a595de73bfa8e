"""few_multiprocessors.py enqueues every kind of step on every board: run on a device that only remembers launches."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from control_gpu import ControlGpu
from forecast import BOARDS

pytest.importorskip("cuda.bindings")

from tests.scripts import few_multiprocessors
from tests.scripts.few_multiprocessors import MIXTURES, PAIRS


class Silent(ControlGpu):
    """Takes what every kind launches, which is something; has no clusters."""

    def most_clusters(self, kernel, *block):
        return 0

    def run(self, name, arguments, grid):
        self.launches.append(name)

    def fill(self, pointer):
        pass

    def capture(self, enqueue):
        self.launches.clear()
        enqueue()
        assert self.launches
        return SimpleNamespace(launch=list)

    def seconds(self, work):
        return 1e-3

    def become(self, sm, layout):
        self.sm, self.sm_count = sm, sum(layout)


class Asleep:
    """Sleepers of a device that computes nothing."""

    clock = 1.98

    def __init__(self, cubin):
        pass

    def gpcs(self):
        return [list(range(at, at + 16)) for at in range(0, 128, 16)]

    def leaving(self, free):
        return nullcontext()


PRODUCTS = 28.7e9, 24.53e9  # weights that a row is multiplied with in a cycle of the 27B, and in its prompts
BYTES = {"qwen3.6-27b": 16.6e9, "qwen3.5-4b": 3.2e9, "qwen3.6-35b-a3b": 8.77e9, "qwen3-coder-30b-a3b": 12.03e9}


@pytest.mark.parametrize(
    ("options", "rows", "flops", "nbytes"),
    [
        *((["--pair", pair], [16], None, BYTES[pair]) for pair in (*PAIRS, *MIXTURES)),
        (["--pair", "qwen3.6-27b", "--rows", "32,64,128"], [32, 64, 128], lambda rows: 2 * rows * PRODUCTS[0], 16.2e9),
        (["--pair", "qwen3.6-27b", "--work", "prompt"], [64, 128, 512], lambda rows: 2 * rows * PRODUCTS[1], None),
        (["--work", "frame"], [0], lambda rows: 2.0605e12, None),
        (["--pair", "qwen3.6-35b-a3b", "--rows", "1,5,128", "--correlation", "0"], [1, 5, 128], None, None),
    ],
)
def test_every_kind_of_step_is_enqueued_on_every_board(options, rows, flops, nbytes, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(few_multiprocessors, "Occupied", Silent)
    monkeypatch.setattr(few_multiprocessors, "Sleepers", Asleep)
    monkeypatch.setattr(few_multiprocessors, "cached_cubin", lambda unit, arch, cache: b"")
    monkeypatch.setattr(sys, "argv", ["few", *options, "--output", str(tmp_path / "found.json")])
    few_multiprocessors.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (tmp_path / "found.json").read_text()
    found = json.loads(last)["results"]
    assert [one["error"] for one in found if "error" in one] == []
    assert {one["board"] for one in found} == {board.name for board in BOARDS}
    assert [one["rows"] for one in found if one["layout"] == "8/8/4"] == rows
    for one in found:
        work = sum(kind["times"] * kind["flops"] for kind in one["kinds"])
        seconds = sum(kind["times"] * kind["seconds"] for kind in one["kinds"] if kind["flops"])
        took = 1e3 * seconds * 1.98 / one["clock_ghz"]
        assert one["products_ms"] == pytest.approx(took)
        count = sum(map(int, one["layout"].split("/")))
        assert one["flops_a_clock"] == pytest.approx(work / (took / 1e3 * count * one["clock_ghz"] * 1e9))
        assert flops is None or work == pytest.approx(flops(one["rows"]), rel=0.01)
        total = sum(kind["times"] * kind["nbytes"] for kind in one["kinds"])
        assert nbytes is None or total == pytest.approx(nbytes, rel=0.01)


@pytest.mark.parametrize("rows", ["0", "129", "many"])
def test_rows_that_no_pass_has_are_refused(rows, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["few", "--rows", rows])
    with pytest.raises(SystemExit):
        few_multiprocessors.main()
    assert "rows" in capsys.readouterr().err
