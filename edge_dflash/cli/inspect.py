"""``edge-dflash inspect``: what a pair costs on a board, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, fields
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge_dflash.backends.cuda.compile import kernel_use
from edge_dflash.board.archs import find_arch
from edge_dflash.board.profiles import SYSTEM_BYTES, largest_board, load_board
from edge_dflash.builder.finish import finish_command
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.checks.inspect import Inspection, inspect_manifest, inspect_recipe
from edge_dflash.cli.build import find_recipe, given_drafter
from edge_dflash.cli.output import Json, emit_json, named_table, show
from edge_dflash.common.files import LARGE, directory, read_bytes
from edge_dflash.errors import BackendError, BundleError, RequestError
from edge_dflash.model.registry import read_pair
from edge_dflash.model.specs import DrafterLayerMask
from edge_dflash.weights.recipe import default_recipe, load_recipe

BOARDS = ", ".join(path.stem for path in sorted(directory("jetson").glob("*.yaml")))

DEFAULT_BOARD = "agx-thor"
_KERNELS = "kernels/*.cubin"  # in a bundle


def inspect(
    bundle: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="Directory that a build made.")] = None,
    target: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory with the target's config.json.")] = None,
    drafter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory with the drafter's config.json; none: plain decoding.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="NAME|FILE", help="A shipped recipe (a wrong name lists them), or a file.")
    ] = None,
    board: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"One of {BOARDS}, or an arch; default: by BUNDLE's arch, else agx-thor."),
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens to keep room for; default: the recipe's.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of context at which a cycle's bytes are counted.")
    ] = None,
    json: Json = False,
) -> None:
    """Print memory, bytes per cycle and the bandwidth floor of a bundle, or of checkpoints that are yet to be built.

    Give BUNDLE, or --target and --drafter (their config.json is enough, weights are not read).

    2 GB of the board are set aside: about 1 for Linux and its services without a desktop, about 1 for the driver, the
    CUDA context and this program. What else the robot runs comes on top.

    JSON keys: verify_bytes, draft_bytes (drafter_bytes + lm_head_bytes), kv_bytes_per_token,
    drafter_kv_bytes_per_token, tape_bytes_per_row, state_bytes, cycle_weight_bytes, cycle_bytes, total_bytes,
    system_bytes (set aside), free_bytes, fits, longest_context (that fits; 0: none), verify_floor_ms, draft_floor_ms,
    plain_floor_ms, floor_ms, break_even_accept_length, architecture, block_size, context, max_context, prefill_chunk,
    prefill_chunk_ms (an estimate), kv_format, drafter_masks (bidirectional and window of each drafter layer), and the
    breakdowns cycle, memory, weights, board, by_drafts (of a target with experts: drafts, experts, verify_bytes,
    cycle_bytes). Of BUNDLE also: backend (the one that runs it), backends (aboard), trial (what build --finish measured
    of them), arch, kernels (compilation units with kernels, registers, shared_bytes, stack_bytes).
    """
    if bundle is not None:
        if target or drafter or recipe or max_context is not None:
            raise RequestError(
                "a bundle has its own models, recipe and sizes; give either BUNDLE or --target and --drafter"
            )
        _show_bundle(bundle, board, context, json)
        return
    if target is None:
        raise RequestError("give BUNDLE, or --target and --drafter with the directories of the two config.json")
    pair = read_pair(target, given_drafter(drafter))
    chosen = load_recipe(find_recipe(recipe)) if recipe is not None else default_recipe()
    result = inspect_recipe(
        pair, chosen, board=load_board(board or DEFAULT_BOARD), max_context=max_context, context=context
    )
    if json:
        emit_json(result.to_json())
    else:
        show(render(result))


def _show_bundle(bundle: Path, board: str | None, context: int | None, json: bool) -> None:
    manifest = read_manifest(bundle)
    profile = load_board(board) if board else largest_board(find_arch(manifest.arch).sm) or load_board(DEFAULT_BOARD)
    result = inspect_manifest(manifest, board=profile, context=context)
    units = bundle_kernels(bundle, manifest)
    if json:
        built = {
            "backend": manifest.backend,
            "backends": list(manifest.backends),
            "trial": None if manifest.trial is None else asdict(manifest.trial),
            "arch": manifest.arch,
            "kernels": [asdict(unit) for unit in units],
        }
        emit_json({**result.to_json(), **built})
        return
    show(render(result))
    if units:
        show(kernels_table(units, manifest))
    print(f"built by {manifest.created_by} for {manifest.options}")
    if manifest.standby:
        print(_both(bundle, manifest))


def _both(bundle: Path, manifest: Manifest) -> str:
    """Which of two backends runs, and why."""
    if manifest.trial is not None:
        trial = manifest.trial
        work = f"{trial.cycles} cycles behind {trial.prompt_tokens} tokens on {trial.device}"
        failed = "".join(f"\n{name} failed: {why}" for name, why in trial.failed.items())
        return f"{manifest.backend} runs it: {trial.text} ({work}){failed}"
    plans = manifest.plans
    missing = f"{len(plans.deferred)} plans are yet to be built" if plans and plans.deferred else "nothing was timed"
    return f"{manifest.backend} runs it; {missing}: {finish_command(bundle)} on the board"


def render(inspection: Inspection) -> RenderableType:
    """Tables of weights, of a cycle's bytes with their least time, and of memory against the board's."""
    parts: list[RenderableType] = [_weights(inspection), _cycle(inspection)]
    if inspection.by_drafts:
        parts.append(_by_drafts(inspection))
    return Group(*parts, _memory(inspection), _summary(inspection))


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
    ]
    if inspection.drafter_masks:
        lines += [
            f"floor: {inspection.floor_ms:.2f} ms a cycle, {inspection.plain_floor_ms:.2f} ms a token without drafter;"
            f" a drafter pays above an accept length of {inspection.break_even_accept_length:.2f}",
            f"drafter layers: {_masks(inspection.drafter_masks)}",
        ]
    else:
        lines.append(f"floor: {inspection.floor_ms:.2f} ms a token; no drafter")
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
