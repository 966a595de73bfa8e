"""What the board says at one moment: clocks, temperatures, throttling, power, memory, in one frozen value.

Clocks: the kernel's Documentation/ABI/testing/sysfs-class-devfreq (Hz) and admin-guide/pm/cpufreq.rst (kHz). The Jetson
Linux Developer Guide names the GPU's devfreq by its address on Orin (17000000.gpu, 17000000.ga10b before Jetson Linux
36); nvpmodel.conf and jetson_clocks of Jetson Linux 38 use gpu-gpc-0 and gpu-nvd-0 (GPU) and bwmgr (memory) on Thor.
Orin's memory clock is a file of debugfs (bpmp/debug/clk/emc/rate, Clocks chapter), for root only.

Temperatures: the kernel's Documentation/driver-api/thermal/sysfs-api.rst (millidegrees Celsius). Zones: Jetson Linux
Developer Guide, "Thermal Management": cpu, gpu, cv0-2, soc0-2, tj on Orin; cpu, gpu, soc012, soc345, tj on Thor, where
``tj`` is the hottest of the others. Throttling shows as cooling devices ``*-throttle-alert`` and ``hot-surface-alert``
(same chapter, "Throttling alerts"): state 0 is none.

Power: rails and over-current counters of the hwmon class. Files and units are those of the kernel's documents
Documentation/hwmon/ina3221.rst and ina238.rst; that Jetson boards put labels on the channels, and which, is in the
Jetson Linux Developer Guide, Platform Power and Performance, chapters Jetson Orin series and Jetson Thor
("Software-Based Power Consumption Modeling"): Orin has VDD_GPU_SOC, VDD_CPU_CV, VIN_SYS_5V0 (AGX) or VDD_IN,
VDD_CPU_GPU_CV, VDD_SOC (NX, Nano); Thor has VDD_GPU, VDD_CPU_SOC_MSS, VIN_SYS_5V0 on INA3221 and VIN on an INA238
that sees the whole board. NVIDIA forum thread 366461 tells the two Thor sensors apart.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from edge_dflash.board import linux

PERIOD = 0.1  # seconds between two samples: the power monitors of Jetson boards average over about as long
GAP = 1.0  # seconds without a sample after which the power is unknown
_KEPT = 36_000  # samples: an hour of work
INPUT_RAILS = ("VDD_IN", "VIN")  # labels of what flows into the whole module or board
_UNUSED = "NC"  # label of a channel with nothing behind it
_HWMON = Path("sys/class/hwmon")


@dataclass(frozen=True)
class Rail:
    """One channel of a power monitor. None: the sensor did not say."""

    name: str
    sensor: str  # "ina3221" or "ina238"
    watts: float | None
    volts: float | None
    amperes: float | None
    alarm: bool | None  # the current is over the critical limit


def read_rails(root: Path) -> tuple[Rail, ...]:
    """Every labelled channel of every power monitor under ``root``."""
    rails: list[Rail] = []
    for device in linux.numbered(root / _HWMON, "hwmon"):
        match linux.read_text(device / "name"):
            case "ina3221":  # channels 1 to 3; 4 and up are shunt voltages and their sum
                rails += [rail for channel in (1, 2, 3) if (rail := _ina3221(device, channel)) is not None]
            case "ina238":
                rails.append(_ina238(device))
    return tuple(rails)


def input_rail(rails: Iterable[Rail]) -> Rail | None:
    """The rail of what flows into the whole board, if it says its power. Rails are never added up."""
    found = {rail.name: rail for rail in rails if rail.watts is not None}
    return next((found[name] for name in INPUT_RAILS if name in found), None)


def read_input(root: Path = Path("/")) -> Rail | None:
    """The rail of what flows into the whole board just now; None where none is known to be all of it."""
    return input_rail(read_rails(root))


def _ina3221(device: Path, channel: int) -> Rail | None:
    """Bus voltage in mV, current in mA; the driver has no file for their product."""
    label = linux.read_text(device / f"in{channel}_label")
    if label is None or label == _UNUSED or linux.read_int(device / f"in{channel}_enable") == 0:
        return None
    volts, amperes = (linux.read_scaled(device / f"{kind}{channel}_input", 1e3) for kind in ("in", "curr"))
    watts = None if volts is None or amperes is None else volts * amperes
    return Rail(label, "ina3221", watts, volts, amperes, _flag(device / f"curr{channel}_crit_alarm"))


def _ina238(device: Path) -> Rail:
    """Bus voltage in mV, current in mA, power in microwatts; the driver has no labels, boards may add one."""
    label = linux.read_text(device / "in1_label") or linux.read_text(device / "label") or "VIN"
    volts, amperes = linux.read_scaled(device / "in1_input", 1e3), linux.read_scaled(device / "curr1_input", 1e3)
    watts = linux.read_scaled(device / "power1_input", 1e6)
    return Rail(label, "ina238", watts, volts, amperes, _flag(device / "power1_max_alarm"))


def read_over_current(root: Path) -> dict[str, int]:
    """Events since boot by counter: oc1 is under-voltage, oc2 average, oc3 momentary over-current.

    Jetson Linux Developer Guide, Jetson Orin, "Over-current throttling": hwmon device ``soctherm_oc`` with the files
    ``oc<n>_event_cnt``; its driver has them for each event that the board's device tree enables. Boards without the
    device give an empty dict.
    """
    names = [f"oc{number}" for number in range(1, 7)]
    files = (
        (name, device / f"{name}_event_cnt") for device in linux.numbered(root / _HWMON, "hwmon") for name in names
    )
    return {name: count for name, file in files if (count := linux.read_int(file)) is not None}


def _flag(path: Path) -> bool | None:
    value = linux.read_int(path)
    return None if value is None else value != 0


class EnergyMeter:
    """Samples the board's power between :meth:`begin` and :meth:`end`, on a thread. Used from any thread.

    Where the board does not say its power the energy is None, never 0.
    """

    def __init__(self, read: Callable[[], Rail | None] = read_input, period: float = PERIOD) -> None:
        """``read`` gives the rail that feeds the whole board, or None; it may take milliseconds."""
        self._read = read
        self._period = period
        self._samples: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # time.perf_counter(), watts
        self._lock = threading.Lock()
        self._at_work = 0  # begun and not ended: works may lie inside each other
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.rail: str | None = None  # that was read last

    def begin(self) -> None:
        """Sample from now on."""
        with self._lock:
            self._at_work += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="edge-dflash energy", daemon=True)
                self._thread.start()
        self._wake.set()

    def end(self) -> None:
        """Sample once more, then no longer, if this was the last work."""
        with self._lock:
            self._at_work = max(0, self._at_work - 1)
        self._wake.set()

    def joules(self, begin: float, end: float) -> float | None:
        """Energy between two times of time.perf_counter(): the trapezoids of the samples.

        None when nothing was read in it, or for longer than GAP seconds. Before the first sample and after the last one
        the power is taken to be that of the sample.
        """
        with self._lock:
            known = [sample for sample in self._samples if begin - GAP <= sample[0] <= end + GAP]
        if not known or end <= begin:
            return None
        if known[0][0] > begin:
            known.insert(0, (begin, known[0][1]))
        if known[-1][0] < end:
            known.append((end, known[-1][1]))
        total = 0.0
        for (t0, w0), (t1, w1) in pairwise(known):
            left, right = max(t0, begin), min(t1, end)
            if right <= left:
                continue
            if t1 - t0 > GAP:
                return None
            slope = (w1 - w0) / (t1 - t0)
            total += (right - left) * (w0 + slope * ((left + right) / 2 - t0))
        return total

    def _run(self) -> None:
        while True:
            self._wake.clear()
            with contextlib.suppress(OSError):  # a sensor that went away: what is not sampled is unknown
                self._sample()
            with self._lock:
                if not self._at_work:
                    self._thread = None
                    return
            self._wake.wait(self._period)

    def _sample(self) -> None:
        rail = self._read()
        if rail is None or rail.watts is None:
            return
        with self._lock:
            self.rail = rail.name
            self._samples.append((time.perf_counter(), rail.watts))


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
    found = [_devfreq(devices / name, part) for name in linux.entries(devices) if (part := _part(name)) is not None]
    if not any(clock.part == "memory" for clock in found):
        debug = root / "sys/kernel/debug/bpmp/debug/clk/emc"
        if (hz := linux.read_int(debug / "rate")) is not None:
            most = linux.read_int(debug / "max_rate")
            found.append(Clock("memory", "emc", hz, linux.read_int(debug / "min_rate"), most, most, None))
    found += [_policy(folder) for folder in linux.numbered(root / "sys/devices/system/cpu/cpufreq", "policy")]
    return tuple(found)


def _part(name: str) -> Part | None:
    if name.startswith("gpu-") or name.endswith(_GPU_ENDS):
        return "gpu"
    return "memory" if name in _MEMORY or name.endswith(".emc") else None


def _devfreq(folder: Path, part: Part) -> Clock:
    steps = [int(word) for word in (linux.read_text(folder / "available_frequencies") or "").split() if word.isdigit()]
    hz, floor, limit = (linux.read_int(folder / file) for file in ("cur_freq", "min_freq", "max_freq"))
    return Clock(part, folder.name, hz, floor, limit, max(steps, default=None), linux.read_text(folder / "governor"))


def _policy(folder: Path) -> Clock:
    files = ("scaling_cur_freq", "scaling_min_freq", "scaling_max_freq", "cpuinfo_max_freq")
    hz, floor, limit, most = (None if (khz := linux.read_int(folder / file)) is None else khz * 1000 for file in files)
    return Clock("cpu", folder.name, hz, floor, limit, most, linux.read_text(folder / "scaling_governor"))


def read_temperatures(root: Path) -> dict[str, float]:
    """Degrees Celsius by zone, without the ending ``-thermal``; zones that gave no answer are not in it."""
    found: dict[str, float] = {}
    for zone in linux.numbered(root / _THERMAL, "thermal_zone"):
        name, value = linux.read_text(zone / "type"), linux.read_int(zone / "temp")
        if name is not None and value is not None and _COLDEST < value < _HOTTEST:
            found[name.removesuffix("-thermal")] = value / 1e3
    return found


def read_throttling(root: Path) -> dict[str, bool]:
    """Whether an alert is on, by its name; empty where there are no alerts to read."""
    found: dict[str, bool] = {}
    for device in linux.numbered(root / _THERMAL, "cooling_device"):
        name, state = linux.read_text(device / "type"), linux.read_int(device / "cur_state")
        if name is not None and name.endswith("-alert") and state is not None:
            found[name.removesuffix("-alert").removesuffix("-throttle")] = state > 0
    return found


@dataclass(frozen=True)
class BoardState:
    """What was read. None and empty: this machine does not say; nothing is estimated."""

    model: str | None = None
    release: str | None = None  # of Jetson Linux
    power_mode: linux.SetMode | None = None
    rails: tuple[Rail, ...] = ()
    clocks: tuple[Clock, ...] = ()
    temperatures: Mapping[str, float] = field(default_factory=dict)  # degrees Celsius by zone
    throttling: Mapping[str, bool] = field(default_factory=dict)  # by what is throttled
    over_current: Mapping[str, int] = field(default_factory=dict)  # events since boot
    memory: linux.MemoryState | None = None

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
        linux.read_model(root),
        linux.read_release(root),
        linux.read_power_mode(root),
        read_rails(root),
        read_clocks(root),
        read_temperatures(root),
        read_throttling(root),
        read_over_current(root),
        linux.read_memory(root),
    )
