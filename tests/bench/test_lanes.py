"""Several requests at once: what the benchmark measures of them, and mixes that verify compares."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from benchmark_support import FakeCosts, subject
from golden_pairs import ENGINE, backend, golden
from rich.console import Console

from edge_dflash.bench.device import Device
from edge_dflash.bench.lanes import joint_bytes
from edge_dflash.bench.run import run
from edge_dflash.bench.workload import Workload
from edge_dflash.checks import mixes as mixes_module
from edge_dflash.checks.lossless import ByTurns
from edge_dflash.checks.mixes import MixCheck, Watching, verify_mixes
from edge_dflash.cli.bench import render
from edge_dflash.decode.backend import Asked
from edge_dflash.decode.delegate import Delegate
from edge_dflash.errors import VerificationError
from edge_dflash.planner import Planner

NAME = "qwen3_5"
PROMPTS = [golden(NAME)[name].tolist() for name in ("p1.prompt", "p2.prompt")]


def lanes_of(count):
    return backend(NAME, ENGINE, lanes=count, prefill_chunk=16, max_context=256)


def quiet(line):
    """Nothing is said."""


@pytest.fixture(scope="module")
def measured():
    said = []
    one = subject(lanes_of(2), costs=False)
    one = replace(one, prompts=[prompt[:12] for prompt in PROMPTS])
    work = Workload(context=12, tokens=8, prefill=(8,), lanes=(1, 2))
    with one.planner:
        found = run(one, Device(), work, said.append)
    return found, said


def test_requests_at_once_are_timed_in_joint_cycles(measured):
    found, said = measured
    assert [load.lanes for load in found.lanes] == [1, 2]
    one, two = found.lanes
    for load in found.lanes:
        assert load.cycle.ms > 0
        assert load.cycle.floor_ms is None
        assert load.tokens_per_second == pytest.approx(1e3 * load.lanes * load.accept_length / load.cycle.ms)
    assert two.rows == 2 * one.rows
    assert "timing 2 requests at once" in said


def test_what_company_costs_one_request_is_told(measured):
    company = measured[0].company
    assert company.lanes == 2
    assert 0 < company.alone_p50_ms <= company.alone_p99_ms
    assert 0 < company.beside_p50_ms <= company.beside_p99_ms
    assert company.deadlines > 0
    assert company.overshoot_ms >= 0


def test_tables_and_json_say_it(measured):
    found, text = measured[0], io.StringIO()
    Console(file=text, width=140).print(render(found))
    for figure in (f"{found.lanes[1].cycle.ms:.3f}", f"{found.company.beside_p99_ms:.3f}", "in company"):
        assert figure in text.getvalue()
    data = json.loads(json.dumps(found.to_json()))
    assert [load["over_floor"] for load in data["lanes"]] == [None, None]
    assert data["company"]["lanes"] == 2


def test_bytes_of_a_joint_cycle_are_the_weights_once_and_the_state_of_each():
    weights = 2_000_000_000 + 500_000_000
    assert joint_bytes(FakeCosts(), 100, 4, 16, 3) == weights + 4 * (100 + 3)
    assert joint_bytes(FakeCosts(), 100, 4, 1, 1) == 2_000_000_000 + 4 * (100 + 1)


# mixes ---------------------------------------------------------------------------------------------------------------


class Leaking(Delegate):
    """A backend whose joint cycles give the first lane a token of another."""

    def cycle(self, asked):
        return self._backend.cycle(asked)

    def cycles(self, asked):
        found = self._backend.cycles(asked)
        return [replace(found[0], tokens=(*found[0].tokens[:-1], (found[0].tokens[-1] + 1) % 64)), *found[1:]]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(mixes_module, "MIXES", 3)


def mixes(lanes, wrap=lambda one: one):
    watching = Watching()
    options = {"fallback": False, "queue": 64, "prompt_share": 1.0}
    with Planner(wrap(lanes_of(lanes)), None, observer=watching, **options) as planner:
        return verify_mixes(planner, watching, [prompt[:20] for prompt in PROMPTS], 10)


def test_mixes_have_no_differences_on_a_backend_that_keeps_lanes_apart():
    found = mixes(3)
    assert found.ok
    found.check()
    assert found.requests >= 3 * found.mixes
    assert found.joint_cycles > 0
    assert "0 differences" in found.summary


def test_a_lane_that_sees_another_is_found():
    found = mixes(2, Leaking)
    assert not found.ok
    with pytest.raises(VerificationError, match=r"differ from those alone.*open this bundle with lanes=1"):
        found.check()


def test_mixes_that_share_nothing_are_no_proof():
    with pytest.raises(VerificationError, match="no cycle was shared"):
        MixCheck(lanes=2, mixes=3, requests=9, tokens=40, joint_cycles=0, differences=()).check()


# asking --------------------------------------------------------------------------------------------------------------


def test_other_numbers_of_drafts_by_turns_go_through_one_joint_pass():
    class Counted(Delegate):
        def cycles(self, asked):
            joint.append([one.drafts for one in asked])
            return self._backend.cycles(asked)

    joint, lanes = [], lanes_of(2)
    for lane in range(2):
        lanes.prefill(PROMPTS[lane][:5], lane)
    ByTurns(Counted(lanes), 1).cycles([Asked(3, lane=0), Asked(3, lane=1)])
    assert joint == [[1, 2]]
