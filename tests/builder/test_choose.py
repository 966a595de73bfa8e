"""A build that is told nothing but the arch: which backends it takes, and two of them over one copy of the weights."""

from dataclasses import replace

import pytest
from builder_support import BF16, recipe
from native_support import fake_cubin, same
from paths import DEMO
from tensorrt_build_support import VERSION, config, fake, fake_tools, install, on

from edge_dflash import backends
from edge_dflash.backends.cuda import support
from edge_dflash.backends.cuda.compile import bundled
from edge_dflash.backends.cuda.tensorrt import dense
from edge_dflash.builder.decide import choose, decide
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.manifest import dump_manifest
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import BackendError, BundleError
from edge_dflash.weights.recipe import default_recipe

__all__ = ["fake"]
MODELS = DEMO / "models"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Bundles of the demo pair for sm110: by the arch alone, native alone, TensorRT alone."""
    folder = tmp_path_factory.mktemp("both")
    with pytest.MonkeyPatch.context() as patch:
        fake_tools(patch)
        return {
            name: build(config(folder / str(name), arch="sm110", backend=name)).bundle
            for name in (None, "native", "tensorrt")
        }


@pytest.fixture
def both(built):
    return Bundle.open(built[None])


def weights_of(path):
    return {file.name: file.read_bytes() for file in (path / "weights").iterdir()}


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("cpu", ("reference",)),
        ("sm87", ("native",)),
        ("sm89", ("native",)),
        ("sm90a", ("native",)),
        ("sm110", ("native", "tensorrt")),
        ("sm120", ("native", "tensorrt")),
        ("121", ("native", "tensorrt")),
    ],
)
def test_the_arch_says_what_runs_it(word, names):
    choice = choose(word, None, default_recipe())
    assert (choice.backends, choice.active) == (names, names[0])
    assert choice.line.startswith(f"building for {choice.arch.name}, backend {','.join(names)}: ")


@pytest.mark.parametrize(
    ("backend", "rows"), [(None, 2048), ("native", 2048), ("tensorrt", 512), ("native,tensorrt", 512)]
)
def test_chunks_beyond_512_rows_are_for_native_kernels_alone(fake, tmp_path, backend, rows):
    wide = recipe(tmp_path, BF16)
    config = BuildConfig(MODELS / "target", MODELS / "drafter", tmp_path / "out", "sm90", backend, recipe=wide)
    assert decide(config).manifest.prefill_chunk == rows


def test_nothing_but_the_arch_makes_a_bundle_that_runs_at_once(fake, tmp_path):
    said = []
    result = build(BuildConfig(MODELS / "target", MODELS / "drafter", tmp_path / "out", arch="sm110a"), say=said.append)
    manifest = Bundle.open(result.bundle).manifest
    assert (manifest.arch, manifest.backend, manifest.standby) == ("sm110", "native", ("tensorrt",))
    assert manifest.weights["target.lm_head"] == "nvfp4"
    assert manifest.precision.kv == "fp8"
    assert "selftest.json" in manifest.files
    assert said[0] == (
        "building for sm110, backend native,tensorrt: kernels that run at once, and the networks of plans, which "
        "only the board can compile; build --finish on the board keeps the faster"
    )
    assert said[1].startswith("building with recipe default: wide linears to NVFP4")
    assert said[2].startswith("building for 2048 tokens of context, prefill by 512: about 0.24")
    assert len(result.deferred) == 14
    assert result.warnings == ()


def test_the_weights_lie_there_once_as_the_kernels_read_them(built, both):
    assert weights_of(built[None]) == weights_of(built["native"])
    assert {n for n in both.manifest.files if n.startswith("kernels/")} == {f"kernels/{u}.cubin" for u in bundled()}
    assert both.cubin("attend") == fake_cubin("attend", "sm110a")
    size = {name: sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) for name, path in built.items()}
    assert 0 < size[None] - size["native"] < 3000  # the names of the plans in the manifest


def test_both_backends_get_the_same_weights(built, both):
    other = Bundle.open(built["tensorrt"])
    assert both.manifest.weights == other.manifest.weights
    for name in both.manifest.weights:
        same(other.get(name), both.get(name))


def test_native_kernels_run_it_before_any_plan_is_there(both, monkeypatch):
    monkeypatch.setattr(support, "device_sm", lambda: 110)
    monkeypatch.setattr("edge_dflash.backends.cuda.backend.NativeBackend", lambda *pair, **rest: rest["dense"])
    assert backends.load(both) is None  # its own launches
    with pytest.raises(BackendError, match=f"lacks 14 plans, .* build: edge-dflash build --finish {both.path}"):
        backends.load(both, "tensorrt")
    with pytest.raises(
        BackendError, match="was built for native, tensorrt, not for reference; build it again with --b"
    ):
        backends.load(both, "reference")


def test_a_finished_bundle_loads_either(fake, tmp_path, monkeypatch):
    bundle = Bundle.open(build(config(tmp_path / "out", backend=None)).bundle)
    assert (bundle.manifest.backends, bundle.manifest.plans.version) == (("native", "tensorrt"), VERSION)
    monkeypatch.setattr(support, "device_sm", lambda: 121)
    monkeypatch.setattr(dense, "load", lambda flavour: type("Trt", (), {"__version__": VERSION}))
    monkeypatch.setattr("edge_dflash.backends.cuda.backend.NativeBackend", lambda *pair, **rest: rest["dense"])
    assert backends.load(bundle) is None
    assert backends.load(bundle, "tensorrt")._files.keys() == set(bundle.manifest.plans.names)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, "TensorRT for RTX is not installed: pip install"),
        ("1.2.0.54", "TensorRT for RTX is 1.2.0.54, plans need"),
    ],
)
def test_without_a_fit_tensorrt_for_rtx_there_are_kernels_alone(fake, tmp_path, monkeypatch, version, why):
    install(monkeypatch, version)
    plan = decide(config(tmp_path / "out", backend=None))
    assert plan.choice.backends == ("native",)
    assert plan.lines[0].startswith(f"building for sm121, backend native: no plans, as {why}")
    assert plan.manifest.plans is None
    with pytest.raises(BackendError, match=why):
        decide(config(tmp_path / "out", backend="native,tensorrt"))


def test_activations_of_four_bits_are_for_tensorrt_alone(fake, tmp_path):
    recipe = tmp_path / "w4a4.yaml"
    recipe.write_text("schema: 1\nname: w4a4\nactivations: nvfp4\ncalibration: {tokens: 64, margin: 1.25}\n")
    made = config(tmp_path / "out", arch="sm110", backend=None, recipe=recipe, calibrate=True)
    assert decide(made).choice.backends == ("tensorrt",)
    with pytest.raises(BackendError, match="the native backend computes with bf16; set activations: bf16"):
        decide(replace(made, backend="native,tensorrt"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"standby": ("reference",)}, "arch of a reference bundle is 'sm110', wanted one of cpu"),
        ({"standby": ("native",)}, "standby is native beside native"),
        ({"standby": ("tensorrt", "tensorrt")}, "standby is tensorrt, tensorrt beside native"),
        ({"backend": "tensorrt", "standby": ("native",)}, "backend is 'tensorrt', whose plans are deferred"),
        ({"standby": ()}, "plans is given for backend 'native'"),
    ],
)
def test_backends_that_contradict_each_other_are_refused(both, changes, words):
    from edge_dflash.bundle.manifest import parse_manifest

    with pytest.raises(BundleError, match=words):
        parse_manifest(dump_manifest(replace(both.manifest, **changes)))


def test_a_build_on_the_board_itself_builds_the_plans_at_once(fake, tmp_path, monkeypatch):
    on(monkeypatch, 110)
    install(monkeypatch, "10.13.3.9")
    result = build(config(tmp_path / "out", arch="sm110", backend=None))
    assert len(result.plans) == 14
    assert (result.active, result.backends, result.trial) == ("native", ("native", "tensorrt"), None)
