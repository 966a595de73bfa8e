"""Figures of a benchmark from known times and bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from benchmark_support import (
    BANDWIDTH,
    PLAIN,
    PREFILL,
    PROPOSE,
    REST,
    SHAPE,
    VERIFY,
    Clock,
    FakeCosts,
    SlowHost,
    TimedBackend,
    device,
    subject,
)
from fakes import FakeBackend
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from edge_dflash.bench.device import Device
from edge_dflash.bench.measure import Meter
from edge_dflash.bench.result import Formed, svg
from edge_dflash.bench.run import run
from edge_dflash.bench.workload import Workload, accept_pattern, tiled
from edge_dflash.board.state import EnergyMeter
from edge_dflash.cli.bench import render
from edge_dflash.errors import ContextError, RequestError

WORK = Workload(context=200, tokens=60, prefill=(32, 1000, 5000), contexts=(400, 4010), accept_length=2.5)
WHOLE = PROPOSE + VERIFY + REST


def quiet(line):
    pass


@pytest.fixture
def clock(monkeypatch):
    return Clock().install(monkeypatch)


@pytest.fixture
def result(clock):
    return run(subject(TimedBackend(clock)), device(), replace(WORK, profile=True), quiet)


def test_tokens_per_second_is_measured_at_the_forced_accept_length(result):
    assert result.speculative.accept_length == pytest.approx(2.5)
    assert result.speculative.tokens_per_second == pytest.approx(2.5 / WHOLE)
    assert result.speculative.ms == pytest.approx(1e3 * WHOLE)
    assert result.plain.tokens_per_second == pytest.approx(1 / PLAIN)
    assert result.plain.accept_length == 1
    assert result.to_json()["speed_up"] == pytest.approx(2.5 * PLAIN / WHOLE)


def test_what_the_host_adds_to_a_cycle_stands_beside_the_raw_cycle(clock):
    backend = TimedBackend(clock)
    found = run(subject(backend, observer=SlowHost(clock, 0.0002)), device(), WORK, quiet)
    assert found.raw.ms == pytest.approx(1e3 * WHOLE)
    assert found.speculative.ms == pytest.approx(1e3 * WHOLE + 0.2)
    assert found.speculative.tokens_per_second == pytest.approx(2.5 / (WHOLE + 0.0002))
    assert found.raw.cycles == found.speculative.cycles
    assert found.raw.accept_length == pytest.approx(2.5)
    assert found.plain.ms == pytest.approx(1e3 * PLAIN + 0.2)
    saved = found.to_json()
    assert saved["host_ms"] == pytest.approx(0.2)
    assert saved["host_share"] == pytest.approx(0.2 / (1e3 * WHOLE))
    assert "host time a cycle: 0.200 ms, 4.4% of the raw cycle" in text_of(found)


def test_the_parts_of_a_cycle_stand_against_their_own_floors(result):
    cycle = result.cycle
    assert (cycle.whole.ms, cycle.propose.ms, cycle.verify.ms) == pytest.approx((1e3 * WHOLE, 1.0, 3.0))
    assert cycle.rest_ms == pytest.approx(1e3 * REST)
    assert cycle.propose.floor_ms == pytest.approx(0.5)
    assert cycle.verify.bytes == 2_000_000_000 + cycle.context + 2  # 2.5 rows pending on average, to the even
    assert cycle.whole.bytes == cycle.propose.bytes + cycle.verify.bytes
    assert cycle.whole.over_floor == pytest.approx(1e3 * WHOLE / (cycle.whole.bytes / BANDWIDTH * 1e3))
    assert 200 < cycle.context < 200 + 2.5 * 25
    assert result.plain_floor_ms == pytest.approx((2_000_000_000 + 130 + 1) / BANDWIDTH * 1e3)


def test_cold_and_steady_are_timed_the_same_way(result):
    assert result.cold.cycle_ms == pytest.approx(4e3 * WHOLE)
    assert result.cold.over_steady == pytest.approx(4)
    assert result.cold.prefill_ms == pytest.approx(1e5 * PREFILL)
    assert (result.cold.load_seconds, result.cold.prefill_tokens) == (12.5, 100)


def test_prompts_are_timed_with_their_rate_and_its_share(result):
    assert [row.tokens for row in result.prefill] == [32, 1000]  # 5,000 do not fit
    for row in result.prefill:
        assert row.ms == pytest.approx(1e3 * PREFILL * row.tokens)
        assert row.operations_per_second == pytest.approx(1e9 / PREFILL)
        assert row.share == pytest.approx(0.5)


def test_more_contexts_are_cycles_of_their_own_and_what_does_not_fit_is_said(clock):
    said = []
    found = run(subject(TimedBackend(clock)), device(), WORK, said.append)
    assert len(found.contexts) == 1  # 4,010 and the cycles behind them do not fit
    assert 400 < found.contexts[0].context < 470
    assert any("4010 tokens do not fit the context of 4096" in line for line in said)
    assert any("5000 tokens do not fit" in line for line in said)


def test_memory_is_what_the_backend_says_and_allocations_after_load_are_counted(clock, result):
    assert result.memory.budget == {"weights": 900, "kv": 100}
    assert (result.memory.allocated, result.memory.device_used, result.memory.device_total) == (1000, 3000, 10000)
    assert result.memory.allocations_after_load == 0
    leaking = run(subject(TimedBackend(clock, allocates=True)), device(), WORK, quiet)
    assert leaking.memory.allocations_after_load > 20


def test_a_profile_adds_up_the_layers(result):
    assert [(s.name, s.count, s.bytes) for s in result.profile] == [
        ("target.layers.*.mlp.down_proj nvfp4", 2, 10),
        ("Attend target.layers.*.kv", 1, 20),
    ]
    assert [s.ms for s in result.profile] == pytest.approx([3.0, 3.0])


def test_experts_are_counted_a_layer_and_a_pass(clock, monkeypatch):
    backend, costs = TimedBackend(clock), FakeCosts()
    costs.expert_layers = 2
    monkeypatch.setattr(Meter, "_experts_read", lambda self: 6 * backend.cycled)
    meter = Meter(subject(backend).planner, costs, BANDWIDTH)
    found = {each.drafts: each.experts for each in meter.by_drafts([1] * 50, None) if each.drafts}
    assert found
    assert set(found.values()) == {3.0}
    assert meter.device_cycle([1] * 50).verify.bytes > 0


def test_without_a_forced_length_the_drafter_counts(clock):
    found = run(subject(TimedBackend(clock, natural=3)), device(), replace(WORK, accept_length=None), quiet)
    assert found.forced_accept_length is None
    assert found.speculative.tokens_per_second == pytest.approx(4 / WHOLE, rel=0.1)  # the last cycle is cut


def test_a_backend_without_a_device_gives_times_and_no_floors():
    backend = FakeBackend(replace(SHAPE, max_context=512))
    work = Workload(context=64, tokens=20, prefill=(16,))
    found = run(replace(subject(backend, costs=False, prompt=20), kind="reference"), Device(), work, quiet)
    assert found.memory is None
    assert found.read_bandwidth is None
    assert found.cycle.whole.bytes is None
    assert found.cycle.whole.over_floor is None
    assert found.prefill[0].operations_per_second is None
    assert found.speculative.accept_length > 1
    json.dumps(found.to_json(), allow_nan=False)
    assert "floor" in text_of(found)


def test_a_context_that_is_too_small_is_refused(clock):
    backend = TimedBackend(clock, replace(SHAPE, max_context=64))
    with pytest.raises(ContextError, match="64 tokens is too small to time cycles in"):
        run(subject(backend), device(), WORK, quiet)


def text_of(result):
    console = Console(width=160, record=True, file=None, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(render(result))
    return captured.get()


def test_tables_show_what_the_json_says(result):
    shown = text_of(result)
    for words in ("Fake GPU", "1.000 TB/s", "20 TFLOP/s (a slide rule)", "cold: load 12.5 s", "4.00 x steady"):
        assert words in shown
    assert f"{result.speculative.tokens_per_second:.1f}" in shown
    assert f"{result.cycle.whole.over_floor:.2f}" in shown
    assert "accept length forced" in shown
    assert "target.layers.*.mlp.down_proj nvfp4" in shown
    found = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert found["cycle"]["over_floor"] == pytest.approx(result.cycle.whole.over_floor)
    assert found["cycle"]["verify_traffic"]["weights"] == {"nvfp4": 1_500_000_000, "fp8": 500_000_000}


def test_a_schema_is_named_with_what_it_costs(result):
    formed = Formed(600.0, 2.5, 24, 1e3 * 2.5 / 600.0, schema="steps of a robot", replaced=0.125)
    slower = replace(result, schema=formed, raw=replace(result.raw, ms=result.speculative.ms + 1))
    shown = text_of(slower)
    more = formed.ms / result.speculative.ms - 1
    assert (
        f"schema: steps of a robot; cycles take {more:+.1%}, 12.5% of the drafts were replaced by the grammar" in shown
    )
    assert "speculative, Planner.plan, schema" in shown
    assert "host time a cycle: -1.000 ms" in shown
    assert "(speculative minus raw; less than the noise here)" in shown
    assert slower.to_json()["schema"]["replaced"] == 0.125
    assert "prompts: a prompt of ones" in text_of(result)


def test_joules_a_plan_stand_where_the_board_says_its_power(clock, monkeypatch, result):
    assert result.speculative.joules is None
    assert "joules" not in text_of(result)
    monkeypatch.setattr(EnergyMeter, "joules", lambda self, begin, end: 30.0 * (end - begin))
    known = run(subject(TimedBackend(clock)), device(), WORK, quiet)
    plan_seconds = known.plain.cycles * known.plain.ms / 1e3 + PREFILL
    assert known.plain.joules == pytest.approx(30.0 * plan_seconds, rel=0.2)
    assert known.raw.joules is None
    assert known.to_json()["speculative"]["joules"] < known.plain.joules
    assert f"{known.plain.joules:.1f}" in text_of(known)
    assert "joules a plan" in " ".join(text_of(known).split())


def test_the_drawing_is_well_formed_and_to_scale(result):
    drawing = ElementTree.fromstring(svg(result))
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "a <fake> pair; weights nvfp4" in texts
    bars = [float(e.get("width")) for e in drawing.iter("{http://www.w3.org/2000/svg}rect") if e.get("x")]
    propose, propose_floor, verify = bars[:3]
    assert propose / propose_floor == pytest.approx(2, rel=0.01)
    assert verify / propose == pytest.approx(3, rel=0.01)


@given(length=st.floats(1, 16), block=st.just(16))
def test_patterns_have_the_mean_that_was_asked(length, block):
    pattern = accept_pattern(length, block)
    assert abs(sum(pattern) / len(pattern) + 1 - length) <= 0.005
    assert all(0 <= n < block for n in pattern)
    assert max(pattern) - min(pattern) <= 1


@pytest.mark.parametrize("length", [0.99, 0, -3, 16.01, 99, float("nan")])
def test_accept_lengths_outside_the_block_are_refused(length):
    with pytest.raises(RequestError, match=r"is outside 1\.\.16, the rows of a verify pass"):
        accept_pattern(length, 16)


def test_work_without_prompts_and_contexts_needs_room_for_its_cycles():
    assert Workload(context=512, tokens=256, prefill=()).rows(16) == 1024


def test_filler_is_as_long_as_asked():
    assert tiled([1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert tiled([1, 2, 3], 2) == [1, 2]


def test_a_profile_of_acceptance_is_forced_and_the_number_of_drafts_is_chosen(clock):
    work = replace(WORK, accept_length=None, acceptance="published")
    found = run(subject(TimedBackend(clock)), device(), work, quiet)
    assert found.forced_acceptance == "published"
    assert found.speculative.accept_length == pytest.approx(1 + 0.854 + 0.770 + 0.713, abs=0.06)
    assert found.chosen.usual == SHAPE.drafts  # every number of drafts takes as long
    assert found.chosen.tokens_per_second == pytest.approx(found.speculative.tokens_per_second, rel=0.1)
    assert [each.drafts for each in found.by_drafts] == [0, 1, 2, 3]
    last = found.by_drafts[-1]
    assert last.ms == pytest.approx(1e3 * WHOLE)
    assert last.tokens_per_second == pytest.approx((1 + 0.854 + 0.770 + 0.713) / WHOLE)
    assert last.verify.floor_ms == pytest.approx(2.0, rel=0.001)
    assert found.by_drafts[0].ms == pytest.approx(1e3 * PLAIN)
    for words in (
        "acceptance as published",
        "Planner.plan, drafts chosen",
        "mostly 3, 3.0 on average",
        "Cycle by drafts",
    ):
        assert words in text_of(found)
    json.dumps(found.to_json())
