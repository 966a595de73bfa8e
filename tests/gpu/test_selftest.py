"""A right bundle opens on the GPU, recorded on a CPU as it was; one with a fault does not."""

import shutil
from dataclasses import replace

import pytest
from native_backend_support import DEMO, small
from native_linear_support import cubin
from synthetic import write_drafter, write_target

from edge_dflash import Planner, VerificationError
from edge_dflash.builder import write as builder
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.manifest import dump_manifest
from edge_dflash.bundle.reader import read_manifest

pytestmark = pytest.mark.gpu
NAMES = ("demo", "hybrid", "dense")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, whole_recording):
    """The default builds of three pairs for this GPU."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "compile_cubin", cubin)
        for name in NAMES:
            root, target, drafter = tmp_path_factory.mktemp(name), DEMO / "target", DEMO / "drafter"
            if name != "demo":
                target, drafter = root / "target", root / "drafter"
                configs = small(name)
                write_target(target, configs[0], seed=3)
                write_drafter(drafter, configs[1], seed=4)
            build(BuildConfig(target, drafter, root / "bundle", arch="sm90", backend="native", max_context=512))
            made[name] = root / "bundle"
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_right_bundle_opens(bundles, name):
    with Planner.open(bundles[name]) as planner:
        found = planner.self_test
        print(f"{name}: {found.summary}")
        assert found.ok
        assert found.verdict in ("identical", "rounding")


def theta(pair):
    attention = pair.target.attention
    changed = replace(attention, rope=replace(attention.rope, theta=100.0))
    return replace(pair, target=replace(pair.target, attention=changed))


def taps(pair):
    ids = tuple(at - 1 for at in pair.drafter.target_layer_ids)
    return replace(pair, drafter=replace(pair.drafter, target_layer_ids=ids))


@pytest.mark.parametrize("fault", [theta, taps])
def test_a_wrong_bundle_does_not(bundles, tmp_path, fault):
    path = tmp_path / "bundle"
    shutil.copytree(bundles["demo"], path)
    manifest = read_manifest(path)
    (path / "manifest.json").write_bytes(dump_manifest(replace(manifest, pair=fault(manifest.pair))))
    with pytest.raises(VerificationError, match="is not the one that was built"):
        Planner.open(path)
