"""The arithmetic of ``inspect`` against the published tables of bytes, from config files alone."""

import io
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from edge_dflash.board.profiles import SYSTEM_BYTES, load_board
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.checks.inspect import inspect_manifest, inspect_pair, inspect_recipe
from edge_dflash.cli.inspect import render
from edge_dflash.cli.output import size
from edge_dflash.errors import RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.recipe import Recipe

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())
ALL_NVFP4 = Recipe(
    "all",
    target=dict.fromkeys(("attention", "gated_delta", "mlp", "lm_head"), "nvfp4"),
    drafter=dict.fromkeys(("attention", "mlp", "fc"), "nvfp4"),
)
FC_WIDE = Recipe("fc", target=ALL_NVFP4.target, drafter={**ALL_NVFP4.drafter, "fc": "bf16"})
HEAD_WIDE = Recipe("head", target={**ALL_NVFP4.target, "lm_head": "bf16"}, drafter=ALL_NVFP4.drafter)
WIDE = Recipe("wide", target=dict.fromkeys(ALL_NVFP4.target, "bf16"), drafter=dict.fromkeys(ALL_NVFP4.drafter, "bf16"))
FP8_ATTENTION = Recipe("fp8", target={**ALL_NVFP4.target, "attention": "fp8", "gated_delta": "fp8"})
GB = 1e9


@cache
def spec(model):
    folder = CONFIGS / model
    return read_pair(folder / "target", folder / "drafter")


def inspected(model, recipe=ALL_NVFP4, board="agx-thor", **options):
    return inspect_recipe(spec(model), recipe, board=load_board(board), max_context=32768, **options)


def wide(model):
    """BF16 for every weight."""
    return dict.fromkeys(pair_programs(spec(model)).weights, "bf16")


def close(value, gigabytes):
    """Within 2 % of a published figure."""
    return value == pytest.approx(gigabytes * GB, rel=0.02)


VERIFY = {  # bytes of target weights per forward: model -> recipe -> GB
    "qwen3.5-4b": (2.373, 3.287, 2.942, 8.412),
    "qwen3.5-9b": (4.475, 5.937, 5.385, 15.873),
    "qwen3.6-27b": (14.452, 16.279, 17.608, 51.249),
    "qwen3-4b": (2.044 + 0.219, 2.82, None, 8.044),
    "qwen3-8b": (3.907 + 0.350, 5.15, None, 2 * (8.191 - 0.622)),
}


@pytest.mark.parametrize("model", VERIFY)
def test_bytes_of_a_verify_in_four_recipes(model):
    recipes = (ALL_NVFP4, HEAD_WIDE, FP8_ATTENTION, WIDE)
    for recipe, gigabytes in zip(recipes, VERIFY[model], strict=True):
        if gigabytes is not None:
            assert close(inspected(model, recipe).verify_bytes, gigabytes), recipe.name


DRAFTER = {  # NVFP4 everything, fc BF16, all BF16, lm_head NVFP4, lm_head BF16; GB
    "qwen3.5-4b": (0.302, 0.349, 1.0749, 0.358, 1.271),
    "qwen3.5-9b": (0.590, 0.711, 2.0973, 0.572, 2.034),
    "qwen3.6-27b": (0.973, 1.162, 3.4604, 0.715, 2.543),
    "qwen3-4b": (0.302, 0.349, 1.0749, 0.219, 0.778),
    "qwen3-8b": (0.590, 0.711, 2.0973, 0.350, 1.245),
}


@pytest.mark.parametrize("model", DRAFTER)
def test_bytes_of_a_draft(model):
    nvfp4, fc_wide, wide, head, wide_head = DRAFTER[model]
    assert close(inspected(model).cycle.drafter_weights, nvfp4)
    assert close(inspected(model, FC_WIDE).cycle.drafter_weights, fc_wide)
    assert close(inspected(model, WIDE).cycle.drafter_weights, wide)
    assert close(inspected(model).cycle.drafter_lm_head, head)
    assert close(inspected(model, HEAD_WIDE).cycle.drafter_lm_head, wide_head)
    assert close(inspected(model).draft_bytes, nvfp4 + head)


