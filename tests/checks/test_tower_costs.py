"""What ``inspect`` counts of a vision tower: parameters, bytes, memory, and a picture."""

import json
from dataclasses import asdict, replace
from math import prod

import pytest
from golden_pairs import GOLDEN
from paths import ROOT
from synthetic import CONFIGS

from edge_dflash.board.archs import find_arch
from edge_dflash.board.profiles import load_board
from edge_dflash.checks.footprint import picture_patches, tower_costs, tower_operations
from edge_dflash.checks.inspect import inspect_recipe
from edge_dflash.cli.inspect import render
from edge_dflash.decode.gaze import SEEN_BYTES
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.recipe import default_recipe

PAIR = read_pair(CONFIGS / "qwen3.6-27b-sees" / "target", CONFIGS / "qwen3.6-27b-sees" / "drafter")
H, INNER, M, OUT = 1152, 4304, 4608, 5120
BLOCK = 4 * H + (3 * H * H + 3 * H) + (H * H + H) + (INNER * H + INNER) + (H * INNER + H)
PARAMETERS = (H * 1536 + H) + 2304 * H + 27 * BLOCK + 2 * H + (M * M + M) + (OUT * M + OUT)


def inspected(pair=PAIR, recipe=None):
    return inspect_recipe(pair, recipe or default_recipe(), board=load_board("agx-thor"))


def test_the_tower_of_the_27b():
    found = inspected()
    tower = found.tower
    assert tower.parameters == PARAMETERS == pytest.approx(460.7e6, rel=1e-3)
    assert tower.bytes == found.memory.tower == 2 * PARAMETERS
    assert (tower.patches, tower.tokens) == (50 * 38, 475)
    linears = 1900 * (1536 * H + 27 * (4 * H * H + 2 * H * INNER)) + 475 * (M * M + M * OUT)
    assert tower.operations == 2 * linears + 27 * 4 * 1900**2 * H
    assert tower.operations == pytest.approx(2.06e12, rel=0.02)
    assert json.loads(json.dumps(found.to_json()))["tower"] == {**asdict(tower), "picture": [600, 800]}


def test_a_picture_takes_the_rate_that_a_whole_frame_reached():
    runs = json.loads((ROOT / "docs" / "results" / "few-multiprocessors-h200.json").read_text())["results"]
    frame = next(run for run in runs if (run["board"], run["work"]) == ("T5000", "frame"))
    assert inspected().tower.milliseconds == pytest.approx(frame["compute_ms"], rel=0.04)


def test_an_h200_takes_what_was_measured():
    measured = json.loads((ROOT / "docs" / "results" / "tower-h200.json").read_text())["tower"]
    one = next(row for row in measured if row["frames"] == 1 and row["weights"] == "bf16")
    arch = find_arch("sm90")
    programs = pair_programs(PAIR)
    found = tower_costs(PAIR, programs, dict.fromkeys(programs.see.weights, 0), arch, arch.chip)
    assert found.operations == one["operations"]
    assert found.milliseconds == pytest.approx(one["kernels_ms"], rel=0.02)


def test_only_memory_differs_from_the_target_of_text():
    sees, text = inspected(), inspected(PAIR.text_only)
    plain = read_pair(CONFIGS / "qwen3.6-27b" / "target", CONFIGS / "qwen3.6-27b" / "drafter")
    assert text == inspected(plain)
    assert text.tower is None
    assert sees.cycle == text.cycle
    assert sees.memory.embedding == text.memory.embedding
    assert (text.memory.tower, text.memory.seen) == (0, 0)
    assert sees.total_bytes - text.total_bytes >= sees.memory.tower + SEEN_BYTES == sees.memory.tower + sees.memory.seen
    assert sees.stored_bytes - text.stored_bytes == sees.memory.tower


def test_fp8_halves_the_linears():
    eight = inspected(recipe=replace(default_recipe(), target={**default_recipe().target, "vision": "fp8"})).tower
    program = pair_programs(PAIR).see
    linears = sum(prod(weight.shape) for weight in program.weights.values() if weight.kind == "linear")
    assert inspected().tower.bytes - eight.bytes == pytest.approx(linears, rel=0.01)  # less scales of rows
    assert eight.operations == inspected().tower.operations


def test_work_grows_with_the_picture():
    program, spec = pair_programs(PAIR).see, PAIR.target.vision
    assert picture_patches(spec) == 1900
    attention = [27 * 4 * H * patches**2 for patches in (1900, 7600)]  # among all patches
    assert tower_operations(program, 7600) - attention[1] == 4 * (tower_operations(program, 1900) - attention[0])


def test_a_small_pair_scratches_for_a_picture():
    pair = read_pair(GOLDEN / "vision-tiny", None)
    assert inspected(pair).memory.scratch >= inspected(pair.text_only).memory.scratch
    assert inspected(pair).tower.tokens == 54  # 65,536 pixels at most


def test_people_are_told(capsys):
    from rich.console import Console

    console = Console(width=200)
    console.print(render(inspected()))
    text = capsys.readouterr().out
    assert "vision tower: 460," in text
    assert "a picture of 800 x 600 is 475 tokens, 2.0" in text
    console.print(render(inspected(PAIR.text_only)))
    assert "a picture of" not in capsys.readouterr().out
