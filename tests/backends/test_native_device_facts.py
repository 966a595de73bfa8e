"""What the driver says of a device, and what follows for the files of a bundle that was loaded onto it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from native_support import formats_of, write_native_bundle

from edge_dflash import backends
from edge_dflash.backends.cuda import backend, driver, support
from edge_dflash.backends.cuda.compile import kernels_digest
from edge_dflash.backends.cuda.support import DeviceFacts, device_facts, shares_memory
from edge_dflash.bundle.reader import Bundle


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
