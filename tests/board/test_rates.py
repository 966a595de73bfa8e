"""No rate is above what its kernel was seen to reach, nor above the arch's products: by the figures of record."""

import json
import re
from dataclasses import replace

import pytest
from forecast import BOARDS
from paths import ROOT

from edge_dflash.backends.cuda.compile import KERNELS
from edge_dflash.bench.random_pair import synthetic_pair
from edge_dflash.board.archs import ARCHS, H200, Chip, KernelRate, find_arch
from edge_dflash.board.profiles import board_profiles, load_board
from edge_dflash.checks.footprint import expert_layers, expert_parameters, row_parameters
from edge_dflash.checks.inspect import inspect_recipe, products
from edge_dflash.cli.inspect import render
from edge_dflash.model import pair_programs
from edge_dflash.weights.recipe import default_recipe

NATIVE, RESULTS = ROOT / "docs" / "lab", ROOT / "docs" / "results"
GPUS = [arch for arch in ARCHS if arch.sm]


def page(name):
    return (NATIVE / f"{name}.md").read_text()


def number(pattern, text):
    """The first group of ``pattern``, which stands in the text."""
    (found,) = re.findall(pattern, text)
    return float(found.replace(",", ""))


def layer_flops(rows):
    """Multiplications and additions of the four linears of a gated delta layer of Qwen3.6-27B."""
    return 2 * rows * (16384 * 5120 + 5120 * 6144 + 34816 * 5120 + 5120 * 17408)


def few_runs(board, work):
    """Runs of record with a board's multiprocessors."""
    runs = json.loads((RESULTS / "few-multiprocessors-h200.json").read_text())["results"]
    return [run for run in runs if (run["board"], run["work"]) == (board, work)]


def few_multiprocessors():
    """Those of joint rows of a T5000, by rows: of several layouts the slowest."""
    found = {}
    for run in few_runs("T5000", "cycle"):
        found[run["rows"]] = max(found.get(run["rows"], run), run, key=lambda one: one["products_ms"])
    return [found[rows] for rows in sorted(found)]


def most_reached():
    """FLOP a clock and multiprocessor that each kernel was seen to reach, by the pages and files of record."""
    tiles = number(r"mma.sync tiles \| (\d+) TFLOP/s", page("prefill"))
    stream = number(r"\| 27B layer \| 215.3 \| 46.8 us \| ([\d.]+) us", page("linears"))
    orin = number(r"27B, AGX Orin 64 GB \| 107.7 \| .* \| ([\d.]+), 111.6 \|", page("boards"))
    wide = re.search(r"27B layer NVFP4 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) ", page("lanes")).groups()
    experts = number(r"\| 512 \| 256 \| 456 \| 314 us, 31 % \| (\d+) us", page("experts"))
    few = few_multiprocessors()
    programs = pair_programs(synthetic_pair("qwen3.6-27b"))
    cycle = sum(weights for one in (programs.verify, programs.propose) for weights, _ in products(one, 16))
    mixture = pair_programs(synthetic_pair("qwen3.6-35b-a3b")).prefill
    row = expert_parameters(mixture) / len(expert_layers(mixture))
    tower = json.loads((RESULTS / "tower-h200.json").read_text())["tower"]
    frame = next(one for one in tower if one["frames"] == 1 and one["weights"] == "bf16")
    prompts = [
        row_parameters(pair_programs(synthetic_pair(run["pair"].split(",")[0])).prefill) * one["tokens"] / one["ms"]
        for run in json.loads((RESULTS / "bench-h200.json").read_text())["runs"]
        if run["machine"]["commit"] == "733dc8d"
        for one in run["prefill"]
    ]
    return {
        "linear_tiles.cu": tiles * 1e12 / H200.clocks,
        "linear.cu": max(layer_flops(16) / stream * 1e6 / H200.clocks, 2 * 16 * cycle / orin * 1e3 / (16 * 1.30e9)),
        "linear_wide.cu": [
            layer_flops(r) / float(us) * 1e6 / H200.clocks for r, us in zip((16, 32, 64, 128), wide, strict=True)
        ],
        "experts_linear.cu": 2 * 512 * row / experts * 1e6 / H200.clocks,
        "linear_cluster.cu": [
            2 * o["rows"] * cycle / o["products_ms"] * 1e3 / (20 * 1e9 * o["clock_ghz"]) for o in few
        ],
        "tower.cu": frame["operations"] / frame["kernels_ms"] * 1e3 / H200.clocks,
        "tower.cu by proxy": min(run["flops_a_clock"] for run in few_runs("T5000", "frame")),
        "tiles_hopper.cuh": 2e3 * min(prompts) / H200.clocks,
    }


REACHED = most_reached()


@pytest.mark.parametrize("arch", GPUS, ids=lambda arch: arch.name)
def test_no_rate_is_above_what_its_kernel_reached_or_the_products_of_the_arch(arch):
    for use, rate in arch.rates.items():
        reached = REACHED.get(f"{rate.kernel} {rate.how}", REACHED[rate.kernel])
        assert (KERNELS / rate.kernel).is_file()
        assert rate.where
        assert rate.how in ("measured", "by proxy", "assumed")
        for (_, flops), most in zip(rate.flops, reached if isinstance(reached, list) else [reached], strict=True):
            assert flops <= 1.01 * most, f"{use}: {rate.kernel} reached {most:.0f}"
            assert flops <= arch.mma, f"{use}: products of {arch.name} are {arch.mma}"
            assert rate.how == "assumed" or flops == pytest.approx(most, rel=0.01)  # what was reached, no more, no less


