"""What the board says at one moment: clocks, temperatures, throttling, power, memory, in one frozen value.

Clocks: the kernel's Documentation/ABI/testing/sysfs-class-devfreq (Hz) and admin-guide/pm/cpufreq.rst (kHz). The Jetson
Linux Developer Guide names the GPU's devfreq by its address on Orin (17000000.gpu, 17000000.ga10b before Jetson Linux
36); nvpmodel.conf and jetson_clocks of Jetson Linux 38 use gpu-gpc-0 and gpu-nvd-0 (GPU) and bwmgr (memory) on Thor.
Orin's memory clock is a file of debugfs (bpmp/debug/clk/emc/rate, Clocks chapter), for root only.

Temperatures: the kernel's Documentation/driver-api/thermal/sysfs-api.rst (millidegrees Celsius). Zones: Jetson Linux
Developer Guide, "Thermal Management": cpu, gpu, cv0-2, soc0-2, tj on Orin; cpu, gpu, soc012, soc345, tj on Thor, where
``tj`` is the hottest of the others. Throttling shows as cooling devices ``*-throttle-alert`` and ``hot-surface-alert``
(same chapter, "Throttling alerts"): state 0 is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from edge_dflash.board.linux import (
    MemoryState,
    SetMode,
    entries,
    numbered,
    read_int,
    read_memory,
    read_model,
    read_power_mode,
    read_release,
    read_text,
)
from edge_dflash.board.power import Rail, input_rail, read_over_current, read_rails

Part = Literal["gpu", "memory", "cpu"]
PARTS: tuple[Part, ...] = get_args(Part)
_GPU_ENDS = (".gpu", ".ga10b", ".gv11b")
_MEMORY = ("bwmgr", "emc")
_THERMAL = Path("sys/class/thermal")
_COLDEST, _HOTTEST = -100_000, 200_000  # millidegrees; what lies outside is a sensor that is off, not a temperature


@dataclass(frozen=True)
class Clock:
    """One clock domain. Hz; None: not said. ``limit_hz`` is what the power mode allows, ``most_hz`` the hardware."""

    part: Part
    name: str
    hz: int | None
    floor_hz: int | None
    limit_hz: int | None
    most_hz: int | None
    governor: str | None

    @property
    def capped(self) -> bool | None:
        """Whether something allows less than the hardware can."""
        return None if self.limit_hz is None or self.most_hz is None else self.limit_hz < self.most_hz

    @property
    def locked(self) -> bool | None:
        """Whether the clock stands at its limit, as after jetson_clocks."""
        return None if self.floor_hz is None or self.limit_hz is None else self.floor_hz >= self.limit_hz


def read_clocks(root: Path) -> tuple[Clock, ...]:
    """GPU and memory by device, CPU by policy."""
    devices = root / "sys/class/devfreq"
    found = [_devfreq(devices / name, part) for name in entries(devices) if (part := _part(name)) is not None]
    if not any(clock.part == "memory" for clock in found):
        debug = root / "sys/kernel/debug/bpmp/debug/clk/emc"
        if (hz := read_int(debug / "rate")) is not None:
            most = read_int(debug / "max_rate")
            found.append(Clock("memory", "emc", hz, read_int(debug / "min_rate"), most, most, None))
    found += [_policy(folder) for folder in numbered(root / "sys/devices/system/cpu/cpufreq", "policy")]
    return tuple(found)


def _part(name: str) -> Part | None:
    if name.startswith("gpu-") or name.endswith(_GPU_ENDS):
        return "gpu"
    return "memory" if name in _MEMORY or name.endswith(".emc") else None


def _devfreq(folder: Path, part: Part) -> Clock:
    steps = [int(word) for word in (read_text(folder / "available_frequencies") or "").split() if word.isdigit()]
    hz, floor, limit = (read_int(folder / file) for file in ("cur_freq", "min_freq", "max_freq"))
    return Clock(part, folder.name, hz, floor, limit, max(steps, default=None), read_text(folder / "governor"))


def _policy(folder: Path) -> Clock:
    files = ("scaling_cur_freq", "scaling_min_freq", "scaling_max_freq", "cpuinfo_max_freq")
    hz, floor, limit, most = (None if (khz := read_int(folder / file)) is None else khz * 1000 for file in files)
    return Clock("cpu", folder.name, hz, floor, limit, most, read_text(folder / "scaling_governor"))


def read_temperatures(root: Path) -> dict[str, float]:
    """Degrees Celsius by zone, without the ending ``-thermal``; zones that gave no answer are not in it."""
    found: dict[str, float] = {}
    for zone in numbered(root / _THERMAL, "thermal_zone"):
        name, value = read_text(zone / "type"), read_int(zone / "temp")
        if name is not None and value is not None and _COLDEST < value < _HOTTEST:
            found[name.removesuffix("-thermal")] = value / 1e3
    return found


def read_throttling(root: Path) -> dict[str, bool]:
    """Whether an alert is on, by its name; empty where there are no alerts to read."""
    found: dict[str, bool] = {}
    for device in numbered(root / _THERMAL, "cooling_device"):
        name, state = read_text(device / "type"), read_int(device / "cur_state")
        if name is not None and name.endswith("-alert") and state is not None:
            found[name.removesuffix("-alert").removesuffix("-throttle")] = state > 0
    return found


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
        clocks = {f"{part}_mhz": clock.hz / 1e6 for part in PARTS if (clock := self.clock(part)) and clock.hz}
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
