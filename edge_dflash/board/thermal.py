"""Temperatures and throttling of the thermal class.

Files: the kernel's Documentation/driver-api/thermal/sysfs-api.rst (millidegrees Celsius). Zones: Jetson Linux Developer
Guide, "Thermal Management": cpu, gpu, cv0-2, soc0-2, tj on Orin; cpu, gpu, soc012, soc345, tj on Thor, where ``tj`` is
the hottest of the others. A zone of a part that is switched off answers EAGAIN. Throttling shows as cooling devices
``*-throttle-alert`` and ``hot-surface-alert`` (same chapter, "Throttling alerts"): state 0 is none.
"""

from __future__ import annotations

from pathlib import Path

from edge_dflash.board.sysfs import numbered, read_int, read_text

_THERMAL = Path("sys/class/thermal")
_COLDEST, _HOTTEST = -100_000, 200_000  # millidegrees; what lies outside is a sensor that is off, not a temperature


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