def test_prompts_reach_their_rate_from_the_least_rows_on():
    thor = find_arch("sm110")
    for run in few_runs("T5000", "prompt"):
        share = run["flops_a_clock"] / thor.prompts.flops[0][1]
        assert share > 0.99 if run["rows"] >= thor.least_rows else share < 0.8


def test_a_rate_is_measured_only_where_kernels_ran():
    for arch in GPUS:
        assert {rate.how for rate in arch.rates.values()} <= (
            {"measured"} if arch.sm == 90 else {"by proxy", "assumed"}
        )


def test_a_rate_of_the_data_sheet_is_found():
    """What stood here once: 0.35 of 250 TFLOP/s, which only tcgen05 does."""
    thor = find_arch("sm110")
    old = replace(thor.prompts, flops=((0, 0.35 * 250e12 / thor.chip.clocks),))
    with pytest.raises(AssertionError, match=r"linear_tiles.cu reached 1048"):
        test_no_rate_is_above_what_its_kernel_reached_or_the_products_of_the_arch(replace(thor, prompts=old))
    joint = replace(thor.joint, flops=tuple((rows, old.flops[0][1]) for rows, _ in thor.joint.flops))
    with pytest.raises(AssertionError, match=r"linear_cluster.cu reached"):
        test_no_rate_is_above_what_its_kernel_reached_or_the_products_of_the_arch(replace(thor, joint=joint))


def test_products_are_those_of_the_kernels_not_of_instructions_that_they_lack():
    thor = find_arch("sm110")
    assert 55e12 < thor.mma * thor.chip.clocks < 65e12  # docs/lab/boards.md: a quarter of tcgen05
    for arch in GPUS:
        assert arch.mma <= (4096 if "wgmma" in arch.features else 2048)


def test_boards_have_their_own_chips_and_the_largest_is_the_archs():
    for board in board_profiles():
        arch = find_arch(str(board.sm))
        assert board.chip.clocks <= arch.chip.clocks
    assert load_board("thor").chip == find_arch("sm110").chip == Chip(20, 1.57e9)
    assert load_board("orin-agx-64").chip == find_arch("sm87").chip
    assert load_board("dgx-spark").chip == find_arch("sm121").chip


def test_forecasts_are_for_the_boards_of_the_profiles():
    for name, board in (("T5000", "thor"), ("T4000", "t4000"), ("AGX Orin 64GB", "orin-agx-64")):
        (found,) = (one for one in BOARDS if one.name == name)
        profile = load_board(board)
        assert Chip(sum(found.layouts[0]), 1e9 * found.clock) == profile.chip
        assert found.read == (profile.read_bandwidth_bytes_per_s or load_board("thor").read_bandwidth_bytes_per_s)


def test_what_is_read_was_measured_below_the_peak():
    for board in board_profiles():
        read, peak = board.read_bandwidth_bytes_per_s, board.memory_bandwidth_bytes_per_s
        assert read is None or (read < peak and any(f"{read / 1e9:g} GB/s" in note.fact for note in board.notes))


def test_a_pass_computes_the_rows_of_its_tile_and_more_in_turn():
    rates, chip = KernelRate("k", ((16, 1.0), (32, 4.0)), "by proxy", "here"), Chip(2, 10.0)
    times = {rows: rates.seconds(100, rows, chip) for rows in (0, 1, 16, 17, 32, 33, 64, 65)}
    assert times == {0: 0, 1: 160, 16: 160, 17: 80, 32: 80, 33: 240, 64: 160, 65: 320}
    assert rates.steps(128) == (16, 32, 64, 96, 128)
    assert rates.steps(16) == (16,)
    assert rates.held(2.0).flops == ((16, 1.0), (32, 2.0))
    assert rates.held(4.0) is rates
    assert rates.by_rows(chip) == [(16, 20.0), (32, 80.0)]


def test_a_rate_that_is_held_is_an_assumption():
    rate = KernelRate("k", ((0, 10.0),), "by proxy", "here")
    assert rate.held(10.0) is rate
    assert rate.held(9.0) == replace(rate, flops=((0, 9.0),), how="assumed")
    assert rate.by_rows(Chip(2, 3.0)) == [(0, 60.0)]


@pytest.mark.parametrize("board", [board.name for board in board_profiles()])
def test_people_and_programs_are_told_the_kernels(board, capsys):
    from rich.console import Console

    found = inspect_recipe(synthetic_pair("qwen3.5-4b"), default_recipe(), board=load_board(board))
    Console(width=200).print(render(found))
    text, rates = capsys.readouterr().out, found.to_json()["rates"]
    assert len(rates) == 4
    for rate in rates:
        line = next(line for line in text.splitlines() if rate["use"] in line)
        assert rate["kernel"] in line
        assert rate["how"] in line
        assert f"{max(flops for _, flops in rate['by_rows']) / 1e12:.3g}" in line
    measured = found.board.read_bandwidth_bytes_per_s
    assert ("a kernel that only reads gets" in text) == (measured is not None)
