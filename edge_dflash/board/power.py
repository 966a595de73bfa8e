"""Power rails and over-current counters of the hwmon class.

Files and units are those of the kernel's documents Documentation/hwmon/ina3221.rst and ina238.rst; that Jetson boards
put labels on the channels, and which, is in the Jetson Linux Developer Guide, Platform Power and Performance, chapters
Jetson Orin series and Jetson Thor ("Software-Based Power Consumption Modeling"): Orin has VDD_GPU_SOC, VDD_CPU_CV,
VIN_SYS_5V0 (AGX) or VDD_IN, VDD_CPU_GPU_CV, VDD_SOC (NX, Nano); Thor has VDD_GPU, VDD_CPU_SOC_MSS, VIN_SYS_5V0 on
INA3221 and VIN on an INA238 that sees the whole board. NVIDIA forum thread 366461 tells the two Thor sensors apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edge_dflash.board.sysfs import numbered, read_int, read_text

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
    volts, amperes = _milli(device / f"in{channel}_input"), _milli(device / f"curr{channel}_input")
    watts = None if volts is None or amperes is None else volts * amperes
    return Rail(label, "ina3221", watts, volts, amperes, _flag(device / f"curr{channel}_crit_alarm"))


def _ina238(device: Path) -> Rail:
    """Bus voltage in mV, current in mA, power in microwatts; the driver has no labels, boards may add one."""
    label = read_text(device / "in1_label") or read_text(device / "label") or "VIN"
    power = read_int(device / "power1_input")
    volts, amperes = _milli(device / "in1_input"), _milli(device / "curr1_input")
    watts = None if power is None else power / 1e6
    return Rail(label, "ina238", watts, volts, amperes, _flag(device / "power1_max_alarm"))


def read_over_current(root: Path) -> dict[str, int]:
    """Events since boot by counter: oc1 is under-voltage, oc2 average, oc3 momentary over-current.

    Jetson Linux Developer Guide, Jetson Orin, "Over-current throttling": hwmon device ``soctherm_oc`` with the files
    ``oc<n>_event_cnt``; its driver has them for each event that the board's device tree enables. Boards without the
    device give an empty dict.
    """
    found: dict[str, int] = {}
    for device in numbered(root / _HWMON, "hwmon"):
        for number in range(1, 7):
            if (count := read_int(device / f"oc{number}_event_cnt")) is not None:
                found[f"oc{number}"] = count
    return found


def _milli(path: Path) -> float | None:
    value = read_int(path)
    return None if value is None else value / 1e3


def _flag(path: Path) -> bool | None:
    value = read_int(path)
    return None if value is None else value != 0
