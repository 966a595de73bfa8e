import numpy as np
import pytest
import torch
from checkpoint_files import Edited
from golden_pairs import GOLDEN
from synthetic import drafter_config, qwen3_5_config, write_drafter, write_target

from edge_dflash.builder.convert import convert
from edge_dflash.errors import CheckpointError
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WideWeight, bf16_to_f32
from edge_dflash.weights.quantize import dequantize, quantize_fp8
from edge_dflash.weights.safetensors import DTYPES, TensorFiles

DOWN = "layers.0.mlp.down_proj"


class Checkpoint(Edited):
    """A golden target with its drafter."""

    def __init__(self, directory, name):
        super().__init__(directory, name, GOLDEN / f"{'qwen3' if name == 'qwen3-tiny' else 'qwen3_5'}-tiny-dflash")

    def open(self):
        return super().open()[0]


@pytest.fixture
def make(tmp_path):
    return lambda name="qwen3_5-tiny": Checkpoint(tmp_path, name)


def fp8(checkpoint, module, *, per_channel, scale_dtype="F32", shape=None):
    """Store a module of a golden as FP8."""
    wide = bf16_to_f32(checkpoint.tensors.pop(f"{module}.weight")[1])
    weight = quantize_fp8(torch.from_numpy(wide), per_channel=per_channel)
    scale = weight.scale if shape is None else weight.scale.reshape(shape)
    if scale_dtype == "BF16":
        scale = (scale.view(np.uint32) >> 16).astype(np.uint16)
    checkpoint.tensors[f"{module}.weight"] = ("F8_E4M3", weight.data)
    checkpoint.tensors[f"{module}.weight_scale"] = (scale_dtype, scale)
    return weight


def test_modelopt_and_compressed_tensors_store_the_same_weights(make, tmp_path):
    modelopt = Checkpoint(tmp_path / "a", "qwen3_5-tiny-nvfp4-modelopt").open()
    packed = Checkpoint(tmp_path / "b", "qwen3_5-tiny-nvfp4-ct").open()
    plain = make().open()
    quantized = 0
    for name in modelopt._expected:
        a, b = modelopt.get(name), packed.get(name)
        assert type(a) is type(b)
        if isinstance(a, Nvfp4Weight) and isinstance(b, Nvfp4Weight):
            quantized += 1
            assert np.array_equal(a.packed, b.packed)
            assert np.array_equal(a.block_scale, b.block_scale)
            assert a.global_scale == pytest.approx(b.global_scale, rel=2e-7)  # a reciprocal is rounded once more
            assert a.input_scale is None
            error = np.abs(dequantize(a).numpy() - dequantize(plain.get(name)).numpy()).max()
            assert error < 0.2 * np.abs(dequantize(a).numpy()).max()
        else:
            assert np.array_equal(a.data, b.data)
    assert quantized == 6 * 3 + 2 * 4 + 8 * 3


@pytest.mark.parametrize("suffix", ["input_scale", "input_global_scale"])
def test_activation_scales_become_multipliers(make, suffix):
    modelopt = suffix == "input_scale"
    c = make("qwen3_5-tiny-nvfp4-modelopt" if modelopt else "qwen3_5-tiny-nvfp4-ct")
    value = np.array([0.25 if modelopt else 4.0], np.float32)
    c.tensors[f"model.language_model.{DOWN}.{suffix}"] = ("F32", value)
    assert c.open().get(f"target.{DOWN}").input_scale == 0.25


@pytest.mark.parametrize(
    ("per_channel", "dtype", "shape"),
    [(False, "F32", ()), (False, "F32", (1,)), (True, "F32", None), (True, "BF16", (128, 1)), (True, "F32", (128, 1))],
)
def test_fp8_per_tensor_and_per_channel(make, per_channel, dtype, shape):
    """A mixed file too: which modules a configuration lists, and as what, adds nothing to the tensors."""
    c = make("qwen3_5-tiny" if per_channel else "qwen3_5-tiny-nvfp4-ct")
    prefix = "model" if per_channel else "model.language_model"
    for name in [name for name in c.tensors if name.startswith(f"{prefix}.{DOWN}.weight_")]:
        del c.tensors[name]
    c.tensors[f"{prefix}.{DOWN}.weight"] = TensorFiles.open(GOLDEN / "qwen3_5-tiny").array(f"model.{DOWN}.weight")
    expected = fp8(c, f"{prefix}.{DOWN}", per_channel=per_channel, scale_dtype=dtype, shape=shape)
    got = c.open().get(f"target.{DOWN}")
    assert isinstance(got, Fp8Weight)
    assert np.array_equal(got.data, expected.data)
    assert got.scale.shape == ((128,) if per_channel else (1,))
    np.testing.assert_allclose(got.scale, expected.scale, rtol=0 if dtype == "F32" else 1 / 128)


