"""Builds of TensorRT bundles: plans here or deferred, what a manifest says of them, resuming, refusals."""

import threading
import time
from dataclasses import replace

import pytest
from native_support import fake_cubin
from tensorrt_build_support import VERSION, FakeCompiler, config, fake, fake_tools, install, on
from tensorrt_support import units

from edge_dflash.backends.cuda.tensorrt.units import STATE_UNITS
from edge_dflash.builder import engines as engines_module
from edge_dflash.builder.write import build
from edge_dflash.bundle import parts
from edge_dflash.bundle.parts import building_path
from edge_dflash.bundle.reader import Bundle
from edge_dflash.demo.tasks import assemble
from edge_dflash.errors import BackendError, BuildError, BundleError, RecipeError
from edge_dflash.model.vision import TOWER

__all__ = ["fake"]
KEYS = sorted(units("demo").units)
NAMES = tuple(f"plans/{key}.plan" for key in KEYS)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        fake_tools(patch)
        made = build(config(tmp_path_factory.mktemp("plans") / "out"), lambda *step: seen.append(step))
    return made, seen


def test_a_bundle_holds_plans_kernels_and_all_weights(built):
    result = built[0]
    bundle = Bundle.open(result.bundle)
    manifest = bundle.manifest
    assert result.plans == NAMES
    assert result.deferred == ()
    assert (manifest.plans.flavour, manifest.plans.version) == ("tensorrt_rtx", VERSION)
    assert (manifest.plans.names, manifest.plans.deferred) == (NAMES, ())
    assert manifest.tools["tensorrt_rtx"] == VERSION
    kernels = {name for name in manifest.files if name.startswith("kernels/")}
    assert kernels == {f"kernels/{unit}.cubin" for unit in STATE_UNITS}
    assert bundle.cubin("attend") == fake_cubin("attend", "sm121a")
    for name in manifest.weights:
        bundle.get(name)
    held = sum(bundle.get(name).nbytes for name in units("demo").units["head"].weights)
    assert bundle.plan("plans/head.plan").read_bytes() == f"head for sm121: {held}".encode()
    assert result.bytes == sum(f.stat().st_size for f in result.bundle.rglob("*") if f.is_file())


@pytest.mark.parametrize("backend", ["tensorrt", "native,tensorrt"])
def test_a_tower_is_one_of_the_plans(fake, tmp_path, backend):
    assemble(tmp_path / "sees")
    result = build(config(tmp_path / "out", target=tmp_path / "sees", backend=backend))
    bundle = Bundle.open(result.bundle)
    assert set(result.plans) == {*NAMES, "plans/vision.plan"}
    assert "kernels/tower.cubin" in bundle.manifest.files
    names = [name for name in bundle.manifest.weights if name.startswith(TOWER)]
    held = sum(bundle.get(name).nbytes for name in names)
    assert bundle.plan("plans/vision.plan").read_bytes() == f"vision for sm121: {held}".encode()
    board = build(config(tmp_path / "board", target=tmp_path / "sees", backend=backend, arch="sm110"))
    assert set(board.deferred) == set(result.plans)


def test_progress_covers_the_plans(built):
    stages = list(dict.fromkeys(stage for stage, _, _ in built[1]))
    assert stages == ["weights", "kernels", "plans"]
    shown = [(done, total) for stage, done, total in built[1] if stage == "plans"]
    assert shown[-1][0] == shown[-1][1]
    assert all(0 <= done <= total for done, total in shown)


def test_plans_of_another_machine_are_deferred(fake, tmp_path):
    install_none = config(tmp_path / "out", arch="sm110")
    result = build(install_none)
    manifest = Bundle.open(result.bundle).manifest
    assert (result.plans, result.deferred) == ((), NAMES)
    assert fake.made == []
    assert (manifest.plans.flavour, manifest.plans.version, manifest.plans.deferred) == ("tensorrt", None, NAMES)
    assert not any(name.startswith("plans/") for name in manifest.files)
    assert Bundle.open(result.bundle).cubin("delta") == fake_cubin("delta", "sm110a")
    assert not any(name.startswith("tensorrt") for name in manifest.tools)


