"""Power rails and over-current counters of the hwmon class, and the energy of a stretch of time from them.

Files and units are those of the kernel's documents Documentation/hwmon/ina3221.rst and ina238.rst; that Jetson boards
put labels on the channels, and which, is in the Jetson Linux Developer Guide, Platform Power and Performance, chapters
Jetson Orin series and Jetson Thor ("Software-Based Power Consumption Modeling"): Orin has VDD_GPU_SOC, VDD_CPU_CV,
VIN_SYS_5V0 (AGX) or VDD_IN, VDD_CPU_GPU_CV, VDD_SOC (NX, Nano); Thor has VDD_GPU, VDD_CPU_SOC_MSS, VIN_SYS_5V0 on
INA3221 and VIN on an INA238 that sees the whole board. NVIDIA forum thread 366461 tells the two Thor sensors apart.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from edge_dflash.board.linux import numbered, read_int, read_scaled, read_text

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
    for device in numbered(root / _HWMON, "hwmon"):
        match read_text(device / "name"):
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
    label = read_text(device / f"in{channel}_label")
    if label is None or label == _UNUSED or read_int(device / f"in{channel}_enable") == 0:
        return None
    volts, amperes = (read_scaled(device / f"{kind}{channel}_input", 1e3) for kind in ("in", "curr"))
    watts = None if volts is None or amperes is None else volts * amperes
    return Rail(label, "ina3221", watts, volts, amperes, _flag(device / f"curr{channel}_crit_alarm"))


def _ina238(device: Path) -> Rail:
    """Bus voltage in mV, current in mA, power in microwatts; the driver has no labels, boards may add one."""
    label = read_text(device / "in1_label") or read_text(device / "label") or "VIN"
    volts, amperes = read_scaled(device / "in1_input", 1e3), read_scaled(device / "curr1_input", 1e3)
    watts = read_scaled(device / "power1_input", 1e6)
    return Rail(label, "ina238", watts, volts, amperes, _flag(device / "power1_max_alarm"))


def read_over_current(root: Path) -> dict[str, int]:
    """Events since boot by counter: oc1 is under-voltage, oc2 average, oc3 momentary over-current.

    Jetson Linux Developer Guide, Jetson Orin, "Over-current throttling": hwmon device ``soctherm_oc`` with the files
    ``oc<n>_event_cnt``; its driver has them for each event that the board's device tree enables. Boards without the
    device give an empty dict.
    """
    names = [f"oc{number}" for number in range(1, 7)]
    files = ((name, device / f"{name}_event_cnt") for device in numbered(root / _HWMON, "hwmon") for name in names)
    return {name: count for name, file in files if (count := read_int(file)) is not None}


def _flag(path: Path) -> bool | None:
    value = read_int(path)
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
