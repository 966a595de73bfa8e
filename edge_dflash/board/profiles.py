"""Board profiles: what a Jetson (or DGX Spark) offers, read from the YAML files in ``jetson/``.

The machine that this runs on is not looked at.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edge_dflash.board.archs import Arch, Chip, find_arch
from edge_dflash.common.files import directory
from edge_dflash.common.tables import decode, read_yaml
from edge_dflash.errors import BackendError, BundleError, RecipeError

# Bytes of a board's memory that a pair cannot have: about 1 GB for Linux and its services without a desktop, about 1 GB
# for the driver, the CUDA context and this program. A desktop, ROS or cameras come on top.
SYSTEM_BYTES = 2_000_000_000


@dataclass(frozen=True)
class PowerMode:
    """One nvpmodel mode. ``id`` None: not confirmed; ``watts`` None: no budget is stated."""

    id: int | None
    name: str
    watts: int | None


@dataclass(frozen=True)
class JetPackVersion:
    """Versions that one JetPack release carries."""

    jetpack: str
    jetson_linux: str
    cuda: str
    tensorrt: str


@dataclass(frozen=True)
class Note:
    """A fact about the board and where it is from."""

    fact: str
    source: str


@dataclass(frozen=True)
class BoardProfile:
    """A board. Memory is shared by CPU and GPU; ``memory_bandwidth_bytes_per_s`` is the theoretical DRAM peak."""

    name: str
    title: str
    aliases: tuple[str, ...]
    models: tuple[str, ...]  # beginnings of the device tree's model
    sm: int  # compute capability without the dot: 110 is 11.0
    memory_bytes: int
    memory_bandwidth_bytes_per_s: int
    read_bandwidth_bytes_per_s: int | None  # what a kernel that only reads was measured to get; None: not known
    multiprocessors: int
    gpu_clock_hz: int  # the fastest
    power_modes: tuple[PowerMode, ...]
    jetpacks: tuple[JetPackVersion, ...]
    notes: tuple[Note, ...]

    @property
    def chip(self) -> Chip:
        """Its GPU, for rates."""
        return Chip(self.multiprocessors, float(self.gpu_clock_hz))

    def milliseconds(self, nbytes: int) -> float:
        """Least time to move ``nbytes`` between memory and processor, in ms: bytes / bandwidth."""
        return nbytes / self.memory_bandwidth_bytes_per_s * 1e3


def load_board(name: str) -> BoardProfile:
    """Return the profile whose name or alias is ``name``, in any case, or the largest board of the arch ``name``.

    Raises RecipeError, listing the accepted names, for another name, and when a profile is malformed.
    """
    boards = board_profiles()
    wanted = name.strip().lower()
    for board in boards:
        if wanted in (board.name, *board.aliases):
            return board
    with suppress(BackendError):
        if found := largest_board(find_arch(name).sm):
            return found
    accepted = ", ".join(f"{b.name} (or {', '.join(b.aliases)})" if b.aliases else b.name for b in boards)
    raise RecipeError(f"unknown board {name!r}; accepted: {accepted}; or add a profile to jetson/")


def named_arch(name: str) -> Arch:
    """The architecture that ``name`` means: its own in any spelling, or that of a board.

    Raises BackendError naming what is accepted; RecipeError when a profile is malformed.
    """
    try:
        return find_arch(name)
    except BackendError as error:
        with suppress(RecipeError, BackendError):
            return find_arch(f"sm{load_board(name).sm}")
        boards = ", ".join(board.name for board in board_profiles())
        raise BackendError(f"{error}; so are boards: {boards}") from None


def largest_board(sm: int) -> BoardProfile | None:
    """The profile with most memory among those of a compute capability."""
    return max((board for board in board_profiles() if board.sm == sm), key=lambda b: b.memory_bytes, default=None)


def match_board(model: str, memory_bytes: int | None) -> BoardProfile | None:
    """The profile of a board by its device tree's ``model`` and its memory as the kernel counts it; None for others.

    Modules that differ in memory alone have one model text. The kernel finds more than the profile's 10^9 bytes a GB,
    and less than the chips hold.
    """
    for board in board_profiles():
        fits = memory_bytes is None or 0.8 < memory_bytes / board.memory_bytes < 1.1
        if fits and any(model.startswith(beginning) for beginning in board.models):
            return board
    return None


def board_profiles() -> tuple[BoardProfile, ...]:
    """All profiles in ``jetson/``, by name. Raises RecipeError when one is malformed or a name is used twice."""
    boards = [read_board(path) for path in sorted(directory("jetson").glob("*.yaml"))]
    owner: dict[str, str] = {}
    for board in boards:
        for name in (board.name, *board.aliases):
            if owner.setdefault(name, board.name) != board.name:
                raise RecipeError(f"board name {name!r} is used by {owner[name]} and {board.name}; rename one of them")
    return tuple(sorted(boards, key=lambda b: b.name))


def read_board(path: Path) -> BoardProfile:
    """Read one profile. Raises RecipeError naming file, key, value found and what is accepted."""
    try:
        found = read_yaml(path, None, "jetson/README.md")
        if isinstance(found, dict) and isinstance(found.get("sm"), str):  # an arch in any of its spellings
            found["sm"] = find_arch(found["sm"]).sm
        board = decode(BoardProfile, found, str(path))
    except (BackendError, BundleError) as error:
        where = "" if str(path) in str(error) else f"{path}.sm: "
        raise RecipeError(f"{where}{error}; see jetson/README.md") from None
    read, peak = board.read_bandwidth_bytes_per_s, board.memory_bandwidth_bytes_per_s
    for key, value in vars(board).items():
        if isinstance(value, int) and value < 1:
            raise RecipeError(f"{path}.{key}: found {value}, wanted a positive integer; see jetson/README.md")
    if read is not None and read > peak:
        raise RecipeError(
            f"{path}.read_bandwidth_bytes_per_s: found {read}, wanted at most the peak of {peak}, or null"
        )
    return replace(board, name=board.name.lower(), aliases=tuple(alias.lower() for alias in board.aliases))
