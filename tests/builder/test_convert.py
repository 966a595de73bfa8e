import numpy as np
import pytest
import torch

from edge_dflash.builder.convert import check_finite, convert
from edge_dflash.errors import BuildError, CheckpointError
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WideWeight
from edge_dflash.weights.quantize import quantize_nvfp4

GATE, UP, DOWN = (f"target.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down"))
NAN = 0x7FC0


def bf16(rng, *shape, scale=1.0):
    tensor = torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * np.float32(scale)).to(torch.bfloat16)
    return WideWeight(tensor.view(torch.uint16).numpy())


class Store(dict):
    def get(self, name):
        return self[name]

    def kv_scale(self, state):
        return (1.0, 1.0)


@pytest.fixture
def store():
    rng = np.random.default_rng(0)
    return Store({GATE: bf16(rng, 8, 32, scale=3), UP: bf16(rng, 8, 32), DOWN: bf16(rng, 32, 16)})


def test_members_of_a_group_share_the_global_scale_and_others_do_not(store):
    made = convert(store, (GATE, UP, DOWN), dict.fromkeys(store, "nvfp4"), {})
    assert list(made) == [GATE, UP, DOWN]
    largest = float(np.abs((store[GATE].data.astype(np.uint32) << 16).view(np.float32)).max())
    assert made[GATE].global_scale == made[UP].global_scale == float(np.float32(largest) / np.float32(2688))
    assert made[DOWN].global_scale < made[UP].global_scale
    assert made[GATE].input_scale is None


@pytest.mark.parametrize(("stored", "form"), [("", "nvfp4"), ("", "fp8"), ("", "bf16"), ("fp8", "nvfp4")])
def test_blocks_of_rows_give_the_weight_of_the_whole(store, monkeypatch, stored, form):
    if stored:
        store = Store(convert(store, (GATE, UP, DOWN), dict.fromkeys(store, stored), {}))
    whole = convert(store, (GATE, UP, DOWN), dict.fromkeys(store, form), {}, again=True)
    monkeypatch.setattr("edge_dflash.builder.convert.ROW_BLOCK", 100)  # bytes: one row, three rows
    blocks = convert(store, (GATE, UP, DOWN), dict.fromkeys(store, form), {}, again=True)
    for name, weight in whole.items():
        for field, value in vars(weight).items():
            assert np.array_equal(value, getattr(blocks[name], field))


def test_a_stored_member_keeps_its_own_scale(store):
    stored = quantize_nvfp4(torch.full((8, 32), 100.0))
    alone = convert(store, (UP,), {UP: "nvfp4"}, {})[UP]
    made = convert(Store({GATE: stored, UP: store[UP]}), (GATE, UP), {GATE: "nvfp4", UP: "nvfp4"}, {})
    assert made[GATE].global_scale == stored.global_scale
    assert made[GATE].packed is stored.packed
    assert made[UP].global_scale == alone.global_scale


def test_a_member_that_stays_wide_does_not_set_the_scale(store):
    made = convert(store, (GATE, UP), {GATE: "bf16", UP: "nvfp4"}, {})
    assert made[GATE] is store[GATE]
    assert made[UP].global_scale == convert(store, (UP,), {UP: "nvfp4"}, {})[UP].global_scale


def test_input_scales_are_those_of_the_build(store):
    stored = Store({DOWN: Nvfp4Weight(np.zeros((4, 8), np.uint8), np.full((4, 1), 0x38, np.uint8), 0.5, 0.125)})
    assert convert(stored, (DOWN,), {DOWN: "nvfp4"}, {})[DOWN].input_scale is None
    assert convert(stored, (DOWN,), {DOWN: "nvfp4"}, {DOWN: 0.25})[DOWN].input_scale == 0.25
    assert convert(store, (DOWN,), {DOWN: "nvfp4"}, {DOWN: 0.25})[DOWN].input_scale == 0.25


def test_wide_formats(store):
    assert convert(store, (DOWN,), {DOWN: "bf16"}, {})[DOWN] is store[DOWN]
    single = Store({DOWN: WideWeight(np.array([[1.0, 1.00390625, -3.0]], np.float32))})
    assert convert(single, (DOWN,), {DOWN: "bf16"}, {})[DOWN].data.tolist() == [[0x3F80, 0x3F80, 0xC040]]
    assert isinstance(convert(store, (DOWN,), {DOWN: "fp8"}, {})[DOWN], Fp8Weight)


def test_what_cannot_be_converted_names_the_weight(store):
    odd = Store({DOWN: WideWeight(np.zeros((4, 12), np.uint16))})
    with pytest.raises(BuildError, match=rf"{DOWN}: NVFP4 needs an input dimension"):
        convert(odd, (DOWN,), {DOWN: "nvfp4"}, {})
    fp8 = Store({DOWN: Fp8Weight(np.zeros((4, 16), np.uint8), np.ones(1, np.float32))})
    with pytest.raises(BuildError, match=rf"{DOWN}: stored as fp8, wanted nvfp4"):
        convert(fp8, (DOWN,), {DOWN: "nvfp4"}, {})
    with pytest.raises(BuildError, match=rf"{DOWN}: stored as bf16, which is not converted to f32"):
        convert(store, (DOWN,), {DOWN: "f32"}, {})


CODES = np.full((4, 1), 0x38, np.uint8)
ONE = np.ones(1, np.float32)
BAD_CODE = np.array([[0x38], [0xFF]], np.uint8)


@pytest.mark.parametrize(
    "weight",
    [
        WideWeight(np.array([[0, NAN]], np.uint16)),
        WideWeight(np.array([0xFF80], np.uint16)),
        WideWeight(np.array([[[np.inf]]], np.float32)),
        Fp8Weight(BAD_CODE, ONE),
        Fp8Weight(CODES, np.array([np.nan], np.float32)),
        Fp8Weight(CODES, np.array([0.0], np.float32)),
        Nvfp4Weight(CODES, BAD_CODE, 1.0),
        Nvfp4Weight(CODES, CODES, float("inf")),
    ],
)
def test_values_that_are_not_finite_are_refused_by_name(weight):
    with pytest.raises(CheckpointError, match=r"^x\.y holds .*damaged"):
        check_finite("x.y", weight)


def test_a_damaged_member_of_a_group_is_the_one_named(store):
    store[UP] = WideWeight(np.full((8, 32), NAN, np.uint16))
    with pytest.raises(CheckpointError, match=f"^{UP} holds"):
        convert(store, (GATE, UP), {GATE: "nvfp4", UP: "nvfp4"}, {})
