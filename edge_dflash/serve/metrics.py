"""What is seen of the engine at work: figures in Prometheus' form, and whether it gets on.

The watchdog is fed from the work itself. While a request runs, only a step of the engine (every chunk of the prompt,
then every cycle) feeds it; a timer that merely finds the process alive would keep a hung engine going. Without a
request nothing could step, and the timer feeds it. So the watchdog's limit must be longer than the longest pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from edge_dflash.board.state import BoardState, EnergyMeter
from edge_dflash.decode.loop import Step
from edge_dflash.decode.shape import MOST_LANES
from edge_dflash.result import Plan
from edge_dflash.runner.observer import Observer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT = (0.001, 0.002, 0.004, 0.007, 0.01, 0.015, 0.02, 0.03, 0.045, 0.07, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_JOULES = (1, 2, 4, 7, 10, 20, 40, 70, 100, 200, 400, 700, 1000, 2000, 4000)
_ACCEPT = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
_DRAFTS = (1, 2, 3, 5, 7, 11, 15, 23, 31)
_LANES = tuple(range(1, MOST_LANES + 1))
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
ACCOUNTS, OTHERS = 32, "other"  # accounts that are told apart, and what all beyond share
RATE_SECONDS = 10.0  # that tokens a second are counted over
SELF_TEST = ("passed", "failed", "none")

# Families of the board: metric, label, help, and values by label.
BOARD: tuple[tuple[str, str, str, Callable[[BoardState], Mapping[str, float | None]]], ...] = (
    ("power_watts", "rail", "Power of a rail.", lambda state: {rail.name: rail.watts for rail in state.rails}),
    ("temperature_celsius", "zone", "Temperature of a thermal zone.", lambda state: state.temperatures),
    ("clock_hertz", "clock", "Frequency of a clock.", lambda state: {clock.name: clock.hz for clock in state.clocks}),
    ("throttled", "part", "1 while a part is slowed down for its heat.", lambda state: state.throttling),
    ("over_current_events", "counter", "Over-current events since boot.", lambda state: state.over_current),
    ("memory_available_bytes", "kind", "Memory that programs may still take.",
     lambda state: {"available": None if state.memory is None else state.memory.available}),
)  # fmt: skip


class Metrics:
    """All metrics of one service, in one registry. Counted from any thread."""

    def __init__(self, board: Callable[[], BoardState]) -> None:
        """``board`` is asked at each scrape."""
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"edge_dflash_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"edge_dflash_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(f"edge_dflash_{name}", text, labels, registry=registry, buckets=tuple(buckets))

        self.requests = counter("requests", "Requests that ended, by endpoint and outcome.", "endpoint", "outcome")
        self.tokens = counter("tokens", "Tokens: of prompts, of those not computed again or scored, generated.", "kind")
        self.drafted = counter("drafted_tokens", "Drafts that were verified, by place in the block.", "position")
        self.accepted = counter("accepted_tokens", "Drafts that were accepted, by place in the block.", "position")
        self.disconnects = counter("disconnects", "Clients that left before the end of their answer.")
        self.account_tokens = counter("account_tokens", "Generated tokens, by the account that asked.", "account")
        self.set_aside = counter("set_aside", "Running requests that gave their lane to a more urgent one.")
        self.lanes = gauge("lanes", "Requests that can run at a time.")
        self.lanes_in_use = gauge("lanes_in_use", "Requests that run.")
        self.rate = Rate()
        gauge("tokens_per_second", "Generated in the last 10 seconds.").set_function(self.rate)
        self.queue_depth = gauge("queue_depth", "Requests that wait.")
        self.running = gauge("running", "1 while a request runs.")
        self.stalled = gauge("stalled_seconds", "Time since the engine got on; 0 when it has nothing to do.")
        self.drafting = gauge("drafting", "1 while cycles draft; 0 while drafting rests because it did not pay.")
        self.ready = gauge("ready", "1 while requests are answered.")
        self.sessions = gauge("open_sessions", "Sessions that are open.")
        self.pictures = gauge("pictures", "Images of prompts: rows kept from before, rows made by the tower.", "rows")
        self.picture_bytes = gauge("picture_bytes", "Rows of images that are kept for the next request.")
        self.recorded = gauge("recorded_answers", "Answers by what became of their record, if kept.", "outcome")
        self.self_test = gauge("self_test", "1 for the state that the self-test left.", "state")
        self.queue_wait = histogram("queue_wait_seconds", "From a request to its start on the engine.", _LONG)
        self.first_token = histogram("first_token_seconds", "From a request to its first token.", _LONG)
        self.prefill = histogram("prefill_seconds", "A prompt's pass.", _LONG)
        self.inter_token = histogram("inter_token_seconds", "Time a token after the first, cycle by cycle.", _SHORT)
        self.cycle = histogram("cycle_seconds", "A cycle: propose, verify, accept, commit.", _SHORT, "kind")
        self.pass_lanes = histogram("pass_lanes", "Requests that shared a cycle's passes.", _LANES)
        self.pass_rows = histogram("pass_rows", "Rows of a cycle's verify pass, of all lanes.", _ROWS)
        self.accept_length = histogram("accept_length", "Tokens that a drafting cycle committed.", _ACCEPT)
        self.drafts = histogram("cycle_drafts", "Drafts that a drafting cycle verified.", _DRAFTS)
        self.joules = histogram("plan_joules", "Energy of the board while a plan is made.", _JOULES, "rail")
        self._accounts: set[str] = set()
        registry.register(_BoardCollector(board))

    def tested(self, state: str) -> None:
        """Note what the self-test gave, one of SELF_TEST."""
        for one in SELF_TEST:
            self.self_test.labels(one).set(one == state)

    def step(self, step: Step) -> None:
        """Count a step of the engine."""
        count, seconds = len(step.tokens), step.propose_seconds + step.verify_seconds
        if count == 0:
            return
        self.rate(count)
        if step.first:
            self.prefill.observe(seconds)
            return
        drafted = step.propose_seconds > 0
        self.cycle.labels("drafted" if drafted else "plain").observe(seconds)
        for _ in range(count):
            self.inter_token.observe(seconds / count)
        if drafted:
            self.accept_length.observe(count)
            self.drafts.observe(step.drafts)
            for position in range(step.drafts):
                self.drafted.labels(str(position + 1)).inc()
            for position in range(step.accepted):
                self.accepted.labels(str(position + 1)).inc()

    def ended(self, endpoint: str, outcome: str) -> None:
        """Count a request that ended."""
        self.requests.labels(endpoint, outcome).inc()
        if outcome == "disconnected":
            self.disconnects.inc()

    def plan(self, plan: Plan, account: str, *, first: bool = True) -> None:
        """Count a finished plan of an account; of several candidates, only the ``first`` one's prompt and waiting."""
        if len(self._accounts) < ACCOUNTS:
            self._accounts.add(account)
        self.account_tokens.labels(account if account in self._accounts else OTHERS).inc(len(plan.tokens))
        self.tokens.labels("generated").inc(len(plan.tokens))
        if not first:
            return
        self.queue_wait.observe(plan.timings.queue_seconds)
        if plan.timings.first_token_seconds:
            self.first_token.observe(plan.timings.first_token_seconds)
        self.tokens.labels("prompt").inc(plan.prompt_tokens)
        self.tokens.labels("reused").inc(plan.reused_tokens)
        self.tokens.labels("scored").inc(len(plan.prompt_logprobs))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        lines = generate_latest(self.registry).splitlines(keepends=True)
        return b"".join(line for line in lines if b"_created" not in line)  # a series with each one's time of birth


