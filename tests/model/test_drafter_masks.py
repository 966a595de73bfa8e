"""Which keys a drafter's block rows see: every row of the table of config keys, and a recipe's say, to the last op."""

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from control_gpu import ControlGpu
from golden_pairs import FLOAT32, GOLDEN
from native_support import NATIVE_PAIR

from edge_dflash.backends.reference.attention import KvMemory, attend
from edge_dflash.board.profiles import load_board
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.checks.inspect import inspect_recipe
from edge_dflash.errors import CheckpointError, RecipeError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Attend
from edge_dflash.model.program import KvState
from edge_dflash.model.registry import match_pair, read_drafter_spec, read_pair, read_target_spec
from edge_dflash.model.specs import DrafterLayerMask
from edge_dflash.weights.recipe import MaskOverride, Recipe, load_recipe
from tests.backends import test_native_backend, test_tensorrt_backend

S, F = "sliding_attention", "full_attention"
ABSENT = object()
FLAGS = (ABSENT, None, False, True)
TYPES = ((F, F, F), (S, S, S), (S, S, F), ABSENT)
SWA = (ABSENT, False, True)
WINDOWS = ((24, ABSENT), (24, 9), (ABSENT, 9))  # sliding_window, swa_window_size
START, ROWS = 40, 8


def write(tmp_path, is_causal=ABSENT, causal=ABSENT, types=ABSENT, use_swa=ABSENT, windows=(24, ABSENT)):
    config = json.loads((GOLDEN / "qwen3_5-tiny-dflash" / "config.json").read_text())
    for key in ("is_causal", "layer_types", "sliding_window", "use_sliding_window"):
        config.pop(key, None)
    top = {"is_causal": is_causal, "layer_types": types, "sliding_window": windows[0]}
    inner = {"causal": causal, "use_swa": use_swa, "swa_window_size": windows[1]}
    config.update({key: value for key, value in top.items() if value is not ABSENT})
    config["dflash_config"].update({key: value for key, value in inner.items() if value is not ABSENT})
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_drafter_spec(tmp_path)


def said(value):
    return value is not ABSENT and value is not None


def expected(layer, is_causal, causal, types, use_swa, windows):
    """[ROWS, START + ROWS] visibility of one layer, from the words of the table, key by key and row by row."""
    slides = types is not ABSENT and types[layer] == S
    if said(is_causal):
        backwards = is_causal
    elif said(causal):
        backwards = causal
    else:
        backwards = slides
    window = None
    if slides or use_swa is True:
        window = windows[1] if windows[1] is not ABSENT else windows[0]
    seen = torch.zeros(ROWS, START + ROWS, dtype=torch.bool)
    for row in range(ROWS):
        for key in range(START + ROWS):
            ahead = key - (START + row)
            seen[row, key] = (ahead <= 0 or not backwards) and (window is None or abs(ahead) < window)
    return seen