@pytest.mark.parametrize(
    ("model", "drafts", "candidates", "once"),
    [
        ("qwen3.8-27b-dflash2", 7, 16, 256 * 5120),  # once: the projection of hidden rows
        ("qwen3.8-27b-dspark", 8, 64, 5120 + 256 + 1),  # the confidence head and its bias
        ("qwen3-8b-dspark", 7, 64, 4096 + 256 + 1),
    ],
)
def test_a_walk_reads_rows_of_its_tables(model, drafts, candidates, once):
    found = inspected(model)
    assert found.cycle.walk == 2 * (drafts * (1 + candidates) * 256 + once)
    plain = inspected(model.rsplit("-", 1)[0].replace("3.8", "3.6"))
    assert found.verify_bytes == plain.verify_bytes
    assert found.cycle.embedding_rows == 2 * spec(model).target.hidden_size * (spec(model).block_size + drafts + 1)
    vocab = spec(model).target.vocab_size
    assert found.memory.drafter_weights >= found.cycle.drafter_weights + 2 * 2 * 256 * vocab


def test_a_cycle_of_the_27b_and_its_floor_on_thor():
    nvfp4, fc_wide = inspected("qwen3.6-27b"), inspected("qwen3.6-27b", FC_WIDE)
    assert close(nvfp4.verify_bytes + nvfp4.draft_bytes, 16.14)
    assert close(fc_wide.verify_bytes + fc_wide.draft_bytes, 16.33)
    assert nvfp4.to_json()["verify_floor_ms"] == pytest.approx(52.9, abs=0.1)
    at_zero = inspected("qwen3.6-27b", context=0)
    assert at_zero.floor_ms == pytest.approx(at_zero.cycle_bytes / 273e9 * 1e3)
    assert close(at_zero.cycle_bytes, 16.14 + 0.03 + 0.308 + 0.032)  # K/V projections again, S, tape


STATE = {  # KV per token FP8, state slot, tape per row; bytes
    "qwen3.5-4b": (16_384, 51_511_296, 399_360),
    "qwen3.5-9b": (16_384, 51_511_296, 399_360),
    "qwen3.6-27b": (32_768, 153_944_064, 1_001_472),
    "qwen3-4b": (73_728, 0, 0),
    "qwen3-8b": (73_728, 0, 0),
}


@pytest.mark.parametrize("model", STATE)
def test_state_bytes_are_exact(model):
    found = inspected(model)
    assert (found.kv_bytes_per_token, found.state_bytes, found.tape_bytes_per_row) == STATE[model]
    wide_kv = inspect_pair(spec(model), wide(model), board=found.board, max_context=64, kv_format="bfloat16")
    assert wide_kv.kv_bytes_per_token == 2 * found.kv_bytes_per_token
    assert wide_kv.drafter_kv_bytes_per_token == 5 * 4096
    assert found.cycle.delta_state == 2 * found.state_bytes
    assert found.memory.tape == 16 * found.tape_bytes_per_row


def test_kv_reads_grow_with_the_context_but_not_in_a_window():
    near, far = (inspected("qwen3.6-27b", context=c).cycle for c in (8192, 16384))
    assert far.target_kv - near.target_kv == 8192 * 32768
    assert far.drafter_kv - near.drafter_kv == 8192 * 2048  # one full layer; the four others see 2047 rows
    assert near.drafter_kv == 8192 * 2048 + 4 * 2047 * 2048 + 16 * 5 * 2048


def test_the_embedding_is_a_gather_and_a_tied_head_is_stored_once():
    plain = inspected("qwen3-4b", WIDE)
    matrix = 2 * 151_936 * 2560
    assert plain.cycle.embedding_rows == 2 * 16 * 2560 * 2
    assert plain.memory.embedding == matrix
    assert plain.memory.target_weights == plain.verify_bytes - matrix
    assert {g.format for g in plain.weights if g.module == "lm_head"} == {"tied"}
    quantized = inspected("qwen3-4b")
    assert quantized.memory.target_weights == quantized.verify_bytes  # a copy of the head in NVFP4
    assert inspected("qwen3-8b", WIDE).memory.target_weights == inspected("qwen3-8b", WIDE).verify_bytes


def test_groups_add_up_and_the_drafter_groups_are_separate():
    found = inspected("qwen3.5-9b")
    total = sum(g.bytes for g in found.weights)
    assert total == found.memory.target_weights + found.memory.drafter_weights + found.memory.embedding
    assert sum(g.parameters for g in found.weights if g.model == "target") == pytest.approx(8.954e9 + 0.0, rel=0.001)
    assert ("drafter", "fc", "nvfp4") in {(g.model, g.module, g.format) for g in found.weights}


