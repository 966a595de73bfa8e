import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundle_support import PAIR, random_weights, write_bundle, write_part
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_dflash.builder.journal import WorkDir
from edge_dflash.bundle.manifest import dump_manifest
from edge_dflash.bundle.parts import building_path, hash_file
from edge_dflash.bundle.reader import MAX_MANIFEST, Bundle
from edge_dflash.errors import BundleError
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WideWeight


def same(a, b):
    assert type(a) is type(b)
    for field in vars(a):
        x, y = getattr(a, field), getattr(b, field)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert x.tobytes() == y.tobytes()
        else:
            assert x == y


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "bundle"
    weights = random_weights(seed=2)
    write_bundle(path, weights)
    return path, weights


@pytest.fixture
def bundle(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "bundle")


def refused(path, message, **options):
    with pytest.raises(BundleError) as error:
        Bundle.open(path, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_weights_round_trip(tmp_path_factory, seed):
    path = tmp_path_factory.mktemp("round") / "bundle"
    weights = random_weights(seed=seed)
    manifest = write_bundle(path, weights)
    bundle = Bundle.open(path)
    assert bundle.manifest == manifest
    assert bundle.pair == PAIR
    for name, weight in weights.items():
        same(bundle.get(name), weight)
    if "target.lm_head" not in weights:
        same(bundle.get("target.lm_head"), weights["target.embed_tokens"])
    shutil.rmtree(path)


def test_store(made):
    seen = []
    bundle = Bundle.open(made[0], progress=lambda done, total: seen.append((done, total)))
    assert bundle.path == made[0]
    assert bundle.kv_scale("target.layers.1.kv") == (0.5, 0.25)
    assert bundle.kv_scale("drafter.layers.0.kv") == (1.0, 1.0)
    assert seen[-1] == (bundle.manifest.size, bundle.manifest.size)
    with pytest.raises(KeyError):
        bundle.get("target.layers.0.mlp.nothing")
    with pytest.raises(ValueError, match="read-only"):
        bundle.get("target.norm").data[0] = 0


def test_require(made):
    bundle = Bundle.open(made[0], check_hashes=False)
    bundle.require(backend="reference", archs=("cpu",))
    with pytest.raises(BundleError, match="backend is 'reference', wanted 'native' here; build again with --backend"):
        bundle.require(backend="native", archs=("sm110a",))
    with pytest.raises(BundleError, match="arch is 'cpu', wanted 'sm110a' or 'sm110' here"):
        bundle.require(backend="reference", archs=("sm110a", "sm110"))


def test_one_flipped_byte_in_every_file(bundle):
    rng = np.random.default_rng(1)
    files = [path for path in bundle.rglob("*") if path.is_file()]
    assert len(files) == 10
    for path in files:
        whole = path.read_bytes()
        for place in {0, len(whole) - 1, *rng.integers(0, len(whole), 3).tolist()}:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
            refused(bundle, path.name)
        path.write_bytes(whole)
    Bundle.open(bundle)


def test_files_that_are_missing_extra_short_or_links_are_refused(bundle):
    part = bundle / "weights" / "target-head.safetensors"
    whole = part.read_bytes()
    part.unlink()
    refused(bundle, "file weights/target-head.safetensors is missing")
    (bundle / "elsewhere").write_bytes(whole)
    part.symlink_to(bundle / "elsewhere")
    refused(bundle, "weights/target-head.safetensors is a symbolic link")
    part.unlink()
    part.write_bytes(whole[:-1])
    (bundle / "elsewhere").unlink()
    refused(bundle, f"size of weights/target-head.safetensors is {len(whole) - 1} bytes, wanted {len(whole)}")
    part.write_bytes(whole)
    (bundle / "weights" / "more.pkl").write_bytes(b"")
    refused(bundle, "file weights/more.pkl is not in the manifest")


def test_linked_directories_are_refused_and_a_linked_bundle_is_not(bundle, tmp_path):
    (tmp_path / "current").symlink_to(bundle)
    assert Bundle.open(tmp_path / "current").pair == PAIR
    (bundle / "weights").rename(tmp_path / "moved")
    (bundle / "weights").symlink_to(tmp_path / "moved")
    refused(bundle, "weights is a symbolic link")


def test_no_bundle_here(tmp_path):
    refused(tmp_path / "nothing", "no bundle at")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "no bundle at")
    refused(tmp_path, "has no manifest.json")
    (tmp_path / "manifest.json").symlink_to("file")
    refused(tmp_path, "has no manifest.json")


