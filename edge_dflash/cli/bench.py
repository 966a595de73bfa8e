"""``edge-dflash bench``: how fast a pair runs here, against how fast the memory can be read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from edge_dflash.checks.bench import Workload
from edge_dflash.checks.bench_result import BenchResult, svg
from edge_dflash.checks.forcing import PROFILES, reached
from edge_dflash.checks.provenance import append, check_record
from edge_dflash.checks.random_pair import pair_names
from edge_dflash.checks.subjects import CUBINS, bench_bundle, bench_synthetic
from edge_dflash.cli.bench_tables import render
from edge_dflash.cli.output import emit_json, say, show
from edge_dflash.cli.prompts import bench_prompts
from edge_dflash.common.files import check_place, check_writable, write_whole
from edge_dflash.decode.backend import MOST_LANES
from edge_dflash.errors import RequestError
from edge_dflash.model.registry import NO_DRAFTER
from edge_dflash.weights.layout import Format

KINDS = get_args(Format)
Acceptance = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"Force a profile of acceptance by position: {', '.join(PROFILES)}.")
]
Correlation = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Force the experts of a synthetic pair: 0, tokens choose independently, to 1, all the same."
    ),
]
Synthetic = Annotated[
    str | None,
    typer.Option(metavar="NAME", help=f"Instead: random weights in the dimensions of {', '.join(pair_names())}."),
]
Length = Annotated[
    float | None,
    typer.Option(metavar="X", help="Force this mean accept length; default: the drafter's own, 5 if synthetic."),
]
Lanes = Annotated[str, typer.Option(metavar="N,N", help="Numbers of requests to time at once, such as 1,2,4,8.")]
Prompts = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSONL of prompts for BUNDLE, as verify takes it; default: see below."),
]
Cubins = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where compiled kernels are kept; default: ~/.cache/edge-dflash.")
]
Commit = Annotated[
    str | None, typer.Option(metavar="ID", help="Commit to record for a copy of the sources that git does not know.")
]

Weights = Annotated[str | None, typer.Option(metavar="FORMAT", help="Of --synthetic: nvfp4 (default), fp8 or bf16.")]
Given = Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="Directory that a build made.")]
Drafter = Annotated[str | None, typer.Option(metavar="none", help="Time BUNDLE without its drafter.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a drawing (SVG) to this file.")]
Record = Annotated[Path | None, typer.Option(metavar="FILE", help="Add the result to this JSON file.")]
Prefill = Annotated[str, typer.Option(metavar="N,N", help="Prompt lengths for the time to the first token.")]
Contexts = Annotated[
    str, typer.Option(metavar="N,N", help="More contexts at which a cycle is timed, such as 2048,32768.")
]


def bench(
    bundle: Given = None,
    synthetic: Synthetic = None,
    weights: Weights = None,
    accept_length: Length = None,
    acceptance: Acceptance = None,
    routing_correlation: Correlation = None,
    context: Annotated[int, typer.Option(metavar="N", min=1, help="Committed tokens at which cycles are timed.")] = 512,
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens to generate for each way of decoding.")] = 256,
    prompts: Prompts = None,
    prefill: Prefill = "128,2048,8192",
    contexts: Contexts = "",
    drafter: Drafter = None,
    lanes: Lanes = "",
    profile: Annotated[bool, typer.Option("--profile", help="Time every step of one cycle.")] = False,
    cubins: Cubins = None,
    plot: Plot = None,
    record: Record = None,
    commit: Commit = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the tables.")] = False,
) -> None:
    """Time a pair: plans as a caller gets them, the parts of a cycle, prompts, memory.

    Give BUNDLE, or --synthetic, which needs an NVIDIA GPU and no download. Decoding is timed through Planner.plan by
    the wall clock, free and under a JSON Schema; the same cycles called directly stand beside, and the difference is
    the host time a cycle. Each part of a cycle is compared with its floor: the bytes that it must read over the read
    bandwidth of the device, measured in the same run. A forced accept length replaces the comparison of drafts and
    choices on the device and changes nothing else; a profile of acceptance does so by position, and a planner that
    chooses the number of drafts by measurement is timed beside. The reference backend is timed without floors.

    Without --prompts, the demo pair plans its held-out tasks, other bundles calib/robot_planning.jsonl.

    JSON keys: pair, backend, weights, kv, block_size, context, forced_accept_length, machine, read_bandwidth (bytes a
    second), matmul_rate (operations a second), matmul_by, prompts, plain and speculative (Planner.plan:
    tokens_per_second, accept_length, cycles, ms, joules of a plan or null), schema (the same under a schema, which it
    describes, and the share of drafts that the grammar replaced; null without tokenizer), raw (cycles called directly),
    host_ms (speculative minus raw), host_share (of raw), speed_up, plain_floor_ms, cycle (whole, propose, verify, each
    with ms, bytes, floor_ms; rest_ms, over_floor, the bytes by kind), cold (load_seconds, prefill_ms, cycle_ms,
    over_steady), prefill (tokens, ms, operations_per_second, share of matmul_rate), contexts (a cycle each), drafts_ms
    (a cycle by its drafts), forced_acceptance, routing_correlation, chosen (Planner.plan with drafts chosen: drafts,
    usual), by_drafts (drafts, ms, verify, experts of a layer counted on the device, tokens_per_second by the profile),
    memory (budget, allocated, device_used, device_total, allocations_after_load), profile, lanes (requests at once:
    rows, cycle, accept_length, tokens_per_second of all and of each, over_floor), company (one request alone and beside
    others, ms between its increments; the most that it took beyond a deadline; null for one lane).
    """
    kind = _checked(bundle, synthetic, weights, prompts, drafter)
    _check_forced(bundle, accept_length, acceptance, routing_correlation)
    _check_files(cubins, plot, record)
    prompt, more, many = lengths(prefill, "--prefill"), lengths(contexts, "--contexts"), _lanes(lanes)
    work = Workload(context, tokens, prompt, more, accept_length, profile, acceptance, routing_correlation, many)
    if synthetic is not None:
        result = bench_synthetic(synthetic, kind, work, cubins or CUBINS, say)
    else:
        path = cast("Path", bundle)
        asked = partial(bench_prompts, path, max_new_tokens=tokens, file=prompts)
        result = bench_bundle(path, asked, work, cubins or CUBINS, say, drafter=drafter is None)
    if commit is not None:
        result = replace(result, machine={**result.machine, "commit": commit})
    _print(result, plot, record, json)


def _check_forced(
    bundle: Path | None, accept_length: float | None, acceptance: str | None, correlation: float | None
) -> None:
    """Raise RequestError for what cannot be forced together, or not of a bundle."""
    if accept_length is not None and acceptance is not None:
        raise RequestError("--accept-length and --acceptance both force what is accepted; give one of them")
    if bundle is not None and correlation is not None:
        raise RequestError("a bundle's own router is timed; --routing-correlation belongs to --synthetic")
    if acceptance is not None:
        reached(acceptance, 1)


def _checked(
    bundle: Path | None, synthetic: str | None, weights: str | None, prompts: Path | None, drafter: str | None
) -> Format:
    """Format of a synthetic pair's weights. Raises RequestError for options that do not go together."""
    if (bundle is None) == (synthetic is None):
        raise RequestError("give BUNDLE or --synthetic NAME")
    if bundle is not None and weights is not None:
        raise RequestError("a bundle has its own weights; --weights belongs to --synthetic")
    if synthetic is not None and prompts is not None:
        raise RequestError("a synthetic pair decodes random ids; --prompts belongs to BUNDLE")
    if drafter not in (None, NO_DRAFTER) or (drafter and bundle is None):
        raise RequestError(f"--drafter is {drafter!r}; BUNDLE has its own drafter, and {NO_DRAFTER} times it without")
    kind = weights or KINDS[0]
    if kind not in KINDS:
        raise RequestError(f"--weights is {kind!r}; give one of {', '.join(KINDS)}")
    return cast("Format", kind)