@pytest.mark.parametrize(
    ("sm", "version", "here"), [(110, "10.13.3.9", True), (90, "10.13.3.9", False), (110, None, False)]
)
def test_plans_for_a_board_are_built_where_the_board_is(fake, tmp_path, monkeypatch, sm, version, here):
    on(monkeypatch, sm)
    install(monkeypatch, version)
    result = build(config(tmp_path / "out", arch="sm110"))
    assert (sorted(fake.made) == KEYS) == here
    assert bool(result.plans) == here
    assert Bundle.open(result.bundle).manifest.plans.version == (version if here else None)


def test_on_a_board_plans_are_timed_one_by_one_with_one_cache(fake, tmp_path, monkeypatch):
    on(monkeypatch, 110)
    install(monkeypatch, "10.13.3.9")
    threads = set()
    plan = fake.build
    monkeypatch.setattr(fake, "build", lambda *a: (threads.add(threading.get_ident()), plan(*a))[1])

    def interrupt(stage, done, total):
        if stage == "plans" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(BuildError, match="resume with: edge-dflash build"):
        build(config(tmp_path / "out", arch="sm110"), interrupt)
    kept = building_path(tmp_path / "out") / engines_module.TIMING_CACHE
    assert kept.read_bytes() == b"t" * len(fake.made)
    assert len(threads) == 1
    before = len(fake.made)
    build(config(tmp_path / "out", arch="sm110"))
    assert fake.timings == [b"", b"t" * before]
    assert sorted(fake.made) == KEYS


def test_an_interrupted_build_builds_no_plan_twice(fake, tmp_path):
    def interrupt(stage, done, total):
        if stage == "plans" and done > 0.3 * total:
            raise KeyboardInterrupt

    with pytest.raises(BuildError, match=r"resume with: edge-dflash build .* --arch sm121 --backend tensorrt"):
        build(config(tmp_path / "out"), interrupt)
    assert not (tmp_path / "out").exists()
    assert fake.made
    assert len(build(config(tmp_path / "out")).plans) == len(KEYS)
    assert sorted(fake.made) == KEYS
    assert not building_path(tmp_path / "out").exists()


def test_a_refused_plan_names_op_and_plan_and_keeps_the_others(fake, tmp_path):
    fake.fail = "target-005"
    with pytest.raises(BuildError, match=r"plan target-005 for sm121: TensorRT 0 says target-005\.out#3 matmul"):
        build(config(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    fake.fail = ""
    build(config(tmp_path / "out"))
    assert sorted(fake.made) == KEYS


def test_a_refused_plan_stops_those_in_work(fake, tmp_path, monkeypatch):
    begun, stopped = threading.Event(), []
    plan = fake.build

    def slow(self, lowered, advance):
        if lowered.unit.key != "drafter-000":
            return plan(self, lowered, advance)
        begun.set()
        for _ in range(2000):
            if not advance(0.1):
                stopped.append(lowered.unit.key)
                break
            time.sleep(0.005)
        raise BuildError("stopped")

    def failing(self, lowered, advance):
        if lowered.unit.key == "drafter-001":
            begun.wait(60)
            raise BuildError("plan drafter-001: no")
        return slow(self, lowered, advance)

    monkeypatch.setattr(engines_module, "workers", lambda arch: 2)
    monkeypatch.setattr(fake, "build", failing)
    with pytest.raises(BuildError, match="plan drafter-001: no"):
        build(config(tmp_path / "out"))
    assert stopped == ["drafter-000"]


def test_plans_are_hashed_and_written_side_by_side(fake, tmp_path, monkeypatch):
    both, write, begun = threading.Barrier(2, timeout=30), parts.write_bytes, set()
    assert len(KEYS) % 2 == 0

    def meeting(file, data):
        if file.name.endswith(".plan.partial") and file.name not in begun:
            begun.add(file.name)
            both.wait()
        write(file, data)

    monkeypatch.setattr(engines_module, "workers", lambda arch: 2)
    monkeypatch.setattr(parts, "write_bytes", meeting)
    result = build(config(tmp_path / "out"))
    assert result.plans == NAMES
    Bundle.open(result.bundle)


def test_a_changed_plan_of_an_interrupted_build_is_built_again(fake, tmp_path):
    fake.fail = "target-008"
    with pytest.raises(BuildError):
        build(config(tmp_path / "out"))
    there = next((building_path(tmp_path / "out") / "bundle" / "plans").glob("*.plan"))
    there.write_bytes(there.read_bytes()[:-1] + b"?")
    fake.fail = ""
    result = build(config(tmp_path / "out"))
    assert fake.made.count(there.stem) == 2
    assert len(fake.made) == len(KEYS) + 1
    Bundle.open(result.bundle)


def test_another_tensorrt_does_not_take_up_an_unfinished_build(fake, tmp_path, monkeypatch):
    fake.fail = "target-008"
    with pytest.raises(BuildError):
        build(config(tmp_path / "out"))
    fake.fail, fake.made = "", []
    install(monkeypatch, "1.8.0.1")
    result = build(config(tmp_path / "out"))
    assert sorted(fake.made) == KEYS
    assert any("had other inputs (tools)" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"arch": "sm100a"}, BackendError, "arch is 'sm100a'; accepted are cpu, sm87"),
        ({"arch": "sm90a"}, BackendError, "is nvfp4, which TensorRT runs on SM 100 and later, not on sm90;"),
        ({"arch": "cpu"}, BackendError, "--arch is 'cpu', --backend tensorrt is built for sm87"),
    ],
)
def test_what_plans_do_not_take_is_refused_before_any_work(fake, tmp_path, changes, error, words):
    with pytest.raises((error, RecipeError), match=words):
        build(config(tmp_path / "out", **changes))
    assert not building_path(tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, r"TensorRT for RTX is not installed: pip install 'edge-dflash\[tensorrt\]'"),
        ("1.2.0.54", "1.2.0.54, plans need 1.3"),
    ],
)
def test_a_missing_or_old_tensorrt_is_named(fake, tmp_path, monkeypatch, version, words):
    install(monkeypatch, version)
    with pytest.raises(BackendError, match=words):
        build(config(tmp_path / "out"))


