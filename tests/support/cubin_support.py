"""Cubins for tests, compiled once for each state of their sources, and what they say of their kernels."""

import sys
from pathlib import Path

import pytest

from edge_dflash.backends.cuda.compile import compiler_version, kernel_use
from edge_dflash.errors import BuildError
from tests.scripts.kernels import kept

__all__ = ["cubin", "kernel_use", "need_compiler", "ptx"]
CACHE = Path(__file__).parents[2] / "build" / "cubins"  # git-ignored; continuous integration fills it


def cubin(unit, arch):
    """The cubin of a unit."""
    need_compiler()
    return kept(unit, arch, CACHE).read_bytes()


def ptx(unit, arch):
    """The PTX that the cubin of a unit was made of."""
    need_compiler()
    return kept(unit, arch, CACHE).with_suffix(".ptx").read_text()


def need_compiler():
    """Skip a test in an install that is meant to run only: without torch and without NVRTC."""
    try:
        compiler_version()
    except BuildError as error:
        if "torch" in sys.modules:
            raise
        pytest.skip(str(error))
