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
from tests.scripts.few_multiprocessors import FRAME, MIXTURES, PAIRS, Frame, Proxy, kinds_of


class Silent(ControlGpu):
    """Takes every launch; has no clusters."""

    def most_clusters(self, kernel, *block):
        return 0

    def run(self, name, arguments, grid):
        self.launches.append(name)

    def fill(self, pointer):
        pass

    def capture(self, enqueue):
        enqueue()
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


TOTAL = {"qwen3.6-27b": 16.6e9, "qwen3.5-4b": 3.2e9, "qwen3.6-35b-a3b": 8.77e9, "qwen3-coder-30b-a3b": 12.03e9}


@pytest.mark.parametrize("name", [*PAIRS, *MIXTURES])
def test_every_kind_of_step_is_enqueued(name):
    gpu = Silent()
    proxy = Proxy(gpu, name, lambda unit: b"")
    for board in BOARDS:
        gpu.sm, gpu.sm_count = board.sm, sum(board.layouts[0])
        proxy.load()
        found = {}
        for kind, calls in proxy.kinds():
            gpu.launches.clear()
            for call in calls:
                call()
            assert gpu.launches, kind.name
            found[kind.name] = kind
        experts = name in MIXTURES
        assert {"q k v", "out", "lm_head", "Attend", *(["Mix"] if experts else ["gate up", "down"])} <= found.keys()
        assert experts or {"qkv z", "GatedDelta"} <= found.keys()
        assert found["lm_head"].times == 2
        total = sum(kind.times * kind.nbytes for kind in found.values())
        assert total == pytest.approx(TOTAL[name], rel=0.01)


def enqueued(gpu, kinds):
    """Kinds by name, each with what was launched and where it lay in the grid."""
    found = {}
    for kind, calls in kinds:
        gpu.launches.clear()
        for call in calls:
            call()
        assert gpu.launches, kind.name
        found[kind.name] = kind, list(gpu.launches)
    return found


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_joint_passes_enqueue_linears_and_heads_of_their_rows(rows):
    gpu = Silent()
    proxy = Proxy(gpu, "qwen3.6-27b", lambda unit: b"")
    for board in BOARDS:
        gpu.become(board.sm, board.layouts[0])
        found = enqueued(gpu, kinds_of(proxy, "cycle", rows))
        assert ("Attend" in found) == (rows == 16)
        linears = {name: one for name, one in found.items() if one[0].flops}
        assert {"qkv z", "q k v", "out", "gate up", "down", "lm_head"} <= linears.keys()
        tile = 32 if rows > 16 else 16
        launched = {
            name for _, names in linears.values() for name in names if name.startswith(("linear_c", "linear_n"))
        }
        kernels = {name for name in launched if "norm" not in name and "greedy" not in name}
        assert kernels
        assert all(f"_{tile}" in name for name in kernels), kernels
        flops = sum(one.times * one.flops for one, _ in linears.values())
        assert flops == pytest.approx(2 * rows * 28.7e9, rel=0.01)
        assert sum(one.times * one.nbytes for one, _ in linears.values()) == pytest.approx(16.2e9, rel=0.01)


@pytest.mark.parametrize("rows", [64, 512])
def test_prompts_enqueue_the_tiles_of_the_board(rows):
    gpu = Silent()
    proxy = Proxy(gpu, "qwen3.6-27b", lambda unit: b"")
    for board in BOARDS:
        gpu.become(board.sm, board.layouts[0])
        found = enqueued(gpu, kinds_of(proxy, "prompt", rows))
        assert {name.rsplit("_", 1)[0] for _, names in found.values() for name in names} == {"linear_tiles"}
        assert sum(one.times * one.flops for one, _ in found.values()) == pytest.approx(2 * rows * 24.53e9, rel=0.01)


def test_a_frame_enqueues_tiles_and_attention():
    gpu = Silent()
    frame = Frame(gpu, lambda unit: b"")
    for board in BOARDS:
        gpu.become(board.sm, board.layouts[0])
        found = enqueued(gpu, kinds_of(frame, "frame", 0))
        attention, names = found["Looked"]
        assert "tower_attend_5" in names
        assert attention.times == 27
        assert sum(one.times * one.flops for one, _ in found.values()) == pytest.approx(2.0605e12, rel=0.001)
        assert all("linear_tiles_bf16" in names for name, (_, names) in found.items() if name.startswith("Product"))


@pytest.mark.parametrize(
    ("options", "pairs", "rows"),
    [
        (["--pair", "qwen3.6-27b", "--rows", "16,32,64,128"], {"qwen3.6-27b"}, [16, 32, 64, 128]),
        (["--pair", "qwen3.6-27b", "--work", "prompt", "--rows", "64,512"], {"qwen3.6-27b"}, [64, 512]),
        (["--pair", "qwen3.6-27b"], {"qwen3.6-27b"}, [16]),
        (["--work", "frame"], {FRAME}, [0]),
        (["--pair", "qwen3.6-35b-a3b", "--rows", "1,5,128", "--correlation", "0"], {"qwen3.6-35b-a3b"}, [1, 5, 128]),
    ],
)
def test_one_json_line_comes_last(options, pairs, rows, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(few_multiprocessors, "Occupied", Silent)
    monkeypatch.setattr(few_multiprocessors, "Sleepers", Asleep)
    monkeypatch.setattr(few_multiprocessors, "cached_cubin", lambda unit, arch, cache: b"")
    monkeypatch.setattr(sys, "argv", ["few", *options, "--board", "T5000", "--output", str(tmp_path / "found.json")])
    few_multiprocessors.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (tmp_path / "found.json").read_text()
    found = json.loads(last)["results"]
    assert [one["error"] for one in found if "error" in one] == []
    assert {one["pair"] for one in found} == pairs
    assert [one["rows"] for one in found if one["layout"] == "8/8/4"] == rows
    for one in found:
        work = sum(kind["times"] * kind["flops"] for kind in one["kinds"])
        seconds = sum(kind["times"] * kind["seconds"] for kind in one["kinds"] if kind["flops"])
        assert one["clock_ghz"] == 1.57
        assert one["products_ms"] == pytest.approx(1e3 * seconds * 1.98 / 1.57)
        assert one["flops_a_clock"] == pytest.approx(work / (one["products_ms"] / 1e3 * 20 * 1.57e9))


@pytest.mark.parametrize("rows", ["0", "129", "16,1000", "many", "16 32"])
def test_rows_that_no_pass_has_are_refused(rows, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["few", "--rows", rows])
    with pytest.raises(SystemExit):
        few_multiprocessors.main()
    assert "rows" in capsys.readouterr().err
