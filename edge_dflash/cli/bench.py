"""``edge-dflash bench``: how fast a pair runs here, against how fast the memory can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge_dflash.bench.device import CUBINS
from edge_dflash.bench.provenance import append, check_record
from edge_dflash.bench.random_pair import pair_names
from edge_dflash.bench.result import BenchResult, PassTime, svg
from edge_dflash.bench.subjects import bench_bundle, bench_synthetic
from edge_dflash.bench.workload import PROFILES, Workload, reached
from edge_dflash.checks.footprint import Traffic
from edge_dflash.cli.output import Columns, emit_json, say, show, tabled
from edge_dflash.cli.prompts import bench_prompts
from edge_dflash.cli.usage import opt, switch
from edge_dflash.common.files import check_place, check_writable, write_whole
from edge_dflash.decode.shape import MOST_LANES
from edge_dflash.errors import RequestError
from edge_dflash.model.registry import NO_DRAFTER
from edge_dflash.weights.layout import Format

KINDS = get_args(Format)
Synthetic = Annotated[
    str | None, opt("NAME", f"Instead: random weights in the dimensions of {', '.join(pair_names())}.")
]
Length = Annotated[float | None, opt("X", "Force this mean accept length; default: the drafter's own, 5 if synthetic.")]
Acceptance = Annotated[str | None, opt("NAME", f"Force a profile of acceptance by position: {', '.join(PROFILES)}.")]
Correlation = Annotated[
    float | None, opt("X", "Force the experts of a synthetic pair: 0, tokens choose independently, to 1, all the same.")
]
Prompts = Annotated[
    Path | None, opt("FILE", "JSONL of prompts, as of verify; default: the demo pair's tasks for it, else calib/.")
]
Cubins = Annotated[Path | None, opt("DIR", "Where compiled kernels are kept; default: ~/.cache/edge-dflash.")]
Commit = Annotated[str | None, opt("ID", "Commit to record for a copy of the sources that git does not know.")]


def bench(
    bundle: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="Directory that a build made.")] = None,
    synthetic: Synthetic = None,
    weights: Annotated[str | None, opt("FORMAT", "Of --synthetic: nvfp4 (default), fp8 or bf16.")] = None,
    accept_length: Length = None,
    acceptance: Acceptance = None,
    routing_correlation: Correlation = None,
    context: Annotated[int, opt("N", "Committed tokens at which cycles are timed.", min=1)] = 512,
    tokens: Annotated[int, opt("N", "Tokens to generate for each way of decoding.", min=2)] = 256,
    prompts: Prompts = None,
    prefill: Annotated[str, opt("N,N", "Prompt lengths for the time to the first token.")] = "128,2048,8192",
    contexts: Annotated[str, opt("N,N", "More contexts at which a cycle is timed, such as 2048,32768.")] = "",
    drafter: Annotated[str | None, opt("none", "Time BUNDLE without its drafter.")] = None,
    lanes: Annotated[str, opt("N,N", "Numbers of requests to time at once, such as 1,2,4,8.")] = "",
    profile: Annotated[bool, switch("--profile", "Time every step of one cycle.")] = False,
    cubins: Cubins = None,
    plot: Annotated[Path | None, opt("FILE", "Write a drawing (SVG) to this file.")] = None,
    record: Annotated[Path | None, opt("FILE", "Add the result to this JSON file.")] = None,
    commit: Commit = None,
    json: Annotated[bool, switch("--json", "One JSON object in place of the tables.")] = False,
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
    _check_files(cubins, plot, record)
    prompt, more, many = lengths(prefill, "--prefill"), lengths(contexts, "--contexts"), lengths(lanes, "--lanes")
    if many and many[-1] > MOST_LANES:
        raise RequestError(f"--lanes names {many[-1]}; there are 1 to {MOST_LANES} lanes")
    work = Workload(context, tokens, prompt, more, accept_length, profile, acceptance, routing_correlation, many)
    kind = _checked(bundle, synthetic, weights, prompts, drafter, work)
    if bundle is None:
        result = bench_synthetic(synthetic or "", kind, work, cubins or CUBINS, say)
    else:
        asked = partial(bench_prompts, bundle, max_new_tokens=tokens, file=prompts)
        result = bench_bundle(bundle, asked, work, cubins or CUBINS, say, drafter=drafter is None)
    if commit is not None:
        result = replace(result, machine={**result.machine, "commit": commit})
    _report(result, plot, record, json)


def _report(result: BenchResult, plot: Path | None, record: Path | None, json: bool) -> None:
    """Print, draw and record what was measured."""
    found = result.to_json()
    if json:
        emit_json(found)
    else:
        show(render(result))
    if plot is not None:
        write_whole(plot, svg(result).encode())
        say(f"drawing: {plot}")
    if record is not None:
        append(record, found)
        say(f"recorded: {record}")


def _checked(
    bundle: Path | None,
    synthetic: str | None,
    weights: str | None,
    prompts: Path | None,
    drafter: str | None,
    work: Workload,
) -> Format:
    """Format of a synthetic pair's weights. Raises RequestError for options that do not go together."""
    refused = {
        "give BUNDLE or --synthetic NAME": (bundle is None) == (synthetic is None),
        "a bundle has its own weights; --weights belongs to --synthetic": bundle and weights is not None,
        "a synthetic pair decodes random ids; --prompts belongs to BUNDLE": synthetic is not None and prompts,
        f"--drafter is {drafter!r}; BUNDLE has its own drafter, and {NO_DRAFTER} times it without": (
            drafter not in (None, NO_DRAFTER) or (drafter and bundle is None)
        ),
        f"--weights is {weights!r}; give one of {', '.join(KINDS)}": weights is not None and weights not in KINDS,
        "--accept-length and --acceptance both force what is accepted; give one of them": (
            work.accept_length is not None and work.acceptance is not None
        ),
        "a bundle's own router is timed; --routing-correlation belongs to --synthetic": (
            bundle and work.correlation is not None
        ),
    }
    for message, wrong in refused.items():
        if wrong:
            raise RequestError(message)
    if work.acceptance is not None:
        reached(work.acceptance, 1)
    return cast("Format", weights or KINDS[0])


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


