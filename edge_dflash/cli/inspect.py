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
from edge_dflash.board.archs import Arch, arch_of_sm, find_arch
from edge_dflash.board.profiles import SYSTEM_BYTES, BoardProfile, largest_board, load_board
from edge_dflash.builder.finish import finish_command
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.checks.footprint import PICTURE, TowerCosts
from edge_dflash.checks.inspect import Inspection, inspect_manifest, inspect_recipe
from edge_dflash.cli.build import find_recipe, given_drafter
from edge_dflash.cli.output import Json, emit_json, named_table, show, size
from edge_dflash.common.files import LARGE, directory, read_bytes
from edge_dflash.decode.backend import MOST_LANES
from edge_dflash.errors import BackendError, BundleError, RequestError
from edge_dflash.model.registry import read_pair
from edge_dflash.model.specs import DrafterLayerMask
from edge_dflash.weights.recipe import default_recipe, load_recipe

BOARDS = ", ".join(path.stem for path in sorted(directory("jetson").glob("*.yaml")))

DEFAULT_BOARD = "agx-thor"
_KERNELS = "kernels/*.cubin"  # in a bundle
MaxContext = Annotated[int | None, typer.Option(metavar="N", help="Tokens to keep room for; default: the recipe's.")]
Context = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens of context at which a cycle's bytes are counted.")
]
Lanes = Annotated[
    int | None, typer.Option(metavar="N", min=1, max=8, help="Sequences at once; default: BUNDLE's or the recipe's.")
]


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
    max_context: MaxContext = None,
    context: Context = None,
    lanes: Lanes = None,
    json: Json = False,
) -> None:
    """Print memory, bytes per cycle and the bandwidth floor of a bundle, or of checkpoints that are yet to be built.

    Give BUNDLE, or --target and --drafter (their config.json is enough, weights are not read).

    2 GB of the board are set aside: about 1 for Linux and its services without a desktop, about 1 for the driver, the
    CUDA context and this program. What else the robot runs comes on top.

    --lanes N shows what N sequences hold, how many of that context the board has room for, and the floor of joint
    cycles of 1, 2, 4 and 8 lanes by their drafts: every weight is read once for all, the state once a lane.

    JSON keys: verify_bytes, draft_bytes (drafter_bytes + lm_head_bytes), kv_bytes_per_token,
    drafter_kv_bytes_per_token, tape_bytes_per_row, state_bytes, cycle_weight_bytes, cycle_bytes, total_bytes,
    system_bytes (set aside), free_bytes, fits, longest_context (that fits; 0: none), verify_floor_ms, draft_floor_ms,
    plain_floor_ms, floor_ms, break_even_accept_length, architecture, block_size, context, max_context, prefill_chunk,
    prefill_chunk_ms (an estimate), kv_format, drafter_masks (bidirectional and window of each drafter layer), rates (of
    estimates: use, kernel, how, where, by_rows: rows of a pass, 0 for any, and FLOP/s), and the breakdowns cycle,
    memory, weights, board, by_drafts (of a target with experts: drafts, experts, verify_bytes, cycle_bytes), lanes
    (lanes, most (that fit; 0: none), free_rows (of a verify that reading the weights hides; null where the board's rate
    is not known), accept_length, parts (what, one, all), cycles (lanes, drafts, rows, experts, bytes, memory_ms,
    product_ms, floor_ms, tokens_per_second, tokens_per_second_each)), tower (of a target that sees: picture (height and
    width of the one costed), parameters, bytes, patches, tokens, operations, milliseconds; else
    null). Of BUNDLE also: backend (the one that runs it), backends (aboard), trial (what build --finish measured of
    them), arch, kernels (compilation units with kernels, registers, shared_bytes, stack_bytes).
    """
    if bundle is not None:
        if target or drafter or recipe or max_context is not None:
            raise RequestError(
                "a bundle has its own models, recipe and sizes; give either BUNDLE or --target and --drafter"
            )
        _show_bundle(bundle, board, context, lanes, json)
        return
    if target is None:
        raise RequestError("give BUNDLE, or --target and --drafter with the directories of the two config.json")
    pair = read_pair(target, given_drafter(drafter))
    chosen = load_recipe(find_recipe(recipe)) if recipe is not None else default_recipe()
    result = inspect_recipe(
        pair, chosen, board=load_board(board or DEFAULT_BOARD), max_context=max_context, context=context, lanes=lanes
    )
    if json:
        emit_json(result.to_json())
    else:
        show(render(result, joint=lanes is not None))


def _show_bundle(bundle: Path, board: str | None, context: int | None, lanes: int | None, json: bool) -> None:
    manifest = read_manifest(bundle)
    profile = load_board(board) if board else largest_board(find_arch(manifest.arch).sm) or load_board(DEFAULT_BOARD)
    result = inspect_manifest(manifest, board=profile, context=context, lanes=lanes)
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
    show(render(result, joint=lanes is not None))
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
