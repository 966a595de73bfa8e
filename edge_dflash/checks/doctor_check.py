"""One finding of the doctor, and the table of codes. A code keeps its meaning for ever; new ones go to the end.

docs/troubleshooting.md has a section for each code; a test compares the two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]

CODES = {
    "D001": "board",
    "D002": "Jetson Linux",
    "D003": "CUDA driver",
    "D004": "GPU",
    "D005": "TensorRT",
    "D006": "power mode",
    "D007": "clocks",
    "D008": "heat and power",
    "D009": "memory",
    "D010": "swap",
    "D011": "disk",
    "D012": "service",
    "D013": "device nodes",
    "D014": "bundle files",
    "D015": "bundle architecture",
    "D016": "bundle kernels",
    "D017": "bundle TensorRT",
}


@dataclass(frozen=True)
class Check:
    """What was found under a code. ``remedy`` is empty only where there is nothing to do."""

    code: str
    status: Status
    found: str
    remedy: str = ""

    @property
    def name(self) -> str:
        """What the code is about."""
        return CODES[self.code]

    def to_json(self) -> dict[str, Any]:
        """All fields, with the name."""
        return {**asdict(self), "name": self.name}


def ok(code: str, found: str) -> Check:
    """Nothing to do."""
    return Check(code, "ok", found)


def warn(code: str, found: str, remedy: str) -> Check:
    """It works, or may; worse than it could."""
    return Check(code, "warn", found, remedy)


def fail(code: str, found: str, remedy: str) -> Check:
    """The bundle cannot be served, or the service does not run as it should."""
    return Check(code, "fail", found, remedy)
