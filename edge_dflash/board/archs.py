"""The one table of architectures: what each is called, what compiles for it, and how fast our kernels are there.

A user may write ``sm110``, ``sm110a``, ``sm_110``, ``110`` or ``11.0``: all are one board. Manifests and messages hold
:attr:`Arch.name`. A new architecture is one entry of :data:`ARCHS`. No rate is a data sheet's: each names the kernel
that reached it, and none is above what ``mma`` does there.

A rate counts multiplications and additions of a multiprocessor in a clock, so that boards of one architecture differ by
their :class:`Chip` alone. It holds for one kernel and one use: another use of the same chip has another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from edge_dflash.errors import BackendError

# On this architecture; by the same kernel on a larger GPU, scaled by multiprocessors and clocks; less than such a proxy
# gave, because a product takes longer here.
How = Literal["measured", "by proxy", "assumed"]


@dataclass(frozen=True)
class Chip:
    """Multiprocessors of a GPU and their fastest clock."""

    multiprocessors: int
    hertz: float

    @property
    def clocks(self) -> float:
        """Clocks of all multiprocessors in a second."""
        return self.multiprocessors * self.hertz


H200 = Chip(132, 1.98e9)  # where all our kernels were timed


@dataclass(frozen=True)
class KernelRate:
    """What one kernel did in passes of some numbers of rows: a pass computes the rows of the next one of them.

    ``flops``: by rows, ascending, a clock and multiprocessor; 0 rows, alone, for any number. More rows than the last
    are passes in turn.
    """

    kernel: str  # its file among backends/cuda/kernels
    flops: tuple[tuple[int, float], ...]
    how: How
    where: str

    def by_rows(self, chip: Chip) -> list[tuple[int, float]]:
        """FLOP/s on ``chip`` by rows of a pass."""
        return [(rows, flops * chip.clocks) for rows, flops in self.flops]

    def per_second(self, chip: Chip) -> float:
        """FLOP/s on ``chip`` in passes of the most rows."""
        return self.flops[-1][1] * chip.clocks

    def seconds(self, weights: float, rows: float, chip: Chip) -> float:
        """Of a product of so many weights with each of ``rows`` rows, of a rate by rows."""
        whole, rest = divmod(rows, self.flops[-1][0])
        parts = [self.flops[-1]] * int(whole) + [next(point for point in self.flops if rest <= point[0])] * (rest > 0)
        return sum(2 * weights * computed / (flops * chip.clocks) for computed, flops in parts)

    def steps(self, most: int) -> tuple[int, ...]:
        """Rows up to ``most`` from which on a pass takes longer, each the last of those that cost the same."""
        last = self.flops[-1][0]
        return (*(rows for rows, _ in self.flops if rows < most), *range(2 * last, most, last), most)

    def held(self, most: float) -> KernelRate:
        """The same where a kernel is trusted with ``most`` of a clock and multiprocessor."""
        if all(flops <= most for _, flops in self.flops):
            return self
        return replace(self, flops=tuple((rows, min(flops, most)) for rows, flops in self.flops), how="assumed")


def reached(kernel: str, per_second: float, where: str, how: How = "by proxy") -> KernelRate:
    """The rate of a kernel that did ``per_second`` FLOP/s on an H200."""
    return KernelRate(kernel, ((0, per_second / H200.clocks),), how, where)


CHUNK_SECONDS = 0.1  # that one prefill pass may take: deadlines, cancels and urgent requests wait for its end
MOST_ROWS = 512  # of a prefill pass by default, unless an architecture says otherwise
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
    chip: Chip  # the largest that is served: default chunks are for it
    mma: float  # dense BF16 products, FLOP a clock and multiprocessor: of wgmma on SM90, else of mma.sync
    prompts: KernelRate  # linears of many rows
    experts: KernelRate  # of a mixture, many rows
    tower: KernelRate  # a picture, its attention included
    joint: KernelRate  # linears of a cycle, by the rows of its pass
    least_rows: int = 128  # of a prefill pass by default: 64 reach three quarters of the rate (20 multiprocessors)
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
        return tuple(backend for backend, runs in RUNS.items() if runs(self))

    @property
    def rates(self) -> Mapping[str, KernelRate]:
        """All of them by use."""
        return {
            "prompts": self.prompts,
            "experts of prompts": self.experts,
            "pictures": self.tower,
            "rows of a cycle": self.joint,
        }

    def prefill_seconds(self, parameters: int, rows: int, *, experts: int = 0, chip: Chip | None = None) -> float:
        """Estimate of a prefill pass over ``rows`` tokens, each multiplied with ``parameters`` weights.

        ``experts``: those of them that are a mixture's; ``chip``: None takes the architecture's.
        """
        chip = chip or self.chip
        dense, mixed = (parameters - experts) / self.prompts.per_second(chip), experts / self.experts.per_second(chip)
        return 2 * rows * (dense + mixed)

    def prefill_rows(self, parameters: int, *, experts: int = 0) -> int:
        """Default chunk: the largest power of two within CHUNK_SECONDS, from ``least_rows`` to ``most_rows``."""
        rows = self.most_rows
        while rows > self.least_rows and self.prefill_seconds(parameters, rows, experts=experts) > CHUNK_SECONDS:
            rows //= 2
        return rows


RUNS: Mapping[str, Callable[[Arch], bool]] = {
    "reference": lambda arch: not arch.sm,
    "native": lambda arch: arch.kernels is not None,
    "tensorrt": lambda arch: arch.tensorrt is not None,
}
"""Backends, and what they run on."""
BACKENDS = tuple(RUNS)
# What kernels did on an H200: docs/lab/prefill.md, experts.md, tower.md, linears.md, lanes.md.
_TILES = reached("linear_tiles.cu", 274e12, "Qwen3.6-27B, gate up, 512 rows")
_EXPERTS = reached("experts_linear.cu", 95.6e12, "Qwen3.6-35B-A3B, a layer, 512 rows in 309 us")
_TOWER = KernelRate("tower.cu", ((0, 599.0),), "by proxy", "20 multiprocessors: a frame of Qwen3.6-27B in 113 ms")
_STREAM = KernelRate("linear.cu", ((16, 440.0),), "by proxy", "Qwen3.6-27B, a layer in 106.4 us")
_USED = 0.35  # of mma's rate, that kernels are trusted with where a product takes longer than on an H200


def _few(mma: float, joint: KernelRate = _STREAM) -> tuple[KernelRate, KernelRate, KernelRate, KernelRate]:
    """Rates by proxy of an architecture without larger tiles, held to a share of ``mma``."""
    return _TILES.held(_USED * mma), _EXPERTS.held(_USED * mma), _TOWER.held(_USED * mma), joint.held(_USED * mma)


# Data sheets give mma as dense BF16 rates over multiprocessors and clocks; of a rate with sparsity or of fewer bits a
# half for the one, and for each halving of the bits.
_ON_CPU = KernelRate(
    "none: torch on one thread", ((0, 8e9),), "measured", "the demo pair did 16e9; halved, for other work"
)
ARCHS = (
    Arch(
        *("cpu", 0, None, None, Chip(1, 1.0), 16e9, _ON_CPU, _ON_CPU, _ON_CPU),
        joint=KernelRate(_ON_CPU.kernel, ((1, 8e9),), _ON_CPU.how, _ON_CPU.where),
        least_rows=32,
    ),
    # AGX Orin 64GB: 170 INT8 TOPS sparse of the GPU. A cycle: docs/lab/boards.md, other steps than linears included
    Arch(
        *("sm87", 87, "sm87", "tensorrt", Chip(16, 1.30e9), 2048),
        *_few(2048, KernelRate("linear.cu", ((16, 532.0),), "by proxy", "16 multiprocessors: a 27B cycle in 82.9 ms")),
        block_shared=163 << 10,
    ),
    # L4, the smallest of the data center, by its clocks; 512 is what RTX 40 do with FP32 sums, an L4 does 1,024
    Arch("sm89", 89, "sm89", "tensorrt", Chip(58, 2.04e9), 512, *_few(512), block_shared=99 << 10),
    # H100 SXM and H200: 1,979 sparse. Prompts: whole ones, of the pair that does least of four
    Arch(
        *("sm90", 90, "sm90a", "tensorrt", H200, 4096),
        prompts=reached("tiles_hopper.cuh", 353e12, "Qwen3-8B in BF16, 2,048 tokens in 82 ms", "measured"),
        experts=reached(_EXPERTS.kernel, 95.6e12, _EXPERTS.where, "measured"),
        tower=reached(_TOWER.kernel, 173e12, "Qwen3.6-27B, a frame of 800 x 600 in 11.9 ms", "measured"),
        joint=KernelRate(
            *("linear_wide.cu", ((16, 637.0), (32, 744.0), (64, 1053.0), (128, 1279.0)), "measured"),
            where="Qwen3.6-27B, a layer in 73.6, 126, 178 and 293 us; 16 rows: linear_hopper.cu",
        ),
        most_rows=2048,
        features=("clusters", "wgmma"),
    ),
    # Thor T5000: mma.sync as others measured it on a B300, a quarter of tcgen05, which no kernel of ours has
    Arch(
        *("sm110", 110, "sm110a", "tensorrt", Chip(20, 1.57e9), 1900, _TILES, _EXPERTS, _TOWER),
        joint=KernelRate(
            *("linear_cluster.cu", ((16, 779.0), (32, 896.0), (64, 919.0), (128, 793.0)), "by proxy"),
            where="20 multiprocessors: Qwen3.6-27B, a cycle's linears in 37.5, 65.2, 127 and 295 ms",
        ),
        features=("clusters", "e2m1"),
    ),
    # RTX 5070: 123.5 sparse with FP32 sums
    Arch(
        *("sm120", 120, "sm120a", "tensorrt_rtx", Chip(48, 2.51e9), 512, *_few(512)),
        block_shared=99 << 10,
        features=("clusters", "e2m1"),
    ),
    # GB10: 1,000 FP4 sparse; with FP32 sums half of what follows for BF16, as on SM120
    Arch(
        *("sm121", 121, "sm121a", "tensorrt_rtx", Chip(48, 2.54e9), 512, *_few(512)),
        block_shared=99 << 10,
        features=("clusters", "e2m1"),
    ),
)
ARCHS_OF = {backend: tuple(arch.name for arch in ARCHS if backend in arch.backends) for backend in BACKENDS}
KERNEL_ARCHS = tuple(arch.kernels for arch in ARCHS if arch.kernels is not None)


def find_arch(spelling: str, backend: str | None = None) -> Arch:
    """The architecture that ``spelling`` means among those of ``backend``. Raises BackendError naming all of them."""
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
