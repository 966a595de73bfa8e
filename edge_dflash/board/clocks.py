"""Clocks of GPU, memory and CPU from devfreq and cpufreq.

Files: the kernel's Documentation/ABI/testing/sysfs-class-devfreq (Hz) and admin-guide/pm/cpufreq.rst (kHz). Devices:
the Jetson Linux Developer Guide names the GPU's devfreq by its address on Orin (17000000.gpu, 17000000.ga10b before
Jetson Linux 36); nvpmodel.conf and jetson_clocks of Jetson Linux 38 use gpu-gpc-0 and gpu-nvd-0 (GPU) and bwmgr
(memory) on Thor. Orin's memory clock is a file of debugfs (bpmp/debug/clk/emc/rate, Clocks chapter), for root only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edge_dflash.board.sysfs import numbered, read_int, read_text

Part = Literal["gpu", "memory", "cpu"]
_GPU_ENDS = (".gpu", ".ga10b", ".gv11b")
_MEMORY = ("bwmgr", "emc")


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
    found = [_devfreq(folder, part) for folder, part in _devices(root / "sys/class/devfreq")]
    if not any(clock.part == "memory" for clock in found):
        debug = root / "sys/kernel/debug/bpmp/debug/clk/emc"
        if (hz := read_int(debug / "rate")) is not None:
            most = read_int(debug / "max_rate")
            found.append(Clock("memory", "emc", hz, read_int(debug / "min_rate"), most, most, None))
    found += [_policy(folder) for folder in numbered(root / "sys/devices/system/cpu/cpufreq", "policy")]
    return tuple(found)


def _devices(folder: Path) -> list[tuple[Path, Part]]:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
    parts = [(folder / name, _part(name)) for name in names]
    return [(path, part) for path, part in parts if part is not None]


def _part(name: str) -> Part | None:
    if name.startswith("gpu-") or name.endswith(_GPU_ENDS):
        return "gpu"
    return "memory" if name in _MEMORY or name.endswith(".emc") else None


def _devfreq(folder: Path, part: Part) -> Clock:
    frequencies = read_text(folder / "available_frequencies")
    steps = [int(word) for word in (frequencies or "").split() if word.isdigit()]
    return Clock(
        part,
        folder.name,
        read_int(folder / "cur_freq"),
        read_int(folder / "min_freq"),
        read_int(folder / "max_freq"),
        max(steps, default=None),
        read_text(folder / "governor"),
    )


def _policy(folder: Path) -> Clock:
    def hz(file: str) -> int | None:
        khz = read_int(folder / file)
        return None if khz is None else khz * 1000

    return Clock(
        "cpu",
        folder.name,
        hz("scaling_cur_freq"),
        hz("scaling_min_freq"),
        hz("scaling_max_freq"),
        hz("cpuinfo_max_freq"),
        read_text(folder / "scaling_governor"),
    )
