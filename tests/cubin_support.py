"""Cubins for tests, compiled once for each state of their sources, and what they say of their kernels."""

from pathlib import Path

from edge_dflash.backends.native.compile import cached_cubin
from edge_dflash.backends.native.cubin import kernel_use

__all__ = ["cubin", "kernel_use"]
CACHE = Path(__file__).parents[1] / "build" / "cubins"  # git-ignored; continuous integration fills it


def cubin(unit, arch):
    """The cubin of a unit."""
    return cached_cubin(unit, arch, CACHE)