def test_an_unfinished_build_is_named_with_its_resume_command(tmp_path):
    output = tmp_path / "out"
    with WorkDir(output, {}, "edge-dflash build --output out"):
        pass
    for path in (output, building_path(output), building_path(output) / "bundle"):
        refused(path, "is an unfinished build, not a bundle; finish it with: edge-dflash build --output out")


def test_a_manifest_that_is_too_large_is_not_read(bundle):
    with (bundle / "manifest.json").open("r+b") as file:
        file.truncate(MAX_MANIFEST + 1)  # a hole: no bytes are written
    refused(bundle, f"has {MAX_MANIFEST + 1} bytes, wanted at most {MAX_MANIFEST}; it is no manifest")


def test_a_weight_file_whose_header_is_damaged_is_named(bundle):
    part = "weights/target-head.safetensors"
    manifest = Bundle.open(bundle).manifest
    (bundle / part).write_bytes(b"\xff" * 64)
    files = {**manifest.files, part: hash_file(bundle / part)}
    (bundle / "manifest.json").write_bytes(dump_manifest(replace(manifest, files=files)))
    refused(bundle, "target-head.safetensors")


@pytest.mark.parametrize("opened", ["manifest.json", "weights/target-head.safetensors"])
def test_files_that_may_not_be_read_are_named(bundle, monkeypatch, opened):
    """As for another user: root may read everything."""
    for place in (Path, os):

        def refuse(path, *args, real=place.open, **kwargs):
            if path == bundle / opened:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(place, "open", refuse)
    refused(bundle, f"cannot read {bundle / opened}: Permission denied; check its permissions")


@pytest.fixture
def changed(made, tmp_path):
    """Make a bundle whose hashes are right and whose weights or manifest were made wrong."""

    def make(weights=None, **changes):
        path = tmp_path / f"changed-{len(list(tmp_path.iterdir()))}"
        write_bundle(path, {**made[1], **(weights or {})}, **changes)
        return path

    return make


def test_weights_that_disagree_with_the_specs_are_refused(changed):
    bf16 = WideWeight(np.zeros((32, 32), np.uint16))
    scale = np.ones(1, np.float32)
    refused(changed({"drafter.fc": bf16}), "drafter.fc has shape [32, 32], wanted [32, 64]")
    refused(
        changed({"target.embed_tokens": Fp8Weight(np.zeros((48, 32), np.uint8), scale)}),
        "target.embed_tokens is stored as fp8; only linear weights may be quantized",
    )
    fc = Fp8Weight(np.zeros((32, 64), np.uint8), np.ones(2, np.float32))
    refused(changed({"drafter.fc": fc}), "weight_scale is F32 [2], wanted F32 [1] or [32]")
    fc = Nvfp4Weight(np.zeros((32, 32), np.uint8), np.zeros((32, 2), np.uint8), 1.0)
    refused(changed({"drafter.fc": fc}), "weight_scale is F8_E4M3 [32, 2], wanted F8_E4M3 [32, 4]")


def rewrite(path, part, weights):
    """Replace a part file and make the manifest agree with its bytes."""
    manifest = Bundle.open(path).manifest
    write_part(path / part, weights)
    files = {**manifest.files, part: hash_file(path / part)}
    (path / "manifest.json").write_bytes(dump_manifest(replace(manifest, files=files)))


def test_tensors_that_disagree_with_the_manifest_are_refused(bundle, made):
    head = {name: weight for name, weight in made[1].items() if name in ("target.norm", "target.lm_head")}
    part = "weights/target-head.safetensors"
    good = (bundle / "manifest.json").read_bytes(), (bundle / part).read_bytes()
    other = WideWeight(np.zeros(32, np.float32 if head["target.norm"].data.dtype == np.uint16 else np.uint16))
    for weights, message in (
        ({**head, "target.norm": other}, "the manifest says"),
        ({"target.norm": head["target.norm"]}, "target.lm_head.weight is nothing"),
        ({**head, "target.more": other}, "tensor target.more.weight belongs to no weight"),
        ({**head, "target.norm.weight": other}, "tensor target.norm.weight.weight belongs to no weight"),
    ):
        rewrite(bundle, part, weights)
        refused(bundle, message)
        (bundle / "manifest.json").write_bytes(good[0])
        (bundle / part).write_bytes(good[1])


def test_weight_files_that_the_models_do_not_need_are_refused(bundle):
    name = "weights/target-layer-009.safetensors"
    manifest = Bundle.open(bundle).manifest
    (bundle / name).write_bytes(b"")
    files = {**manifest.files, name: hash_file(bundle / name)}
    (bundle / "manifest.json").write_bytes(dump_manifest(replace(manifest, files=files)))
    refused(bundle, f"weight file {name} is unknown")
