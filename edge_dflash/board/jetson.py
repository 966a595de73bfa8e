"""Who the board is: its model, its Jetson Linux release, its power mode.

Jetson Linux Developer Guide: /etc/nv_tegra_release holds the release ("# R38 (release), REVISION: 4.0, ..."), the
device tree's ``model`` the board; nvpmodel keeps the mode that it set in /var/lib/nvpmodel/status ("pmode:0000") and
reads the modes' names from /etc/nvpmodel.conf ("< POWER_MODEL ID=0 NAME=MAXN >"). Reading these files needs no root.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edge_dflash.board.sysfs import read_text


@dataclass(frozen=True)
class SetMode:
    """The power mode that is set. ``name`` None: the table of modes does not tell."""

    id: int
    name: str | None


def read_model(root: Path) -> str | None:
    """Model of the device tree: "NVIDIA Jetson AGX Thor Developer Kit"; None on machines without one."""
    return read_text(root / "proc/device-tree/model") or read_text(root / "sys/firmware/devicetree/base/model")


def read_release(root: Path) -> str | None:
    """Release of Jetson Linux: "38.4", "36.4.3"; None elsewhere."""
    text = read_text(root / "etc/nv_tegra_release") or ""
    found = re.match(r"#\s*R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]*\d)", text)
    if found is None:
        return None
    major, minor = found.groups()
    return f"{major}.{minor.removesuffix('.0')}"


def read_power_mode(root: Path) -> SetMode | None:
    """The mode that nvpmodel set last; None where there is no nvpmodel or it has not run."""
    found = re.fullmatch(r"pmode:(\d+)(?:\s.*)?", read_text(root / "var/lib/nvpmodel/status") or "", re.DOTALL)
    if found is None:
        return None
    number = int(found.group(1))
    names = power_mode_names(read_text(root / "etc/nvpmodel.conf") or "")
    return SetMode(number, names.get(number))


def power_mode_names(conf: str) -> dict[int, str]:
    """Names by id from the text of nvpmodel.conf; comments are not read."""
    lines = (line.strip() for line in conf.splitlines())
    modes = (re.match(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=([^\s>]+)", line) for line in lines)
    return {int(mode.group(1)): mode.group(2) for mode in modes if mode}
