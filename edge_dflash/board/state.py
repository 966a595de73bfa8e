"""Everything that the board says at one moment, in one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edge_dflash.board.clocks import Clock, Part, read_clocks
from edge_dflash.board.jetson import SetMode, read_model, read_power_mode, read_release
from edge_dflash.board.memory import MemoryState, read_memory
from edge_dflash.board.power import Rail, input_rail, read_over_current, read_rails
from edge_dflash.board.thermal import read_temperatures, read_throttling


@dataclass(frozen=True)
class BoardState:
    """What was read. None and empty: this machine does not say; nothing is estimated."""

    model: str | None = None
    release: str | None = None  # of Jetson Linux
    power_mode: SetMode | None = None
    rails: tuple[Rail, ...] = ()
    clocks: tuple[Clock, ...] = ()
    temperatures: Mapping[str, float] = field(default_factory=dict)  # degrees Celsius by zone
    throttling: Mapping[str, bool] = field(default_factory=dict)  # by what is throttled
    over_current: Mapping[str, int] = field(default_factory=dict)  # events since boot
    memory: MemoryState | None = None

    @property
    def watts(self) -> float | None:
        """Power into the whole board; None where no rail is known to be all of it."""
        rail = input_rail(self.rails)
        return None if rail is None else rail.watts

    @property
    def hottest(self) -> float | None:
        """Highest temperature of a zone, in degrees Celsius."""
        return max(self.temperatures.values(), default=None)

    @property
    def throttled(self) -> bool | None:
        """Whether anything is slowed down for its heat just now."""
        return any(self.throttling.values()) if self.throttling else None

    def clock(self, part: Part) -> Clock | None:
        """The first clock of a part that says its frequency."""
        return next((clock for clock in self.clocks if clock.part == part and clock.hz is not None), None)

    def to_json(self) -> dict[str, Any]:
        """All fields that are known, and the derived ``watts``, ``hottest`` and ``throttled``."""
        derived = {"watts": self.watts, "hottest": self.hottest, "throttled": self.throttled}
        return {key: value for key, value in (asdict(self) | derived).items() if value not in (None, (), {})}

    def brief(self) -> dict[str, Any]:
        """The flat figures that belong beside a measurement or in a reply: mode, watts, degrees, MHz, bytes, events."""
        clocks = {f"{part}_mhz": clock.hz / 1e6 for part in _PARTS if (clock := self.clock(part)) and clock.hz}
        mode = self.power_mode
        flat = {
            "power_mode": None if mode is None else mode.name or str(mode.id),
            "watts": self.watts,
            "celsius": self.hottest,
            **clocks,
            "throttled": self.throttled,
            "over_current_events": sum(self.over_current.values()) if self.over_current else None,
            "available_bytes": None if self.memory is None else self.memory.available,
        }
        return {key: value for key, value in flat.items() if value is not None}


_PARTS: tuple[Part, ...] = ("gpu", "memory", "cpu")


def read_board_state(root: Path = Path("/")) -> BoardState:
    """Read all that the machine at ``root`` says, within a few milliseconds. Never raises for what is not there."""
    return BoardState(
        read_model(root),
        read_release(root),
        read_power_mode(root),
        read_rails(root),
        read_clocks(root),
        read_temperatures(root),
        read_throttling(root),
        read_over_current(root),
        read_memory(root),
    )
