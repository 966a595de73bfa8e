"""The tables of ``edge-dflash inspect``."""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge_dflash.board.archs import Arch, arch_of_sm
from edge_dflash.board.profiles import SYSTEM_BYTES, BoardProfile
from edge_dflash.checks.inspect import Inspection
from edge_dflash.checks.tower_costs import PICTURE, TowerCosts
from edge_dflash.cli.output import named_table, size
from edge_dflash.decode.backend import MOST_LANES
from edge_dflash.model.specs import DrafterLayerMask


def render(inspection: Inspection, *, joint: bool = False) -> RenderableType:
    """Tables of weights, of a cycle's bytes with their least time, and of memory against the board's.

    ``joint``: also of several lanes, whatever their number.
    """
    parts: list[RenderableType] = [_weights(inspection), _cycle(inspection)]
    if inspection.by_drafts:
        parts.append(_by_drafts(inspection))
    if joint or inspection.by_lanes.lanes > 1:
        parts += [_lanes(inspection), _joint(inspection)]
    parts.append(_memory(inspection))
    if (arch := arch_of_sm(inspection.board.sm)) is not None:
        parts.append(_rates(arch, inspection.board))
    return Group(*parts, _summary(inspection, joint=joint))


def _lanes(inspection: Inspection) -> Table:
    """What each lane holds."""
    costs = inspection.by_lanes
    title = f"Lanes of {inspection.max_context:,} tokens of context"
    table = named_table(title, "what a lane holds", right=("one", f"{costs.lanes} of them"))
    for part in costs.parts:
        table.add_row(part.what, size(part.one), size(part.all))
    table.add_section()
    table.add_row("all", size(sum(part.one for part in costs.parts)), size(sum(part.all for part in costs.parts)))
    return table


def _joint(inspection: Inspection) -> Table:
    """What cycles of several lanes take at least."""
    costs, experts = inspection.by_lanes, bool(inspection.by_drafts)
    title = f"Joint cycles at {inspection.context:,} tokens a lane, by arithmetic"
    right = ("drafts", "rows", *(["experts a layer"] if experts else []), "MB", "memory ms", "products ms", "floor ms")
    table = named_table(title, "lanes", right=(*right, "tokens/s", "of each"))
    for at, each in enumerate(costs.cycles):
        if at and each.lanes != costs.cycles[at - 1].lanes:
            table.add_section()
        counts = [str(each.drafts), str(each.rows), *([f"{each.experts:.1f}"] if each.experts is not None else [])]
        products = "-" if each.product_ms is None else f"{each.product_ms:.2f}"
        times = f"{each.bytes / 1e6:,.0f}", f"{each.memory_ms:.2f}", products, f"{each.floor_ms:.2f}"
        rates = f"{each.tokens_per_second:.1f}", f"{each.tokens_per_second / each.lanes:.1f}"
        table.add_row(str(each.lanes), *counts, *times, *rates)
    return table


def _lanes_summary(inspection: Inspection) -> list[str]:
    """How many lanes there can be, and what the floors of joint cycles stand on."""
    costs = inspection.by_lanes
    most = "no lane" if not costs.most else f"{costs.most} lane{'s' if costs.most > 1 else ''}"
    room = ", the most there can be," if costs.most == MOST_LANES else ""
    lines = [f"lanes: {most} of {inspection.max_context:,} tokens{room} fit; {costs.lanes} counted above"]
    if costs.free_rows:
        lines.append(f"products: reading the weights hides up to {costs.free_rows} rows of a verify")
    elif costs.free_rows is not None:
        lines.append("products: of any rows they take longer than reading the weights")
    if inspection.drafter_masks:
        lines.append(f"tokens/s: at floors, where cycles of all drafts commit {costs.accept_length:g} tokens a lane")
    return lines


def _rates(arch: Arch, board: BoardProfile) -> Table:
    """What estimates stand on."""
    title = f"Rates that estimates stand on: {arch.name}, {board.multiprocessors} multiprocessors"
    title += f" at {board.gpu_clock_hz / 1e9:.2f} GHz"
    table = named_table(title, "of", "kernel", "known", right=("TFLOP/s",))
    for use, rate in arch.rates.items():
        found = sorted({f"{flops / 1e12:.3g}" for _, flops in rate.by_rows(board.chip)}, key=float)
        table.add_row(use, rate.kernel, rate.how, " to ".join(found[:: max(1, len(found) - 1)]))
    return table


def _weights(inspection: Inspection) -> Table:
    table = named_table("Weights", "model", "module", "format", right=("parameters", "size"))
    for group in inspection.weights:
        table.add_row(group.model, group.module, group.format, _count(group.parameters), size(group.bytes))
    return table


