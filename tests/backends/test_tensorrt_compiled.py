"""Whole builds with the real compiler: bundles with plans, interrupted in the middle of some, and what it refuses."""

import pytest
from golden_pairs import WALKS
from native_support import fake_cubin
from tensorrt_build_support import config
from tensorrt_support import reference, units

from edge_dflash.backends.cuda.tensorrt.compile import Compiler
from edge_dflash.backends.cuda.tensorrt.net import Net
from edge_dflash.builder import write as builder
from edge_dflash.builder.engines import bundle_engines
from edge_dflash.builder.write import build
from edge_dflash.bundle.parts import building_path
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import BuildError

pytestmark = pytest.mark.tensorrt


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(builder, "compile_cubin", fake_cubin)


def test_a_build_that_is_stopped_inside_plans_resumes(tmp_path):
    shown = []

    def interrupt(stage, done, total):
        if stage == "plans":
            shown.append(done)
            if done > 0.4 * total:
                raise KeyboardInterrupt

    with pytest.raises(BuildError, match="interrupted; finished files are kept"):
        build(config(tmp_path / "out"), interrupt)
    assert not (tmp_path / "out").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in building_path(tmp_path / "out").rglob("*.plan")}
    assert kept
    assert shown == sorted(shown)
    assert len(set(shown)) > 3  # TensorRT's own steps show
    result = build(config(tmp_path / "out"))
    bundle = Bundle.open(result.bundle)
    assert {name: (result.bundle / "plans" / name).stat().st_mtime_ns for name in kept} == kept
    for name, unit in bundle_engines(bundle.pair, bundle.manifest.weights, bundle.manifest.prefill_chunk).items():
        weights = sum(bundle.get(weight).nbytes for weight in unit.weights)
        size = bundle.plan(name).stat().st_size
        assert weights < size < weights + (1 + len(unit.ops)) * (1 << 20), name


def test_what_tensorrt_refuses_ends_the_build_with_its_words(tmp_path, monkeypatch):
    original = Net.dequantize
    monkeypatch.setattr(
        Net, "dequantize", lambda net, x, s, axis=None: original(net, x, net.cast(s, "FLOAT") if axis else s, axis)
    )
    with pytest.raises(BuildError, match=r"plan [a-z]+(-\d+)? for sm121: TensorRT 1\.\d.* says .*#"):
        build(config(tmp_path / "out"))
    assert building_path(tmp_path / "out").is_dir()


def test_a_build_is_stopped_by_its_progress():
    compiler = Compiler("sm121")
    head = head_of_the_demo()
    seen = []
    with pytest.raises(BuildError, match=r"plan head for sm121: .*[Cc]ancel"):
        compiler.build(compiler.lower(*head), lambda share: seen.append(share) or False)
    assert len(seen) == 1
    seen.clear()
    assert compiler.build(compiler.lower(*head), lambda share: seen.append(share) or True)
    assert seen == sorted(seen)
    assert seen[-1] > 0.8


@pytest.mark.parametrize("name", WALKS)
def test_plans_of_drafters_with_a_walk_are_built(name):
    compiler, store = Compiler("sm121"), reference(name, "bf16").store
    for key, unit in units(name).units.items():
        if key == "head" or key.startswith("drafter-"):
            assert compiler.build(compiler.lower(unit, store)).nbytes > sum(store.get(w).nbytes for w in unit.weights)


def head_of_the_demo():
    return units("demo").units["head"], reference("demo", "bf16").store
