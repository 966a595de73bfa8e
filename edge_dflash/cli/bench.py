"""``edge-dflash bench``: how fast a pair runs here, against how fast the memory can be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge_dflash.bench.provenance import append, check_record
from edge_dflash.bench.random_pair import pair_names
from edge_dflash.bench.result import BenchResult, CycleTimes, PassTime, svg
from edge_dflash.bench.subjects import CUBINS, bench_bundle, bench_synthetic
from edge_dflash.bench.workload import PROFILES, Workload, reached
from edge_dflash.checks.footprint import Traffic
from edge_dflash.cli.output import emit_json, named_table, say, show
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
    prompt, more, many = lengths(prefill, "--prefill"), lengths(contexts, "--contexts"), _lane_numbers(lanes)
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


def _lane_numbers(text: str) -> tuple[int, ...]:
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


def render(result: BenchResult) -> RenderableType:
    """Tables of decoding, of a cycle's parts, of prompts, contexts, steps and memory."""
    parts: list[RenderableType] = [_head(result), _decoding(result), _host(result), _cold(result), _cycle(result)]
    further: dict[Callable[[BenchResult], Table], object] = {_prefill: result.prefill, _drafts: result.drafts_ms}
    further |= {_by_drafts: result.by_drafts, _lanes: result.lanes, _company: result.company}
    further |= {_contexts: result.contexts, _profile: result.profile, _memory: result.memory}
    return Group(*parts, *(table(result) for table, there in further.items() if there))


def _head(result: BenchResult) -> Text:
    machine = result.machine
    clocks = machine.get("clocks") or {}
    lines = [f"{result.pair}; weights {result.weights}, keys and values {result.kv}, {result.backend} backend"]
    if "device" in machine:
        lines.append(f"{machine['device']}, SM {machine['sm']}, {machine['multiprocessors']} multiprocessors")
    if clocks:
        power = f", {clocks['watts']:.0f} of {clocks['watt_limit']:.0f} W" if "watts" in clocks else ""
        lines.append(
            f"driver {clocks.get('driver')}, {clocks.get('sm_mhz', 0):.0f} MHz, "
            f"memory {clocks.get('memory_mhz', 0):.0f} MHz{power}"
        )
    if "board" in machine:
        lines.append(f"{machine['board']}, power mode {machine.get('power_mode', 'unknown')}")
    if result.read_bandwidth is not None:
        lines.append(f"read bandwidth {result.read_bandwidth / 1e12:.3f} TB/s, measured in this run")
    if result.matmul_rate is not None:
        lines.append(f"BF16 matrix product {result.matmul_rate / 1e12:.0f} TFLOP/s ({result.matmul_by})")
    lines.append(
        f"{machine.get('date')}, edge-dflash {machine.get('edge_dflash')}, commit {machine.get('commit', 'unknown')}"
    )
    return Text("\n".join(lines) + "\n")


def _decoding(result: BenchResult) -> Table:
    forced = ", accept length forced" if result.forced_accept_length is not None else ""
    forced = f", acceptance as {result.forced_acceptance}" if result.forced_acceptance else forced
    title = "Decoding, wall clock from the first token on" + forced
    columns = ["tokens/s", "accept length", "cycles", "ms a cycle", "floor", "x floor"]
    known = result.speculative.joules is not None
    table = named_table(title, "", right=[*columns, *(["joules a plan"] if known else [])])
    for name, decode in (
        ("plain, Planner.plan", result.plain),
        ("speculative, Planner.plan", result.speculative),
        ("speculative, Planner.plan, drafts chosen", result.chosen),
        ("speculative, Planner.plan, schema", result.schema),
        ("raw cycles: backend.cycle, commit", result.raw),
    ):
        if decode is not None:
            floor = result.plain_floor_ms if decode is result.plain else result.cycle.whole.floor_ms
            floor = None if decode is result.chosen else floor
            part = PassTime(decode.ms, None, floor)
            row = [f"{decode.tokens_per_second:.1f}", f"{decode.accept_length:.2f}", str(decode.cycles)]
            row += [f"{part.ms:.3f}", _number(floor, ".3f"), _number(part.over_floor, ".2f")]
            table.add_row(name, *row, *([_number(decode.joules, ".1f")] if known else []))
    return table


