"""CUDA C++ to cubins, ahead of time, with NVRTC: needs pip packages only, no GPU and no driver.

Build-time only; the run time loads the cubins. Kernel sources lie in ``kernels/``; each is one compilation unit with
``extern "C"`` entry points.
"""

from __future__ import annotations

import hashlib
import os
import re
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from edge_dflash.errors import BuildError

KERNELS = Path(__file__).parent / "kernels"
ARCHS = ("sm87", "sm89", "sm90a", "sm110a", "sm120a", "sm121a")
_IMPORT = Lock()  # two threads that import cuda.core at once find it half made
BENCH = "bench"  # kernels of benchmarks: no bundle holds them
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.M)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def sources() -> tuple[str, ...]:
    """Names of the compilation units, without ``.cu``."""
    return tuple(sorted(path.stem for path in KERNELS.glob("*.cu")))


def bundled() -> tuple[str, ...]:
    """Compilation units that a bundle holds."""
    return tuple(unit for unit in sources() if unit != BENCH)


def unit_sources(unit: str) -> tuple[Path, ...]:
    """The files that a unit is compiled from: its own and those it includes from ``kernels/``, in order of use."""
    found: list[Path] = []
    pending = [KERNELS / f"{unit}.cu"]
    while pending:
        path = pending.pop(0)
        if path not in found and path.exists():
            found.append(path)
            pending += [KERNELS / name for name in _INCLUDE.findall(path.read_text())]
    return tuple(found)


def kernels_digest() -> str:
    """SHA-256 (16 hex digits) of what the bundled units compute, comments and blanks left out.

    Kernels and the code that launches them must be of one version: a bundle records this.
    """
    digest = hashlib.sha256()
    for path in sorted({path for unit in bundled() for path in unit_sources(unit)}):
        words = " ".join(_COMMENT.sub(" ", path.read_text()).split())
        digest.update(f"{path.name}\0{words}\0".encode())
    return digest.hexdigest()[:16]


def compiler_version() -> str:
    """Version of the compiler, such as 13.1. Raises BuildError when it, or the CUDA headers, are missing."""
    try:
        from cuda.bindings import nvrtc

        if find_spec("cuda.core") is None:
            raise ModuleNotFoundError(name="cuda.core")
        status, major, minor = nvrtc.nvrtcVersion()
    except ModuleNotFoundError as error:
        raise BuildError(_missing(error.name)) from None
    except Exception as error:  # the bindings raise types of their own when there is no library
        raise BuildError(_missing(f"NVRTC, which does not load ({type(error).__name__})")) from None
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildError(_missing(f"NVRTC, which says {status.name}"))
    include_paths()
    return f"{major}.{minor}"


def compile_cubin(unit: str, arch: str) -> bytes:
    """Cubin of ``kernels/<unit>.cu`` for ``arch`` (``sm90a``). Raises BuildError with the compiler's first error."""
    if arch not in ARCHS:
        raise BuildError(f"arch is {arch!r}, wanted one of {', '.join(ARCHS)}")
    try:
        with _IMPORT:
            from cuda.core import Program, ProgramOptions
    except ModuleNotFoundError as error:
        raise BuildError(_missing(error.name)) from None
    path = KERNELS / f"{unit}.cu"
    options = ProgramOptions(
        name=str(path.name),
        arch="sm_" + arch.removeprefix("sm"),
        std="c++17",
        include_path=[str(KERNELS), *include_paths()],
        fma=True,
    )
    try:
        return bytes(Program(path.read_text(), "c++", options).compile("cubin").code)
    except Exception as error:  # cuda-core raises a type of its own for a compile error
        lines = [line for line in str(error).splitlines() if "error" in line.lower()]
        raise BuildError(f"{path.name} does not compile for {arch}: {(lines or [str(error)])[0].strip()}") from error


def cached_cubin(unit: str, arch: str, cache: Path) -> bytes:
    """:func:`compile_cubin`, once for each state of the unit's sources: kept in the folder ``cache``."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in unit_sources(unit))).hexdigest()[:16]
    path = cache / f"{unit}-{arch}-{digest}.cubin"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_bytes(compile_cubin(unit, arch))
        partial.replace(path)
    return path.read_bytes()


def include_paths() -> tuple[str, ...]:
    """Directories of the CUDA headers: those of the nvidia-cuda-runtime and -crt packages."""
    found = find_spec("nvidia")
    for root in found.submodule_search_locations or () if found else ():
        for include in Path(root).glob("cu*/include"):
            if (include / "cuda_fp8.h").exists():
                return (str(include), str(include / "cccl"))
    raise BuildError(
        "no CUDA headers were found; install them with: pip install 'edge-dflash[cuda]' "
        "(nvidia-cuda-runtime and nvidia-cuda-crt)"
    )


def _missing(name: str | None) -> str:
    return f"compiling kernels needs {name}; install it with: pip install 'edge-dflash[cuda]'"
