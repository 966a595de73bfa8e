"""The one table of architectures: what each is called, what compiles for it, and how long a prompt takes there.

A user may write ``sm110``, ``sm110a``, ``sm_110``, ``110`` or ``11.0``: all are one board. Manifests and messages hold
:attr:`Arch.name`. A new architecture is one line of :data:`ARCHS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from edge_dflash.errors import BackendError

CHUNK_SECONDS = 0.1  # that one prefill pass may take: deadlines, cancels and urgent requests wait for its end
MOST_ROWS = 512  # of a prefill pass by default, unless an architecture says otherwise
_USED = 0.35  # of a dense BF16 rate, that our prefill is trusted with: on an H200 it was 0.31 to 0.56 of cuBLAS's
_SPELLING = re.compile(r"(?:sm[_-]?)?(?:(\d{2,3})|(\d{1,2})\.(\d))a?")

# Blocks in clusters with programmatic dependent launch; warpgroup products, which no other architecture has; E2M1 codes
# converted by an instruction.
Feature = Literal["clusters", "wgmma", "e2m1"]


@dataclass(frozen=True)
class Arch:
    """What a bundle is built for."""

    name: str
    sm: int  # compute capability without its dot, 110 for 11.0; 0: no GPU
    kernels: str | None  # what our kernels are compiled for: with "a" where they use instructions of this SM alone
    tensorrt: Literal["tensorrt", "tensorrt_rtx"] | None  # module that builds engines for it
    flops: float  # of prefill, to be relied on: multiplications and additions a second
    least_rows: int = 64  # of a prefill pass by default: fewer leave the tensor cores idle
    most_rows: int = MOST_ROWS  # of a prefill pass by default: more are hardly faster
    block_shared: int = 227 << 10  # bytes of shared memory that a block of a kernel may have
    features: tuple[Feature, ...] = ()

    @property
    def capability(self) -> str:
        """Its name among TensorRT's compute capabilities."""
        return f"SM{self.sm}"

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that run on it."""
        return tuple(b for b, there in zip(BACKENDS, (not self.sm, self.kernels, self.tensorrt), strict=True) if there)

    def prefill_seconds(self, parameters: int, rows: int) -> float:
        """Estimate of a prefill pass over ``rows`` tokens, each multiplied with ``parameters`` weights."""
        return 2 * parameters * rows / self.flops

    def prefill_rows(self, parameters: int) -> int:
        """Default chunk: the largest power of two within CHUNK_SECONDS, from ``least_rows`` to ``most_rows``."""
        rows = self.most_rows
        while rows > self.least_rows and self.prefill_seconds(parameters, rows) > CHUNK_SECONDS:
            rows //= 2
        return rows


BACKENDS = ("reference", "native", "tensorrt")
# Dense BF16 rates as NVIDIA publishes them, in FLOP/s; of a rate with sparsity or of fewer bits a half for the one, and
# for each halving of the bits. The CPU: the demo pair on one thread of a cloud x86-64 did 16e9 in passes of 64 and of
# 128 rows; halved, for a machine with other work.
ARCHS = (
    Arch("cpu", 0, None, None, 8e9, least_rows=32),
    # AGX Orin 64GB: 170 INT8 TOPS sparse of the GPU
    Arch("sm87", 87, "sm87", "tensorrt", _USED * 42.5e12, block_shared=163 << 10),
    # L4, the smallest of the data center: 121 sparse
    Arch("sm89", 89, "sm89", "tensorrt", _USED * 60.5e12, block_shared=99 << 10),
    # H100 SXM and H200: 1,979 sparse
    Arch("sm90", 90, "sm90a", "tensorrt", _USED * 989e12, most_rows=2048, features=("clusters", "wgmma")),
    # Thor T5000: 2,070 FP4 sparse
    Arch("sm110", 110, "sm110a", "tensorrt", _USED * 250e12, features=("clusters", "e2m1")),
    # RTX 5070, FP32 sums: 123.5 sparse
    Arch("sm120", 120, "sm120a", "tensorrt_rtx", _USED * 61.7e12, block_shared=99 << 10, features=("clusters", "e2m1")),
    # GB10: 1,000 FP4 sparse
    Arch("sm121", 121, "sm121a", "tensorrt_rtx", _USED * 125e12, block_shared=99 << 10, features=("clusters", "e2m1")),
)
ARCHS_OF = {backend: tuple(arch.name for arch in ARCHS if backend in arch.backends) for backend in BACKENDS}
KERNEL_ARCHS = tuple(arch.kernels for arch in ARCHS if arch.kernels is not None)


def find_arch(spelling: str, backend: str | None = None) -> Arch:
    """The architecture that ``spelling`` means, among those of ``backend``.

    Raises BackendError naming the accepted ones.
    """
    known = [arch for arch in ARCHS if backend is None or backend in arch.backends]
    word = str(spelling).strip().lower()
    digits = _SPELLING.fullmatch(word)
    sm = int("".join(part for part in digits.groups() if part)) if digits else 0
    for arch in known:
        if word == arch.name or (sm and sm == arch.sm):
            return arch
    names = ", ".join(arch.name for arch in known)
    gpus = [arch.sm for arch in known if arch.sm]
    also = f" (sm{gpus[-1]}a, {gpus[-1]} and {gpus[-1] / 10:.1f} mean sm{gpus[-1]}, and so with all)" if gpus else ""
    of = "" if backend is None else f", which the {backend} backend does not run on"
    raise BackendError(f"arch is {spelling!r}{of}; accepted are {names}{also}")


def arch_of_sm(sm: int) -> Arch | None:
    """The architecture of a device or board of compute capability ``sm``; None: there are no kernels for it."""
    return next((arch for arch in ARCHS if arch.sm and arch.sm == sm), None)


def supports(sm: int, feature: Feature) -> bool:
    """Whether kernels for a device of compute capability ``sm`` may use a feature."""
    return any(feature in arch.features for arch in ARCHS if arch.sm == sm)


def ordered(backends: Iterable[str]) -> tuple[str, ...]:
    """Backends in the order of BACKENDS."""
    found = set(backends)
    return tuple(backend for backend in BACKENDS if backend in found)
