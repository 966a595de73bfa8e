"""CUDA C++ to cubins, ahead of time, with NVRTC: needs pip packages only, no GPU and no driver.

Build-time only; the run time loads the cubins. Kernel sources lie in ``kernels/``; each is one compilation unit with
``extern "C"`` entry points.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from edge_dflash.errors import BuildError

KERNELS = Path(__file__).parent / "kernels"
ARCHS = ("sm87", "sm89", "sm90a", "sm110a", "sm120a", "sm121a")


def sources() -> tuple[str, ...]:
    """Names of the compilation units, without ``.cu``."""
    return tuple(sorted(path.stem for path in KERNELS.glob("*.cu")))


def compile_cubin(unit: str, arch: str) -> bytes:
    """Cubin of ``kernels/<unit>.cu`` for ``arch`` (``sm90a``). Raises BuildError with the compiler's first error."""
    if arch not in ARCHS:
        raise BuildError(f"arch is {arch!r}, wanted one of {', '.join(ARCHS)}")
    try:
        from cuda.core import Program, ProgramOptions
    except ModuleNotFoundError as error:
        raise BuildError(
            f"compiling kernels needs {error.name}; install it with: pip install 'edge-dflash[cuda]'"
        ) from None
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
