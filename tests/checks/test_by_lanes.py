"""Costs of several lanes by arithmetic: against one lane's, by hand, and what the tables say of them."""

import io
import json
from dataclasses import asdict, replace
from functools import cache
from math import prod

import pytest
from paths import ROOT
from rich.console import Console

from edge_dflash.bench.random_pair import synthetic_pair
from edge_dflash.board.archs import arch_of_sm
from edge_dflash.board.profiles import SYSTEM_BYTES, load_board
from edge_dflash.checks.footprint import distinct, expert_layers, expert_weights, routed, row_parameters, row_weights
from edge_dflash.checks.inspect import ACCEPT_LENGTH, LANES, inspect_recipe, products
from edge_dflash.cli.inspect import render
from edge_dflash.cli.output import size
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Linear
from edge_dflash.weights.formats import read_as
from edge_dflash.weights.recipe import default_recipe
from tests.board.test_rates import few_multiprocessors

DENSE, EXPERTS = "qwen3.6-27b", "qwen3.6-35b-a3b"


@cache
def inspected(name=DENSE, board="agx-thor", max_context=32768, **options):
    thor = load_board(board)
    return inspect_recipe(synthetic_pair(name), default_recipe(), board=thor, max_context=max_context, **options)


def shown(inspection, **options):
    text = io.StringIO()
    Console(file=text, width=120).print(render(inspection, **options))
    return text.getvalue()


def cycles_of(inspection):
    return {(one.lanes, one.drafts): one for one in inspection.by_lanes.cycles}


@pytest.mark.parametrize("name", [DENSE, EXPERTS])
def test_one_lane_costs_what_a_cycle_costs(name):
    found = inspected(name)
    drafts = synthetic_pair(name).drafts
    assert cycles_of(found)[1, drafts].bytes == found.cycle_bytes
    assert cycles_of(found)[1, 0].memory_ms == pytest.approx(found.plain_floor_ms, rel=1e-4)
    if name == EXPERTS:
        for each in found.by_drafts:
            if (1, each.drafts) in cycles_of(found):
                assert cycles_of(found)[1, each.drafts].bytes == each.cycle_bytes


def test_lanes_read_the_weights_once_and_their_state_each():
    found, drafts = inspected(), synthetic_pair(DENSE).drafts
    cycle = asdict(found.cycle)
    state = sum(cycle[name] for name in ("embedding_rows", "delta_state", "tape", "target_kv", "drafter_kv"))
    for lanes in LANES:
        assert cycles_of(found)[lanes, drafts].bytes == found.cycle_bytes + (lanes - 1) * state


def test_experts_are_read_by_the_rows_of_all_lanes():
    found, spec = inspected(EXPERTS), synthetic_pair(EXPERTS)
    one, four = cycles_of(found)[1, 15], cycles_of(found)[4, 3]
    assert one.rows == four.rows == 16
    assert one.experts == four.experts
    programs = pair_programs(spec)
    formats = default_recipe().formats(programs.weights)
    read = {name: read_as(formats[name]).nbytes(weight.shape) for name, weight in programs.weights.items()}
    layers = expert_layers(programs.verify)
    every = sum(read[name] for op in layers for name in routed(op))
    more = cycles_of(found)[8, 0].bytes - cycles_of(found)[1, 0].bytes
    experts = [found.by_drafts[0].experts, cycles_of(found)[8, 0].experts]
    state = 7 * (found.cycle.delta_state + found.cycle.target_kv)
    assert more == pytest.approx(state + every * (experts[1] - experts[0]) / len(layers[0].gates), rel=1e-3)


def test_products_are_every_weight_with_every_row_the_head_with_selected_rows_alone():
    programs = pair_programs(synthetic_pair(DENSE))
    head = prod(programs.weights["target.lm_head"].shape)
    linears = {op.weight for op in programs.verify.ops if isinstance(op, Linear)}
    found = sum(weights * rows for weights, rows in products(programs.verify, 7))
    assert found == 7 * sum(prod(programs.weights[name].shape) for name in linears)
    for lanes in (1, 3):
        found = sum(weights * rows for weights, rows in products(programs.propose, 16, lanes))
        assert found == lanes * (16 * row_parameters(programs.propose) + 15 * head)


