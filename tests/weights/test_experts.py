"""Spellings of experts: the same values from each, and what is refused."""

import re

import numpy as np
import pytest
from checkpoint_files import Edited, opened
from golden_pairs import GOLDEN
from synthetic import mixture_config, write_mixture

from edge_dflash.errors import CheckpointError
from edge_dflash.weights.quantize import dequantize
from edge_dflash.weights.safetensors import TensorFiles

WIDE, SINGLE, MODELOPT, CT = (f"qwen3_5_moe-tiny{end}" for end in ("", "-perexpert", "-nvfp4-modelopt", "-nvfp4-ct"))
EXPERTS, PREFIX = 8, "model.language_model."
LAYER = f"{PREFIX}layers.1.mlp"
GATE, DOWN = f"{LAYER}.experts.3.gate_proj", f"{LAYER}.experts.3.down_proj"


class Files(Edited):
    """A copy of a golden mixture."""

    def stacked(self, *, number=lambda values: values):
        """All experts of a layer in two tensors, their scales beside them; ``number`` shapes [E] or [E, 2] scalars."""
        layers = sorted({name.partition(".experts.")[0] for name in self.tensors if ".experts." in name})
        for layer in layers:
            for fused, kinds in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                first = f"{layer}.experts.0.{kinds[0]}."
                for suffix in [name.removeprefix(first) for name in self.tensors if name.startswith(first)]:
                    parts = [
                        [self.tensors.pop(f"{layer}.experts.{e}.{kind}.{suffix}") for kind in kinds]
                        for e in range(EXPERTS)
                    ]
                    kind, array = parts[0][0]
                    arrays = [[array for _, array in pair] for pair in parts]
                    if array.size == 1:
                        values = np.array(arrays).reshape(EXPERTS, len(kinds))
                        stacked = number(values[:, 0] if len(kinds) == 1 else values)
                    else:
                        stacked = np.stack([np.concatenate(pair) for pair in arrays])
                    self.tensors[f"{layer}.experts.{fused}" + ("" if suffix == "weight" else f"_{suffix}")] = (
                        kind,
                        stacked,
                    )


def same(one, other):
    store, weights = one
    for name, spec in weights.items():
        a, b = store.get(name), other[0].get(name)
        assert type(a) is type(b)
        assert a.shape == b.shape == spec.shape
        for (kind, left), (also, right) in zip(a.parts().values(), b.parts().values(), strict=True):
            assert kind == also
            assert np.array_equal(left, right), name


@pytest.fixture
def files(tmp_path):
    return lambda name: Files(tmp_path, name)


def test_stacked_and_single_experts_are_the_same():
    same(opened(GOLDEN / WIDE), opened(GOLDEN / SINGLE))


def test_both_libraries_hold_the_same_nvfp4_experts():
    (modelopt, weights), (ct, _) = opened(GOLDEN / MODELOPT), opened(GOLDEN / CT)
    names = [name for name, spec in weights.items() if spec.module == "experts"]
    assert len(names) == 4 * (3 * EXPERTS + 3)
    for name in names:
        assert np.array_equal(modelopt.get(name).packed, ct.get(name).packed)
        assert np.allclose(dequantize(modelopt.get(name)), dequantize(ct.get(name)), rtol=1e-6)


@pytest.mark.parametrize("name", [SINGLE, MODELOPT, CT])
def test_the_index_may_come_after_the_projection(files, name):
    turned = files(name)
    turned.renamed(r"\.experts\.(\d+)\.(\w+_proj)\.", r".experts.\2.\1.")
    same(turned.open(), opened(GOLDEN / name))


@pytest.mark.parametrize("name", [SINGLE, MODELOPT, CT])
@pytest.mark.parametrize(
    "number",
    [lambda values: values, lambda values: values[..., None], lambda values: values.reshape(EXPERTS, -1, 1, 1)],
)
def test_experts_and_their_scales_may_be_stacked(files, name, number):
    stacked = files(name)
    stacked.stacked(number=number)
    assert sum(".experts." in tensor for tensor in stacked.tensors) < 50
    same(stacked.open(), opened(GOLDEN / name))


def test_one_scale_may_be_of_gate_and_up_and_one_of_all_experts(files):
    stacked = files(MODELOPT)
    stacked.stacked(number=lambda values: values[:, 0] if values.ndim == 2 else values)  # they share weight_scale_2
    for name in [name for name in stacked.tensors if name.endswith("_input_scale")]:
        stacked.tensors[name] = ("F32", np.array(0.25, np.float32))
    store, weights = stacked.open()
    reference = opened(GOLDEN / MODELOPT)[0]
    for name, spec in weights.items():
        if spec.module == "experts" and ".experts." in name:
            assert store.get(name).global_scale == reference.get(name).global_scale
            assert store.get(name).input_scale == 0.25


def test_experts_of_other_parts_are_left_out(files):
    more = files(SINGLE)
    more.tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = "BF16", np.zeros((3, 4, 4), np.uint16)
    more.tensors["mtp.layers.0.mlp.experts.odd"] = "BF16", np.zeros(3, np.uint16)
    same(more.open(), opened(GOLDEN / SINGLE))


