"""Quantized drafters: read as what they stand for, in every layout, or refused; never taken for something else."""

import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from checkpoint_files import write

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import load_selftest
from edge_dflash.common.files import directory
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.demo.tasks import HELDOUT, MODELS, task_from_json
from edge_dflash.errors import CheckpointError
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.formats import bf16_to_f32
from edge_dflash.weights.quantize import dequantize, quantize_fp8, quantize_nvfp4
from edge_dflash.weights.safetensors import TensorFiles

GROUP = 32


def int4(wide):
    """compressed-tensors' pack-quantized tensors of a linear, and its values."""
    rows, columns = wide.shape
    groups = wide.reshape(rows, -1, GROUP)
    scale = np.abs(groups).max(axis=-1) / 7
    bits = (scale.view(np.uint32) >> 16).astype(np.uint16)
    scale = bf16_to_f32(bits)
    codes = np.clip(np.rint(groups / scale[..., None]), -8, 7)
    values = torch.from_numpy(codes * scale[..., None]).to(torch.bfloat16).float().numpy().reshape(rows, columns)
    words = (codes.astype(np.int64).reshape(rows, -1, 8) + 8) << np.arange(0, 32, 4)
    tensors = {
        "weight_packed": ("I32", words.sum(axis=-1).astype(np.uint32).view(np.int32)),
        "weight_scale": ("BF16", bits),
        "weight_shape": ("I64", np.array([rows, columns])),
    }
    return tensors, values


def fp8(wide, *, per_channel):
    weight = quantize_fp8(torch.from_numpy(wide), per_channel=per_channel)
    scale = weight.scale[:, None] if per_channel else weight.scale
    return {"weight": ("F8_E4M3", weight.data), "weight_scale": ("F32", scale)}, dequantize(weight).numpy()


def nvfp4(wide, *, packed):
    weight = quantize_nvfp4(torch.from_numpy(wide))
    if packed:
        reciprocal = np.array([np.float32(1) / np.float32(weight.global_scale)], np.float32)
        names = {"weight_packed": ("U8", weight.packed), "weight_global_scale": ("F32", reciprocal)}
        weight = replace(weight, global_scale=float(np.float32(1) / reciprocal[0]))  # as stored: one rounding more
    else:
        scale = np.array(weight.global_scale, np.float32)
        names = {"weight": ("U8", weight.packed), "weight_scale_2": ("F32", scale)}
    return {**names, "weight_scale": ("F8_E4M3", weight.block_scale)}, dequantize(weight).numpy()


def compressed(form, weights):
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["fc"]}


FORMS = {
    "int4": (
        int4,
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
    ),
    "fp8 compressed-tensors": (
        lambda wide: fp8(wide, per_channel=True),
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ),
    "fp8 ModelOpt": (
        lambda wide: fp8(wide, per_channel=False),
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["fc"]},
    ),
    "nvfp4 compressed-tensors": (
        lambda wide: nvfp4(wide, packed=True),
        compressed(
            "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        ),
    ),
    "nvfp4 ModelOpt": (
        lambda wide: nvfp4(wide, packed=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["fc"]},
    ),
}


def drafters(root, form):
    """The demo drafter with its layers' linears quantized, and with the values that these stand for."""
    quantize, declared = FORMS[form]
    source = TensorFiles.open(MODELS / "drafter")
    config = json.loads((MODELS / "drafter" / "config.json").read_text())
    stored, dense = {}, {}
    for name in source.names():
        kind, array = source.array(name)
        stored[name] = dense[name] = (kind, array)
        if "_proj" in name:
            module = name.removesuffix(".weight")
            tensors, values = quantize(bf16_to_f32(array))
            del stored[name]
            stored |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
            dense[name] = ("F32", values)
    quantized = write(root / "quantized", stored, {**config, "quantization_config": declared})
    return quantized, write(root / "dense", dense, config)


@cache
def prompt():
    task = task_from_json(json.loads(HELDOUT.read_text().splitlines()[0]))
    return tuple(Tokenizer.open(MODELS / "target").encode_chat(task.messages))


def opened(drafter):
    pair = read_pair(MODELS / "target", drafter)
    programs = pair_programs(pair)
    return pair, programs, PairCheckpoint.open(MODELS / "target", drafter, programs.weights)


class Drafts(Delegate):
    """A backend that writes down what is drafted."""

    def __init__(self, backend):
        super().__init__(backend)
        self.drafts = []

    def propose(self, anchor, lane=0):
        rows = super().propose(anchor, lane)
        self.drafts.append(rows.argmax())
        return rows


