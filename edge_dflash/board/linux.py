"""What Linux and Jetson Linux say in small files: main memory, the board's model, its release, its power mode.

A file may be missing, or refuse an answer just now: then the value is None, never a guess. A sensor of a part that is
switched off answers EAGAIN (Jetson: the GPU's thermal zone while the GPU sleeps); others need root (EACCES), lost their
bus (EIO) or their driver (ENODEV).

Memory: on a Jetson CPU and GPU share it, so MemAvailable of /proc/meminfo (Documentation/filesystems/proc.rst) is what
a model can have: free pages and those that the kernel takes back without swapping. NVIDIA's "CUDA for Tegra" says the
same of estimating what can be allocated there.

Identity (Jetson Linux Developer Guide): /etc/nv_tegra_release holds the release ("# R38 (release), REVISION: 4.0,
..."), the device tree's ``model`` the board; nvpmodel keeps the mode that it set in /var/lib/nvpmodel/status
("pmode:0000") and reads the modes' names from /etc/nvpmodel.conf ("< POWER_MODEL ID=0 NAME=MAXN >").
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOST = 1 << 20  # bytes of a file that are read


def read_text(path: Path) -> str | None:
    """Text of a file without the white space and NUL bytes around it; None when it cannot be read or is empty."""
    try:  # not by the io module: it waits for, or swallows, the EAGAIN that is an answer here
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = b""
            while part := os.read(descriptor, MOST - len(data)):
                data += part
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return data.decode("utf-8", "replace").strip("\0 \t\r\n") or None


def read_int(path: Path) -> int | None:
    """The integer that a file holds, with or without a unit behind it."""
    found = re.match(r"-?\d{1,19}(?!\S)", read_text(path) or "")
    return int(found.group()) if found else None


def read_scaled(path: Path, scale: float) -> float | None:
    """The integer that a file holds, divided by ``scale``: 1e3 for a file in thousandths."""
    value = read_int(path)
    return None if value is None else value / scale


def entries(folder: Path) -> list[str]:
    """Names in a folder, sorted; empty when it cannot be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def numbered(folder: Path, prefix: str) -> list[Path]:
    """Entries ``prefix0, prefix1, ...`` of a folder in the order of their numbers."""
    numbers = (name.removeprefix(prefix) for name in entries(folder) if name.startswith(prefix))
    return [folder / f"{prefix}{number}" for number in sorted(filter(str.isdecimal, numbers), key=int)]


@dataclass(frozen=True)
class MemoryState:
    """Bytes."""

    total: int
    available: int
    swap_total: int
    swap_free: int

    @property
    def swap_used(self) -> int:
        """Bytes that were moved out of memory."""
        return self.swap_total - self.swap_free


def read_memory(root: Path) -> MemoryState | None:
    """State of /proc/meminfo, which counts in kB; None when it lacks a line."""
    found = dict(re.findall(r"^(\w+):\s+(\d+)\b", read_text(root / "proc/meminfo") or "", re.MULTILINE))
    try:
        return MemoryState(*(1024 * int(found[key]) for key in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")))
    except KeyError:
        return None


def drop_page_cache(place: Path) -> int:
    """Ask the kernel to forget the pages of a file, or of all under a folder (posix_fadvise(2)); bytes of files.

    Pages that a process still maps, or that are not written yet, stay. Files that cannot be opened are left alone.
    """
    nbytes = 0
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                nbytes += os.fstat(descriptor).st_size if path.is_file() else 0
            finally:
                os.close(descriptor)
    return nbytes


def read_model(root: Path) -> str | None:
    """Model of the device tree: "NVIDIA Jetson AGX Thor Developer Kit"; None on machines without one."""
    return read_text(root / "proc/device-tree/model") or read_text(root / "sys/firmware/devicetree/base/model")


def read_release(root: Path) -> str | None:
    """Release of Jetson Linux: "38.4", "36.4.3"; None elsewhere."""
    text = read_text(root / "etc/nv_tegra_release") or ""
    found = re.match(r"#\s*R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]*\d)", text)
    return f"{found[1]}.{found[2].removesuffix('.0')}" if found else None


@dataclass(frozen=True)
class SetMode:
    """The power mode that is set. ``name`` None: the table of modes does not tell."""

    id: int
    name: str | None


def read_power_mode(root: Path) -> SetMode | None:
    """The mode that nvpmodel set last; None where there is no nvpmodel or it has not run."""
    found = re.fullmatch(r"pmode:(\d+)(?:\s.*)?", read_text(root / "var/lib/nvpmodel/status") or "", re.DOTALL)
    if found is None:
        return None
    conf = read_text(root / "etc/nvpmodel.conf") or ""
    modes = re.findall(r"^\s*<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=([^\s>]+)", conf, re.MULTILINE)
    return SetMode(int(found[1]), {int(number): name for number, name in modes}.get(int(found[1])))