def _count(parameters: int) -> str:
    """A number of parameters in words, such as 17.11 G."""
    unit, name = (1e9, "G") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / unit:,.2f} {name}"


def _cycle(inspection: Inspection) -> Table:
    title = f"One cycle at {inspection.context:,} tokens, block {inspection.block_size}"
    table = named_table(title, "what is moved", right=("size", "ms at least"))
    for part in fields(inspection.cycle):
        if moved := getattr(inspection.cycle, part.name):
            table.add_row(part.metadata["label"], size(moved), f"{inspection.board.milliseconds(moved):.3f}")
    table.add_section()
    table.add_row("cycle", size(inspection.cycle_bytes), f"{inspection.floor_ms:.3f}")
    return table


def _by_drafts(inspection: Inspection) -> Table:
    title = "Cycles by drafts, if rows chose experts uniformly and independently: at most"
    right = ("experts a layer", "verify MB", "cycle MB", "floor ms", "pays above accept length")
    table, milliseconds = named_table(title, "drafts", right=right), inspection.board.milliseconds
    plain = inspection.by_drafts[0].cycle_bytes
    for each in inspection.by_drafts:
        sizes = f"{each.verify_bytes / 1e6:,.0f}", f"{each.cycle_bytes / 1e6:,.0f}"
        floor, least = f"{milliseconds(each.cycle_bytes):.2f}", f"{each.cycle_bytes / plain:.2f}"
        table.add_row(str(each.drafts), f"{each.experts:.1f}", *sizes, floor, least)
    return table


def _memory(inspection: Inspection) -> Table:
    lanes = inspection.by_lanes.lanes
    each = f", {lanes} lanes" if lanes > 1 else ""
    title = f"Memory for {inspection.max_context:,} tokens of context{each}"
    table = named_table(title, "what is held", right=("size",))
    for part in fields(inspection.memory):
        if held := getattr(inspection.memory, part.name):
            table.add_row(part.metadata["label"], size(held))
    table.add_section()
    table.add_row("total", size(inspection.total_bytes))
    table.add_row("set aside: Linux, driver, CUDA, this program", size(SYSTEM_BYTES))
    table.add_row(f"memory of {inspection.board.title}", size(inspection.board.memory_bytes))
    table.add_row("free" if inspection.free_bytes >= 0 else "missing", size(abs(inspection.free_bytes)))
    return table


def _summary(inspection: Inspection, *, joint: bool) -> Text:
    board = inspection.board
    chunk_ms = inspection.prefill_chunk_ms
    estimate = "" if chunk_ms is None else f", about {chunk_ms:.3g} ms on SM {board.sm}"
    lines = [
        f"{board.title}: {board.memory_bandwidth_bytes_per_s / 1e9:g} GB/s peak, which floors stand on{_read(board)}",
        f"K/V per token ({inspection.kv_format}): {inspection.kv_bytes_per_token:,} B target,"
        f" {inspection.drafter_kv_bytes_per_token:,} B drafter; tape per row: {inspection.tape_bytes_per_row:,} B;"
        f" state: {inspection.state_bytes:,} B",
    ]
    if inspection.drafter_masks:
        lines += [
            f"floor: {inspection.floor_ms:.2f} ms a cycle, {inspection.plain_floor_ms:.2f} ms a token without drafter;"
            f" a drafter pays above an accept length of {inspection.break_even_accept_length:.2f}",
            f"drafter layers: {_masks(inspection.drafter_masks)}",
        ]
    else:
        lines.append(f"floor: {inspection.floor_ms:.2f} ms a token; no drafter")
    if inspection.tower is not None:
        lines.append(_tower(inspection.tower, board.sm))
    lines.append(f"prefill: at most {inspection.prefill_chunk} tokens a pass{estimate}")
    if joint or inspection.by_lanes.lanes > 1:
        lines += _lanes_summary(inspection)
    if inspection.free_bytes < 0:
        lines.append(_advice(inspection))
    return Text("\n".join(lines))


def _read(board: BoardProfile) -> str:
    """What was measured beside the peak."""
    if (measured := board.read_bandwidth_bytes_per_s) is None:
        return ""
    more = board.memory_bandwidth_bytes_per_s / measured - 1
    return f"; a kernel that only reads gets {measured / 1e9:g}, with which they are {more:.0%} longer"


def _tower(tower: TowerCosts, sm: int) -> str:
    """A tower and a picture in one line."""
    height, width = PICTURE
    took = "" if tower.milliseconds is None else f", about {tower.milliseconds:.3g} ms on SM {sm}"
    return (
        f"vision tower: {tower.parameters:,} parameters, {tower.bytes:,} B; a picture of {width} x {height} is "
        f"{tower.tokens} tokens, {tower.operations / 1e12:.3g} TFLOP{took}"
    )


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
