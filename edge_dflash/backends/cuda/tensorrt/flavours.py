"""The one place that imports TensorRT: which flavour serves an architecture, and what its version is.

Both flavours have the same Python API. TensorRT (import ``tensorrt``) builds for the GPU it runs on; TensorRT for RTX
(import ``tensorrt_rtx``) builds for a named compute capability with no GPU at hand. Nothing else in the package imports
either, so everything but a build and a run works without them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from edge_dflash.board.archs import find_arch
from edge_dflash.errors import BackendError


@dataclass(frozen=True)
class Flavour:
    """One distribution of TensorRT."""

    module: str  # what to import
    product: str
    first: str  # version with all that we call: FP4, or building for a named GPU
    install: str  # what to do when the import fails


TENSORRT = Flavour(
    "tensorrt",
    "TensorRT",
    "10.8",  # JetPack 7.0 ships 10.13
    "on a Jetson make the virtual environment with --system-site-packages (JetPack ships it), "
    "elsewhere pip install tensorrt-cu13",
)
TENSORRT_RTX = Flavour("tensorrt_rtx", "TensorRT for RTX", "1.3", "pip install 'edge-dflash[tensorrt]'")
FLAVOURS = (TENSORRT, TENSORRT_RTX)


def flavour_of(arch: str) -> Flavour:
    """The flavour that builds for an architecture. Raises BackendError for one that neither serves."""
    module = find_arch(arch, "tensorrt").tensorrt
    return next(flavour for flavour in FLAVOURS if flavour.module == module)


def load(flavour: Flavour) -> Any:
    """Import a flavour. Raises BackendError when it is not installed."""
    try:
        return importlib.import_module(flavour.module)
    except ImportError as error:
        raise BackendError(f"{flavour.product} is not installed ({error}): {flavour.install}") from None


def version(trt: Any) -> str:
    """Full version of a loaded flavour, to which engines are bound: ``1.7.1.116``."""
    return str(trt.__version__)
