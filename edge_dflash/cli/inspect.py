"""``edge-dflash inspect``: what a pair costs on a board, before anything is loaded."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

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
from edge_dflash.checks.footprint import TowerCosts, labelled
from edge_dflash.checks.inspect import Inspection, LanePart, inspect_manifest, inspect_recipe
from edge_dflash.cli.build import find_recipe, given_drafter
from edge_dflash.cli.output import Columns, Json, emit_json, named_table, show, size, tabled
from edge_dflash.cli.quality import quality_table
from edge_dflash.cli.usage import opt
from edge_dflash.common.files import LARGE, directory, read_bytes
from edge_dflash.common.tables import encode
from edge_dflash.decode.shape import MOST_LANES
from edge_dflash.errors import BackendError, BundleError, RequestError
from edge_dflash.model.registry import read_pair
from edge_dflash.model.specs import DrafterLayerMask
from edge_dflash.quality.report import Quality, read_quality
from edge_dflash.weights.recipe import default_recipe, load_recipe

BOARDS = ", ".join(path.stem for path in sorted(directory("jetson").glob("*.yaml")))

DEFAULT_BOARD = "agx-thor"
_KERNELS = "kernels/*.cubin"  # in a bundle
Drafter = Annotated[Path | None, opt("DIR", "Directory with the drafter's config.json; none: plain decoding.")]
Board = Annotated[str | None, opt("NAME", f"One of {BOARDS}, or an arch; default: by BUNDLE's arch, else agx-thor.")]
Lanes = Annotated[int | None, opt("N", "Sequences at once; default: BUNDLE's or the recipe's.", min=1, max=8)]


def inspect(
    bundle: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="Directory that a build made.")] = None,
    target: Annotated[Path | None, opt("DIR", "Directory with the target's config.json.")] = None,
    drafter: Drafter = None,
    recipe: Annotated[Path | None, opt("NAME|FILE", "A shipped recipe (a wrong name lists them), or a file.")] = None,
    board: Board = None,
    max_context: Annotated[int | None, opt("N", "Tokens to keep room for; default: the recipe's.")] = None,
    context: Annotated[int | None, opt("N", "Tokens of context at which a cycle's bytes are counted.")] = None,
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
    width of the one costed), parameters, bytes, patches, tokens, operations, milliseconds; else null). Of BUNDLE also:
    backend (the one that runs it), backends (aboard), trial (what build --finish measured of them), arch, rounding (by,
    rounded and kept weights, tokens; null: max), quality (docs/quality.md; null: not measured), kernels (units with
    kernels, registers, shared_bytes, stack_bytes).
    """
    own = {"--target": target, "--drafter": drafter, "--recipe": recipe, "--max-context": max_context}
    if bundle is not None and (named := [name for name, value in own.items() if value is not None]):
        raise RequestError(f"{', '.join(named)}: a bundle has its own models and sizes; give either it or these")
    built: dict[str, Any] = {}
    if bundle is not None:
        manifest = read_manifest(bundle)
        profile = load_board(board) if board else largest_board(find_arch(manifest.arch).sm)
        result = inspect_manifest(manifest, board=profile or load_board(DEFAULT_BOARD), context=context, lanes=lanes)
        units = tuple(_unit(bundle / name) for name in sorted(fnmatch.filter(manifest.files, _KERNELS)))
        built = {name: getattr(manifest, name) for name in ("backend", "backends", "trial", "arch", "rounding")}
        built |= {"kernels": units, "quality": read_quality(bundle, manifest)}
    elif target is None:
        raise RequestError("give BUNDLE, or --target and --drafter with the directories of the two config.json")
    else:
        pair = read_pair(target, given_drafter(drafter))
        chosen = load_recipe(find_recipe(recipe)) if recipe is not None else default_recipe()
        profile = load_board(board or DEFAULT_BOARD)
        result = inspect_recipe(pair, chosen, board=profile, max_context=max_context, context=context, lanes=lanes)
    if json:
        emit_json(result.to_json() | encode(built))
        return
    show(render(result, joint=lanes is not None))
    if bundle is not None:
        _show_built(bundle, manifest, units, built["quality"])


def _show_built(bundle: Path, manifest: Manifest, units: tuple[UnitUse, ...], quality: Quality | None) -> None:
    if quality is not None:
        show(quality_table(quality, short=True))
    if units:
        columns: Columns = {
            "unit": ("unit", ""),
            "kernels": ("kernels", ",d"),
            "registers": ("registers", ",d"),
            "shared bytes": ("shared_bytes", ",d"),
            "spilled bytes": ("stack_bytes", ",d"),
        }
        there = [unit for unit in units if unit.kernels]  # a unit of another architecture has none
        show(tabled(f"Kernels for {manifest.arch}, largest of each unit", there, columns))
    print(f"built by {manifest.created_by} for {manifest.options}")
    if (use := manifest.rounding) is not None:
        weighted = f"weighted by {use.tokens:,} tokens" if use.tokens else "unweighted"
        others = " (drafter and experts by search)" if use.by == "compensated" else ""
        print(f"rounding: {use.rounded} weights by {use.by}{others}, {weighted}; {use.kept} as they came")
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