def _check_files(cubins: Path | None, plot: Path | None, record: Path | None) -> None:
    """Raise RequestError, before any work, for files that cannot be written."""
    if cubins is not None:
        check_place(cubins / "any.cubin", "--cubins")
    if plot is not None:
        if not plot.parent.is_dir():
            raise RequestError(f"{plot.parent} is no directory; make it first or give another --plot")
        check_writable(plot, "--plot")
    if record is not None:
        check_record(record)


def _lanes(text: str) -> tuple[int, ...]:
    """Numbers of lanes from ``1,2,4``. Raises RequestError for more than there can be."""
    found = lengths(text, "--lanes")
    if found and found[-1] > MOST_LANES:
        raise RequestError(f"--lanes names {found[-1]}; there are 1 to {MOST_LANES} lanes")
    return found


def lengths(text: str, option: str) -> tuple[int, ...]:
    """Token counts from ``128,2048``. Raises RequestError naming the piece that is none."""
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    for piece in pieces:
        if not piece.isascii() or not piece.isdigit() or not 0 < int(piece) <= 1 << 20:
            raise RequestError(f"{piece[:24]!r} in {option} is no number of tokens; give some such as 128,2048")
    return tuple(sorted({int(piece) for piece in pieces}))


def _print(result: BenchResult, plot: Path | None, record: Path | None, json: bool) -> None:
    if json:
        emit_json(result.to_json())
    else:
        show(render(result))
    if plot is not None:
        write_whole(plot, svg(result).encode())
        say(f"drawing: {plot}")
    if record is not None:
        append(record, result.to_json())
        say(f"recorded: {record}")