def test_memory_and_cores_bound_the_plans_in_work(monkeypatch):
    monkeypatch.setattr(engines_module.os, "cpu_count", lambda: 64)
    assert engines_module.workers("sm110") == 1
    for available, count in ((1 << 30, 1), (5 << 30, 2), (1 << 40, engines_module.AT_ONCE)):
        state = type("State", (), {"available": available})
        monkeypatch.setattr(engines_module, "read_memory", lambda root, state=state: state)
        assert engines_module.workers("sm121") == count


def test_a_damaged_plan_is_refused_even_without_hashing_all(fake, tmp_path):
    result = build(config(tmp_path / "out"))
    file = result.bundle / "plans" / "head.plan"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(BundleError, match=r"sha256 of plans/head\.plan"):
        Bundle.open(result.bundle)
    with pytest.raises(BundleError, match=r"sha256 of plans/head\.plan"):
        Bundle.open(result.bundle, check_hashes=False).plan("plans/head.plan")
    with pytest.raises(BundleError, match=r"plans/tail\.plan is missing"):
        Bundle.open(result.bundle, check_hashes=False).plan("plans/tail.plan")


def test_w4a4_is_a_matter_of_the_recipe(fake, tmp_path):
    recipe = tmp_path / "w4a4.yaml"
    recipe.write_text("schema: 1\nname: w4a4\nactivations: nvfp4\ncalibration: {tokens: 64, margin: 1.25}\n")
    result = build(config(tmp_path / "out", recipe=recipe, calibrate=True))
    weight = Bundle.open(result.bundle).get("target.layers.0.mlp.gate_proj")
    assert weight.input_scale is not None
    assert any("1 NVFP4 linears (target.lm_head ...) read BF16 activations" in w for w in result.warnings)


def test_what_tensorrt_expands_on_every_run_is_warned_about(built, fake, tmp_path):
    (warning,) = [w for w in built[0].warnings if "expands" in w]
    assert "set activations: nvfp4 in the recipe, and fp8 for lm_head and fc" in warning
    recipe = tmp_path / "fp8.yaml"
    every = "attention: fp8, gated_delta: fp8, mlp: fp8"
    recipe.write_text(
        f"schema: 1\nname: fp8\ntarget: {{{every}, lm_head: fp8}}\ndrafter: {{attention: fp8, mlp: fp8}}\n"
    )
    assert not any("expands" in w for w in build(config(tmp_path / "out", recipe=recipe)).warnings)


def test_the_fake_and_the_compiler_have_one_face():
    from inspect import signature

    from edge_dflash.backends.cuda.tensorrt.compile import Compiler

    for name in ("__init__", "lower", "build"):
        assert list(signature(getattr(Compiler, name)).parameters) == list(
            signature(getattr(FakeCompiler, name)).parameters
        )
    assert replace(config("x"), arch="sm110").arch == "sm110"