@pytest.mark.parametrize("names", [("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale")])
def test_kv_scales(make, names):
    c = make()
    for name, value in zip(names, (0.5, 0.25), strict=True):
        c.tensors[f"model.layers.3.self_attn.{name}"] = ("F32", np.array(value, np.float32))
    store = c.open()
    assert store.kv_scale("target.layers.3.kv") == (0.5, 0.25)
    assert store.kv_scale("target.layers.7.kv") == (1.0, 1.0)
    assert store.stored_kv_scale("target.layers.7.kv") is None
    assert store.kv_scale("drafter.layers.0.kv") == (1.0, 1.0)


def test_a_missing_or_present_lm_head_of_a_tied_model(make):
    c = make("qwen3-tiny")
    embedding = c.tensors["model.embed_tokens.weight"]
    assert np.array_equal(c.open().get("target.lm_head").data, embedding[1])
    c.tensors["lm_head.weight"] = embedding
    assert np.array_equal(c.open().get("target.lm_head").data, embedding[1])
    assert c.open().get("target.lm_head").shape == (512, 128)


def test_vectors_may_be_f32_or_f16(make):
    c = make()
    for name, kind in (("A_log", "F32"), ("dt_bias", "F16")):
        tensor = f"model.layers.0.linear_attn.{name}"
        value = bf16_to_f32(c.tensors[tensor][1])
        c.tensors[tensor] = (kind, value.astype(np.float32 if kind == "F32" else np.float16))
        got = c.open().get(f"target.layers.0.linear_attn.{name}")
        assert isinstance(got, WideWeight)
        assert got.data.dtype == np.float32
        np.testing.assert_allclose(got.data, value, rtol=1e-3)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(make):
    c = make("qwen3-tiny")
    kind, embedding = c.tensors["model.embed_tokens.weight"]
    c.tensors["lm_head.weight"] = (kind, np.zeros_like(embedding))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        c.open()
    c.config["tie_word_embeddings"] = False
    assert not c.open().get("target.lm_head").data.any()


@pytest.mark.parametrize("byte", [0x80, 0x81, 0xB8, 0x7F, 0xFF])
@pytest.mark.parametrize("name", ["qwen3_5-tiny-nvfp4-ct", "qwen3_5-tiny-nvfp4-modelopt"])
def test_block_scales_that_are_negative_or_nan_are_refused(make, name, byte):
    c = make(name)
    c.tensors[f"model.language_model.{DOWN}.weight_scale"][1][3, 5] = byte
    store = c.open()
    assert store.get(f"target.{DOWN}").damaged()
    assert not store.get("target.layers.0.mlp.up_proj").damaged()
    with pytest.raises(CheckpointError, match=r"down_proj holds .* a scale that is negative"):
        convert(store, [f"target.{DOWN}"], {f"target.{DOWN}": "nvfp4"}, {})


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-30, 1e30, 5e3])
@pytest.mark.parametrize("name", ["k_proj.k_scale", "v_proj.v_scale", "k_scale", "v_scale"])
def test_kv_scales_that_no_cache_has_are_refused(make, name, scale):
    c = make()
    c.tensors[f"model.layers.3.self_attn.{name}"] = ("F32", np.array(scale, np.float32))
    with pytest.raises(CheckpointError, match=rf"tensor model\.layers\.3\.self_attn\.{name} is .*, wanted a positive"):
        c.open()


def test_an_activation_scale_whose_reciprocal_is_infinite_is_refused(make):
    c = make("qwen3_5-tiny-nvfp4-ct")
    c.tensors[f"model.language_model.{DOWN}.input_global_scale"] = ("F32", np.array([1e-40], np.float32))
    with pytest.raises(CheckpointError, match=r"input_global_scale is .*, wanted a positive number"):
        c.open()


