"""Where things lie in a checkout."""

import fcntl
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "edge_dflash" / "demo"


def unpacked(folder: Path) -> Path:
    """``folder`` after the tensors of its archive were put beside its other files, which is done once."""
    archive, done = folder / "tensors.tar.xz", folder / ".unpacked"
    with archive.open("rb") as packed:
        fcntl.flock(packed, fcntl.LOCK_EX)  # processes that come meanwhile wait
        if not done.exists() or done.stat().st_mtime < archive.stat().st_mtime:
            with tarfile.open(fileobj=packed) as tensors:
                tensors.extractall(folder, filter="data")
            done.touch()
    return folder


GOLDEN = unpacked(ROOT / "tests" / "golden")
"""Golden files and the checkpoints that they were made from."""
