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

from edge_dflash.checks.bench import Workload
from edge_dflash.checks.bench_result import BenchResult, CycleTimes, PassTime, svg
from edge_dflash.checks.footprint import Traffic
from edge_dflash.checks.provenance import append, check_record
from edge_dflash.checks.random_pair import pair_names
from edge_dflash.checks.subjects import CUBINS, bench_bundle, bench_synthetic
from edge_dflash.cli.output import emit_json, named_table, say, show
from edge_dflash.cli.prompts import bench_prompts
from edge_dflash.errors import RequestError
from edge_dflash.model.registry import NO_DRAFTER
from edge_dflash.weights.layout import Format

KINDS = get_args(Format)


def bench(
    bundle: Annotated[Path | None, typer.Argument(metavar="[BUNDLE]", help="Directory that a build made.")] = None,
    synthetic: Annotated[
        str | None, typer.Option(help=f"Instead: random weights in the dimensions of {', '.join(pair_names())}.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Of --synthetic: nvfp4 (default), fp8 or bf16.")] = None,
    accept_length: Annotated[
        float | None, typer.Option(help="Force this mean accept length; default: the drafter's own, 5 if synthetic.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Committed tokens at which cycles are timed.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each way of decoding.")] = 256,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of prompts for BUNDLE, as verify takes it; default: see below.")
    ] = None,
    prefill: Annotated[str, typer.Option(help="Prompt lengths for the time to the first token.")] = "128,2048,8192",
    contexts: Annotated[str, typer.Option(help="More contexts at which a cycle is timed, such as 2048,32768.")] = "",
    drafter: Annotated[str | None, typer.Option(metavar="none", help="Time BUNDLE without its drafter.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Time every step of one cycle.")] = False,
    cubins: Annotated[
        Path | None, typer.Option(help="Where compiled kernels are kept; default: ~/.cache/edge-dflash.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a drawing (SVG) to this file.")] = None,
    record: Annotated[Path | None, typer.Option(help="Add the result to this JSON file.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit to record for a copy of the sources that git does not know.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the tables.")] = False,
) -> None:
    """Time a pair: plans as a caller gets them, the parts of a cycle, prompts, memory.

    Give BUNDLE, or --synthetic, which needs an NVIDIA GPU and no download. Decoding is timed through Planner.plan by
    the wall clock, free and under a JSON Schema; the same cycles called directly stand beside, and the difference is
    the host time a cycle. Each part of a cycle is compared with its floor: the bytes that it must read over the read
    bandwidth of the device, measured in the same run. A forced accept length replaces the comparison of drafts and
    choices on the device and changes nothing else. The reference backend is timed without floors.

    Without --prompts, the demo pair plans its held-out tasks, other bundles calib/robot_planning.jsonl.

    JSON keys: pair, backend, weights, kv, block_size, context, forced_accept_length, machine, read_bandwidth (bytes a
    second), matmul_rate (operations a second), matmul_by, prompts, plain and speculative (Planner.plan:
    tokens_per_second, accept_length, cycles, ms, joules of a plan or null), schema (the same under a schema, which it
    describes, and the share of drafts that the grammar replaced; null without tokenizer), raw (cycles called directly),
    host_ms (speculative minus raw), host_share (of raw), speed_up, plain_floor_ms, cycle (whole, propose, verify, each
    with ms, bytes, floor_ms; rest_ms, over_floor, the bytes by kind), cold (load_seconds, prefill_ms, cycle_ms,
    over_steady), prefill (tokens, ms, operations_per_second, share of matmul_rate), contexts (a cycle each), drafts_ms
    (a cycle by its drafts), memory (budget, allocated, device_used, device_total, allocations_after_load), profile.
    """
    kind = _checked(bundle, synthetic, weights, prompts, drafter)
    _check_files(plot, record)
    prompt, more = lengths(prefill, "--prefill"), lengths(contexts, "--contexts")
    work = Workload(context, tokens, prompt, more, accept_length, profile)
    if synthetic is not None:
        result = bench_synthetic(synthetic, kind, work, cubins or CUBINS, say)
    else:
        path = cast("Path", bundle)
        asked = partial(bench_prompts, path, max_new_tokens=tokens, file=prompts)
        result = bench_bundle(path, asked, work, cubins or CUBINS, say, drafter=drafter is None)
    if commit is not None:
        result = replace(result, machine={**result.machine, "commit": commit})
    _print(result, plot, record, json)


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


