"""CUDA C++ to cubins, ahead of time, with NVRTC: needs the extra ``compile`` only, no GPU, driver or CUDA header.

Build-time only; the run time loads the cubins. Kernel sources lie in ``kernels/``; each is one compilation unit with
``extern "C"`` entry points. Every NVRTC of CUDA 13 takes them; from 13.2 on it converts E2M1 to BF16 in one instruction
(kernels/e2m1.cuh), to the same bits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from edge_dflash.backends.cuda.kernels.source import COMMENT, INCLUDE, KERNELS
from edge_dflash.board.archs import KERNEL_ARCHS, find_arch
from edge_dflash.common.files import write_whole
from edge_dflash.errors import BackendError, BuildError

ARCHS = KERNEL_ARCHS
_LOADING = Lock()  # bindings of 13.0 find the library half loaded when two threads load it at once
BENCH = "bench"  # kernels of benchmarks: no bundle holds them


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
            pending += [KERNELS / name for name in INCLUDE.findall(path.read_text())]
    return tuple(found)


def kernels_digest() -> str:
    """SHA-256 (16 hex digits) of what the bundled units compute, comments and blanks left out.

    Kernels and the code that launches them must be of one version: a bundle records this.
    """
    digest = hashlib.sha256()
    for path in sorted({path for unit in bundled() for path in unit_sources(unit)}):
        words = " ".join(COMMENT.sub(" ", path.read_text()).split())
        digest.update(f"{path.name}\0{words}\0".encode())
    return digest.hexdigest()[:16]


def compiler_version() -> str:
    """Version of the compiler, such as 13.1. Raises BuildError when it is missing."""
    major, minor = _call(_nvrtc().nvrtcVersion(), "giving its version")
    return f"{major}.{minor}"


def compile_cubin(unit: str, arch: str) -> bytes:
    """Cubin of ``kernels/<unit>.cu`` for ``arch``; raises as :func:`compiled` does."""
    with compiled(unit, arch) as result:
        return result("CUBIN")


@contextmanager
def compiled(unit: str, arch: str, source: bytes | None = None) -> Iterator[Callable[[str], bytes]]:
    """What the compiler makes of ``kernels/<unit>.cu`` for ``arch``, by name: "PTX", and the "CUBIN" of that.

    ``source``: in the place of the unit's file. Raises BackendError for an unknown arch, BuildError with the compiler's
    first error.
    """
    arch = _flag(arch)
    nvrtc, path = _nvrtc(), KERNELS / f"{unit}.cu"
    gpu = f"-arch=sm_{arch.removeprefix('sm')}"
    options = [option.encode() for option in (gpu, "--std=c++17", "--fmad=true", f"--include-path={KERNELS}")]
    source = path.read_bytes() if source is None else source
    program = _call(nvrtc.nvrtcCreateProgram(source, path.name.encode(), 0, [], []), f"reading {path.name}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status.value:
            lines = _result(nvrtc, program, "ProgramLog").decode(errors="replace").rstrip("\0").splitlines()
            first = next((line for line in lines if "error" in line.lower()), status.name)
            raise BuildError(f"{path.name} does not compile for {arch}: {first.strip()}")
        yield partial(_result, nvrtc, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _result(nvrtc: Any, program: Any, name: str) -> bytes:
    """What a program gives by ``nvrtcGet<name>``."""
    found = bytearray(_call(getattr(nvrtc, f"nvrtcGet{name}Size")(program), f"measuring its {name}"))
    _call(getattr(nvrtc, f"nvrtcGet{name}")(program, found), f"giving its {name}")
    return bytes(found)


def cached_path(unit: str, arch: str, cache: Path) -> Path:
    """Where the folder ``cache`` keeps the cubin of a unit in the state of its sources."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in unit_sources(unit))).hexdigest()[:16]
    return cache / f"{unit}-{_flag(arch)}-{digest}.cubin"


def cached_cubin(unit: str, arch: str, cache: Path) -> bytes:
    """:func:`compile_cubin`, once for each state of the unit's sources: kept in the folder ``cache``."""
    path = cached_path(unit, arch, cache)
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(path, compile_cubin(unit, arch))
    return path.read_bytes()