def _host(result: BenchResult) -> Text:
    """What the caller pays beyond the backend's cycle, and what was asked."""
    lines = [
        f"host time a cycle: {result.host_ms:z.3f} ms, {result.host_ms / result.raw.ms:z.1%} of the raw cycle "
        f"(speculative minus raw{'; less than the noise here' if result.host_ms < 0 else ''})"
    ]
    if result.schema is not None:
        more = result.schema.ms / result.speculative.ms - 1
        lines.append(
            f"schema: {result.schema.schema}; cycles take {more:+z.1%}, "
            f"{result.schema.replaced:.1%} of the drafts were replaced by the grammar"
        )
    if result.chosen is not None:
        found = result.chosen
        lines.append(f"drafts chosen by measurement: mostly {found.usual}, {found.drafts:.1f} on average")
    if result.routing_correlation is not None:
        lines.append(f"experts of verified rows are forced, correlation of rows {result.routing_correlation:g}")
    return Text("\n".join([*lines, f"prompts: {result.prompts}"]) + "\n")


def _cold(result: BenchResult) -> Text:
    cold = result.cold
    return Text(
        f"cold: load {cold.load_seconds:.1f} s, first prompt of {cold.prefill_tokens} tokens {cold.prefill_ms:.1f} ms, "
        f"first cycle {cold.cycle_ms:.3f} ms ({cold.over_steady:.2f} x steady)\n"
    )


def _cycle(result: BenchResult) -> Table:
    cycle = result.cycle
    title = f"One steady cycle at {cycle.context:,} tokens, block {result.block_size}"
    table = named_table(title, "part", right=("ms", "MB", "floor ms", "x floor", "TB/s", "of which, MB"))
    table.add_row("propose", *_part(cycle.propose), _traffic(cycle.propose_traffic))
    table.add_row("verify", *_part(cycle.verify), _traffic(cycle.verify_traffic))
    table.add_row("accept, commit, launch, read back", f"{cycle.rest_ms:.3f}", *["-"] * 5)
    table.add_section()
    table.add_row("cycle", *_part(cycle.whole), "")
    return table


def _prefill(result: BenchResult) -> Table:
    table = named_table("Time to the first token", "prompt", right=("ms", "tokens/s", "TFLOP/s", "of matrix rate"))
    for row in result.prefill:
        rate = _number(row.operations_per_second, ".0f", 1e12)
        speed = f"{row.tokens / row.ms * 1e3:,.0f}"
        table.add_row(f"{row.tokens:,}", f"{row.ms:.1f}", speed, rate, _number(row.share, ".0%"))
    return table


def _drafts(result: BenchResult) -> Table:
    table = named_table("Cycle by the drafts that it verifies, empty context", "drafts", right=("ms", "of plain"))
    plain = next(iter(result.drafts_ms.values()))
    for drafts, ms in result.drafts_ms.items():
        table.add_row(drafts, f"{ms:.3f}", f"{ms / plain:.2f}")
    return table


def _by_drafts(result: BenchResult) -> Table:
    right = ("cycle ms", "of plain", "verify ms", "experts", "MB", "floor ms", "x floor", "tokens/s")
    table = named_table(f"Cycle by drafts at {result.context:,} tokens, bytes of the verify", "drafts", right=right)
    plain = result.by_drafts[0].ms
    for each in result.by_drafts:
        part, rate = each.verify, _number(each.tokens_per_second, ".1f")
        floors = _number(part.floor_ms, ".3f"), _number(part.over_floor, ".2f")
        times = f"{each.ms:.3f}", f"{each.ms / plain:.2f}", f"{part.ms:.3f}"
        needed = _number(each.experts, ".1f"), _number(part.bytes, ",.1f", 1e6)
        table.add_row(str(each.drafts), *times, *needed, *floors, rate)
    return table


