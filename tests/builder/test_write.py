import errno
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from builder_support import (
    BF16,
    DRAFTERS,
    KEEP,
    SHORT,
    TARGETS,
    add_scalars,
    add_tokenizer,
    config_of,
    copy_target,
    digests,
    poison,
    recipe,
)
from paths import GOLDEN
from safetensors.numpy import load_file

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.board.archs import find_arch
from edge_dflash.builder.scales import load_scales
from edge_dflash.builder.write import build
from edge_dflash.bundle import parts
from edge_dflash.bundle.parts import building_path
from edge_dflash.bundle.reader import Bundle
from edge_dflash.checks.footprint import row_parameters
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BuildError, BundleError, CheckpointError, EdgeDflashError
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.formats import Nvfp4Weight, WideWeight, bf16_to_f32
from edge_dflash.weights.quantize import quantize_nvfp4, wide_tensor
from edge_dflash.weights.rounding import Search


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Bundles of all golden pairs with the default recipe, built without interruption."""
    root = tmp_path_factory.mktemp("built")
    return {name: build(config_of(name, root / name)) for name in TARGETS}


def checkpoint(name):
    pair = read_pair(TARGETS[name], DRAFTERS[name])
    return PairCheckpoint.open(TARGETS[name], DRAFTERS[name], pair_programs(pair).weights)


def refused(config, kind, *words, keeps=()):
    """The build fails in one line and leaves nothing but what is named."""
    with pytest.raises(EdgeDflashError) as error:
        build(config)
    assert type(error.value) is kind
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    left = {path.name for path in config.output.parent.iterdir()} - {"recipe.yaml", "target", "drafter"}
    assert left == set(keeps)
    with pytest.raises(BundleError):
        Bundle.open(config.output)
    return message


@pytest.mark.parametrize("name", TARGETS)
def test_bundle_of_a_golden_pair(built, name):
    result = built[name]
    bundle, source = Bundle.open(result.bundle), checkpoint(name)
    assert result.bytes == sum(path.stat().st_size for path in result.bundle.rglob("*") if path.is_file())
    assert (result.plans, result.deferred) == ((), ())
    assert "the bundle takes and returns token ids only" in result.warnings[0]
    assert "FP8 scale 1.0 for the keys and values" in result.warnings[1]
    assert not building_path(result.bundle).exists()
    manifest = bundle.manifest
    assert (manifest.arch, manifest.backend, manifest.tokenizer) == ("cpu", "reference", False)
    assert (manifest.pair.block_size, manifest.pair.mask_token_id) == (8, 511)
    rows = find_arch("cpu").prefill_rows(row_parameters(pair_programs(manifest.pair).prefill))
    assert (manifest.max_context, manifest.prefill_chunk) == (1024, rows)
    assert manifest.precision == Precision("bfloat16", "fp8")
    for weight, form in manifest.weights.items():
        stored = source.get(weight)
        if form == "bf16":
            assert bundle.get(weight).data.tobytes() == stored.data.tobytes()
    assert isinstance(bundle.get("target.lm_head"), Nvfp4Weight)
    assert isinstance(bundle.get("target.embed_tokens"), WideWeight)


def test_fused_groups_share_one_scale(built):
    bundle, source = Bundle.open(built["qwen3_5"].bundle), checkpoint("qwen3_5")
    names = [f"target.layers.3.self_attn.{part}_proj" for part in "qkv"]
    tensors = [wide_tensor(source.get(name)) for name in names]
    amax = max(float(tensor.abs().max()) for tensor in tensors)
    for name, tensor in zip(names, tensors, strict=True):
        wanted = quantize_nvfp4(tensor, amax, Search())
        assert bundle.get(name).global_scale == wanted.global_scale
        assert bundle.get(name).packed.tobytes() == wanted.packed.tobytes()
    alone = source.get("target.layers.3.self_attn.o_proj")
    amax = float(np.abs(bf16_to_f32(alone.data)).max())
    assert bundle.get("target.layers.3.self_attn.o_proj").global_scale == float(np.float32(amax) / np.float32(2688))


def test_a_stored_nvfp4_model_computes_the_golden_logits(tmp_path):
    build(config_of("modelopt", tmp_path / "out", recipe=recipe(tmp_path, KEEP)))
    bundle = Bundle.open(tmp_path / "out")
    golden = load_file(GOLDEN / "golden_qwen3_5.safetensors")
    backend = ReferenceBackend(bundle.pair, bundle, Precision("float32", "float32"), max_context=64)
    rows = backend.prefill(golden["p1.prompt"].tolist())
    assert np.abs(rows.logits()[0] - golden["p1.nvfp4_w4a16_prefill_logits"][-1]).max() < 1e-3


def test_a_wide_tied_head_is_stored_once(tmp_path):
    build(config_of("qwen3", tmp_path / "out", recipe=recipe(tmp_path, BF16)))
    bundle = Bundle.open(tmp_path / "out")
    assert set(bundle.manifest.weight_summary) == {"bf16", "tied"}
    assert bundle.manifest.precision.kv == "bfloat16"
    assert bundle.get("target.lm_head") is bundle.get("target.embed_tokens")
    source = checkpoint("qwen3")
    for name in bundle.manifest.weights:
        assert bundle.get(name).data.tobytes() == source.get(name).data.tobytes()


def test_tokenizer_calibration_and_progress(tmp_path):
    target = add_tokenizer(copy_target("qwen3_5", tmp_path / "target"), 512)
    (target / "generation_config.json").write_text('{"eos_token_id": 0}')
    seen = []
    config = config_of("qwen3_5", tmp_path / "out", target=target, recipe=recipe(tmp_path, SHORT))
    result = build(config, lambda *step: seen.append(step))
    assert len(result.warnings) == 1
    assert "the drafter does not fit the target" in result.warnings[0]  # random weights
    bundle = Bundle.open(result.bundle)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (bundle.path / "tokenizer" / name).read_bytes() == (target / name).read_bytes()
    assert bundle.manifest.tokenizer
    states = {"target.layers.3.kv", "target.layers.7.kv", *(f"drafter.layers.{i}.kv" for i in range(3))}
    assert bundle.manifest.kv_scales.keys() == states
    assert all(0 < k != 1.0 and 0 < v != 1.0 for k, v in bundle.manifest.kv_scales.values())
    assert bundle.kv_scale("target.layers.3.kv") == bundle.manifest.kv_scales["target.layers.3.kv"]
    scales = load_scales((bundle.path / "calibration.json").read_bytes())
    assert (scales.tokens, scales.margin, scales.kv) == (64, 1.5, bundle.manifest.kv_scales)
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["calibration", "weights", "self-test"]
    assert all(0 <= done <= total for _, done, total in seen)
    assert {stage: (done, total) for stage, done, total in seen}["weights"] == (seen[-1][2], seen[-1][2])


def test_checkpoint_scales_are_kept(tmp_path):
    target = copy_target("modelopt", tmp_path / "target")
    layer = "model.language_model.layers.3.self_attn"
    add_scalars(target, {f"{layer}.k_proj.k_scale": 0.5, f"{layer}.v_proj.v_scale": 1.0})
    config = config_of("modelopt", tmp_path / "out", target=target)
    bundle = Bundle.open(build(config).bundle)
    assert bundle.manifest.kv_scales == {"target.layers.3.kv": (0.5, 1.0)}
    assert load_scales((bundle.path / "calibration.json").read_bytes()).stored == ("target.layers.3.kv",)


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_and_resumed_builds_have_the_same_bytes(built, tmp_path, seed):
    name = ("qwen3", "qwen3_5")[seed % 2]
    program = [sys.executable, Path(__file__).parents[1] / "support" / "kill_builds.py", TARGETS[name], DRAFTERS[name]]
    run = subprocess.run([*program, tmp_path / "out", "8", str(seed)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout) >= 5
    assert digests(tmp_path / "out") == digests(built[name].bundle)


class Failing:
    """write_bytes that fails at the given call, after half of the bytes."""

    def __init__(self, at, error):
        self.left, self.error = at, error

    def __call__(self, file, data):
        self.left -= 1
        if self.left == 0:
            file.write(data[: len(data) // 2])
            raise self.error
        file.write(data)


@pytest.mark.parametrize("at", [1, 40, 150])
def test_a_full_disk_leaves_a_resumable_build(built, tmp_path, monkeypatch, at):
    config = config_of("qwen3_5", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_bytes", Failing(at, OSError(errno.ENOSPC, "No space left on device")))
        refused(
            config, BuildError, "is full; free some space and resume with: edge-dflash build", keeps=["out.building"]
        )
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(tmp_path.rglob("manifest.json"))
    assert digests(build(config).bundle) == digests(built["qwen3_5"].bundle)


def test_other_system_errors_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "write_bytes", Failing(1, OSError(errno.EIO, "Input/output error")))
    refused(config_of("qwen3", tmp_path / "out"), BuildError, "Input/output error", keeps=["out.building"])


def test_an_interrupted_build_says_how_to_resume(built, tmp_path):
    config = config_of("qwen3_5", tmp_path / "out")

    def interrupt(stage, done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(BuildError) as error:
        build(config, interrupt)
    assert str(error.value) == f"interrupted; finished files are kept, resume with: {config.command}"
    with pytest.raises(BundleError, match="is an unfinished build, not a bundle; finish it with: edge-dflash build"):
        Bundle.open(config.output)
    kept = digests(building_path(config.output) / "bundle")
    assert len(kept) > 5
    written = Counter()
    original = parts.write_bytes
    try:
        parts.write_bytes = lambda file, data: (written.update([Path(file.name).name]), original(file, data))[1]
        result = build(config)
    finally:
        parts.write_bytes = original
    assert not {f"{Path(name).name}.partial" for name in kept} & set(written)
    assert digests(result.bundle) == digests(built["qwen3_5"].bundle)


def test_a_resumed_build_of_other_inputs_starts_over(built, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_bytes", Failing(60, OSError(errno.ENOSPC, "full")))
        with pytest.raises(BuildError):
            build(config_of("qwen3", tmp_path / "out"))
    result = build(config_of("qwen3_5", tmp_path / "out"))
    assert any("had other inputs" in warning and "starting over" in warning for warning in result.warnings)
    assert digests(result.bundle) == digests(built["qwen3_5"].bundle)


@pytest.mark.parametrize("tensor", ["model.layers.2.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"])
def test_nan_weights_are_refused(tmp_path, tensor):
    target = copy_target("qwen3", tmp_path / "target")
    poison(target, tensor)
    canonical = tensor.replace("model.", "target.").removesuffix(".weight")
    config = config_of("qwen3", tmp_path / "out", target=target)
    refused(config, CheckpointError, f"{target}: {canonical} holds NaN or infinity", keeps=["out.building"])
    assert not list(tmp_path.rglob("*.partial"))


def test_force_replaces_a_bundle(built, tmp_path):
    output = tmp_path / "out"
    build(config_of("qwen3", output))
    result = build(config_of("qwen3_5", output, force=True))
    assert digests(result.bundle) == digests(built["qwen3_5"].bundle)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_builds_do_not_depend_on_threads(built, tmp_path):
    torch.set_num_threads(2)
    try:
        assert digests(build(config_of("qwen3", tmp_path / "out")).bundle) == digests(built["qwen3"].bundle)
    finally:
        torch.set_num_threads(1)


def test_a_bundle_has_the_templates_by_name(tmp_path):
    target = add_tokenizer(copy_target("qwen3", tmp_path / "target"), 512)
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | tojson }}")
    build(config_of("qwen3", tmp_path / "out", target=target))
    opened = Tokenizer.open(Bundle.open(tmp_path / "out").path / "tokenizer")
    assert "".join(opened.render_pieces([{"role": "user", "content": "x"}], tools=[{"name": "y"}])).startswith(
        "tools ["
    )