def test_a_tied_head_may_have_a_quantized_tensor_of_its_own(make):
    c = make("qwen3-tiny")
    c.tensors["lm_head.weight"] = c.tensors["model.embed_tokens.weight"]
    expected = fp8(c, "lm_head", per_channel=False)
    store = c.open()
    assert np.array_equal(store.get("target.lm_head").data, expected.data)
    assert isinstance(store.get("target.embed_tokens"), WideWeight)


def test_one_kv_scale_alone_leaves_the_other_at_one(make):
    c = make()
    c.tensors["model.layers.3.self_attn.v_scale"] = ("F32", np.array([0.25], np.float32))
    assert c.open().kv_scale("target.layers.3.kv") == (1.0, 0.25)
    c.tensors["model.layers.3.self_attn.v_scale"] = ("F32", np.array([0.0], np.float32))
    with pytest.raises(CheckpointError, match=r"v_scale is 0\.0, wanted a positive number"):
        c.open()


def test_kv_scales_of_layers_without_a_cache_are_refused(make):
    c = make()
    c.tensors["model.layers.0.self_attn.k_scale"] = ("F32", np.array(0.25, np.float32))
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_scale .* not part of the target"):
        c.open()


def test_problems_are_counted_and_the_first_are_named(make):
    c = make()
    for i in range(5):
        del c.tensors[f"model.layers.{i}.input_layernorm.weight"]
    with pytest.raises(CheckpointError, match=r"lacks 5 tensors .*layers\.0\..* then .*layers\.2\.") as caught:
        c.open()
    assert "layers.3." not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "stray", "words"),
    [
        ("qwen3_5-tiny", f"model.{DOWN}.weight_scale", "weight_scale is there, wanted only weight beside BF16"),
        ("qwen3_5-tiny", f"model.{DOWN}.bias", "bias .* not part of the target"),
        ("qwen3_5-tiny", "model.norm.weight_scale", "weight_scale .* not part of the target"),
        ("qwen3_5-tiny-nvfp4-ct", f"model.language_model.{DOWN}.weight", "weight is there, wanted only weight_packed"),
        ("qwen3_5-tiny-nvfp4-modelopt", f"model.language_model.{DOWN}.pre_quant_scale", "pre_quant_scale .* not part"),
    ],
)
def test_tensors_of_two_forms_are_refused(make, name, stray, words):
    c = make(name)
    c.tensors[stray] = ("F32", np.ones(1, np.float32))
    with pytest.raises(CheckpointError, match=words):
        c.open()


def test_fp8_scales_of_another_shape_are_refused(make):
    c = make()
    fp8(c, f"model.{DOWN}", per_channel=True)
    c.tensors[f"model.{DOWN}.weight_scale"] = ("F32", np.ones(3, np.float32))
    with pytest.raises(
        CheckpointError, match=r"weight_scale .*F32 \[3\], wanted F32 \[\], \[1\], \[128\] or \[128, 1\]"
    ):
        c.open()


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_fp8_scales_must_be_positive_numbers(make, bad):
    c = make()
    fp8(c, f"model.{DOWN}", per_channel=True)
    c.tensors[f"model.{DOWN}.weight_scale"][1][5] = bad
    with pytest.raises(CheckpointError, match="not positive everywhere"):
        c.open()


def change(kind=None, shape=None, value=None):
    def apply(c, tensor):
        old_kind, array = c.tensors[tensor]
        if kind is not None:
            array = np.zeros(array.shape, DTYPES[kind])
        if shape is not None:
            array = np.zeros(shape, array.dtype)
        if value is not None:
            array = np.full(array.shape, value, array.dtype)
        c.tensors[tensor] = (kind or old_kind, array)

    return apply


