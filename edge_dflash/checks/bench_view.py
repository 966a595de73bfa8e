"""A benchmark's result for people: tables, and one SVG drawing. All arithmetic but that of units is the result's."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge_dflash.checks.bench_result import Cycle, Part, Result
from edge_dflash.checks.footprint import Traffic
from edge_dflash.checks.inspect_view import named_table


def render(result: Result) -> RenderableType:
    """Tables of decoding, of a cycle's parts, of prompts, contexts, steps and memory."""
    parts: list[RenderableType] = [_head(result), _decoding(result), _host(result), _cold(result), _cycle(result)]
    further = {_prefill: result.prefill, _contexts: result.contexts, _profile: result.profile, _memory: result.memory}
    return Group(*parts, *(table(result) for table, there in further.items() if there))


def _head(result: Result) -> Text:
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


def _decoding(result: Result) -> Table:
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
            part = Part(decode.ms, None, floor)
            row = [f"{decode.tokens_per_second:.1f}", f"{decode.accept_length:.2f}", str(decode.cycles)]
            row += [f"{part.ms:.3f}", _number(floor, ".3f"), _number(part.over_floor, ".2f")]
            table.add_row(name, *row, *([_number(decode.joules, ".1f")] if known else []))
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
    table.add_row("propose", *_part(cycle.propose), _traffic(cycle.propose_traffic))
    table.add_row("verify", *_part(cycle.verify), _traffic(cycle.verify_traffic))
    table.add_row("accept, commit, launch, read back", f"{cycle.rest_ms:.3f}", *["-"] * 5)
    table.add_section()
    table.add_row("cycle", *_part(cycle.whole), "")
    return table


def _prefill(result: Result) -> Table:
    table = named_table("Time to the first token", "prompt", right=("ms", "tokens/s", "TFLOP/s", "of matrix rate"))
    for row in result.prefill:
        rate = _number(row.operations_per_second, ".0f", 1e12)
        speed = f"{row.tokens / row.ms * 1e3:,.0f}"
        table.add_row(f"{row.tokens:,}", f"{row.ms:.1f}", speed, rate, _number(row.share, ".0%"))
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


def _part(part: Part) -> Sequence[str]:
    rate = None if part.bytes is None else part.bytes / part.ms
    floor, over = _number(part.floor_ms, ".3f"), _number(part.over_floor, ".2f")
    return f"{part.ms:.3f}", _number(part.bytes, ",.1f", 1e6), floor, over, _number(rate, ".2f", 1e9)


def _traffic(traffic: Traffic | None) -> str:
    if traffic is None:
        return "-"
    parts = {**traffic.weights, "K/V": traffic.kv, "state": traffic.state, "tape": traffic.tape}
    return ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in parts.items() if size >= 5e5)


def _kv(cycle: Cycle) -> str:
    parts = [t.kv for t in (cycle.propose_traffic, cycle.verify_traffic) if t is not None]
    return f"{sum(parts) / 1e6:,.1f}" if parts else "-"


def _number(value: float | None, form: str, unit: float = 1) -> str:
    """A value in ``unit`` in the format ``form``; a dash for one that is not known."""
    return "-" if value is None else f"{value / unit:{form}}"


_WIDTH, _LEFT, _BAR, _GAP, _TOP = 760, 130, 22, 12, 74  # of the drawing, in pixels
_MEASURED, _FLOOR, _INK = "#4c78a8", "#1b2a3a", "#222222"


def svg(result: Result) -> str:
    """Bars in milliseconds, each with its floor as a dark inner bar; then bars of tokens a second."""
    cycle = result.cycle
    times = [
        ("propose", cycle.propose.ms, cycle.propose.floor_ms),
        ("verify", cycle.verify.ms, cycle.verify.floor_ms),
        ("cycle", cycle.whole.ms, cycle.whole.floor_ms),
        ("plain token", result.plain.ms, result.plain_floor_ms),
    ]
    rates = [("plain", result.plain.tokens_per_second), ("speculative", result.speculative.tokens_per_second)]
    longest, fastest = max(ms for _, ms, _ in times), max(rate for _, rate in rates)
    body, y = [], _TOP
    for name, ms, floor in times:
        over = f", {ms / floor:.2f} x floor" if floor else ""
        body += _bar(y, name, ms / longest, f"{ms:.3f} ms{over}", floor / longest if floor else 0.0)
        y += _BAR + _GAP
    y += 34
    body.append(_text(16, y - 12, "Tokens a second", bold=True))
    for name, rate in rates:
        body += _bar(y, name, rate / fastest, f"{rate:.1f}", 0.0)
        y += _BAR + _GAP
    device = result.machine.get("device", result.machine.get("system", ""))
    bandwidth = f", read bandwidth {result.read_bandwidth / 1e12:.2f} TB/s" if result.read_bandwidth else ""
    where = f"{cycle.context} tokens, accept length {result.speculative.accept_length:.2f}"
    head = [
        _text(16, 24, f"{result.pair}; weights {result.weights}", bold=True),
        _text(16, 44, f"{device}{bandwidth}; {where}"),
        _text(16, 64, "Milliseconds; dark: bytes / read bandwidth"),
    ]
    style = f'font-family="sans-serif" font-size="13" fill="{_INK}"'
    size = f'width="{_WIDTH}" height="{y + 8}" viewBox="0 0 {_WIDTH} {y + 8}"'
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', paper, *head, *body, "</svg>"]
    return "\n".join(lines) + "\n"


def _bar(y: int, name: str, share: float, label: str, floor: float) -> list[str]:
    room = _WIDTH - _LEFT - 190
    found = [
        _text(16, y + 16, name),
        f'<rect x="{_LEFT}" y="{y}" width="{room * share:.1f}" height="{_BAR}" fill="{_MEASURED}"/>',
        _text(round(_LEFT + room * share) + 8, y + 16, label),
    ]
    if floor:
        found.append(f'<rect x="{_LEFT}" y="{y + 7}" width="{room * floor:.1f}" height="{_BAR - 14}" fill="{_FLOOR}"/>')
    return found


def _text(x: int, y: int, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}"{weight}>{escape(text)}</text>'
