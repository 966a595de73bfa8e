"""An Inspection and the kernels of a bundle as tables for people; ``Inspection.to_json`` is the form for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge_dflash.backends.cuda.compile import kernel_use
from edge_dflash.board.profiles import SYSTEM_BYTES
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.checks.inspect import Inspection
from edge_dflash.common.files import LARGE, read_bytes
from edge_dflash.errors import BackendError, BundleError
from edge_dflash.model.specs import DrafterLayerMask

_KERNELS = "kernels/*.cubin"  # in a bundle


def render(inspection: Inspection) -> RenderableType:
    """Tables of weights, of a cycle's bytes with their least time, and of memory against the board's."""
    return Group(_weights(inspection), _cycle(inspection), _memory(inspection), _summary(inspection))


def _weights(inspection: Inspection) -> Table:
    table = named_table("Weights", "model", "module", "format", right=("parameters", "bytes"))
    for group in inspection.weights:
        table.add_row(group.model, group.module, group.format, f"{group.parameters:,}", f"{group.bytes:,}")
    return table


def _cycle(inspection: Inspection) -> Table:
    title = f"One cycle at {inspection.context:,} tokens, block {inspection.block_size}"
    table = named_table(title, "what is moved", right=("bytes", "ms at least"))
    for part in fields(inspection.cycle):
        size = getattr(inspection.cycle, part.name)
        table.add_row(part.metadata["label"], f"{size:,}", f"{inspection.board.milliseconds(size):.3f}")
    table.add_section()
    table.add_row("cycle", f"{inspection.cycle_bytes:,}", f"{inspection.floor_ms:.3f}")
    return table


def _memory(inspection: Inspection) -> Table:
    table = named_table(f"Memory for {inspection.max_context:,} tokens of context", "what is held", right=("bytes",))
    for part in fields(inspection.memory):
        table.add_row(part.metadata["label"], f"{getattr(inspection.memory, part.name):,}")
    table.add_section()
    table.add_row("total", f"{inspection.total_bytes:,}")
    table.add_row("set aside: Linux, driver, CUDA, this program", f"{SYSTEM_BYTES:,}")
    table.add_row(f"memory of {inspection.board.title}", f"{inspection.board.memory_bytes:,}")
    table.add_row("free" if inspection.free_bytes >= 0 else "missing", f"{abs(inspection.free_bytes):,}")
    return table


def _summary(inspection: Inspection) -> Text:
    board = inspection.board
    chunk_ms = inspection.prefill_chunk_ms
    estimate = "" if chunk_ms is None else f", about {chunk_ms:.3g} ms on SM {board.sm}"
    lines = [
        f"{board.title}: {board.memory_bandwidth_bytes_per_s / 1e9:g} GB/s peak",
        f"K/V per token ({inspection.kv_format}): {inspection.kv_bytes_per_token:,} B target,"
        f" {inspection.drafter_kv_bytes_per_token:,} B drafter; tape per row: {inspection.tape_bytes_per_row:,} B;"
        f" state: {inspection.state_bytes:,} B",
        f"floor: {inspection.floor_ms:.2f} ms a cycle, {inspection.plain_floor_ms:.2f} ms a token without drafter;"
        f" a drafter pays above an accept length of {inspection.break_even_accept_length:.2f}",
    ]
    lines.append(f"drafter layers: {_masks(inspection.drafter_masks)}")
    lines.append(f"prefill: at most {inspection.prefill_chunk} tokens a pass{estimate}")
    if inspection.free_bytes < 0:
        lines.append(_advice(inspection))
    return Text("\n".join(lines))


def _masks(masks: tuple[DrafterLayerMask, ...]) -> str:
    """Neighbouring layers of one mask together: ``0-3 causal in the block, window 2048; 4 bidirectional``."""
    parts = []
    for mask, group in groupby(range(len(masks)), key=lambda index: masks[index]):
        first, *rest = group
        name = f"{first}-{rest[-1]}" if rest else str(first)
        window = "" if mask.window is None else f", window {mask.window:,}"
        parts.append(f"{name} {'bidirectional' if mask.bidirectional else 'causal'} in the block{window}")
    return "; ".join(parts)


def _advice(inspection: Inspection) -> str:
    """What to do about a pair that does not fit."""
    if inspection.longest_context:
        return (
            f"does not fit with {inspection.max_context:,} tokens of context; with {inspection.longest_context:,} it "
            "does: give --max-context, to build as well, or use a recipe with smaller formats"
        )
    room = inspection.board.memory_bytes - SYSTEM_BYTES
    alone = inspection.stored_bytes > room
    what = "the weights alone are" if alone else "weights, recurrent state and scratch are"
    return (
        f"does not fit with any context: {what} larger than the {room / 1e9:,.1f} GB beside the system; use a recipe "
        "with smaller formats, a smaller pair or another board"
    )


def named_table(title: str, *left: str, right: Sequence[str]) -> Table:
    """An empty table with a title; columns of words, then of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


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
    names = sorted(name for name in manifest.files if fnmatchcase(name, _KERNELS))
    return tuple(_unit(path / name) for name in names)


def kernels_table(units: tuple[UnitUse, ...], manifest: Manifest) -> Table:
    """For people."""
    columns = ("kernels", "registers", "shared bytes", "spilled bytes")
    table = named_table(f"Kernels for {manifest.arch}, largest of each unit", "unit", right=columns)
    for unit, *figures in map(astuple, units):
        if figures[0]:  # a unit of another architecture has no kernels
            table.add_row(unit, *(f"{figure:,}" for figure in figures))
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
