"""Which TensorRT serves which architecture, without any installed."""

import importlib

import pytest

from edge_dflash.backends.cuda.tensorrt import flavours
from edge_dflash.bundle.manifest import ARCHS_OF
from edge_dflash.errors import BackendError


def test_every_architecture_of_a_tensorrt_bundle_has_one_flavour():
    assert all(flavours.flavour_of(arch) in flavours.FLAVOURS for arch in ARCHS_OF["tensorrt"])
    assert flavours.flavour_of("sm110") is flavours.TENSORRT
    assert flavours.flavour_of("sm121") is flavours.TENSORRT_RTX


def test_an_unknown_architecture_is_refused():
    with pytest.raises(
        BackendError, match="arch is 'cpu', which the tensorrt backend does not run on; accepted are sm87"
    ):
        flavours.flavour_of("cpu")


def test_a_missing_tensorrt_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BackendError, match=r"TensorRT for RTX is not installed .*edge-dflash\[tensorrt\]"):
        flavours.load(flavours.TENSORRT_RTX)
    with pytest.raises(BackendError, match=r"TensorRT is not installed .*--system-site-packages"):
        flavours.load(flavours.TENSORRT)
