"""Native bundles: what reading them gives and refuses, and what reaches a device."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from native_support import (
    NATIVE_PAIR,
    FakeGpu,
    formats_of,
    programs,
    same,
    write_native_bundle,
)
from paths import DEMO

from edge_dflash.backends.cuda.weights import BundleWeights
from edge_dflash.board.archs import find_arch
from edge_dflash.bundle.manifest import dump_manifest
from edge_dflash.bundle.parts import hash_file
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import BundleError
from edge_dflash.model import pair_programs
from edge_dflash.weights.layout import repack, unpack, words_of
from edge_dflash.weights.stacks import pair_stacks

MIXED = {"k_proj": "fp8", "down_proj": "bf16", "drafter__fc": "fp8", "A_log": "f32", "target__norm": "f32"}


@pytest.fixture(scope="module", params=[("nvfp4", "sm90a"), ("tied", "sm90a"), ("nvfp4", "sm110a")], ids="-".join)
def made(request, tmp_path_factory):
    """A small native bundle of mixed formats and its weights."""
    path, (head, arch) = tmp_path_factory.mktemp("made") / "bundle", request.param
    return path, write_native_bundle(path, formats_of("nvfp4", target__lm_head=head, **MIXED), arch=arch)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_weights_come_back_as_they_were(made):
    path, weights = made
    bundle = Bundle.open(path)
    for name, weight in weights.items():
        found = bundle.get(name)
        same(weight, found)
        array = found.packed if hasattr(found, "packed") else found.data
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    if "target.lm_head" not in weights:
        same(weights["target.embed_tokens"], bundle.get("target.lm_head"))
    assert bundle.kv_scale("target.layers.1.kv") == (0.5, 0.25)
    with pytest.raises(KeyError):
        bundle.get("target.layers.0.mlp.nothing")


def test_stacks_are_views_of_the_file(made):
    path, weights = made
    bundle = Bundle.open(path)
    words = words_of(find_arch(bundle.manifest.arch).sm)
    for stack in pair_stacks(programs(), bundle.manifest.weights).values():
        if stack.names[0] not in weights:
            continue
        packed = bundle.repacked(stack)
        wanted = repack([weights[name] for name in stack.names], swiglu=stack.layout.swiglu, words=words)
        assert packed.words == (words if stack.layout.format == "nvfp4" else "shared")
        assert np.array_equal(packed.data, wanted.data)
        assert np.array_equal(packed.scale, wanted.scale)
        assert packed.layout == wanted.layout
        assert not packed.data.flags.owndata
        assert not packed.scale.flags.owndata


def test_stacks_that_the_bundle_has_not_are_refused(made):
    bundle = Bundle.open(made[0])
    stack = next(iter(pair_stacks(programs(), bundle.manifest.weights).values()))
    other = replace(stack, layout=replace(stack.layout, format="bf16"))
    with pytest.raises(BundleError, match=r"in_proj_qkv\+1 is wanted as .*bf16.*, the bundle has 2 matrices, .*nvfp4"):
        bundle.repacked(other)
    with pytest.raises(BundleError, match="the bundle has no stack of this name"):
        bundle.repacked(replace(stack, names=("target.nothing",)))


def test_kernels_are_checked_when_they_are_read(made, tmp_path):
    path = tmp_path / "bundle"
    write_native_bundle(path, formats_of("fp8"))
    file = path / "kernels" / "attend.cubin"
    bundle = Bundle.open(path, check_hashes=False)
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(BundleError, match=r"sha256 of kernels/attend\.cubin is .*, wanted"):
        bundle.cubin("attend")
    with pytest.raises(BundleError, match=r"kernels/orbit\.cubin is missing; this version of edge-dflash runs it"):
        bundle.cubin("orbit")


def rewritten(path, part, change):
    """Change the header of a part and make the manifest agree with its bytes."""
    manifest, file = Bundle.open(path).manifest, path / part
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    files = {**manifest.files, part: hash_file(file, lambda count: None)}
    (path / "manifest.json").write_bytes(dump_manifest(replace(manifest, files=files)))


def renamed(old, new):
    return lambda header: header.update({new: header.pop(old)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h["drafter.fc+0.data"].update(shape=[2, h["drafter.fc+0.data"]["shape"][0] // 2]), "is U8 [2, "),
        (lambda h: h["drafter.fc+0.data"].update(dtype="I8"), "drafter.fc+0.data is I8 [2048], wanted U8 [2048]"),
        (lambda h: h["drafter.fc+0.scale"].update(dtype="U32"), "drafter.fc+0.scale is U32 [32], wanted F32 [32]"),
        (renamed("drafter.fc+0.scale", "drafter.fc+0.size"), "drafter.fc+0.scale is nothing [], wanted F32 [32]"),
        (renamed("drafter.fc+0.scale", "drafter.fc.weight"), "drafter.fc.weight belongs to no weight"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(tmp_path, change, words):
    write_native_bundle(tmp_path / "bundle", formats_of("fp8"))
    rewritten(tmp_path / "bundle", "weights/drafter-context.safetensors", change)
    with pytest.raises(BundleError) as error:
        Bundle.open(tmp_path / "bundle")
    assert words in str(error.value)
    assert "drafter-context.safetensors" in str(error.value)


def test_a_manifest_of_other_formats_is_refused(tmp_path):
    write_native_bundle(tmp_path / "bundle", formats_of("fp8"))
    manifest = Bundle.open(tmp_path / "bundle").manifest
    changed = replace(manifest, weights={**manifest.weights, "drafter.fc": "nvfp4"})
    (tmp_path / "bundle" / "manifest.json").write_bytes(dump_manifest(changed))
    with pytest.raises(BundleError, match=r"drafter\.fc\+0\.words is nothing \[\], wanted U8 \[1152\]"):
        Bundle.open(tmp_path / "bundle")


# -- the way to a device ---------------------------------------------------------------------------------------------


def test_weights_reach_the_device_as_they_lie_in_the_file(made):
    path, weights = made
    bundle, gpu = Bundle.open(path), FakeGpu()
    source = BundleWeights(bundle)
    assert source.formats == bundle.manifest.weights
    assert source.kv_scale("target.layers.1.kv") == (0.5, 0.25)
    for stack in pair_stacks(programs(), source.formats).values():
        loaded = source.stack(gpu, stack)
        assert loaded.layout == stack.layout
        stored = [weights[name if name in weights else "target.embed_tokens"] for name in stack.names]
        wanted = repack(stored, swiglu=stack.layout.swiglu)
        assert np.array_equal(gpu.bytes_of(loaded.data), wanted.data)
        assert np.array_equal(gpu.bytes_of(loaded.scale).view(np.float32), wanted.scale)
        assert len(unpack(wanted)) == len(stack.names)
    embedding = gpu.bytes_of(source.embedding(gpu, "target.embed_tokens"))
    assert np.array_equal(embedding.view(np.uint16), weights["target.embed_tokens"].data.reshape(-1))
    assert np.array_equal(source.vector("target.norm"), weights["target.norm"].data)
    assert source.vector("target.layers.0.linear_attn.conv1d").shape == (128, 1, 4)


def test_a_tied_head_is_made_of_the_embedding_in_blocks(tmp_path, monkeypatch):
    target = replace(NATIVE_PAIR.target, vocab_size=1000)
    pair = replace(NATIVE_PAIR, target=target, drafter=replace(NATIVE_PAIR.drafter, vocab_size=1000))
    weights = write_native_bundle(tmp_path / "bundle", formats_of("fp8", pair, target__lm_head="tied"), pair)
    monkeypatch.setattr("edge_dflash.backends.cuda.weights.row_blocks", small_blocks)
    source, gpu = BundleWeights(Bundle.open(tmp_path / "bundle")), FakeGpu()
    stack = pair_stacks(pair_programs(pair), source.formats)["target.lm_head+0"]
    loaded = source.stack(gpu, stack)
    wanted = repack([weights["target.embed_tokens"]])
    assert np.array_equal(gpu.bytes_of(loaded.data), wanted.data)
    assert np.array_equal(gpu.bytes_of(loaded.scale).view(np.float32), wanted.scale)


def small_blocks(weights, layout):
    from edge_dflash.weights.layout import row_blocks

    blocks = list(row_blocks(weights, layout, 8192))
    assert len(blocks) > 4
    return blocks


def test_a_native_bundle_is_used_without_torch(made):
    program = f"""
import sys
sys.path.insert(0, {str(DEMO.parents[1] / "tests")!r})
import edge_dflash, edge_dflash.planner
from edge_dflash.bundle.reader import Bundle
from edge_dflash.backends import load
from edge_dflash.backends.cuda.weights import BundleWeights
from edge_dflash.weights.stacks import pair_stacks
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs

class Gpu:
    sm = 90

    def upload(self, array):
        return array
    def allocate(self, nbytes):
        from edge_dflash.backends.cuda.memory import DevicePointer
        return DevicePointer(0, nbytes)
    def write(self, pointer, array):
        assert array.nbytes <= pointer.nbytes

bundle = Bundle.open({str(made[0])!r})
weights = BundleWeights(bundle)
for stack in pair_stacks(pair_programs(bundle.pair), weights.formats).values():
    weights.stack(Gpu(), stack)
weights.embedding(Gpu(), "target.embed_tokens")
for name in bundle.manifest.weights:
    bundle.get(name)
try:
    load(bundle)
except BackendError as error:
    assert f"was built for {{bundle.manifest.arch}}" in str(error), error
import edge_dflash.backends.cuda.backend
assert "torch" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
