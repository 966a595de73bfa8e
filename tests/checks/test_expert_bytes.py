"""Bytes of a target with experts: by its published table, by the rows of a pass, on boards that hold it or not."""

import io
from functools import cache

import pytest
from rich.console import Console

from edge_dflash.bench.random_pair import kind_recipe, synthetic_pair
from edge_dflash.board.profiles import load_board
from edge_dflash.checks.footprint import Costs, distinct, expert_layers, row_parameters, streamed_bytes
from edge_dflash.checks.inspect import inspect_recipe
from edge_dflash.cli.inspect import render
from edge_dflash.model import pair_programs
from edge_dflash.weights.recipe import Recipe, default_recipe

NAME = "qwen3.6-35b-a3b"
PUBLISHED = Recipe(  # nvidia/Qwen3.6-35B-A3B-NVFP4
    "published",
    target={"attention": "fp8", "gated_delta": "fp8", "experts": "nvfp4", "lm_head": "nvfp4"},
    drafter=dict.fromkeys(("attention", "mlp", "fc"), "nvfp4"),
)
TABLE = {1: 2.25, 2: 2.80, 4: 3.84, 6: 4.82, 8: 5.75, 12: 7.42, 16: 8.90}  # GB of a verify by rows


RECIPES = {"published": PUBLISHED, "nvfp4": default_recipe()}


@cache
def inspected(recipe="published", board="agx-thor", name=NAME):
    return inspect_recipe(synthetic_pair(name), RECIPES[recipe], board=load_board(board), max_context=32768)


@cache
def costs(name=NAME, kind="nvfp4"):
    pair = synthetic_pair(name)
    programs = pair_programs(pair)
    return Costs(programs, kind_recipe(kind).formats(programs.weights), "fp8", pair)


def test_experts_by_rows():
    (op, *_) = expert_layers(costs().programs.verify)
    assert distinct(op, 1) == pytest.approx(8)
    assert [round(distinct(op, rows), 1) for rows in (2, 4, 8, 16)] == [15.8, 30.5, 57.4, 102.0]
    assert distinct(op, 4096) == pytest.approx(256)


def test_verify_bytes_are_the_published_ones_by_rows():
    found = {each.drafts + 1: each.verify_bytes for each in inspected().by_drafts}
    assert sorted(found) == [1, 2, 3, 5, 7, 9, 13, 16]
    for rows in TABLE.keys() & found.keys():
        assert found[rows] == pytest.approx(TABLE[rows] * 1e9, rel=0.01)
    assert found[16] == inspected().verify_bytes == inspected().cycle.target_weights + inspected().cycle.experts
    assert inspected("nvfp4").by_drafts[0].verify_bytes == pytest.approx(1.69e9, rel=0.02)


def test_a_token_without_drafts_reads_what_one_row_chooses():
    found = inspected()
    plain = found.by_drafts[0]
    assert found.plain_floor_ms == pytest.approx(found.board.milliseconds(plain.cycle_bytes))
    assert plain.cycle_bytes == plain.verify_bytes + found.cycle.delta_state + found.cycle.target_kv - 15 * 10240
    assert found.by_drafts[-1].cycle_bytes == found.cycle_bytes
    assert found.break_even_accept_length == pytest.approx(3.98, abs=0.02)
    assert [each["drafts"] for each in found.to_json()["by_drafts"]] == [0, 1, 2, 4, 6, 8, 12, 15]


def test_a_thor_holds_it_and_boards_of_16_gb_do_not():
    thor, small = inspected(), inspected(board="orin-nx-16")
    assert thor.memory.target_weights + thor.memory.embedding == pytest.approx(20.8e9, rel=0.01)
    assert thor.free_bytes > 100e9
    assert small.free_bytes < 0
    assert small.longest_context == 0
    text = io.StringIO()
    Console(file=text, width=120).print(render(small))
    assert "does not fit with any context: the weights alone are larger than the 14.0 GB beside the system" in " ".join(
        text.getvalue().split()
    )
    assert "if rows chose experts uniformly and independently" in text.getvalue()


def test_a_dense_target_has_no_table_by_drafts():
    assert inspected("nvfp4", name="qwen3-8b").by_drafts == ()
    assert inspected("nvfp4", name="qwen3-8b").cycle.experts == 0


@pytest.mark.parametrize(("kind", "size"), [("nvfp4", 0.5625), ("fp8", 1), ("bf16", 2)])
def test_native_passes_read_the_experts_that_were_counted(kind, size):
    found = costs(kind=kind)
    one = 3 * 512 * 2048 * size + 4 * (1024 + 2048)  # an expert with its row scales
    assert found.expert_layers == 40
    assert found.verify(512, 1, 1).experts == pytest.approx(40 * 8 * one)
    assert found.verify(512, 1, 16, experts=8.0).experts == found.verify(512, 1, 1).experts
    assert found.verify(512, 1, 16, experts=20.5).experts == pytest.approx(40 * 20.5 * one)
    assert found.verify(512, 1, 16).experts == pytest.approx(40 * 102.0 * one, rel=0.001)
    assert found.propose(512).experts == 0
    shared, router = 40 * one, 40 * 2 * 2048 * 257
    dense = sum(costs("qwen3-8b").verify(512, 1, 1).weights.values())
    assert sum(streamed_bytes(found.programs.verify, found.formats).values()) == pytest.approx(
        256 * 40 * one + shared + router
    )
    assert dense == sum(costs("qwen3-8b").verify(512, 1, 16).weights.values())


def test_a_prompt_costs_the_chosen_experts_alone():
    parameters = row_parameters(pair_programs(synthetic_pair(NAME)).prefill)
    assert 2.0e9 < parameters < 3.2e9
    found = costs()
    assert found.prefill_operations(1000) == pytest.approx(2 * 1000 * parameters, rel=0.05)


def test_experts_without_a_shared_one_are_counted_too():
    found = inspected("nvfp4", name="qwen3-coder-30b-a3b")
    assert [round(each.experts, 1) for each in found.by_drafts[:3]] == [8.0, 15.5, 22.5]
    assert found.memory.target_weights + found.memory.embedding == pytest.approx(17.6e9, rel=0.03)