@pytest.mark.parametrize(
    ("name", "tensor", "edit", "words"),
    [
        ("qwen3_5-tiny", f"model.{DOWN}.weight", lambda c, t: c.tensors.pop(t), "lacks 1 tensors of the target"),
        ("qwen3_5-tiny", "model.layers.0.linear_attn.A_log", lambda c, t: c.tensors.pop(t), "first is .*A_log"),
        (
            "qwen3_5-tiny",
            "model.extra.weight",
            lambda c, t: c.tensors.update({t: c.tensors["model.norm.weight"]}),
            "extra",
        ),
        (
            "qwen3_5-tiny",
            "model.layers.9.x.weight",
            lambda c, t: c.tensors.update({t: c.tensors["model.norm.weight"]}),
            "x",
        ),
        ("qwen3_5-tiny", f"model.{DOWN}.weight", change(shape=(128, 128)), r"shape \[128, 128\], wanted \[128, 256\]"),
        ("qwen3_5-tiny", "model.norm.weight", change(shape=(64,)), r"shape \[64\], wanted \[128\]"),
        ("qwen3_5-tiny", f"model.{DOWN}.weight", change(kind="I64"), "dtype I64, wanted BF16"),
        ("qwen3_5-tiny", f"model.{DOWN}.weight", change(kind="F16"), "dtype F16, wanted BF16 or F32"),
        ("qwen3_5-tiny", "model.embed_tokens.weight", change(kind="F16"), "dtype F16, wanted BF16 or F32"),
        ("qwen3_5-tiny", "model.norm.weight", change(kind="F8_E4M3"), "dtype F8_E4M3, wanted BF16"),
        ("qwen3_5-tiny", f"model.{DOWN}.weight", change(kind="F8_E4M3"), "weight_scale is missing"),
        ("qwen3_5-tiny-nvfp4-ct", f"{DOWN}.weight_packed", change(kind="I64"), "dtype I64, wanted U8"),
        ("qwen3_5-tiny-nvfp4-ct", f"{DOWN}.weight_scale", change(kind="BF16"), "dtype BF16, wanted F8_E4M3"),
        ("qwen3_5-tiny-nvfp4-ct", f"{DOWN}.weight_scale", lambda c, t: c.tensors.pop(t), "weight_scale is missing"),
        ("qwen3_5-tiny-nvfp4-ct", f"{DOWN}.weight_global_scale", change(value=0.001), "reciprocal, above 1"),
        ("qwen3_5-tiny-nvfp4-ct", f"{DOWN}.weight_global_scale", change(value=np.nan), "wanted a positive number"),
        ("qwen3_5-tiny-nvfp4-modelopt", f"{DOWN}.weight_scale_2", change(value=500.0), "a multiplier below 1"),
        ("qwen3_5-tiny-nvfp4-modelopt", f"{DOWN}.weight_scale_2", change(value=0.0), "wanted a positive number"),
        ("qwen3_5-tiny-nvfp4-modelopt", f"{DOWN}.weight_scale", change(shape=(128, 8)), r"wanted \[128, 16\]"),
        ("qwen3_5-tiny-nvfp4-modelopt", f"{DOWN}.weight_scale_2", change(shape=(2,)), r"F32 \[2\], wanted F32 \[\] or"),
    ],
)
def test_wrong_tensors_are_refused_by_name(make, name, tensor, edit, words):
    c = make(name)
    edit(c, tensor if tensor.startswith("model.") else f"model.language_model.{tensor}")
    with pytest.raises(CheckpointError, match=words) as caught:
        c.open()
    assert "\n" not in str(caught.value)
    assert str(c.target) in str(caught.value) or "checkpoint: tensor" in str(caught.value)


def test_synthetic_sharded_checkpoints_open(tmp_path):
    config = qwen3_5_config()
    write_target(tmp_path / "target", config, shard_bytes=100_000, extra=[("model.visual.norm.weight", (8,))])
    write_drafter(tmp_path / "drafter", drafter_config(config))
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 2
    pair = read_pair(tmp_path / "target", tmp_path / "drafter")
    expected = pair_programs(pair).weights
    store = PairCheckpoint.open(tmp_path / "target", tmp_path / "drafter", expected)
    for name, spec in expected.items():
        assert store.get(name).shape == spec.shape
    store.release()
    assert np.isfinite(dequantize(store.get("target.lm_head")).numpy()).all()


def test_a_missing_head_is_the_embedding_only_if_the_config_does_not_deny_it(make):
    c = make("qwen3-tiny")
    c.config["tie_word_embeddings"] = False
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors of the target, the first is lm_head\.weight"):
        c.open()
    del c.config["tie_word_embeddings"]
    assert c.open().get("target.lm_head").shape == (512, 128)
