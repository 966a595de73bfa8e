"""Loading a TensorRT bundle: only finished, on its SM, with its TensorRT; and what reaches the backend."""

from types import SimpleNamespace

import pytest
from native_support import FakeGpu
from tensorrt_build_support import VERSION, config, fake_tools

from edge_dflash import backends
from edge_dflash.backends.cuda import support
from edge_dflash.backends.cuda.tensorrt import dense
from edge_dflash.builder.write import build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import BackendError


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Finished for sm121, deferred for sm110."""
    with pytest.MonkeyPatch.context() as patch:
        fake_tools(patch)
        folder = tmp_path_factory.mktemp("load")
        return [build(config(folder / name, arch=name)).bundle for name in ("sm121", "sm110")]


def on(patch, sm, version=VERSION):
    patch.setattr(support, "device_sm", lambda: sm)
    patch.setattr(dense, "load", lambda flavour: SimpleNamespace(__version__=version))


def test_a_deferred_bundle_says_how_to_finish_it(bundles, monkeypatch):
    on(monkeypatch, 110)
    with pytest.raises(BackendError, match=f"lacks 14 plans, .* build: edge-dflash build --finish {bundles[1]}"):
        backends.load(Bundle.open(bundles[1]))


def test_another_device_is_refused(bundles, monkeypatch):
    on(monkeypatch, 110)
    with pytest.raises(BackendError, match=r"was built for sm121, .* is SM 110: .* --backend tensorrt --arch sm110"):
        backends.load(Bundle.open(bundles[0]))


def test_another_tensorrt_is_refused_with_the_command_that_builds_new_plans(bundles, monkeypatch):
    on(monkeypatch, 121, "1.8.0.1")
    words = f"has plans of TensorRT for RTX {VERSION}, here is 1.8.0.1: build new ones with edge-dflash build --finish"
    with pytest.raises(BackendError, match=words):
        backends.load(Bundle.open(bundles[0]))


def test_a_missing_tensorrt_is_named(bundles, monkeypatch):
    monkeypatch.setattr(support, "device_sm", lambda: 121)

    def missing(flavour):
        raise BackendError(f"{flavour.product} is not installed")

    monkeypatch.setattr(dense, "load", missing)
    with pytest.raises(BackendError, match="TensorRT for RTX is not installed"):
        backends.load(Bundle.open(bundles[0]))


def test_kernels_of_another_version_are_refused(bundles, monkeypatch):
    from edge_dflash.backends.cuda import compile

    on(monkeypatch, 121)
    monkeypatch.setattr(compile, "kernels_digest", lambda: "0" * 16)
    with pytest.raises(BackendError, match=r"this version launches 0{16}; build it again with --backend tensorrt"):
        backends.load(Bundle.open(bundles[0]))


def test_pair_plans_kernels_and_sizes_reach_the_backend(bundles, monkeypatch):
    on(monkeypatch, 121)
    monkeypatch.setattr("edge_dflash.backends.cuda.backend.NativeBackend", lambda *pair, **rest: (pair, rest))
    bundle = Bundle.open(bundles[0])
    (pair, weights, precision), rest = backends.load(bundle)
    manifest = bundle.manifest
    assert (pair, precision) == (bundle.pair, manifest.precision)
    assert (rest["max_context"], rest["prefill_chunk"]) == (48, 48)
    assert rest["cubin"]("attend") == bundle.cubin("attend")
    assert rest["dense"]._files == {name: bundle.path / name for name in manifest.plans.names}
    assert weights.embedding(FakeGpu(), "target.embed_tokens").nbytes == 2 * 1024 * 256
    assert weights.vector("target.norm").shape == (256,)
