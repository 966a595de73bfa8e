"""What the kernels of a built bundle need of a multiprocessor: read from its cubins, no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from edge_dflash.backends.cuda.compile import kernel_use
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.common.files import LARGE, read_bytes
from edge_dflash.errors import BackendError, BundleError

_FOLDER, _SUFFIX = "kernels/", ".cubin"


@dataclass(frozen=True)
class UnitUse:
    """One compilation unit; the figures are the largest of its kernels."""

    unit: str
    kernels: int
    registers: int  # of a thread
    shared_bytes: int  # static, of a block
    stack_bytes: int  # of a thread: arrays and spilled registers


def bundle_kernels(path: Path, manifest: Manifest) -> tuple[UnitUse, ...]:
    """Every unit of the bundle at ``path``; none for the reference backend. Raises BundleError for a damaged one."""
    names = sorted(name for name in manifest.files if name.startswith(_FOLDER) and name.endswith(_SUFFIX))
    return tuple(_unit(path / name) for name in names)


def kernels_table(units: tuple[UnitUse, ...], manifest: Manifest) -> Table:
    """For people."""
    table = Table(title=f"Kernels for {manifest.arch}, largest of each unit", title_justify="left", title_style="bold")
    table.add_column("unit")
    for name in ("kernels", "registers", "shared bytes", "spilled bytes"):
        table.add_column(name, justify="right")
    for use in units:
        if use.kernels == 0:  # a unit of another architecture
            continue
        figures = (use.kernels, use.registers, use.shared_bytes, use.stack_bytes)
        table.add_row(use.unit, *(f"{figure:,}" for figure in figures))
    return table


def _unit(file: Path) -> UnitUse:
    try:
        uses = kernel_use(read_bytes(file, LARGE)).values()
    except OSError as error:
        raise BundleError(f"cannot read {file}: {error.strerror}; copy or build the bundle again") from None
    except BackendError as error:
        raise BundleError(f"{file}: {error}; copy or build the bundle again") from None
    return UnitUse(
        file.stem,
        len(uses),
        max((use.registers for use in uses), default=0),
        max((use.shared_bytes for use in uses), default=0),
        max((use.stack_bytes for use in uses), default=0),
    )