def _nvrtc() -> Any:
    """The compiler's bindings. Raises BuildError when they, or the library, are missing."""
    try:
        from cuda.bindings import nvrtc

        with _LOADING:
            nvrtc.nvrtcVersion()
    except ModuleNotFoundError as error:
        raise BuildError(_missing(str(error.name))) from None
    except Exception as error:  # the bindings' own types, for a missing library
        raise BuildError(_missing(f"NVRTC, which does not load ({type(error).__name__})")) from None
    return nvrtc


def _call(result: tuple[Any, ...], doing: str) -> Any:
    """Value of a call of NVRTC; raises BuildError when it failed."""
    status, *values = result
    if status.value:
        raise BuildError(_missing(f"an NVRTC that works; {doing}, this one says {status.name}"))
    return values[0] if len(values) == 1 else values


def _flag(arch: str) -> str:
    """What the compiler calls an arch: ``sm110a`` for sm110."""
    return str(find_arch(arch, "native").kernels)


def _missing(name: str) -> str:
    return f"compiling kernels needs {name}; install it with: pip install 'edge-dflash[compile]'"


_SYMBOL_TABLE = 2
_REGISTERS, _FRAME_SIZE, _MIN_STACK_SIZE = 0x2F, 0x11, 0x12  # attributes of .nv.info
_WORDS_FOLLOW = 4  # form of an attribute whose value lies behind it
_INFO, _SHARED = ".nv.info", ".nv.shared."


@dataclass
class KernelUse:
    """What one kernel needs of a multiprocessor, besides dynamic shared memory."""

    registers: int = 0  # of a thread
    stack_bytes: int = 0  # arrays and spilled registers in local memory, of a thread
    shared_bytes: int = 0  # static, of a block


def kernel_use(cubin: bytes) -> dict[str, KernelUse]:
    """Use of every kernel of a 64-bit cubin, by name. Raises BackendError for bytes that are no cubin."""
    try:
        return _kernel_use(cubin)
    except (struct.error, ValueError, IndexError, UnicodeDecodeError):
        raise BackendError("these bytes are no cubin: wanted a 64-bit ELF file with its sections whole") from None


def _kernel_use(cubin: bytes) -> dict[str, KernelUse]:
    sections = _sections(cubin)
    symbols: list[str] = []
    for _, kind, begin, size, link in sections:
        if kind == _SYMBOL_TABLE:
            names = (
                sections[link][2] + struct.unpack_from("<I", cubin, at)[0] for at in range(begin, begin + size, 24)
            )
            symbols = symbols or [_string(cubin, at) for at in names]
    found: dict[str, KernelUse] = {}
    for name, _, begin, size, _ in sections:
        for attribute, symbol, value in _attributes(cubin, begin, begin + size) if name == _INFO else ():
            use = found.setdefault(symbols[symbol], KernelUse())
            if attribute == _REGISTERS:
                use.registers = value
            else:
                use.stack_bytes = max(use.stack_bytes, value)
    kernels = {name: use for name, use in found.items() if not name.startswith("$")}  # slow paths of divisions
    for name, _, _, size, _ in sections:
        if name.startswith(_SHARED) and name.removeprefix(_SHARED) in kernels:
            kernels[name.removeprefix(_SHARED)].shared_bytes = size
    return kernels


def _attributes(elf: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol, value) of what a kernel needs, in a section of attributes."""
    while at < stop:
        form, attribute, length = struct.unpack_from("<BBH", elf, at)
        at += 4
        if form == _WORDS_FOLLOW:  # in the other forms the value lies in the place of the length
            if attribute in (_REGISTERS, _FRAME_SIZE, _MIN_STACK_SIZE):
                yield attribute, *struct.unpack_from("<II", elf, at)
            at += length


def _sections(elf: bytes) -> list[tuple[str, int, int, int, int]]:
    """(name, type, offset, size, link) of every section."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    raw = [struct.unpack_from("<IIQQQQII", elf, table + i * entry) for i in range(count)]
    text = raw[names][4]
    return [(_string(elf, text + r[0]), r[1], r[4], r[5], r[6]) for r in raw]


def _string(elf: bytes, at: int) -> str:
    return elf[at : elf.index(b"\0", at)].decode()