class Rate:
    """Tokens a second, of late; called by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._counts: dict[int, int] = {}  # tokens by the second that they were made in

    def __call__(self, tokens: int = 0) -> float:
        """The rate of the RATE_SECONDS until now, in which so many more were made."""
        with self._lock:
            now = int(self._clock())
            self._counts = {at: count for at, count in self._counts.items() if at > now - RATE_SECONDS}
            self._counts[now] = self._counts.get(now, 0) + tokens
            return sum(self._counts.values()) / RATE_SECONDS


class _BoardCollector(Collector):
    """Asks the board at each scrape. What it does not say is left out."""

    def __init__(self, board: Callable[[], BoardState]) -> None:
        self._board = board

    def collect(self) -> Iterator[GaugeMetricFamily]:
        state = self._board()
        for name, label, text, values in BOARD:
            family = GaugeMetricFamily(f"edge_dflash_board_{name}", text, labels=[label])
            for of, value in values(state).items():
                if value is not None:
                    family.add_metric([of], float(value))
            yield family


class Watcher(Observer):
    """Watches the engine of the planner that is opened with it: what it does, and whether it gets on.

    Told by the engine's thread, asked by the loop.
    """

    def __init__(self, metrics: Metrics, power: EnergyMeter, clock: Callable[[], float] = time.monotonic) -> None:
        """``power`` is sampled while the engine works."""
        self._metrics, self._power, self._clock = metrics, power, clock
        self._lock = threading.Lock()
        self.jobs = 0  # that have begun and not ended: those beyond the lanes are set aside
        self._last = clock()  # when it got on
        self._steps = self._fed = 0

    def started(self) -> None:
        """A request, or a small work between two, begins to run."""
        self._note(1)
        self._power.begin()

    def step(self, step: Step) -> None:
        """Tokens were committed, or the request ends."""
        self._note()
        self._metrics.step(step)

    def passed(self, lanes: int, rows: int) -> None:
        """A cycle ran."""
        self._metrics.pass_lanes.observe(lanes)
        self._metrics.pass_rows.observe(rows)

    def aside(self) -> None:
        """A running request gives its lane to a more urgent one."""
        self._metrics.set_aside.inc()

    def ended(self) -> None:
        """It runs no more, however it ended."""
        self._note(-1)
        self._power.end()

    def _note(self, jobs: int = 0) -> None:
        """The engine got on, with so many more jobs."""
        with self._lock:
            self.jobs, self._last = self.jobs + jobs, self._clock()
            self._steps += 1

    def stalled_seconds(self, waiting: int) -> float:
        """Seconds since the engine last got on; 0 when it has nothing to do. ``waiting``: requests in the queue."""
        with self._lock:
            return self._clock() - self._last if self.jobs or waiting else 0.0

    def feeds(self, waiting: int) -> bool:
        """Whether there is reason to feed the watchdog: a step since the last call, or nothing to do."""
        with self._lock:
            stepped, self._fed = self._steps != self._fed, self._steps
            if idle := not (self.jobs or waiting):
                self._last = self._clock()  # time without work is not held against the request that ends it
            return stepped or idle
