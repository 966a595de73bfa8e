"""What a benchmark found (milliseconds, bytes), as frozen values that become its JSON and one SVG drawing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from edge_dflash.checks.footprint import Traffic
from edge_dflash.common.tables import encode

_WIDTH, _LEFT, _BAR, _GAP, _TOP = 760, 130, 22, 12, 74  # of the drawing, in pixels
_MEASURED, _FLOOR, _INK = "#4c78a8", "#1b2a3a", "#222222"


@dataclass(frozen=True)
class PassTime:
    """A pass or a whole cycle against its floor: its bytes over the measured read bandwidth."""

    ms: float
    bytes: int | None = None  # None: not known (reference backend)
    floor_ms: float | None = None

    @classmethod
    def of(cls, seconds: float, nbytes: int | None, bandwidth: float | None) -> PassTime:
        """From seconds; without a bandwidth there is no floor."""
        floor = nbytes / bandwidth * 1e3 if nbytes is not None and bandwidth is not None else None
        return cls(seconds * 1e3, nbytes, floor)

    @property
    def over_floor(self) -> float | None:
        """Measured over floor; 1 is as fast as memory allows."""
        return self.ms / self.floor_ms if self.floor_ms else None

    @property
    def rate(self) -> float | None:
        """Bytes a second."""
        return None if self.bytes is None else 1e3 * self.bytes / self.ms


@dataclass(frozen=True)
class Decode:
    """One way of decoding by the wall clock, from the first token on."""

    tokens_per_second: float
    accept_length: float  # tokens committed per cycle, as counted
    cycles: int
    ms: float  # wall clock of a cycle
    joules: float | None = field(default=None, kw_only=True)  # of a plan, its prompt included; None: not known


@dataclass(frozen=True)
class Formed(Decode):
    """Decoding under a JSON Schema."""

    schema: str  # in words
    replaced: float  # share of the drafts in whose place the grammar put another token


@dataclass(frozen=True)
class Chosen(Decode):
    """Decoding with as many drafts as are measured to give most tokens a second."""

    drafts: float  # that a cycle verified, mean
    usual: int  # drafts of most cycles


@dataclass(frozen=True)
class ByDrafts:
    """A steady cycle that verifies so many drafts."""

    drafts: int
    ms: float  # from call to commit, on the host's clock
    verify: PassTime  # on the device's clock
    experts: float | None  # that a layer read, counted on the device; None: the target has none
    tokens_per_second: float | None  # by the forced acceptance; None: none is forced


@dataclass(frozen=True)
class LaneLoad:
    """So many requests at once."""

    lanes: int
    rows: float  # of a joint verify pass, mean
    cycle: PassTime  # joint, from the end of one to the end of the next, by the wall clock
    accept_length: float
    tokens_per_second: float  # of all lanes, in joint cycles
    tokens_per_second_each: float  # from its first token to its end, mean: prompts of others lie between


@dataclass(frozen=True)
class Company:
    """One request alone, and while others come and go: milliseconds between two of its increments."""

    lanes: int
    alone_p50_ms: float
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    deadlines: int  # requests with a deadline, in company
    overshoot_ms: float  # the longest that one of them took beyond it; 0: all kept it


@dataclass(frozen=True)
class CycleTimes:
    """A steady cycle, on the device's own clock."""

    context: int  # committed tokens, mean over the timed cycles
    whole: PassTime
    propose: PassTime
    verify: PassTime
    propose_traffic: Traffic | None = None
    verify_traffic: Traffic | None = None

    @property
    def rest_ms(self) -> float:
        """Accept, commit and what lies between the passes."""
        return self.whole.ms - self.propose.ms - self.verify.ms

    def ratios(self) -> dict[str, float | None]:
        """What follows from the fields, by its JSON key."""
        parts = {"over_floor": self.whole, "propose_over_floor": self.propose, "verify_over_floor": self.verify}
        return {**{name: part.over_floor for name, part in parts.items()}, "rest_ms": self.rest_ms}


@dataclass(frozen=True)
class Prefill:
    """A prompt until its first token, warm."""

    tokens: int
    ms: float
    operations_per_second: float | None
    share: float | None  # of the matrix product rate measured in the same run


@dataclass(frozen=True)
class Cold:
    """The first work after loading."""

    load_seconds: float
    prefill_tokens: int
    prefill_ms: float
    cycle_ms: float
    steady_cycle_ms: float  # timed the same way

    @property
    def over_steady(self) -> float:
        """First cycle over steady cycle."""
        return self.cycle_ms / self.steady_cycle_ms


