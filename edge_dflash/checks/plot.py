"""A Result as one SVG drawing: measured time of each part over its floor, and tokens a second. No library."""

from __future__ import annotations

from xml.sax.saxutils import escape

from edge_dflash.checks.bench_result import Result

_WIDTH, _LEFT, _BAR, _GAP, _TOP = 760, 130, 22, 12, 74
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
