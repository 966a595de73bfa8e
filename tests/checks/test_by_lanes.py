"""Costs of several lanes by arithmetic: against one lane's, by hand, and what the tables say of them."""

import io
import json
from dataclasses import asdict, replace
from functools import cache
from math import prod

import pytest
from rich.console import Console

from edge_dflash.board.archs import arch_of_sm
from edge_dflash.board.profiles import SYSTEM_BYTES, load_board
from edge_dflash.checks.by_drafts import by_drafts
from edge_dflash.checks.by_lanes import ACCEPT_LENGTH, LANES, operations
from edge_dflash.checks.expert_bytes import expert_layers, routed
from edge_dflash.checks.footprint import row_parameters
from edge_dflash.checks.inspect import inspect_recipe
from edge_dflash.checks.random_pair import synthetic_pair
from edge_dflash.cli.inspect_tables import render
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Linear
from edge_dflash.weights.formats import read_as
from edge_dflash.weights.recipe import default_recipe

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
    experts = [by_drafts(spec, programs, read, found.context, "fp8")[0].experts, cycles_of(found)[8, 0].experts]
    state = 7 * (found.cycle.delta_state + found.cycle.target_kv)
    assert more == pytest.approx(state + every * (experts[1] - experts[0]) / len(layers[0].gates), rel=1e-3)


def test_operations_are_two_a_weight_and_row_the_head_of_selected_rows_alone():
    programs = pair_programs(synthetic_pair(DENSE))
    head = prod(programs.weights["target.lm_head"].shape)
    linears = {op.weight for op in programs.verify.ops if isinstance(op, Linear)}
    assert operations(programs.verify, 7) == 14 * sum(prod(programs.weights[name].shape) for name in linears)
    assert operations(programs.propose, 16) == 2 * (16 * row_parameters(programs.propose) + 15 * head)


def test_a_pass_is_bound_by_products_beyond_the_rows_that_memory_hides():
    found, board = inspected(), load_board("agx-thor")
    rows, verify = found.by_lanes.free_rows, pair_programs(synthetic_pair(DENSE)).verify
    weights_ms, rate = board.milliseconds(found.verify_bytes), arch_of_sm(board.sm).flops
    assert 1e3 * operations(verify, rows) / rate <= weights_ms < 1e3 * operations(verify, rows + 1) / rate
    assert 64 < rows < 128
    most = cycles_of(found)[8, 15]
    assert most.rows == 128
    assert most.floor_ms == most.product_ms > most.memory_ms
    assert cycles_of(found)[2, 15].floor_ms == cycles_of(found)[2, 15].memory_ms


def test_tokens_a_second_follow_from_floor_and_accept_length():
    found = cycles_of(inspected())
    whole, plain = found[4, 15], found[4, 0]
    assert whole.tokens_per_second == pytest.approx(4e3 * ACCEPT_LENGTH / whole.floor_ms, rel=1e-3)
    assert plain.tokens_per_second == pytest.approx(4e3 / plain.floor_ms)
    assert plain.tokens_per_second < found[4, 3].tokens_per_second < whole.tokens_per_second


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
        assert all(f"{part.one:,}" in text for part in costs.parts)
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
