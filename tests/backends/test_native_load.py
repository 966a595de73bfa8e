"""Loading a native bundle: only where it belongs, and the error says what to do elsewhere."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from native_support import NATIVE_PAIR, FakeGpu, formats_of, write_native_bundle

from edge_dflash import backends
from edge_dflash.backends.cuda import backend, driver, support
from edge_dflash.backends.cuda.compile import ARCHS, kernels_digest
from edge_dflash.backends.cuda.support import DeviceFacts, device_facts, shares_memory
from edge_dflash.backends.selftest import promises_bits
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import BackendError
from edge_dflash.planner import Planner


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "bundle"
    write_native_bundle(path, formats_of("nvfp4"), arch="sm110a")
    return path


@pytest.fixture
def bundle(path):
    return Bundle.open(path)


def on(monkeypatch, sm):
    monkeypatch.setattr(support, "device_sm", lambda: sm)


@pytest.mark.parametrize("name", ARCHS)
def test_an_arch_runs_on_its_own_sm_only(name):
    sm = int("".join(filter(str.isdigit, name)))
    support.check_arch(name, sm, "b")
    for other in {87, 89, 90, 110, 120, 121} - {sm}:
        with pytest.raises(BackendError) as error:
            support.check_arch(name, other, "b")
        assert f"b was built for {name}, which runs on SM {sm}; this device is SM {other}" in str(error.value)
        assert f"build it again with --backend native --arch sm{other}" in str(error.value)


def test_a_device_without_kernels_is_sent_to_the_cpu(bundle, monkeypatch):
    on(monkeypatch, 75)
    with pytest.raises(BackendError, match=r"this device is SM 75: build it with --backend reference --arch cpu"):
        backends.load(bundle)


def test_another_device_is_refused_before_anything_is_loaded(bundle, monkeypatch):
    on(monkeypatch, 90)
    monkeypatch.setattr(backend, "NativeBackend", None)
    with pytest.raises(BackendError, match=r"bundle was built for sm110a, .* this device is SM 90: .* --arch sm90"):
        backends.load(bundle)


def test_a_machine_without_driver_or_bindings_is_told(bundle, path, monkeypatch, refused):
    def no_library(flags):
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(driver, "cu", SimpleNamespace(cuInit=no_library))
    for command in (("generate", path, "--ids", "1"), ("verify", path)):
        code, line = refused(*command)
        assert code == 7
        assert "was built for sm110a: no NVIDIA driver was found (RuntimeError); install the driver" in line
        assert "to run it on a CPU, build it with --backend reference --arch cpu" in line
    monkeypatch.delitem(sys.modules, driver.__name__)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendError, match=r"needs cuda.bindings; install it with: pip install 'edge-dflash\[cuda\]'"):
        Planner.open(path)


def test_what_builds_and_inspects_needs_no_bindings():
    modules = ("backends.cuda.support", "builder.decide", "builder.engines", "builder.finish", "checks.doctor")
    imports = ", ".join(f"edge_dflash.{name}" for name in modules)
    code = f"import sys; sys.modules['cuda'] = None; import {imports}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_driver_that_does_not_start_is_told(monkeypatch):
    status = SimpleNamespace(name="CUDA_ERROR_NO_DEVICE")
    monkeypatch.setattr(driver, "cu", SimpleNamespace(cuInit=lambda flags: (status,), CUresult=driver.cu.CUresult))
    with pytest.raises(BackendError, match="no usable device \\(CUDA_ERROR_NO_DEVICE\\)"):
        support.device_sm()


def test_kernels_of_another_version_are_refused(tmp_path, monkeypatch):
    write_native_bundle(tmp_path / "old", formats_of("nvfp4"), tools={"kernels": "0" * 16})
    on(monkeypatch, 90)
    with pytest.raises(BackendError, match=f"holds kernels {'0' * 16} of edge-dflash 0.0.0, this version launches"):
        backends.load(Bundle.open(tmp_path / "old"))


def test_pair_weights_kernels_and_sizes_reach_the_backend(tmp_path, monkeypatch):
    write_native_bundle(tmp_path / "bundle", formats_of("fp8"), arch="sm110a", tools={"kernels": kernels_digest()})
    bundle = Bundle.open(tmp_path / "bundle")
    on(monkeypatch, 110)
    monkeypatch.setattr(backend, "NativeBackend", lambda *pair, **sizes: (pair, sizes))
    (pair, weights, precision), sizes = backends.load(bundle)
    assert pair == NATIVE_PAIR
    assert precision == bundle.manifest.precision
    assert (sizes["max_context"], sizes["prefill_chunk"]) == (128, 64)
    assert sizes["cubin"]("attend") == (bundle.path / "kernels" / "attend.cubin").read_bytes()
    assert weights.embedding(FakeGpu(), "target.embed_tokens").nbytes == 2 * 48 * 32


def test_a_native_backend_does_not_promise_the_bits_of_the_recording():
    assert not promises_bits(SimpleNamespace(arithmetic="any"), "native")


# What the driver says of a device, and what follows for the files of a bundle that was loaded onto it -----------------


def answers(*, integrated, major=11, minor=0, version=13020):
    """As much of cuda.bindings.driver as is asked."""
    attributes = {"MAJOR": major, "MINOR": minor, "INTEGRATED": integrated}
    names = {
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": "MAJOR",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": "MINOR",
        "CU_DEVICE_ATTRIBUTE_INTEGRATED": "INTEGRATED",
    }
    return SimpleNamespace(
        cuInit=lambda flags: (0,),
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetAttribute=lambda name, device: (0, attributes[name]),
        cuDeviceGetName=lambda size, device: (0, b"NVIDIA Thor" + bytes(size - 11)),
        cuDriverGetVersion=lambda: (0, version),
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUdevice_attribute=SimpleNamespace(**names),
    )


@pytest.fixture
def board(monkeypatch):
    def install(**facts):
        monkeypatch.setattr(driver, "cu", answers(**facts))

    return install


def test_facts(board):
    board(integrated=1)
    assert device_facts() == DeviceFacts("NVIDIA Thor", 110, (13, 2), True)
    assert support.device_sm() == 110
    board(integrated=0, major=9, version=12060)
    assert device_facts() == DeviceFacts("NVIDIA Thor", 90, (12, 6), False)


def test_a_machine_without_bindings_shares_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, driver.__name__)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert shares_memory() is False


@pytest.mark.parametrize("integrated", [0, 1])
def test_page_cache_is_given_back_where_memory_is_shared(board, monkeypatch, tmp_path, integrated):
    write_native_bundle(tmp_path / "b", formats_of("fp8"), arch="sm110a", tools={"kernels": kernels_digest()})
    board(integrated=integrated)
    order = []
    monkeypatch.setattr(backend, "NativeBackend", lambda *args, **keys: order.append("loaded") or "backend")
    monkeypatch.setattr(backends, "drop_page_cache", order.append)
    assert backends.load(Bundle.open(tmp_path / "b")) == "backend"
    assert order == (["loaded", tmp_path / "b"] if integrated else ["loaded"])
