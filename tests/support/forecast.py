"""What a board with few multiprocessors is expected to take, from times of kernels on a larger GPU. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_dflash.board.archs import supports


@dataclass(frozen=True)
class Board:
    """A board by its data sheet and others' measurements; ``layouts`` are guesses, in multiprocessors by GPC."""

    name: str
    sm: int  # whose kernels and plans it runs
    clock: float  # GHz, of the multiprocessors
    read: float  # bytes a second
    layouts: tuple[tuple[int, ...], ...]


BOARDS = (
    Board("T5000", 110, 1.57, 259.7e9, ((8, 8, 4), (8, 6, 6))),
    Board("T4000", 110, 1.52, 259.7e9, ((8, 4), (6, 6))),  # it reads as a T5000: the memory is the same
    Board("AGX Orin 64GB", 87, 1.30, 154.4e9, ((8, 8),)),
)

CONVERTED = 156 / 204
"""Instructions of a piece of NVFP4 weights, decoded by conversions as boards with "e2m1" have them, over masks and
shifts as SM90 runs them: counted in SASS of linear_cluster.cu (sm_110a), the path of a whole unit."""

CAVEATS = (
    "The kernels run on another generation (sm_90): its rates of tensor cores, FP32 and integers, its latencies.",
    "The proxy's L2 cache is large and its memory idle: activations that are read again may come slower on a board.",
    "Memory time is bytes over the read rate that others measured on a T5000 (259.7 GB/s) and an AGX Orin (154.4).",
    "Kinds of steps run alone, one launch behind the other: what they gain or lose in turns is not seen, nor is power.",
    "Converted: times of NVFP4 linears by the instructions of sm_110a over those of sm_90; arithmetic, not measured.",
    "Layouts of GPCs are guesses. Code of sm_87 is compiled for sm_90 here; its launches do not overlap.",
)


@dataclass(frozen=True)
class Kind:
    """Steps of one kind in a cycle."""

    name: str
    times: int
    nbytes: int  # of one
    seconds: float  # of one, on the proxy
    nvfp4: bool = False  # a linear with these weights
    flops: int = 0  # multiplications and additions of one; 0: not products

    def compute(self, board: Board, clock: float) -> float:
        """Seconds of all of them if memory took no time; ``clock``: GHz of the proxy."""
        return self.times * self.seconds * clock / board.clock

    def memory(self, board: Board) -> float:
        """Seconds of all of them at the speed of memory."""
        return self.times * self.nbytes / board.read

    def slower(self, board: Board, clock: float) -> float:
        """The larger of the two."""
        return max(self.compute(board, clock), self.memory(board))

    def converted(self, board: Board, clock: float) -> float:
        """The larger of the two, if the board decodes NVFP4 by conversions."""
        factor = CONVERTED if self.nvfp4 and supports(board.sm, "e2m1") else 1.0
        return max(factor * self.compute(board, clock), self.memory(board))


def clusters_held(layout: tuple[int, ...], blocks: int, per_sm: int) -> int:
    """Clusters of so many blocks that run at once, ``per_sm`` blocks on a multiprocessor: none spans two GPCs."""
    return sum(count * per_sm // blocks for count in layout)


def picked(gpcs: list[list[int]], layout: tuple[int, ...]) -> list[int]:
    """Multiprocessors that look like ``layout``: the first of as many GPCs, the largest for the largest.

    Raises ValueError where the GPCs are too small.
    """
    there = sorted(gpcs, key=len, reverse=True)
    if len(there) < len(layout):
        raise ValueError(f"{len(there)} GPCs were found, {len(layout)} are needed")
    chosen = []
    for gpc, count in zip(there, sorted(layout, reverse=True), strict=False):
        if len(gpc) < count:
            raise ValueError(f"a GPC has {len(gpc)} multiprocessors, {count} are needed")
        chosen += sorted(gpc)[:count]
    return chosen


def joined(clusters: list[list[int]]) -> list[list[int]]:
    """Multiprocessors that lie in one GPC: those that clusters brought together, one with the other."""
    groups: list[set[int]] = []
    for cluster in clusters:
        met = [g for g in groups if g & set(cluster)]
        groups = [g for g in groups if not g & set(cluster)] + [set(cluster).union(*met)]
    return sorted(sorted(group) for group in groups)


def table(kinds: list[Kind], board: Board, clock: float) -> str:
    """Lines for people: ms of each kind and of all."""
    lines = [f"{'kind':28s} times       MB   compute    memory    slower converted"]
    columns = _columns(board, clock)
    for kind in kinds:
        cells = "".join(f"{1e3 * column(kind):10.2f}" for column in columns)
        lines.append(f"{kind.name:28s} {kind.times:5d} {kind.nbytes / 1e6:8.2f}{cells}")
    cells = "".join(f"{1e3 * sum(map(column, kinds)):10.2f}" for column in columns)
    return "\n".join([*lines, f"{'all':28s} {'':14s}{cells}"])


def _columns(board: Board, clock: float) -> tuple[Callable[[Kind], float], ...]:
    return (
        lambda k: k.compute(board, clock),
        lambda k: k.memory(board),
        lambda k: k.slower(board, clock),
        lambda k: k.converted(board, clock),
    )


def summary(kinds: list[Kind], board: Board, clock: float) -> dict[str, float]:
    """Milliseconds of a cycle: compute, memory, slower kind by kind, the same with NVFP4 decoded by conversions.

    ``products_ms``: compute of products alone; ``flops_a_clock``: theirs, of a multiprocessor.
    """
    names = ("compute_ms", "memory_ms", "forecast_ms", "converted_ms")
    found = {name: 1e3 * sum(map(column, kinds)) for name, column in zip(names, _columns(board, clock), strict=True)}
    products = [kind for kind in kinds if kind.flops]
    took = sum(kind.compute(board, clock) for kind in products)
    flops = sum(kind.times * kind.flops for kind in products)
    clocks = took * 1e9 * board.clock * sum(board.layouts[0])
    return found | {"products_ms": 1e3 * took, "flops_a_clock": flops / clocks if took else 0.0}