@pytest.mark.parametrize(("rows", "lanes"), [(1, 1), (16, 1), (16, 8)])
def test_experts_multiply_the_rows_that_chose_them(rows, lanes):
    verify = pair_programs(synthetic_pair(EXPERTS)).verify
    (op, *_), every = expert_layers(verify), list(products(verify, rows, lanes))
    one, read = expert_weights(verify, op), distinct(op, rows * lanes)
    assert (read * one, rows * lanes * op.top_k / read) in every
    row = sum(weights * count for weights, count in every) / (rows * lanes)
    linears = sum(prod(verify.weights[o.weight].shape) for o in verify.ops if isinstance(o, Linear))
    assert row == pytest.approx(linears + sum(row_weights(verify, o) for o in expert_layers(verify)))


def test_products_of_a_cycle_are_those_that_were_measured():
    """On 20 multiprocessors with the plans of SM110, clocks scaled: linears and heads of a cycle of 27B."""
    for run in few_multiprocessors():
        board, arch = load_board("thor"), arch_of_sm(110)
        chip = replace(board, gpu_clock_hz=round(1e9 * run["clock_ghz"])).chip
        programs = pair_programs(synthetic_pair(run["pair"]))
        both = [*products(programs.verify, run["rows"]), *products(programs.propose, run["rows"])]
        took = 1e3 * sum(arch.joint.seconds(weights, rows, chip) for weights, rows in both)
        assert took == pytest.approx(run["products_ms"], rel=0.01)
    lanes = {one.rows: one for one in inspected().by_lanes.cycles if one.drafts == 15}
    assert {rows: round(one.product_ms) for rows, one in lanes.items()} == {16: 38, 32: 65, 64: 127, 128: 295}


def test_an_h200_takes_what_was_measured_of_lanes():
    measured = json.loads((ROOT / "docs" / "results" / "lanes-h200.json").read_text())["cycles"]
    spec, arch = synthetic_pair(DENSE), arch_of_sm(90)
    verify, seen = pair_programs(spec).verify, 0
    for run in measured:
        if (run["pair"], run["weights"]) == (DENSE, "nvfp4"):
            took = 1e3 * sum(arch.joint.seconds(w, r, arch.chip) for w, r in products(verify, 16, run["lanes"]))
            assert 0.75 * run["ms"]["greedy"][2] < took < run["ms"]["greedy"][2]  # attention and state come on top
            seen += 1
    assert seen >= 4


def test_a_pass_is_bound_by_products_beyond_the_rows_that_memory_hides():
    found, thor = inspected(), load_board("agx-thor")
    rows, verify, arch = found.by_lanes.free_rows, pair_programs(synthetic_pair(DENSE)).verify, arch_of_sm(thor.sm)
    weights_ms = thor.milliseconds(found.verify_bytes)

    def took(rows):
        return 1e3 * sum(arch.joint.seconds(weights, count, thor.chip) for weights, count in products(verify, rows))

    assert took(rows) <= weights_ms < took(rows + 1)
    assert rows == 16
    for lanes, rows in ((4, 64), (8, 128)):
        one = cycles_of(found)[lanes, 15]
        assert one.rows == rows
        assert one.floor_ms == one.product_ms > 1.8 * one.memory_ms
    assert cycles_of(found)[1, 15].floor_ms == cycles_of(found)[1, 15].memory_ms
    assert cycles_of(found)[2, 15].floor_ms < 1.04 * cycles_of(found)[2, 15].memory_ms  # nearly free


def test_a_board_with_fewer_multiprocessors_takes_longer_for_the_same_rows():
    thor, small = inspected(), inspected(board="t4000")
    share = load_board("thor").chip.clocks / load_board("t4000").chip.clocks
    for at, one in cycles_of(thor).items():
        assert cycles_of(small)[at].product_ms == pytest.approx(share * one.product_ms)
    assert small.by_lanes.free_rows == 0
    assert "of any rows they take longer" in shown(small, joint=True)