def lengths(text: str, option: str) -> tuple[int, ...]:
    """Token counts from ``128,2048``. Raises RequestError naming the piece that is none."""
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    for piece in pieces:
        if not piece.isascii() or not piece.isdigit() or not 0 < int(piece) <= 1 << 20:
            raise RequestError(f"{piece[:24]!r} in {option} is no number of tokens; give some such as 128,2048")
    return tuple(sorted({int(piece) for piece in pieces}))


def render(result: BenchResult) -> RenderableType:
    """Tables of decoding, of a cycle's parts, of prompts, contexts, steps and memory."""
    parts: list[RenderableType] = [_head(result), _decoding(result), _host(result), _cycle(result)]
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
        mhz = f"{clocks.get('sm_mhz', 0):.0f} MHz, memory {clocks.get('memory_mhz', 0):.0f} MHz"
        lines.append(f"driver {clocks.get('driver')}, {mhz}{power}")
    if "board" in machine:
        lines.append(f"{machine['board']}, power mode {machine.get('power_mode', 'unknown')}")
    if result.read_bandwidth is not None:
        lines.append(f"read bandwidth {result.read_bandwidth / 1e12:.3f} TB/s, measured in this run")
    if result.matmul_rate is not None:
        lines.append(f"BF16 matrix product {result.matmul_rate / 1e12:.0f} TFLOP/s ({result.matmul_by})")
    version, commit = machine.get("edge_dflash"), machine.get("commit", "unknown")
    return Text("\n".join([*lines, f"{machine.get('date')}, edge-dflash {version}, commit {commit}"]) + "\n")


