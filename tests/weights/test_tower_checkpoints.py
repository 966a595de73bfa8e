"""Towers beside quantized text, as published exports have them."""

import json
import shutil

import pytest
import torch
from golden_pairs import GOLDEN
from safetensors.torch import load_file, save_file

from edge_dflash.builder.decide import decide
from edge_dflash.builder.write import BuildConfig
from edge_dflash.model import pair_programs
from edge_dflash.weights.checkpoint import PairCheckpoint, checkpoint_pair

SEES = GOLDEN / "vision-tiny"
CT, MODELOPT = "qwen3_5-tiny-nvfp4-ct", "qwen3_5-tiny-nvfp4-modelopt"
QKV = "model.visual.blocks.0.attn.qkv"


@pytest.fixture
def target(tmp_path):
    """A function that puts the golden tower beside quantized text; ``ignored``: names that are said to be wide."""

    def make(name, ignored=(), change=None):
        made = shutil.copytree(GOLDEN / name, tmp_path / "target")
        shutil.copy(SEES / "preprocessor_config.json", made)
        config, says = json.loads((made / "config.json").read_text()), json.loads((SEES / "config.json").read_text())
        text = config["text_config"]
        pairs = int(text["head_dim"] * text["rope_parameters"]["partial_rotary_factor"]) // 2
        text["rope_parameters"]["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        config |= {key: value for key, value in says.items() if key.endswith("_token_id")}
        config["vision_config"] = says["vision_config"] | {"out_hidden_size": text["hidden_size"]}
        if "quantization_config" in config:
            config["quantization_config"]["ignore"] = [*config["quantization_config"].get("ignore", ()), *ignored]
        (made / "config.json").write_text(json.dumps(config))
        if (file := made / "hf_quant_config.json").exists():
            said = json.loads(file.read_text())
            said["quantization"]["exclude_modules"] = [*said["quantization"].get("exclude_modules", ()), *ignored]
            file.write_text(json.dumps(said))
        tower = {k: v for k, v in load_file(SEES / "model.safetensors").items() if "visual" in k}
        tower["model.visual.merger.linear_fc2.weight"] = torch.zeros(text["hidden_size"], 256).bfloat16()
        tower["model.visual.merger.linear_fc2.bias"] = torch.zeros(text["hidden_size"]).bfloat16()
        if change is not None:
            change(tower)
        save_file(load_file(made / "model.safetensors") | tower, made / "model.safetensors")
        return made

    return make


def tower_formats(target, tmp_path):
    decided = decide(BuildConfig(target, None, tmp_path / "out", max_context=64))
    return {name: form for name, form in decided.manifest.weights.items() if name.startswith("target.visual.")}


@pytest.mark.parametrize(
    ("name", "ignored"), [(CT, ["re:.*visual.*"]), (CT, []), (MODELOPT, ["model.visual*"]), (MODELOPT, [])]
)
def test_a_wide_tower_beside_quantized_text_is_read_whatever_its_quantizer_said(target, tmp_path, name, ignored):
    assert set(tower_formats(target(name, ignored), tmp_path).values()) == {"bf16"}


def fp8(tower):
    """Store one linear in FP8."""
    tower[f"{QKV}.weight"] = tower[f"{QKV}.weight"].to(torch.float8_e4m3fn)
    tower[f"{QKV}.weight_scale"] = torch.tensor(1.0)


def test_a_linear_that_is_stored_in_fp8_stays_so(target, tmp_path):
    made = target(CT, ["re:.*visual.*"], fp8)
    found = tower_formats(made, tmp_path)
    assert [name for name, form in found.items() if form == "fp8"] == ["target.visual.blocks.0.attn.qkv"]
    store = PairCheckpoint.open(made, None, pair_programs(checkpoint_pair(made, None)).weights)
    assert store.get("target.visual.blocks.0.attn.qkv").shape == (192, 64)
