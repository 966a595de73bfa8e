"""``edge-dflash inspect``: what a pair costs on a board, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from edge_dflash.board.archs import find_arch
from edge_dflash.board.profiles import largest_board, load_board
from edge_dflash.builder.finish import finish_command
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.checks.inspect import inspect_manifest, inspect_recipe
from edge_dflash.checks.inspect_view import bundle_kernels, kernels_table, render
from edge_dflash.cli.output import emit_json, show
from edge_dflash.cli.recipes import find_recipe
from edge_dflash.common.files import directory
from edge_dflash.errors import RequestError
from edge_dflash.model.config import match_pair, read_drafter_spec, read_target_spec
from edge_dflash.weights.recipe import default_recipe, load_recipe

BOARDS = ", ".join(path.stem for path in sorted(directory("jetson").glob("*.yaml")))

DEFAULT_BOARD = "agx-thor"


def inspect(
    bundle: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="Directory that a build made.")] = None,
    target: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory with the target's config.json.")] = None,
    drafter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory with the drafter's config.json.")
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
    json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line of stdout.")] = False,
) -> None:
    """Print memory, bytes per cycle and the bandwidth floor of a bundle, or of checkpoints that are yet to be built.

    Give BUNDLE, or --target and --drafter (their config.json is enough, weights are not read).

    2 GB of the board are set aside: about 1 for Linux and its services without a desktop, about 1 for the driver, the
    CUDA context and this program. What else the robot runs comes on top.

    JSON keys: verify_bytes, draft_bytes (drafter_bytes + lm_head_bytes), kv_bytes_per_token,
    drafter_kv_bytes_per_token, tape_bytes_per_row, state_bytes, cycle_weight_bytes, cycle_bytes, total_bytes,
    system_bytes (set aside), free_bytes, fits, longest_context (that fits; 0: none), verify_floor_ms, draft_floor_ms,
    plain_floor_ms, floor_ms, break_even_accept_length, architecture, block_size, context, max_context, prefill_chunk,
    prefill_chunk_ms (an estimate), kv_format, drafter_masks (bidirectional and window of each
    drafter layer), and the breakdowns cycle, memory, weights, board. Of BUNDLE also: backend
    (the one that runs it), backends (aboard), trial (what build --finish measured of them), arch, kernels (compilation
    units with kernels, registers, shared_bytes, stack_bytes).
    """
    if bundle is not None:
        if target or drafter or recipe or max_context is not None:
            raise RequestError(
                "a bundle has its own models, recipe and sizes; give either BUNDLE or --target and --drafter"
            )
        _show_bundle(bundle, board, context, json)
        return
    if target is None or drafter is None:
        raise RequestError("give BUNDLE, or --target and --drafter with the directories of the two config.json")
    pair = match_pair(read_target_spec(target), read_drafter_spec(drafter))
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