@pytest.mark.parametrize(("board", "fits"), [("thor", True), ("t4000", True), ("orin-agx", True), ("orin-nx", False)])
def test_memory_against_the_board(board, fits):
    found = inspected("qwen3.6-27b", board=board)
    assert (found.free_bytes >= 0) is fits
    assert found.free_bytes == found.board.memory_bytes - SYSTEM_BYTES - found.total_bytes
    assert found.total_bytes == sum(asdict(found.memory).values())
    text = shown(found)
    assert ("does not fit" in text) is not fits


def test_a_shorter_context_is_advised_where_it_helps():
    model, board = "qwen3.5-9b", load_board("orin-nx")
    long = inspect_recipe(spec(model), ALL_NVFP4, board=board, max_context=262_144)
    assert long.free_bytes < 0 < long.longest_context < 262_144
    text = " ".join(shown(long).split())
    assert f"with {long.longest_context:,} it does: give --max-context" in text
    at_most = inspect_recipe(spec(model), ALL_NVFP4, board=board, max_context=long.longest_context)
    more = inspect_recipe(spec(model), ALL_NVFP4, board=board, max_context=long.longest_context + 1)
    assert more.free_bytes < 0 <= at_most.free_bytes
    assert at_most.longest_context == long.longest_context


def test_no_context_is_advised_where_the_weights_alone_are_too_large():
    found = inspected("qwen3.6-27b", board="orin-nx")
    assert found.stored_bytes > found.board.memory_bytes - SYSTEM_BYTES
    assert (found.longest_context, found.to_json()["longest_context"], found.to_json()["fits"]) == (0, 0, False)
    text = " ".join(shown(found).split())
    assert "with any context: the weights alone are larger than the 14.0 GB beside the system" in text
    assert "--max-context" not in text


def shown(inspection):
    text = io.StringIO()
    Console(file=text, width=120).print(render(inspection))
    return text.getvalue()


def test_the_tables_show_every_number_of_the_cycle_and_of_the_memory():
    found = inspected("qwen3.6-27b")
    text = shown(found)
    numbers = [*asdict(found.cycle).values(), *asdict(found.memory).values(), found.cycle_bytes, found.total_bytes]
    assert all(size(number) in text for number in numbers if number)
    assert f"{found.floor_ms:.2f} ms a cycle" in text
    assert "Jetson AGX Thor (T5000): 273 GB/s peak" in text


def test_the_json_form_is_flat_where_it_is_documented_and_serialises():
    data = json.loads(json.dumps(inspected("qwen3.6-27b").to_json()))
    documented = "verify_bytes draft_bytes kv_bytes_per_token tape_bytes_per_row state_bytes total_bytes floor_ms"
    for key in documented.split():
        assert data[key] > 0, key
    assert data["cycle_bytes"] == sum(data["cycle"].values())
    assert data["total_bytes"] == sum(data["memory"].values())
    assert data["board"]["name"] == "agx-thor"
    assert data["break_even_accept_length"] == pytest.approx(data["floor_ms"] / data["plain_floor_ms"])
    assert 1 < data["break_even_accept_length"] < 1.2


def test_a_bundle_manifest_gives_the_same_numbers_as_its_recipe():
    pair = spec("qwen3.5-4b")
    formats = ALL_NVFP4.formats(pair_programs(pair).weights)
    manifest = object.__new__(Manifest)
    for name, value in {"pair": pair, "weights": formats, "max_context": 32768, "prefill_chunk": 256}.items():
        object.__setattr__(manifest, name, value)
    object.__setattr__(manifest, "precision", type("P", (), {"kv": "fp8"}))
    board = load_board("thor")
    assert inspect_manifest(manifest, board=board, context=100) == inspected("qwen3.5-4b", context=100)


def test_bad_sizes_are_refused_with_the_numbers():
    pair, formats, board = spec("qwen3-4b"), wide("qwen3-4b"), load_board("thor")
    for options, message in (
        ({"max_context": 16}, "maximum context 16"),
        ({"max_context": 64, "prefill_chunk": 0}, "prefill chunk 0"),
        ({"max_context": 64, "context": 49}, r"context 49 is outside 0\.\.48"),
        ({"max_context": 64, "context": -1}, "context -1"),
    ):
        with pytest.raises(RequestError, match=message):
            inspect_pair(pair, formats, board=board, **options)
    assert inspect_pair(pair, formats, board=board, max_context=64).context == 48
