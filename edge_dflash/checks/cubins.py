"""Cubins for a device that has no bundle: compiled at first use and kept, by source and arch."""

from __future__ import annotations

from pathlib import Path

from edge_dflash.backends.cuda.compile import ARCHS, cached_cubin
from edge_dflash.errors import BackendError


def device_arch(sm: int) -> str:
    """The arch that kernels are compiled for on a device of compute capability ``sm`` (90: 9.0).

    Raises BackendError for a device without kernels.
    """
    for arch in (f"sm{sm}a", f"sm{sm}"):
        if arch in ARCHS:
            return arch
    raise BackendError(f"this GPU is SM{sm}; the kernels are built for {', '.join(ARCHS)}")


class Cubins:
    """Cubins of the kernels in ``directory``; what is missing is compiled, which needs NVRTC, and put there."""

    def __init__(self, directory: Path, arch: str) -> None:
        self._directory, self._arch = directory, arch

    def __call__(self, unit: str) -> bytes:
        """Cubin of a compilation unit. Raises BuildError when it has to be compiled and cannot be."""
        return cached_cubin(unit, self._arch, self._directory)
