"""The driver face on a driver that only answers: what closing frees, and what is refused afterwards."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from native_support import NATIVE_PAIR, formats_of, random_store
from store_weights import StoreWeights

from edge_dflash.backends.cuda import backend as native_backend
from edge_dflash.backends.cuda import driver
from edge_dflash.backends.cuda.driver import as_argument
from edge_dflash.backends.cuda.kernels.linear import bf16_map
from edge_dflash.backends.cuda.memory import DevicePointer, Matrix
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError

OK, BROKEN = 0, 700
ATTRIBUTES = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT", "INTEGRATED")


class Driver:
    """Answers every call with ``status`` and notes it; memory comes from the host."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUdevice_attribute = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in ATTRIBUTES})

    def __init__(self):
        self.calls, self.status, self.kept = [], OK, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return self.status, *self.values(name, arguments)

        return call

    def values(self, name, arguments):
        match name:
            case "cuMemAlloc" | "cuMemAllocHost":
                self.kept.append(np.zeros(arguments[0], np.uint8))
                return (self.kept[-1].ctypes.data,)
            case "cuDeviceGetName":
                return (b"a GPU\0",)
            case "cuDeviceGetAttribute":
                return (9,)
            case "cuDriverGetVersion" | "cuDeviceGet" | "cuDevicePrimaryCtxRetain" | "cuStreamCreate":
                return (1,)
            case "cuGetErrorName" | "cuGetErrorString":
                return (b"CUDA_ERROR_ILLEGAL_ADDRESS",)
            case _:
                return ()


@pytest.fixture
def cu(monkeypatch):
    found = Driver()
    monkeypatch.setattr(driver, "cu", found)
    return found


def test_closing_frees_everything_once_from_any_thread(cu):
    gpu = driver.Gpu()
    gpu.allocate(64), gpu.allocate(32), gpu.pinned((4,), np.int32)
    cu.calls.clear()
    gpu.close()
    assert cu.calls[:2] == ["cuCtxSetCurrent", "cuStreamSynchronize"]
    assert cu.calls[2:] == [*["cuMemFree"] * 2, "cuMemFreeHost", "cuStreamDestroy", "cuDevicePrimaryCtxRelease"]
    cu.calls.clear()
    gpu.close()
    assert cu.calls == []
    with pytest.raises(BackendError, match="a GPU was closed; load the pair again"):
        gpu.enter()


def test_a_driver_that_refuses_does_not_keep_the_rest_from_being_freed(cu):
    gpu = driver.Gpu()
    gpu.allocate(64), gpu.allocate(32)
    cu.status = BROKEN
    with pytest.raises(BackendError, match="waiting for the device failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpu.synchronize()
    cu.calls.clear()
    gpu.close()
    assert cu.calls.count("cuMemFree") == 2
    assert cu.calls[-1] == "cuDevicePrimaryCtxRelease"


def test_a_load_that_fails_on_the_device_says_so_and_closes(cu, monkeypatch):
    def broken(*arguments):
        cu.status = BROKEN
        driver.check((BROKEN,), "loading a cubin")

    monkeypatch.setattr(native_backend, "load", broken)
    weights = StoreWeights(random_store(formats_of()), formats_of())
    with pytest.raises(BackendError, match="loading a cubin failed"):
        native_backend.NativeBackend(NATIVE_PAIR, weights, Precision(), cubin=lambda unit: b"", max_context=128)
    assert cu.calls[-1] == "cuDevicePrimaryCtxRelease"


def test_arguments_are_passed_as_their_types():
    assert as_argument(True) == (1, ctypes.c_int32)
    assert as_argument(3) == (3, ctypes.c_int32)
    assert as_argument(0.5) == (0.5, ctypes.c_float)
    assert as_argument(ctypes.c_longlong(1 << 40)) == (1 << 40, ctypes.c_longlong)
    assert as_argument(driver.DevicePointer(8, 4)) == (8, ctypes.c_void_p)


@pytest.mark.parametrize(("address", "stride"), [(0x1008, 64), (0x1000, 60)])
def test_a_matrix_that_tensor_copies_cannot_reach_is_refused(address, stride):
    matrix = Matrix(DevicePointer(address, 4096), stride)
    with pytest.raises(BackendError, match=rf"8 x 48 at address {address:#x}, row stride {stride}, .* 16 bytes"):
        bf16_map(matrix, 8, 48, (32, 64))