def _check_files(plot: Path | None, record: Path | None) -> None:
    """Raise RequestError, before any work, for files that cannot be written."""
    if plot is not None and not plot.parent.is_dir():
        raise RequestError(f"{plot.parent} is no directory; make it first or give another --plot")
    if record is not None:
        check_record(record)


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
        plot.write_text(svg(result), encoding="utf-8")
        say(f"drawing: {plot}")
    if record is not None:
        append(record, result.to_json())
        say(f"recorded: {record}")


def render(result: BenchResult) -> RenderableType:
    """Tables of decoding, of a cycle's parts, of prompts, contexts, steps and memory."""
    parts: list[RenderableType] = [_head(result), _decoding(result), _host(result), _cold(result), _cycle(result)]
    further: dict[Callable[[BenchResult], Table], object] = {_prefill: result.prefill, _drafts: result.drafts_ms}
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
    forced = result.forced_accept_length is not None
    title = "Decoding, wall clock from the first token on" + (", accept length forced" if forced else "")
    columns = ["tokens/s", "accept length", "cycles", "ms a cycle", "floor", "x floor"]
    known = result.speculative.joules is not None
    table = named_table(title, "", right=[*columns, *(["joules a plan"] if known else [])])
    for name, decode in (
        ("plain, Planner.plan", result.plain),
        ("speculative, Planner.plan", result.speculative),
        ("speculative, Planner.plan, schema", result.schema),
        ("raw cycles: backend.cycle, commit", result.raw),
    ):
        if decode is not None:
            floor = result.plain_floor_ms if decode is result.plain else result.cycle.whole.floor_ms
            part = PassTime(decode.ms, None, floor)
            row = [f"{decode.tokens_per_second:.1f}", f"{decode.accept_length:.2f}", str(decode.cycles)]
            row += [f"{part.ms:.3f}", _number(floor, ".3f"), _number(part.over_floor, ".2f")]
            table.add_row(name, *row, *([_number(decode.joules, ".1f")] if known else []))
    return table


def _host(result: BenchResult) -> Text:
    """What the caller pays beyond the backend's cycle, and what was asked."""
    lines = [
        f"host time a cycle: {result.host_ms:.3f} ms, {result.host_ms / result.raw.ms:.1%} of the raw cycle "
        f"(speculative minus raw{'; less than the noise here' if result.host_ms < 0 else ''})"
    ]
    if result.schema is not None:
        more = result.schema.ms / result.speculative.ms - 1
        lines.append(
            f"schema: {result.schema.schema}; cycles take {more:+.1%}, "
            f"{result.schema.replaced:.1%} of the drafts were replaced by the grammar"
        )
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


def _contexts(result: BenchResult) -> Table:
    table = named_table("Cycle by context", "tokens", right=("ms", "MB", "floor ms", "x floor", "TB/s", "K/V, MB"))
    for cycle in (result.cycle, *result.contexts):
        table.add_row(f"{cycle.context:,}", *_part(cycle.whole), _kv(cycle))
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
    parts = {**traffic.weights, "K/V": traffic.kv, "state": traffic.state, "tape": traffic.tape}
    return ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in parts.items() if size >= 5e5)


def _kv(cycle: CycleTimes) -> str:
    parts = [t.kv for t in (cycle.propose_traffic, cycle.verify_traffic) if t is not None]
    return f"{sum(parts) / 1e6:,.1f}" if parts else "-"


def _number(value: float | None, form: str, unit: float = 1) -> str:
    """A value in ``unit`` in the format ``form``; a dash for one that is not known."""
    return "-" if value is None else f"{value / unit:{form}}"
