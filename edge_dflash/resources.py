"""Where the data directories that ship with edge-dflash lie: ``engines``, ``calib``, ``jetson``."""

from __future__ import annotations

from pathlib import Path


def directory(name: str) -> Path:
    """Return the data directory ``name`` at the root of the checkout."""
    return Path(__file__).resolve().parent.parent / name