def visible(op):
    """The same from the op as the reference runs it: keys are told apart by their values."""
    keys = START + ROWS
    memory = KvMemory(KvState(op.kv_heads, keys), 64, FLOAT32, (1.0, 1.0))
    memory.append(0, torch.zeros(keys, op.kv_heads, keys), torch.eye(keys)[:, None].repeat(1, op.kv_heads, 1))
    op = replace(op, head_dim=keys)
    turn = torch.ones(16, keys // 2), torch.zeros(16, keys // 2)
    out = attend(op, torch.zeros(16, op.heads * keys), torch.ones(keys), turn, memory, START, ROWS)
    return out[:ROWS, :keys] > 0


MASKS = [DrafterLayerMask(both, window) for window in (None, 9, 24) for both in (False, True)]  # that come out of it
ROWS_OF_THE_TABLE = list(itertools.product(FLAGS, FLAGS, TYPES, SWA, WINDOWS))


def test_every_row_of_the_table_reaches_the_reference(tmp_path):
    target = read_target_spec(GOLDEN / "qwen3_5-tiny")
    assert len(ROWS_OF_THE_TABLE) == 576
    known: dict[DrafterLayerMask, torch.Tensor] = {}
    for row in ROWS_OF_THE_TABLE:
        spec = write(tmp_path, *row)
        block = [op for op in pair_programs(match_pair(target, spec)).propose.ops if isinstance(op, Attend)]
        assert len(block) == 3
        for layer, op in enumerate(block):
            mask = DrafterLayerMask(op.bidirectional, op.window)
            assert mask == spec.layers[layer]
            if mask not in known:
                known[mask] = visible(op)
            assert torch.equal(known[mask], expected(layer, *row)), f"layer {layer} of {row}"
    assert known.keys() == set(MASKS)


def test_a_window_without_a_size_is_refused(tmp_path):
    for changes in ({"types": (S, S, F)}, {"use_swa": True}):
        with pytest.raises(CheckpointError, match="lacks the field sliding_window"):
            write(tmp_path, windows=(ABSENT, ABSENT), **changes)


def recipe(tmp_path, masks):
    (tmp_path / "r.yaml").write_text(f"schema: 1\nname: x\nmasks:\n{masks}")
    return load_recipe(tmp_path / "r.yaml")


def golden_pair():
    return read_pair(GOLDEN / "qwen3_5-tiny", GOLDEN / "qwen3_5-tiny-dflash")


def test_a_recipe_sets_the_mask_of_each_layer(tmp_path):
    pair = golden_pair()
    assert Recipe("x").masked(pair) == pair
    read = recipe(
        tmp_path,
        '  - {match: "drafter.layers.*", block: causal, window: none}\n'
        '  - {match: "drafter.layers.[01]", window: 9}\n'
        '  - {match: "drafter.layers.2", block: bidirectional}\n',
    )
    assert read.masks[1] == MaskOverride("drafter.layers.[01]", "config", 9)
    layers = read.masked(pair).drafter.layers
    assert layers == (DrafterLayerMask(False, 9), DrafterLayerMask(False, 9), DrafterLayerMask(True, None))
    shown = inspect_recipe(pair, read, board=load_board("agx-thor"), max_context=256)
    assert shown.to_json()["drafter_masks"][1:] == (
        {"bidirectional": False, "window": 9},
        {"bidirectional": True, "window": None},
    )


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{block: causal}", "match is missing; give a glob of the drafter's layers"),
        ('{match: "*", block: full}', "block is 'full'; give one of config, causal, bidirectional"),
        ('{match: "*", window: 0}', "window is 0; give a positive integer, none or config"),
        ('{match: "*", window: all}', "window is 'all'; give a positive integer, none or config"),
        ('{match: "*", sliding: 3}', "sliding is unknown here; known are match, block, window"),
    ],
)
def test_bad_masks_of_a_recipe_are_refused(tmp_path, entry, words):
    with pytest.raises(RecipeError, match=words):
        recipe(tmp_path, f"  - {entry}\n")


def test_a_mask_that_matches_no_layer_is_refused():
    with pytest.raises(RecipeError, match=r"matches no layer of the drafter.*names are drafter\.layers\.0, "):
        Recipe("x", masks=(MaskOverride("drafter.layers.7"),)).masked(golden_pair())


def launched_masks(backend):
    """(bidirectional, window) that the attention kernels of a propose pass are launched with, layer by layer."""
    calls = [
        call for name, call in backend.graphs[1].propose.calls if re.match(r"attend_(fp8|bf16)_d|attend_wide_s", name)
    ]
    return [DrafterLayerMask(bool(call[16] & 1), call[15] or None) for call in calls]  # flags, window


@pytest.mark.parametrize("masks", [MASKS[:2], MASKS[2:4], MASKS[4:]], ids=str)
def test_masks_are_arguments_of_the_kernels_between_plans_and_without(monkeypatch, tmp_path, masks):
    """What the kernels make of them is compared with the reference on a GPU."""
    pair = replace(NATIVE_PAIR, drafter=replace(NATIVE_PAIR.drafter, layers=tuple(masks)))
    assert launched_masks(test_native_backend.load(monkeypatch, ControlGpu(), pair=pair)) == masks
    assert launched_masks(test_tensorrt_backend.load(monkeypatch, tmp_path, pair=pair)[0]) == masks


def test_a_bundle_carries_the_masks_of_its_recipe(cli, build_pair, tmp_path):
    (tmp_path / "r.yaml").write_text('schema: 1\nname: x\nmasks: [{match: "*.[02]", block: causal, window: 7}]')
    assert cli(*build_pair, "--recipe", tmp_path / "r.yaml")[0] == 0
    masks = (DrafterLayerMask(False, 7), DrafterLayerMask(False, 24), DrafterLayerMask(False, 7))
    assert read_manifest(tmp_path / "out").pair.drafter.layers == masks
    code, out, _ = cli("inspect", tmp_path / "out")
    assert code == 0
    line = "drafter layers: 0 causal in the block, window 7; 1 causal in the block, window 24; 2 causal in"
    assert line in " ".join(out.split())