def test_experts_may_be_fp8(files):
    fp8 = files(SINGLE)
    for name in [name for name in fp8.tensors if ".mlp." in name and name.endswith("_proj.weight")]:
        codes = (fp8.tensors[name][1] & 0x3F).astype(np.uint8)
        fp8.tensors[name] = "F8_E4M3", codes
        rows = len(codes) if "down_proj" in name else 1
        fp8.tensors[f"{name}_scale"] = "F32", np.linspace(0.5, 1, rows, dtype=np.float32)
    store, weights = fp8.open()
    names = [name for name, spec in weights.items() if spec.module == "experts"]
    assert {store.get(name).format for name in names} == {"fp8"}
    stacked = Files(fp8.target.parent / "again", SINGLE)
    stacked.tensors = dict(fp8.tensors)
    stacked.stacked()
    same(stacked.open(), (store, weights))


def lost(name):
    return lambda tensors: tensors.pop(name)


def added(name, array):
    return lambda tensors: tensors.update({name: ("F32", array)})


FUSED = f"{LAYER.replace(PREFIX, 'model.')}.experts"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (SINGLE, lost(f"{GATE}.weight"), rf"lacks 1 tensors of the target, the first is {GATE}\.weight"),
        (MODELOPT, lost(f"{GATE}.weight_scale"), rf"{GATE}\.weight_scale is missing"),
        (MODELOPT, lost(f"{GATE}.weight_scale_2"), rf"{GATE}\.weight_scale_2 is missing"),
        (CT, lost(f"{DOWN}.weight_global_scale"), rf"{DOWN}\.weight_global_scale is missing"),
        (CT, lost(f"{DOWN}.weight_scale"), rf"{DOWN}\.weight_scale is missing"),
        (MODELOPT, added(f"{GATE}.weight_scale_3", np.ones(1, np.float32)), r"weight_scale_3 \(1 such\) is not part"),
        (MODELOPT, added(f"{GATE}.pre_quant_scale", np.ones(64, np.float32)), r"pre_quant_scale .* is not part"),
        (SINGLE, added(f"{GATE}.weight_scale", np.ones(1, np.float32)), r"weight_scale is there, wanted only weight"),
        (SINGLE, added(f"{LAYER}.experts.8.gate_proj.weight", np.ones((16, 64), np.float32)), r"gate_proj.* not part"),
        (SINGLE, added(f"{LAYER}.experts.gate_proj.3.weight", np.ones((16, 64), np.float32)), "which is there too"),
        (SINGLE, added(f"{LAYER}.experts.bias", np.ones(8, np.float32)), r"experts\.bias \(1 such\) is not part"),
        (WIDE, added(f"{FUSED}.gate_up_proj_blocks", np.ones(8, np.float32)), "gate_up_proj_blocks .* is not part"),
        (WIDE, added(f"{FUSED}.gate_up_proj_weight_scale", np.ones(8, np.float32)), "scale is there, wanted only"),
        (WIDE, lost(f"{FUSED}.down_proj"), r"lacks 8 tensors of the target, the first is .*experts\.0\.down_proj"),
        (SINGLE, lost(f"{LAYER}.gate.weight"), rf"first is {LAYER}\.gate\.weight"),
        (SINGLE, lost(f"{LAYER}.shared_expert_gate.weight"), rf"first is {LAYER}\.shared_expert_gate\.weight"),
    ],
)  # fmt: skip
def test_what_is_missing_or_unknown_is_named(files, name, change, message):
    changed = files(name)
    change(changed.tensors)
    with pytest.raises(CheckpointError, match=message):
        changed.open()


@pytest.mark.parametrize("shape", [(7, 32, 64), (8, 31, 64), (32, 64), (8, 64), (8,), (8, 0, 64)])
def test_a_tensor_of_other_experts_is_refused(files, shape):
    changed = files(WIDE)
    changed.tensors[f"{FUSED}.gate_up_proj"] = "BF16", np.zeros(shape, np.uint16)
    with pytest.raises(
        CheckpointError, match=rf"gate_up_proj is {re.escape(str(list(shape)))}, wanted \[8 experts, gate"
    ):
        changed.open()


def test_experts_that_lie_the_other_way_round_are_refused(files):
    changed = files(WIDE)
    kind, values = changed.tensors[f"{FUSED}.gate_up_proj"]
    changed.tensors[f"{FUSED}.gate_up_proj"] = kind, values.transpose(0, 2, 1).copy()
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight is shape \[32, 32\], wanted \[16, 64\]"):
        changed.open()


def test_tens_of_thousands_of_tensors_open_in_seconds(tmp_path):
    """Ten layers of a published mixture; a step that is quadratic would take minutes."""
    text = mixture_config()["text_config"]
    config = mixture_config(num_hidden_layers=10, layer_types=text["layer_types"][:10])
    target = write_mixture(tmp_path / "target", config)
    assert len(TensorFiles.open(target).names()) > 31_000
    store, weights = opened(target)
    assert len(weights) == 10 * (3 * 257 + 4) + 8 * 9 + 2 * 6 + 3
    assert {store.get(name).format for name in weights} == {"bf16", "fp8", "nvfp4"}
