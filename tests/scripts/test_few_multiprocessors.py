"""few_multiprocessors.py enqueues every kind of step on every board: run on a device that only remembers launches."""

import pytest
from control_gpu import ControlGpu
from forecast import BOARDS

pytest.importorskip("cuda.bindings")

from tests.scripts.few_multiprocessors import MIXTURES, PAIRS, Proxy


class Silent(ControlGpu):
    """Takes every launch; has no clusters."""

    def most_clusters(self, kernel, *block):
        return 0

    def run(self, name, arguments, grid):
        self.launches.append(name)


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
