"""A Result as tables for people. Knows no arithmetic beyond units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge_dflash.checks.bench_result import Cycle, Part, Result
from edge_dflash.checks.inspect_view import named_table
from edge_dflash.checks.traffic import Traffic


def render(result: Result) -> RenderableType:
    """Tables of decoding, of a cycle's parts, of prompts, contexts, steps and memory."""
    parts: list[RenderableType] = [_head(result), _decoding(result), _host(result), _cold(result), _cycle(result)]
    if result.prefill:
        parts.append(_prefill(result))
    if result.contexts:
        parts.append(_contexts(result))
    if result.profile:
        parts.append(_profile(result))
    if result.memory:
        parts.append(_memory(result))
    return Group(*parts)


def _head(result: Result) -> Text:
    machine: Mapping[str, Any] = result.machine
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


def _decoding(result: Result) -> Table:
    forced = result.forced_accept_length is not None
    title = "Decoding, wall clock from the first token on" + (", accept length forced" if forced else "")
    known = ("joules a plan",) if result.speculative.joules is not None else ()
    columns = ("tokens/s", "accept length", "cycles", "ms a cycle", "floor", "x floor", *known)
    table = named_table(title, "", right=columns)
    ways = [("plain, Planner.plan", result.plain), ("speculative, Planner.plan", result.speculative)]
    if result.schema is not None:
        ways.append(("speculative, Planner.plan, schema", result.schema))
    ways.append(("raw cycles: backend.cycle, commit", result.raw))
    for name, decode in ways:
        floor = result.plain_floor_ms if decode is result.plain else result.cycle.whole.floor_ms
        over = _ratio(decode.ms / floor) if floor else "-"
        row = (f"{decode.tokens_per_second:.1f}", f"{decode.accept_length:.2f}", str(decode.cycles), f"{decode.ms:.3f}")
        energy = "-" if decode.joules is None else f"{decode.joules:.1f}"
        table.add_row(name, *row, _ms(floor), over, *((energy,) if known else ()))
    return table


def _host(result: Result) -> Text:
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


def _cold(result: Result) -> Text:
    cold = result.cold
    return Text(
        f"cold: load {cold.load_seconds:.1f} s, first prompt of {cold.prefill_tokens} tokens {cold.prefill_ms:.1f} ms, "
        f"first cycle {cold.cycle_ms:.3f} ms ({cold.over_steady:.2f} x steady)\n"
    )


def _cycle(result: Result) -> Table:
    cycle = result.cycle
    title = f"One steady cycle at {cycle.context:,} tokens, block {result.block_size}"
    table = named_table(title, "part", right=("ms", "MB", "floor ms", "x floor", "TB/s", "of which, MB"))
    for name, part, traffic in (
        ("propose", cycle.propose, cycle.propose_traffic),
        ("verify", cycle.verify, cycle.verify_traffic),
    ):
        table.add_row(name, *_part(part), _traffic(traffic))
    table.add_row("accept, commit, launch, read back", f"{cycle.rest_ms:.3f}", *["-"] * 5)
    table.add_section()
    table.add_row("cycle", *_part(cycle.whole), "")
    return table


def _prefill(result: Result) -> Table:
    table = named_table("Time to the first token", "prompt", right=("ms", "tokens/s", "TFLOP/s", "of matrix rate"))
    for row in result.prefill:
        rate = "-" if row.operations_per_second is None else f"{row.operations_per_second / 1e12:.0f}"
        share = "-" if row.share is None else f"{row.share:.0%}"
        table.add_row(f"{row.tokens:,}", f"{row.ms:.1f}", f"{row.tokens / row.ms * 1e3:,.0f}", rate, share)
    return table


def _contexts(result: Result) -> Table:
    table = named_table("Cycle by context", "tokens", right=("ms", "MB", "floor ms", "x floor", "TB/s", "K/V, MB"))
    for cycle in (result.cycle, *result.contexts):
        table.add_row(f"{cycle.context:,}", *_part(cycle.whole), _kv(cycle))
    return table


def _profile(result: Result) -> Table:
    table = named_table("Steps of a cycle, one after the other", "step", right=("times", "ms", "MB", "TB/s"))
    for step in result.profile:
        rate = f"{step.bytes / step.ms / 1e9:.2f}" if step.bytes else "-"
        table.add_row(step.name, str(step.count), f"{step.ms:.3f}", f"{step.bytes / 1e6:,.1f}", rate)
    table.add_section()
    table.add_row("all", "", f"{sum(step.ms for step in result.profile):.3f}", "", "")
    return table


def _memory(result: Result) -> Table:
    memory = result.memory
    table = named_table("Device memory", "what is held", right=("MB",))
    if memory is None:
        return table
    for purpose, size in sorted(memory.budget.items(), key=lambda entry: -entry[1]):
        table.add_row(purpose, f"{size / 1e6:,.1f}")
    table.add_section()
    table.add_row("allocated", f"{memory.allocated / 1e6:,.1f}")
    table.add_row("used on the device, code and graphs included", f"{memory.device_used / 1e6:,.1f}")
    table.add_row("of the device", f"{memory.device_total / 1e6:,.1f}")
    table.add_row("allocations after loading", str(memory.allocations_after_load))
    return table


def _part(part: Part) -> tuple[str, ...]:
    rate = "-" if part.bytes is None else f"{part.bytes / part.ms / 1e9:.2f}"
    size = "-" if part.bytes is None else f"{part.bytes / 1e6:,.1f}"
    return f"{part.ms:.3f}", size, _ms(part.floor_ms), _ratio(part.over_floor), rate


def _traffic(traffic: Traffic | None) -> str:
    if traffic is None:
        return "-"
    parts = {**traffic.weights, "K/V": traffic.kv, "state": traffic.state, "tape": traffic.tape}
    return ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in parts.items() if size >= 5e5)


def _kv(cycle: Cycle) -> str:
    parts = [t.kv for t in (cycle.propose_traffic, cycle.verify_traffic) if t is not None]
    return f"{sum(parts) / 1e6:,.1f}" if parts else "-"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
