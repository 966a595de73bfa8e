"""Where the data folders that ship with edge-dflash lie: ``calib``, ``deploy``, ``engines`` and ``jetson``.

They are folders at the root of a checkout and part of the package once installed. Knows nothing of what is in them.
"""

from __future__ import annotations

from pathlib import Path

from edge_dflash.errors import EdgeDflashError

FOLDERS = ("calib", "deploy", "engines", "jetson")


def directory(name: str) -> Path:
    """Return the data folder ``name``, from the installed package or, in a checkout, from its root.

    Raises EdgeDflashError when the folder is not one of ``FOLDERS`` or was lost from the installation.
    """
    return find(name, Path(__file__).resolve().parents[1])


def find(name: str, package: Path) -> Path:
    """Like :func:`directory`, for a package that lies at ``package``."""
    if name not in FOLDERS:
        raise EdgeDflashError(f"no data folder is called {name!r}; there are {', '.join(FOLDERS)}")
    for candidate in (package / "_data" / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise EdgeDflashError(f"data folder {name!r} is missing from {package}; install edge-dflash again")