def _unit(file: Path) -> UnitUse:
    """Of a compiled unit. Raises BundleError for a damaged one."""
    try:
        uses = kernel_use(read_bytes(file, LARGE)).values()
    except OSError as error:
        raise BundleError(f"cannot read {file}: {error.strerror}; copy or build the bundle again") from None
    except BackendError as error:
        raise BundleError(f"{file}: {error}; copy or build the bundle again") from None
    of_kernels = zip(*((use.registers, use.shared_bytes, use.stack_bytes) for use in uses), strict=True)
    return UnitUse(file.stem, len(uses), *(tuple(map(max, of_kernels)) or (0, 0, 0)))


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
    every = LanePart("all", sum(part.one for part in costs.parts), sum(part.all for part in costs.parts))
    columns: Columns = {
        "what a lane holds": ("what", ""),
        "one": (lambda part: size(part.one), ""),
        f"{costs.lanes} of them": (lambda part: size(part.all), ""),
    }
    return tabled(title, (*costs.parts, every), columns, sections=(-1,))


def _joint(inspection: Inspection) -> Table:
    """What cycles of several lanes take at least."""
    cycles = inspection.by_lanes.cycles
    columns: Columns = {
        "lanes": ("lanes", "d"),
        "drafts": ("drafts", "d"),
        "rows": ("rows", "d"),
        **({"experts a layer": ("experts", ".1f")} if inspection.by_drafts else {}),
        "MB": ("bytes", ",.0f", 1e6),
        "memory ms": ("memory_ms", ".2f"),
        "products ms": ("product_ms", ".2f"),
        "floor ms": ("floor_ms", ".2f"),
        "tokens/s": ("tokens_per_second", ".1f"),
        "of each": ("tokens_per_second_each", ".1f"),
    }
    begun = [at for at, each in enumerate(cycles) if at and each.lanes != cycles[at - 1].lanes]
    title = f"Joint cycles at {inspection.context:,} tokens a lane, by arithmetic"
    return tabled(title, cycles, columns, sections=begun)


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
        unit, name = (1e9, "G") if group.parameters >= 1e9 else (1e6, "M")
        count = f"{group.parameters / unit:,.2f} {name}"
        table.add_row(group.model, group.module, group.format, count, size(group.bytes))
    return table


def _cycle(inspection: Inspection) -> Table:
    title = f"One cycle at {inspection.context:,} tokens, block {inspection.block_size}"
    parts = [*labelled(inspection.cycle), ("cycle", inspection.cycle_bytes)]
    columns: Columns = {
        "what is moved": ("0", ""),
        "size": (lambda part: size(part[1]), ""),
        "ms at least": (lambda part: inspection.board.milliseconds(part[1]), ".3f"),
    }
    return tabled(title, parts, columns, sections=(-1,))


def _by_drafts(inspection: Inspection) -> Table:
    title = "Cycles by drafts, if rows chose experts uniformly and independently: at most"
    columns: Columns = {
        "drafts": ("drafts", "d"),
        "experts a layer": ("experts", ".1f"),
        "verify MB": ("verify_bytes", ",.0f", 1e6),
        "cycle MB": ("cycle_bytes", ",.0f", 1e6),
        "floor ms": (lambda each: inspection.board.milliseconds(each.cycle_bytes), ".2f"),
        "pays above accept length": (lambda each: each.cycle_bytes / inspection.by_drafts[0].cycle_bytes, ".2f"),
    }
    return tabled(title, inspection.by_drafts, columns)


def _memory(inspection: Inspection) -> Table:
    lanes, board = inspection.by_lanes.lanes, inspection.board
    each = f", {lanes} lanes" if lanes > 1 else ""
    held = labelled(inspection.memory)
    rows = [
        *held,
        ("total", inspection.total_bytes),
        ("set aside: Linux, driver, CUDA, this program", SYSTEM_BYTES),
        (f"memory of {board.title}", board.memory_bytes),
        ("free" if inspection.free_bytes >= 0 else "missing", abs(inspection.free_bytes)),
    ]
    columns: Columns = {"what is held": ("0", ""), "size": (lambda row: size(row[1]), "")}
    title = f"Memory for {inspection.max_context:,} tokens of context{each}"
    return tabled(title, rows, columns, sections=(len(held),))


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
    height, width = tower.picture
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