@dataclass(frozen=True)
class DeviceMemory:
    """Device memory. ``allocations_after_load`` must be 0."""

    budget: Mapping[str, int]  # by purpose
    allocated: int
    device_used: int  # free memory before load minus after
    device_total: int
    allocations_after_load: int


@dataclass(frozen=True)
class StepKind:
    """One kind of step in a cycle, all layers together."""

    name: str
    count: int
    ms: float
    bytes: int  # of weights


@dataclass(frozen=True)
class BenchResult:
    """A whole run."""

    pair: str
    backend: str
    weights: str
    kv: str
    block_size: int
    context: int
    forced_accept_length: float | None
    machine: Mapping[str, Any]
    read_bandwidth: float | None  # bytes a second
    matmul_rate: float | None  # operations a second
    matmul_by: str | None
    prompts: str  # what was decoded, in words
    plain: Decode  # Planner.plan, without drafts
    plain_floor_ms: float | None
    speculative: Decode  # Planner.plan
    schema: Formed | None  # Planner.plan; None without a tokenizer
    raw: Decode  # cycles of the speculative plans again, called directly
    cycle: CycleTimes
    cold: Cold
    prefill: tuple[Prefill, ...]
    contexts: tuple[CycleTimes, ...]
    drafts_ms: Mapping[str, float]  # a cycle by the drafts that it verifies, on an empty sequence, wall clock
    memory: DeviceMemory | None
    profile: tuple[StepKind, ...]
    forced_acceptance: str | None = None  # name of a profile
    routing_correlation: float | None = None  # of the rows of a verify whose experts are forced
    chosen: Chosen | None = None  # Planner.plan under a forced profile
    by_drafts: tuple[ByDrafts, ...] = ()  # under a forced profile or routing
    lanes: tuple[LaneLoad, ...] = ()
    company: Company | None = None

    @property
    def host_ms(self) -> float:
        """What a caller's cycle takes beyond the backend's own: loop, queue, text, on the host."""
        return self.speculative.ms - self.raw.ms

    def to_json(self) -> dict[str, Any]:
        """Fields, and the ratios that follow from them."""
        found: dict[str, Any] = encode(self)
        for cycle, entry in zip((self.cycle, *self.contexts), (found["cycle"], *found["contexts"]), strict=True):
            entry |= cycle.ratios()
        found["cold"]["over_steady"] = self.cold.over_steady
        for load, entry in zip(self.lanes, found["lanes"], strict=True):
            entry["over_floor"] = load.cycle.over_floor
        found["host_ms"] = self.host_ms
        found["host_share"] = self.host_ms / self.raw.ms
        found["speed_up"] = self.speculative.tokens_per_second / self.plain.tokens_per_second
        return found


def svg(result: BenchResult) -> str:
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
    device = result.machine.get("device", result.machine.get("system", ""))
    bandwidth = f", read bandwidth {result.read_bandwidth / 1e12:.2f} TB/s" if result.read_bandwidth else ""
    where = f"{cycle.context} tokens, accept length {result.speculative.accept_length:.2f}"
    body = [
        _text(16, 24, f"{result.pair}; weights {result.weights}", bold=True),
        _text(16, 44, f"{device}{bandwidth}; {where}"),
        _text(16, 64, "Milliseconds; dark: bytes / read bandwidth"),
    ]
    y = _TOP
    for name, ms, floor in times:
        over = f", {ms / floor:.2f} x floor" if floor else ""
        body += _bar(y, name, ms / longest, f"{ms:.3f} ms{over}", floor / longest if floor else 0.0)
        y += _BAR + _GAP
    y += 34
    body.append(_text(16, y - 12, "Tokens a second", bold=True))
    for name, rate in rates:
        body += _bar(y, name, rate / fastest, f"{rate:.1f}", 0.0)
        y += _BAR + _GAP
    size = f'width="{_WIDTH}" height="{y + 8}" viewBox="0 0 {_WIDTH} {y + 8}"'
    style = f'font-family="sans-serif" font-size="13" fill="{_INK}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, *body, "</svg>"]) + "\n"


def _bar(y: int, name: str, share: float, label: str, floor: float) -> list[str]:
    room = _WIDTH - _LEFT - 190
    found = [_text(16, y + 16, name), _rectangle(y, room * share, _BAR, _MEASURED)]
    found.append(_text(round(_LEFT + room * share) + 8, y + 16, label))
    return [*found, _rectangle(y + 7, room * floor, _BAR - 14, _FLOOR)] if floor else found


def _rectangle(y: int, width: float, height: int, colour: str) -> str:
    return f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: int, y: int, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}"{weight}>{escape(text)}</text>'
