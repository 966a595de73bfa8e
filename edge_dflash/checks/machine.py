"""Which machine, driver, clocks and version a benchmark ran with, by asking other programs; answers may be missing."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edge_dflash.board.state import read_board_state
from edge_dflash.version import __version__

_QUERY = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit")
_KEYS = ("name", "driver", "sm_mhz", "memory_mhz", "most_sm_mhz", "watts", "watt_limit")
_MODEL = Path("/proc/device-tree/model")  # of a Jetson or another board


class ClockSample:
    """Asks nvidia-smi for clocks and power while the device works; :meth:`result` collects the answer."""

    def __init__(self, ordinal: int = 0) -> None:
        command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits", "-i", str(ordinal)]
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return  # no such program here

    @property
    def pending(self) -> bool:
        """Whether the answer is still being made."""
        return self._process is not None and self._process.poll() is None

    def result(self) -> dict[str, Any]:
        """Name, driver, clocks in MHz, power in watts; empty where there is no nvidia-smi."""
        if self._process is None:
            return {}
        try:
            out, _ = self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return {}
        return parse_clocks(out) if self._process.returncode == 0 else {}


def parse_clocks(line: str) -> dict[str, Any]:
    """A line of nvidia-smi's table; fields that the device does not support are left out."""
    found: dict[str, Any] = {}
    for key, value in zip(_KEYS, line.splitlines()[0].split(",") if line.strip() else (), strict=False):
        value = value.strip()
        if value.startswith("[") or not value:
            continue
        found[key] = value if key in ("name", "driver") else float(value)
    return found


def describe() -> dict[str, Any]:
    """Date, versions, commit and host; on a Jetson its model, power mode and L4T release."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "edge_dflash": __version__,
        "commit": commit(Path(__file__).parent),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if _MODEL.is_file():
        state = read_board_state()
        found["board"] = state.model
        found["power_mode"] = power_mode(_answer(("nvpmodel", "-q"))) or state.brief().get("power_mode")
        found["board_state"] = state.brief()
        release = Path("/etc/nv_tegra_release")
        found["l4t"] = release.read_text(errors="replace").splitlines()[0] if release.is_file() else None
    return {key: value for key, value in found.items() if value is not None}


def power_mode(answer: str | None) -> str | None:
    """The mode that ``nvpmodel -q`` names."""
    for line in (answer or "").splitlines():
        label, _, name = line.partition(":")
        if label.strip() == "NV Power Mode":
            return name.strip()
    return None


def commit(directory: Path) -> str | None:
    """Commit of a checkout, with ``+`` when tracked files were changed; None outside of one."""
    head = _answer(("git", "-C", str(directory), "rev-parse", "--short", "HEAD"))
    if not head:
        return None
    changed = _answer(("git", "-C", str(directory), "status", "--porcelain", "--untracked-files=no"))
    return head.strip() + ("+" if changed else "")


def _answer(command: Sequence[str]) -> str | None:
    """What a program prints; None when it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