def _decoding(result: BenchResult) -> Table:
    forced = ", accept length forced" if result.forced_accept_length is not None else ""
    forced = f", acceptance as {result.forced_acceptance}" if result.forced_acceptance else forced
    ways = {
        "plain, Planner.plan": (result.plain, result.plain_floor_ms),
        "speculative, Planner.plan": (result.speculative, result.cycle.whole.floor_ms),
        "speculative, Planner.plan, drafts chosen": (result.chosen, None),
        "speculative, Planner.plan, schema": (result.schema, result.cycle.whole.floor_ms),
        "raw cycles: backend.cycle, commit": (result.raw, result.cycle.whole.floor_ms),
    }
    columns: Columns = {
        "": (lambda way: way[0], ""),
        "tokens/s": (lambda way: way[1].tokens_per_second, ".1f"),
        "accept length": (lambda way: way[1].accept_length, ".2f"),
        "cycles": (lambda way: way[1].cycles, "d"),
        "ms a cycle": (lambda way: way[1].ms, ".3f"),
        "floor": (lambda way: way[2], ".3f"),
        "x floor": (lambda way: way[1].ms / way[2] if way[2] else None, ".2f"),
    }
    if result.speculative.joules is not None:
        columns["joules a plan"] = (lambda way: way[1].joules, ".1f")
    found = [(name, way, floor) for name, (way, floor) in ways.items() if way is not None]
    return tabled("Decoding, wall clock from the first token on" + forced, found, columns)


def _host(result: BenchResult) -> Text:
    """What the caller pays beyond the backend's cycle, what was asked, and the first work after loading."""
    cold, chosen, schema = result.cold, result.chosen, result.schema
    lines = [
        f"host time a cycle: {result.host_ms:z.3f} ms, {result.host_ms / result.raw.ms:z.1%} of the raw cycle "
        f"(speculative minus raw{'; less than the noise here' if result.host_ms < 0 else ''})"
    ]
    if schema is not None:
        more = schema.ms / result.speculative.ms - 1
        replaced = f"{schema.replaced:.1%} of the drafts were replaced by the grammar"
        lines.append(f"schema: {schema.schema}; cycles take {more:+z.1%}, {replaced}")
    if chosen is not None:
        lines.append(f"drafts chosen by measurement: mostly {chosen.usual}, {chosen.drafts:.1f} on average")
    if result.routing_correlation is not None:
        lines.append(f"experts of verified rows are forced, correlation of rows {result.routing_correlation:g}")
    lines.append(f"prompts: {result.prompts}\n")
    first = f"first prompt of {cold.prefill_tokens} tokens {cold.prefill_ms:.1f} ms"
    steady = f"first cycle {cold.cycle_ms:.3f} ms ({cold.over_steady:.2f} x steady)"
    return Text("\n".join([*lines, f"cold: load {cold.load_seconds:.1f} s, {first}, {steady}\n"]))


def _pass(get: Callable[[Any], PassTime]) -> Columns:
    """Columns of a pass or a cycle against its floor."""
    return {
        "ms": (lambda row: get(row).ms, ".3f"),
        "MB": (lambda row: get(row).bytes, ",.1f", 1e6),
        "floor ms": (lambda row: get(row).floor_ms, ".3f"),
        "x floor": (lambda row: get(row).over_floor, ".2f"),
        "TB/s": (lambda row: get(row).rate, ".2f", 1e12),
    }


def _cycle(result: BenchResult) -> Table:
    cycle = result.cycle
    parts = [
        ("propose", cycle.propose, _traffic(cycle.propose_traffic)),
        ("verify", cycle.verify, _traffic(cycle.verify_traffic)),
        ("accept, commit, launch, read back", PassTime(cycle.rest_ms), "-"),
        ("cycle", cycle.whole, ""),
    ]
    columns: Columns = {"part": ("0", ""), **_pass(itemgetter(1)), "of which, MB": ("2", "")}
    title = f"One steady cycle at {cycle.context:,} tokens, block {result.block_size}"
    return tabled(title, parts, columns, sections=(3,))


def _prefill(result: BenchResult) -> Table:
    columns: Columns = {
        "prompt": ("tokens", ",d"),
        "ms": ("ms", ".1f"),
        "tokens/s": (lambda row: row.tokens / row.ms * 1e3, ",.0f"),
        "TFLOP/s": ("operations_per_second", ".0f", 1e12),
        "of matrix rate": ("share", ".0%"),
    }
    return tabled("Time to the first token", result.prefill, columns)


