"""``edge-dflash inspect``: what a pair costs on a board, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from edge_dflash.backends.cuda.compile import kernel_use
from edge_dflash.board.archs import find_arch
from edge_dflash.board.profiles import largest_board, load_board
from edge_dflash.builder.finish import finish_command
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.checks.inspect import inspect_manifest, inspect_recipe
from edge_dflash.cli.build import find_recipe, given_drafter
from edge_dflash.cli.inspect_tables import render
from edge_dflash.cli.output import Json, emit_json, named_table, show
from edge_dflash.common.files import LARGE, directory, read_bytes
from edge_dflash.errors import BackendError, BundleError, RequestError
from edge_dflash.model.registry import read_pair
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