def _contexts(result: BenchResult) -> Table:
    table = named_table("Cycle by context", "tokens", right=("ms", "MB", "floor ms", "x floor", "TB/s", "K/V, MB"))
    for cycle in (result.cycle, *result.contexts):
        table.add_row(f"{cycle.context:,}", *_part(cycle.whole), _kv(cycle))
    return table


def _lanes(result: BenchResult) -> Table:
    right = ("rows", "ms a cycle", "floor ms", "x floor", "accept length", "tokens/s", "of one lane's", "of each")
    table = named_table("Requests at once, joint cycles", "lanes", right=right)
    one = result.lanes[0].tokens_per_second / result.lanes[0].lanes
    for load in result.lanes:
        cycle, rate = load.cycle, load.tokens_per_second
        times = f"{cycle.ms:.3f}", _number(cycle.floor_ms, ".3f"), _number(cycle.over_floor, ".2f")
        rates = f"{rate:.1f}", f"{rate / one:.2f}" if one else "-", f"{load.tokens_per_second_each:.1f}"
        table.add_row(str(load.lanes), f"{load.rows:.1f}", *times, f"{load.accept_length:.2f}", *rates)
    return table


def _company(result: BenchResult) -> Table:
    assert result.company is not None
    found = result.company
    title = f"One request while others come and go, {found.lanes} lanes: ms between two increments"
    table = named_table(title, "", right=("p50", "p99"))
    table.add_row("alone", f"{found.alone_p50_ms:.3f}", f"{found.alone_p99_ms:.3f}")
    table.add_row("in company", f"{found.beside_p50_ms:.3f}", f"{found.beside_p99_ms:.3f}")
    table.add_section()
    table.add_row(f"most beyond {found.deadlines} deadlines", "", f"{found.overshoot_ms:.3f}")
    return table


def _profile(result: BenchResult) -> Table:
    table = named_table("Steps of a cycle, one after the other", "step", right=("times", "ms", "MB", "TB/s"))
    for step in result.profile:
        rate = f"{step.bytes / step.ms / 1e9:.2f}" if step.bytes else "-"
        table.add_row(step.name, str(step.count), f"{step.ms:.3f}", f"{step.bytes / 1e6:,.1f}", rate)
    table.add_section()
    table.add_row("all", "", f"{sum(step.ms for step in result.profile):.3f}", "", "")
    return table


def _memory(result: BenchResult) -> Table:
    table = named_table("Device memory", "what is held", right=("MB",))
    if (memory := result.memory) is not None:
        for purpose, size in sorted(memory.budget.items(), key=lambda entry: -entry[1]):
            table.add_row(purpose, f"{size / 1e6:,.1f}")
        table.add_section()
        table.add_row("allocated", f"{memory.allocated / 1e6:,.1f}")
        table.add_row("used on the device, code and graphs included", f"{memory.device_used / 1e6:,.1f}")
        table.add_row("of the device", f"{memory.device_total / 1e6:,.1f}")
        table.add_row("allocations after loading", str(memory.allocations_after_load))
    return table


def _part(part: PassTime) -> Sequence[str]:
    rate = None if part.bytes is None else part.bytes / part.ms
    floor, over = _number(part.floor_ms, ".3f"), _number(part.over_floor, ".2f")
    return f"{part.ms:.3f}", _number(part.bytes, ",.1f", 1e6), floor, over, _number(rate, ".2f", 1e9)


def _traffic(traffic: Traffic | None) -> str:
    if traffic is None:
        return "-"
    parts = {
        **traffic.weights,
        "experts": traffic.experts,
        "walk": traffic.walk,
        "K/V": traffic.kv,
        "state": traffic.state,
        "tape": traffic.tape,
    }
    return ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in parts.items() if size >= 5e5)


def _kv(cycle: CycleTimes) -> str:
    parts = [t.kv for t in (cycle.propose_traffic, cycle.verify_traffic) if t is not None]
    return f"{sum(parts) / 1e6:,.1f}" if parts else "-"


def _number(value: float | None, form: str, unit: float = 1) -> str:
    """A value in ``unit`` in the format ``form``; a dash for one that is not known."""
    return "-" if value is None else f"{value / unit:z{form}}"