def _drafts(result: BenchResult) -> Table:
    plain = next(iter(result.drafts_ms.values()))
    columns: Columns = {"drafts": ("0", ""), "ms": ("1", ".3f"), "of plain": (lambda row: row[1] / plain, ".2f")}
    return tabled("Cycle by the drafts that it verifies, empty context", list(result.drafts_ms.items()), columns)


def _by_drafts(result: BenchResult) -> Table:
    part = _pass(attrgetter("verify"))
    columns: Columns = {
        "drafts": ("drafts", "d"),
        "cycle ms": ("ms", ".3f"),
        "of plain": (lambda row: row.ms / result.by_drafts[0].ms, ".2f"),
        "verify ms": part["ms"],
        "experts": ("experts", ".1f"),
        **{name: part[name] for name in ("MB", "floor ms", "x floor")},
        "tokens/s": ("tokens_per_second", ".1f"),
    }
    return tabled(f"Cycle by drafts at {result.context:,} tokens, bytes of the verify", result.by_drafts, columns)


def _contexts(result: BenchResult) -> Table:
    columns: Columns = {
        "tokens": ("context", ",d"),
        **_pass(attrgetter("whole")),
        "K/V, MB": (lambda row: row.verify_traffic and row.propose_traffic.kv + row.verify_traffic.kv, ",.1f", 1e6),
    }
    return tabled("Cycle by context", (result.cycle, *result.contexts), columns)


def _lanes(result: BenchResult) -> Table:
    part, one = _pass(attrgetter("cycle")), result.lanes[0].tokens_per_second / result.lanes[0].lanes
    columns: Columns = {
        "lanes": ("lanes", "d"),
        "rows": ("rows", ".1f"),
        "ms a cycle": part["ms"],
        "floor ms": part["floor ms"],
        "x floor": part["x floor"],
        "accept length": ("accept_length", ".2f"),
        "tokens/s": ("tokens_per_second", ".1f"),
        "of one lane's": (lambda load: load.tokens_per_second / one if one else None, ".2f"),
        "of each": ("tokens_per_second_each", ".1f"),
    }
    return tabled("Requests at once, joint cycles", result.lanes, columns)


def _company(result: BenchResult) -> Table:
    found = result.company
    assert found is not None
    title = f"One request while others come and go, {found.lanes} lanes: ms between two increments"
    rows = [
        ("alone", found.alone_p50_ms, found.alone_p99_ms),
        ("in company", found.beside_p50_ms, found.beside_p99_ms),
        (f"most beyond {found.deadlines} deadlines", "", found.overshoot_ms),
    ]
    return tabled(title, rows, {"": ("0", ""), "p50": ("1", ".3f"), "p99": ("2", ".3f")}, sections=(2,))


def _profile(result: BenchResult) -> Table:
    columns: Columns = {
        "step": ("name", ""),
        "times": ("count", "d"),
        "ms": ("ms", ".3f"),
        "MB": ("bytes", ",.1f", 1e6),
        "TB/s": (lambda step: step.bytes / step.ms if step.bytes else None, ".2f", 1e9),
    }
    table = tabled("Steps of a cycle, one after the other", result.profile, columns)
    table.add_section()
    table.add_row("all", "", f"{sum(step.ms for step in result.profile):.3f}", "", "")
    return table


def _memory(result: BenchResult) -> Table:
    memory = result.memory
    assert memory is not None
    held = sorted(memory.budget.items(), key=lambda entry: -entry[1])
    table = tabled("Device memory", held, {"what is held": ("0", ""), "MB": ("1", ",.1f", 1e6)})
    table.add_section()
    table.add_row("allocated", f"{memory.allocated / 1e6:,.1f}")
    table.add_row("used on the device, code and graphs included", f"{memory.device_used / 1e6:,.1f}")
    table.add_row("of the device", f"{memory.device_total / 1e6:,.1f}")
    table.add_row("allocations after loading", str(memory.allocations_after_load))
    return table


def _traffic(traffic: Traffic | None) -> str:
    if traffic is None:
        return "-"
    named = {"experts": traffic.experts, "walk": traffic.walk, "K/V": traffic.kv, "state": traffic.state}
    parts = {**traffic.weights, **named, "tape": traffic.tape}
    return ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in parts.items() if size >= 5e5)