def test_tokens_a_second_follow_from_floor_and_accept_length():
    found = cycles_of(inspected())
    whole, plain = found[4, 15], found[4, 0]
    assert whole.tokens_per_second == pytest.approx(4e3 * ACCEPT_LENGTH / whole.floor_ms, rel=1e-3)
    assert plain.tokens_per_second == pytest.approx(4e3 / plain.floor_ms)
    assert plain.tokens_per_second < whole.tokens_per_second < found[4, 7].tokens_per_second  # fewer rows pay more


@pytest.mark.parametrize("lanes", [1, 4, 8])
def test_memory_grows_by_what_a_lane_holds(lanes):
    one, more = inspected(), inspected(lanes=lanes)
    kinds = ("target_kv", "drafter_kv", "delta_state", "tape")
    for kind in kinds:
        assert getattr(more.memory, kind) == lanes * getattr(one.memory, kind)
    assert more.memory.target_weights == one.memory.target_weights
    parts = {part.what: part for part in more.by_lanes.parts}
    assert [part.one for part in parts.values()][:4] == [getattr(one.memory, kind) for kind in kinds]
    assert all(part.all == lanes * part.one > 0 for part in parts.values())
    assert parts["logits of a verify"].one == 16 * 4 * synthetic_pair(DENSE).target.vocab_size


@pytest.mark.parametrize(("board", "context", "most"), [("agx-thor", 32768, 8), ("agx-thor", 262144, 8)])
def test_as_many_lanes_fit_as_memory_has(board, context, most):
    assert inspected(board=board, max_context=context).by_lanes.most == most


def test_the_most_lanes_fit_and_one_more_does_not():
    found = inspected(board="orin-agx-64", max_context=131072)
    most = found.by_lanes.most
    assert 1 <= most < 8
    assert inspected(board="orin-agx-64", max_context=131072, lanes=most).free_bytes >= 0
    assert inspected(board="orin-agx-64", max_context=131072, lanes=most + 1).free_bytes < 0
    small = replace(found.board, memory_bytes=SYSTEM_BYTES + found.stored_bytes)
    spec, recipe = synthetic_pair(DENSE), default_recipe()
    assert inspect_recipe(spec, recipe, board=small, max_context=131072).by_lanes.most == 0


def test_a_recipe_may_say_the_lanes_and_a_number_that_is_given_wins():
    recipe = replace(default_recipe(), context=replace(default_recipe().context, lanes=2))
    spec, board = synthetic_pair(DENSE), load_board("thor")
    assert inspect_recipe(spec, recipe, board=board).by_lanes.lanes == 2
    assert inspect_recipe(spec, recipe, board=board, lanes=4).by_lanes.lanes == 4


def test_tables_of_lanes_are_shown_where_they_are_asked_for():
    one, four = inspected(), inspected(lanes=4)
    assert "Joint cycles" not in shown(one)
    for text, costs in ((shown(four), four.by_lanes), (shown(one, joint=True), one.by_lanes)):
        assert all(size(part.one) in text for part in costs.parts)
        assert all(f"{each.floor_ms:.2f}" in text for each in costs.cycles)
        assert f"hides up to {costs.free_rows} rows" in text
    assert "Memory for 32,768 tokens of context, 4 lanes" in shown(four)
    assert "8 lanes of 32,768 tokens, the most there can be, fit; 4 counted above" in shown(four)


def test_json_has_the_lanes():
    found = json.loads(json.dumps(inspected(lanes=2).to_json()))["lanes"]
    assert (found["lanes"], found["accept_length"]) == (2, ACCEPT_LENGTH)
    for each in found["cycles"]:
        assert each["tokens_per_second_each"] == pytest.approx(each["tokens_per_second"] / each["lanes"])
        assert each["floor_ms"] == max(each["memory_ms"], each["product_ms"])
