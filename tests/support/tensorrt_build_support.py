"""Builds of TensorRT bundles without TensorRT: a compiler that writes a line for each plan, and devices by their SM."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
from native_support import fake_cubin
from paths import DEMO

from edge_dflash.backends.cuda.compile import kernels_digest
from edge_dflash.backends.cuda.tensorrt.flavours import flavour_of
from edge_dflash.builder import decide, engines, write
from edge_dflash.builder.write import BuildConfig
from edge_dflash.common.files import directory
from edge_dflash.errors import BackendError, BuildError

DIGEST = kernels_digest()
VERSION = "1.7.1.116"


class FakeCompiler:
    """Takes the place of Compiler: a plan names its unit and how many bytes of weights it was given."""

    made: ClassVar[list[str]] = []
    timings: ClassVar[list[bytes]] = []
    fail = ""  # key of the unit that TensorRT refuses

    def __init__(self, arch, timing=b""):
        self.arch, self.timing, self.timed = arch, timing, flavour_of(arch).module == "tensorrt"
        FakeCompiler.timings.append(timing)

    def lower(self, unit, store):
        held = [store.get(name) for name in unit.weights]
        return SimpleNamespace(unit=unit, net=SimpleNamespace(held=[]), size=sum(w.nbytes for w in held))

    def build(self, lowered, advance=None):
        key = lowered.unit.key
        for share in (0.25, 0.5):
            if not advance(share):
                raise BuildError(f"plan {key}: stopped")
        if key == FakeCompiler.fail:
            raise BuildError(f"plan {key} for {self.arch}: TensorRT 0 says {key}.out#3 matmul: no")
        FakeCompiler.made.append(key)
        if self.timed:
            self.timing += b"t"
        return memoryview(f"{key} for {self.arch}: {lowered.size}".encode())


@pytest.fixture
def fake(monkeypatch):
    """Fake kernels and plans; TensorRT of VERSION is installed, and there is no GPU."""
    return fake_tools(monkeypatch)


def fake_tools(patch):
    FakeCompiler.made, FakeCompiler.timings, FakeCompiler.fail = [], [], ""
    patch.setattr(write, "compile_cubin", fake_cubin)
    patch.setattr(decide, "kernels_digest", lambda: DIGEST)
    patch.setattr("edge_dflash.backends.cuda.tensorrt.compile.Compiler", FakeCompiler)
    install(patch, VERSION)
    on(patch, None)
    return FakeCompiler


def install(patch, version):
    """TensorRT of a version is installed, or (None) there is none."""

    def load(flavour):
        if version is None:
            raise BackendError(f"{flavour.product} is not installed: {flavour.install}")
        return SimpleNamespace(__version__=version)

    patch.setattr(engines, "load", load)


def on(patch, sm):
    """The device's SM, or (None) no device."""

    def device_sm():
        if sm is None:
            raise BackendError("no NVIDIA driver was found (RuntimeError); install the driver")
        return sm

    patch.setattr(engines, "device_sm", device_sm)


def config(output, **changes):
    """The demo pair with so little context that no self-test is recorded."""
    made = BuildConfig(
        DEMO / "models" / "target",
        DEMO / "models" / "drafter",
        output,
        arch="sm121",
        backend="tensorrt",
        recipe=directory("engines") / "demo-cpu.yaml",
        max_context=48,
        calibrate=False,
    )
    return replace(made, **changes)
