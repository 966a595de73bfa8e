"""What is written down of a run: the machine that it ran on, a line of a results file, the report of ``verify``.

The machine is described by asking other programs; answers may be missing.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edge_dflash.board.state import read_board_state
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.common.files import check_writable, write_whole
from edge_dflash.common.tables import encode
from edge_dflash.errors import RequestError
from edge_dflash.version import __version__

_CLOCKS = {  # what nvidia-smi is asked, by our names
    "name": "name",
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "most_sm_mhz": "clocks.max.sm",
    "watts": "power.draw",
    "watt_limit": "power.limit",
}
_MODEL = Path("/proc/device-tree/model")  # of a Jetson or another board
_WHAT = "Runs of edge-dflash bench, oldest first, one a line"


class ClockSample:
    """Asks nvidia-smi for clocks and power while the device works; :meth:`result` collects the answer."""

    def __init__(self, ordinal: int = 0) -> None:
        query = f"--query-gpu={','.join(_CLOCKS.values())}"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", str(ordinal)]
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
    for key, value in zip(_CLOCKS, line.splitlines()[0].split(",") if line.strip() else (), strict=False):
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
    lines = (line.partition(":") for line in (answer or "").splitlines())
    return next((name.strip() for label, _, name in lines if label.strip() == "NV Power Mode"), None)


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


def check_record(file: Path) -> None:
    """Raise RequestError, before any work, unless results can be added to ``file``, which need not exist."""
    _read(file)
    check_writable(file, "--record")


def append(file: Path, result: Mapping[str, Any]) -> None:
    """Add a result; what else the file says stays. Raises RequestError as :func:`check_record`."""
    found = _read(file)
    runs = ",\n".join("  " + json.dumps(run, allow_nan=False) for run in (*found.pop("runs"), result))
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in found.items())
    write_whole(file, f'{{\n{head} "runs": [\n{runs}\n ]\n}}\n'.encode())


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file.parent.is_dir():
            return {"what": _WHAT, "runs": []}
        raise RequestError(f"{file.parent} is no directory; make it first or give another --record") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{file} cannot be read as JSON ({error}); give another --record") from None
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise RequestError(f"{file} holds no object with a list of runs; give another --record")
    return found


def write_report(
    file: Path, bundle: Path, found: Mapping[str, Any], bench: Mapping[str, Any] | None, doctor: Mapping[str, Any]
) -> None:
    """Write what ``verify`` found, the benchmark (None: not run), the doctor's checks and what ran. Raises OSError."""
    text = {
        "what": "Report of edge-dflash verify",
        "ok": found["ok"],
        "machine": describe(),
        "bundle": identity(bundle, read_manifest(bundle)),
        "verify": found,
        "bench": bench,
        "doctor": doctor,
    }
    write_whole(file, (json.dumps(text, indent=1, allow_nan=False) + "\n").encode())


def identity(path: Path, manifest: Manifest) -> dict[str, Any]:
    """What identifies a bundle, without its thousands of names."""
    plans = manifest.plans
    return {
        "path": str(path),
        "created_by": manifest.created_by,
        "backend": manifest.backend,
        "backends": list(manifest.backends),
        "trial": encode(manifest.trial),
        "arch": manifest.arch,
        "architecture": manifest.pair.target.architecture,
        "recipe": manifest.recipe,
        "precision": encode(manifest.precision),
        "weights": manifest.weight_summary,
        "block_size": manifest.pair.block_size,
        "max_context": manifest.max_context,
        "prefill_chunk": manifest.prefill_chunk,
        "bytes": manifest.size,
        "tools": dict(manifest.tools),
        "plans": plans and {"flavour": plans.flavour, "version": plans.version, "count": len(plans.names)},
    }
