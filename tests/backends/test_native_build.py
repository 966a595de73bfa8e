"""Builds of native bundles: the codes of a reference build, repacked, with kernels; resumable to the byte."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from builder_support import digests
from bundle_support import random_weight
from native_support import fake_cubin, same
from paths import DEMO

from edge_dflash.backends.cuda.compile import bundled, kernels_digest
from edge_dflash.builder import decide
from edge_dflash.builder import write as builder
from edge_dflash.builder.convert import weight_tensors
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.parts import Part, building_path, tensor_file, write_file
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.files import directory
from edge_dflash.errors import BuildError
from edge_dflash.weights.layout import Layout
from edge_dflash.weights.safetensors import TensorFiles
from edge_dflash.weights.stacks import Stack

DIGEST = kernels_digest()


def quick_kernels(patch):
    patch.setattr(builder, "compile_cubin", fake_cubin)
    patch.setattr(decide, "kernels_digest", lambda: DIGEST)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quick_kernels(monkeypatch)


def demo_config(output, **changes):
    made = BuildConfig(
        DEMO / "models" / "target",
        DEMO / "models" / "drafter",
        output,
        arch="sm90a",
        backend="native",
        recipe=directory("engines") / "demo-cpu.yaml",
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A native bundle of the demo pair, and the progress of its build."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        quick_kernels(patch)
        result = build(demo_config(tmp_path_factory.mktemp("native") / "out"), lambda *step: seen.append(step))
    return result, seen


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Digests of the demo pair's bundle with so little context that no self-test is recorded."""
    output = tmp_path_factory.mktemp("short") / "out"
    with pytest.MonkeyPatch.context() as patch:
        quick_kernels(patch)
        return digests(build(demo_config(output, max_context=48)).bundle)


def test_a_native_bundle_holds_the_codes_of_a_reference_bundle(demo, demo_bundle):
    native, reference = Bundle.open(demo[0].bundle), Bundle.open(demo_bundle)
    manifest = native.manifest
    assert (manifest.arch, manifest.backend) == ("sm90", "native")
    assert manifest.weights == reference.manifest.weights
    assert manifest.kv_scales == reference.manifest.kv_scales
    for name in manifest.weights:
        same(reference.get(name), native.get(name))
    for name in ("selftest.json", "calibration.json", "tokenizer/tokenizer.json"):
        assert (native.path / name).read_bytes() == (reference.path / name).read_bytes()


def test_a_native_bundle_holds_kernels_of_this_version(demo):
    bundle = Bundle.open(demo[0].bundle)
    assert {n for n in bundle.manifest.files if n.startswith("kernels/")} == {f"kernels/{u}.cubin" for u in bundled()}
    assert "kernels/bench.cubin" not in bundle.manifest.files
    assert bundle.cubin("attend") == fake_cubin("attend", "sm90a")
    assert bundle.manifest.tools["kernels"] == DIGEST
    assert "nvrtc" in bundle.manifest.tools


def test_progress_covers_weights_and_kernels(demo):
    result, seen = demo
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["calibration", "weights", "kernels", "self-test"]
    assert all(0 <= done <= total for _, done, total in seen)
    last = {stage: done == total for stage, done, total in seen}
    assert all(last.values())
    weights = sum(f.stat().st_size for f in (result.bundle / "weights").iterdir())
    assert 0 <= weights - seen[-1][2] < 64_000  # the decisions held the size, but for headers
    assert result.bytes == sum(f.stat().st_size for f in result.bundle.rglob("*") if f.is_file())
    assert result.warnings == ()


def test_stacks_lie_aligned_in_their_files(demo):
    for file in (demo[0].bundle / "weights").iterdir():
        tensors = TensorFiles.open([file])
        for name in tensors.names():
            kind, array = tensors.array(name)
            assert array.flags.writeable is False, (name, kind)  # a view, not a copy that alignment would ask for


@pytest.mark.parametrize(("stage", "share"), [("weights", 0.4), ("kernels", 0.4)])
def test_an_interrupted_build_resumes_to_the_same_bytes(short, tmp_path, stage, share, monkeypatch):
    config = demo_config(tmp_path / "out", max_context=48)

    def interrupt(name, done, total):
        if name == stage and done >= share * total:
            raise KeyboardInterrupt

    with pytest.raises(BuildError, match=r"resume with: edge-dflash build .* --arch sm90a --backend native"):
        build(config, interrupt)
    assert not config.output.exists()
    kept = {path.name for path in building_path(config.output).rglob("*.cubin")}
    compiled = []
    monkeypatch.setattr(builder, "compile_cubin", lambda unit, arch: (compiled.append(unit), fake_cubin(unit, arch))[1])
    result = build(config)
    assert {f"{unit}.cubin" for unit in compiled} == {f"{unit}.cubin" for unit in bundled()} - kept
    assert digests(result.bundle) == short


def test_an_unfinished_build_for_another_arch_is_not_taken_up(tmp_path):
    config = demo_config(tmp_path / "out", max_context=48)

    def interrupt(name, done, total):
        if name == "kernels" and done == total:
            raise KeyboardInterrupt

    with pytest.raises(BuildError):
        build(config, interrupt)
    result = build(replace(config, arch="sm110a"))
    assert any("had other inputs" in warning for warning in result.warnings)
    assert any("no self-test is recorded" in warning for warning in result.warnings)
    assert Bundle.open(result.bundle).cubin("small") == fake_cubin("small", "sm110a")


def test_a_large_stack_is_converted_without_being_held_several_times(tmp_path):
    """The bytes of one stack, its source's blocks and little else: measured by what NumPy allocates."""
    names = ("target.layers.0.mlp.gate_proj", "target.layers.0.mlp.up_proj")
    rng = np.random.default_rng(0)
    store = {name: random_weight(rng, (8192, 2048), "nvfp4", None) for name in names}
    stack = Stack(names, Layout("nvfp4", (8192, 8192), 2048, True))
    formats = dict.fromkeys(names, "nvfp4")
    tracemalloc.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            write_file(tmp_path / "part", tensor_file(weight_tensors(Part((), (stack,)), store, formats, {}, pool)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100e6, peak  # the stack has 19 MB; a block of 8 MB takes 7 times its size while it is turned
