"""The tables of ``edge-dflash bench``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge_dflash.checks.bench_result import BenchResult, CycleTimes, PassTime
from edge_dflash.checks.footprint import Traffic
from edge_dflash.cli.output import named_table


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