def drafted(drafter):
    """Tokens, accept lengths and all drafts of a plan."""
    pair, _, store = opened(drafter)
    context = len(prompt()) + 100
    backend = Drafts(ReferenceBackend(pair, store, Precision("float32", "float32"), max_context=context))
    found = generate(backend, prompt(), Options(max_new_tokens=48))
    return found.tokens, found.accept_lengths, backend.drafts


@pytest.mark.parametrize("form", FORMS)
def test_a_quantized_drafter_drafts_what_its_values_draft(tmp_path, form):
    quantized, dense = drafters(tmp_path, form)
    _, programs, found = opened(quantized)
    wanted = opened(dense)[2]
    for name, spec in programs.weights.items():
        if spec.kind == "linear":
            np.testing.assert_array_equal(dequantize(found.get(name)), dequantize(wanted.get(name)), err_msg=name)
    tokens, lengths, drafts = drafted(quantized)
    assert (tokens, lengths, drafts) == drafted(dense)
    assert tokens == drafted(MODELS / "drafter")[0]
    assert sum(lengths) / len(lengths) > 1.5  # noise in the place of weights is accepted now and then: 1.0


def change(tmp_path, form, edit):
    """Open a quantized drafter after ``edit`` of its tensors and its config."""
    source, _ = drafters(tmp_path, form)
    files, config = TensorFiles.open(source), json.loads((source / "config.json").read_text())
    tensors = {name: files.array(name) for name in files.names()}
    edit(tensors, config["quantization_config"], "layers.0.mlp.up_proj")
    write(tmp_path / "edited", tensors, config)
    with pytest.raises(CheckpointError) as refused:
        opened(tmp_path / "edited")
    return str(refused.value)


@pytest.mark.parametrize(
    ("suffix", "tensor", "words"),
    [
        ("weight_zero_point", ("I32", np.zeros((96, 8), np.int32)), "weight_zero_point is there"),
        ("weight_g_idx", ("I32", np.zeros(256, np.int32)), "weight_g_idx is there"),
        ("weight_shape", ("I64", np.array([768, 128])), r"weight_shape is \[768, 128\], wanted \[768, 256\]"),
        ("weight_scale", ("BF16", np.zeros((768, 3), np.uint16)), r"weight_scale is BF16 \[768, 3\]"),
        ("weight_scale", ("F32", np.zeros((768, 8), np.float32)), "weight_scale is not positive everywhere"),
        ("weight_scale", ("F32", np.full((768, 8), -1, np.float32)), "weight_scale is not positive everywhere"),
        ("weight_packed", ("I32", np.zeros((768, 64), np.int32)), r"shape \[768, 64\], wanted \[768, 32\]"),  # 8 bits
        ("weight_packed", ("I8", np.zeros((768, 256), np.int8)), "is there, wanted only weight_packed and"),
    ],
)
def test_what_would_be_misread_of_integers_is_refused_by_name(tmp_path, suffix, tensor, words):
    message = change(tmp_path, "int4", lambda t, c, m: t.update({f"{m}.{suffix}": tensor}))
    assert re.search(words, message), message


def test_integers_of_a_target_are_refused(tmp_path):
    files = TensorFiles.open(MODELS / "target")
    tensors = {name: files.array(name) for name in files.names()}
    name = next(name for name in tensors if name.endswith("mlp.up_proj.weight"))
    module = name.removesuffix(".weight")
    packed, _ = int4(bf16_to_f32(tensors.pop(name)[1]))
    tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in packed.items()}
    config = json.loads((MODELS / "target" / "config.json").read_text())
    write(tmp_path / "target", tensors, config)
    pair = read_pair(tmp_path / "target", MODELS / "drafter")
    with pytest.raises(CheckpointError, match="read of drafters alone: a target would be quantized twice"):
        PairCheckpoint.open(tmp_path / "target", MODELS / "drafter", pair_programs(pair).weights)


def test_integers_are_built_as_the_bf16_values_that_they_are(tmp_path):
    quantized, dense = drafters(tmp_path, "int4")
    bundles = []
    for source in (quantized, dense):
        output = tmp_path / f"{source.name}.bundle"
        recipe = directory("engines") / "demo-cpu.yaml"
        build(BuildConfig(MODELS / "target", source, output, recipe=recipe, calibrate=False))
        bundles.append(Bundle.open(output))
    found, wanted = bundles
    assert load_selftest(found).accept_lengths == load_selftest(wanted).accept_lengths
    for name, form in found.manifest.weights.items():
        assert form == wanted.manifest.weights[name]
        np.testing.assert_array_equal(dequantize(found.get(name)), dequantize(wanted.get(name)))
