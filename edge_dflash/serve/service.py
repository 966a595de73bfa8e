"""The service without HTTP: a planner that is loaded, asked, watched and stopped.

Knows calls, plans and sessions. What is sent, and how, is :mod:`edge_dflash.serve.app`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

from edge_dflash.backends.selftest import Mode
from edge_dflash.board.power import EnergyMeter
from edge_dflash.board.state import BoardState
from edge_dflash.common.progress import Progress as Report
from edge_dflash.common.progress import unheard
from edge_dflash.errors import EdgeDflashError
from edge_dflash.planner import Planner
from edge_dflash.result import Plan
from edge_dflash.runner.stream import AsyncPlanStream, PlanStream
from edge_dflash.serve.accounts import own
from edge_dflash.serve.config import MIB, ServeConfig
from edge_dflash.serve.lifecycle import Notifier, NullNotifier, Progress, State, Watchers
from edge_dflash.serve.metrics import Meter, Metrics, Sampling
from edge_dflash.serve.openai import Call
from edge_dflash.serve.owners import AllSessions
from edge_dflash.serve.refusal import Refusal
from edge_dflash.serve.replies import Writer
from edge_dflash.serve.running import Running, queue
from edge_dflash.serve.sessions import Sessions

log = logging.getLogger("edge_dflash.serve")
Board = Callable[[], BoardState]
MOST_SECONDS = 600.0  # that a client is asked to wait before it tries again
TICK = 0.5  # seconds between two looks at the engine
PREPARE = 0.5  # seconds that a stop waits for requests that are not queued yet: their form is compiled


class Service:
    """One bundle, served. Its methods are called on the loop's thread, if they do not say otherwise."""

    def __init__(
        self,
        config: ServeConfig,
        notifier: Notifier | None = None,
        board: Board = BoardState,
        power: EnergyMeter | None = None,
    ) -> None:
        """``board`` says its state, ``power`` its energy; without them they are unknown."""
        self.config = config
        self.notifier = notifier or NullNotifier()
        self.board = board
        self.power = power or EnergyMeter(lambda: None)
        self.state: State = "loading"
        self.metrics = Metrics(board)
        self.progress = Progress()
        self.planner: Planner | None = None
        self.sessions: AllSessions | None = None
        self._running: set[Running] = set()
        self._seconds: deque[float] = deque(maxlen=16)  # of the last requests that ran
        self.threads = ThreadPoolExecutor(2 * config.limits.connections + 4, thread_name_prefix="edge-dflash request")

    # Loading ----------------------------------------------------------------------------------------------------------

    def load(self, show: Report = unheard) -> None:
        """Open the bundle and go through its self-test; ``show`` is told how far it is. Blocks: called on a thread."""
        service, engine = self.config.service, self.config.engine

        def report(stage: str, done: int, total: int) -> None:
            if not done:
                self.notifier.status(f"loading {self.config.model}: {stage}")
            show(stage, done, total)

        planner = Planner.open(
            service.bundle,
            queue=engine.queue,
            prefix_bytes=engine.prefix_mib * MIB,
            fallback=engine.fallback,
            check_hashes=service.check_hashes,
            self_test=cast(Mode, service.self_test),
            progress=report,
            observer=self.observer,
        )
        planner.warm_up()
        self.take(planner)

    @property
    def observer(self) -> Watchers:
        """What the planner is to be opened with."""
        return Watchers(self.progress, Meter(self.metrics), Sampling(self.power))

    def take(self, planner: Planner) -> None:
        """Serve this planner, which was opened with :attr:`observer`; it is closed in the end."""
        self.planner = planner
        limits = self.config.limits
        self.sessions = AllSessions(
            planner,
            Path(self.config.service.state_dir) / "sessions",
            limit=limits.sessions,
            saved_limit=limits.saved_sessions,
            save=self.config.sessions.save,
        )
        metrics, sessions, tested = self.metrics, self.sessions, planner.self_test
        metrics.size(planner.shape.block_size)
        metrics.tested("none" if tested is None else "passed" if tested.ok else "failed")
        metrics.queue_depth.set_function(lambda: planner.waiting)
        metrics.running.set_function(lambda: self.progress.running)
        metrics.drafting.set_function(lambda: planner.drafting)
        metrics.stalled.set_function(self.stalled_seconds)
        metrics.ready.set_function(lambda: self.state == "ready")
        metrics.sessions.set_function(lambda: len(sessions))

    def open_doors(self) -> None:
        """Answer requests from now on."""
        self.state = "ready"
        self.notifier.ready()
        self.notifier.status(f"serving {self.config.model}")

    async def reload(self) -> None:
        """Save the sessions; one whose turn runs is saved when it ends. A stop saves them anyway."""
        if self.state != "ready" or self.sessions is None:
            return
        self.notifier.reloading()
        try:
            for problem in await self.on_thread(self.sessions.save_soon):
                log.error("not saved: %s", problem)
            never = self.config.sessions.save == "never"
            log.info("reload: sessions %s", 'are not saved, sessions.save is "never"' if never else "are saved")
        except Exception:
            log.exception("reload: sessions are not saved")
        finally:
            if self.state == "ready":  # and not stopping meanwhile
                self.notifier.ready()

    # Watching ---------------------------------------------------------------------------------------------------------

    def stalled_seconds(self) -> float:
        """Seconds since the engine last got on; 0 when it has nothing to do. From any thread."""
        return self.progress.stalled_seconds(self.planner.waiting if self.planner is not None else 0)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the engine gets on, and what to say about it."""
        stalled = self.stalled_seconds()
        good = stalled < self.config.timeouts.stall and self.state != "failed"
        waiting = self.planner.waiting if self.planner is not None else 0
        said = {
            "status": "ok" if good else "failed" if self.state == "failed" else "hung",
            "state": self.state,
            "running": self.progress.running,
        }
        return good, {**said, "waiting": waiting, "stalled_seconds": round(stalled, 3)}

    async def watch(self) -> BaseException:
        """Feed the watchdog for as long as there is reason to, and say what goes on.

        Returns what ended the engine's worker: from then on nothing is answered, and the process should end.
        """
        said = ""
        while True:
            await asyncio.sleep(TICK)
            planner = self.planner
            if planner is None:
                continue
            if (failure := planner.failure) is not None:
                self.state = "failed"
                self.notifier.status(f"failed: {type(failure).__name__}: {failure}")
                return failure
            if self.progress.feeds(planner.waiting):
                self.notifier.watchdog()
            if self.state == "ready":
                what = f"serving {self.config.model}: {int(self.progress.running)} running, {planner.waiting} waiting"
                if what != said:
                    self.notifier.status(said := what)

    # Requests ---------------------------------------------------------------------------------------------------------

    def loaded(self, account: str | None = None) -> tuple[Planner, Sessions]:
        """The planner and the sessions of an account (None: the service's own user).

        Raises Refusal when no requests are taken now.
        """
        if self.state != "ready" or self.planner is None or self.sessions is None:
            why = {"loading": "is loading", "failed": "has failed"}.get(self.state, "is stopping")
            raise Refusal(f"the service {why}; try again soon", status=503, code=self.state, retry_after=5)
        return self.planner, self.sessions.of(account or own())

    def retry_after(self) -> float:
        """Seconds in which what waits now is served, at the pace of the last requests."""
        pace = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return min(MOST_SECONDS, pace * max(1, self.planner.waiting if self.planner is not None else 0))

    def start(self, call: Call, arrived: float, account: str | None = None) -> Running:
        """Admit a call of an account (None: the service's own user); ``arrived``: time.perf_counter() of its arrival.

        Errors come as Planner.stream raises them.
        """
        planner, sessions = self.loaded(account)
        if call.model is not None and call.model != self.config.model:
            raise Refusal(
                f"there is no model {call.model[:60]!r}; this service has {self.config.model!r}",
                status=404,
                code="model_not_found",
                param="model",
            )

        def begin() -> PlanStream:  # on a thread: opening a session may wait for the engine
            session = None
            if call.session is not None:
                session = sessions.acquire(call.session)
                running.held = call.session
            running.began = time.perf_counter()
            seconds = call.deadline if call.deadline is not None else self.config.timeouts.deadline or None
            until = None if seconds is None else arrived + seconds
            return queue(planner, session, call, account=account or own(), until=until)

        writer = Writer(call, self.config.model, planner.fingerprint[:16])
        running = Running(call, writer, AsyncPlanStream(begin), sessions)
        self._running.add(running)
        return running

    async def finish(self, running: Running) -> Plan:
        """The plan of a request, counted; its session is saved if that is wanted after every turn."""
        plan = await running.stream.result()
        self._count(running, plan)
        if (name := running.call.session) is not None and plan.tokens:
            try:
                await self.on_thread(partial(running.sessions.turned, name))
            except EdgeDflashError as error:  # the answer is there all the same
                log.error("session %s was not saved: %s", name, error)
                running.session_error = str(error)
        return plan

    def _count(self, running: Running, plan: Plan) -> None:
        if not running.counted:
            running.counted = True
            self.metrics.plan(plan)
            if (joules := self._joules(running, plan)) is not None:
                self.metrics.joules.labels(self.power.rail).observe(joules)
            if plan.tokens:
                self._seconds.append(plan.timings.total_seconds - plan.timings.queue_seconds)

    def _joules(self, running: Running, plan: Plan) -> float | None:
        """Energy of the board while a plan was made; None where it does not say its power."""
        timings = plan.timings
        return self.power.joules(running.began + timings.queue_seconds, running.began + timings.total_seconds)

    async def details(self, running: Running) -> dict[str, Any]:
        """What is told of a finished request beside its plan: the board, and what went wrong with its session."""
        state: BoardState = await self.on_thread(self.board)
        joules = self._joules(running, running.stream.plan)
        board = state.brief() if joules is None else {**state.brief(), "joules": joules}
        found: dict[str, Any] = {"board": board, "session_error": running.session_error}
        return {name: value for name, value in found.items() if value}

    async def end(self, running: Running) -> None:
        """A request is over, however: nothing of it stays on the engine."""
        try:
            await running.stream.aclose()
            self._count(running, running.stream.plan)  # of a client that left: its tokens were made all the same
        except Exception as error:
            log.debug("a request ended with %r", error)
        finally:
            self._running.discard(running)
            if running.held is not None:
                await self.on_thread(partial(running.sessions.release, running.held))

    async def on_thread(self, function: Callable[[], Any]) -> Any:
        """Run what may wait for the engine."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function)

    # Stopping ---------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse new requests, let those that run end, cut them when they take too long, save the sessions."""
        if self.state == "draining":
            return
        self.state = "draining"
        self.notifier.stopping()
        self.notifier.status("stopping: waiting for the running request")
        began = time.monotonic()
        until = began + self.config.timeouts.drain
        while self._running and time.monotonic() < until:
            await asyncio.sleep(0.02)
            if time.monotonic() > began + PREPARE:
                for running in [one for one in self._running if not one.stream.queued]:
                    running.stream.cancel()
        for running in list(self._running):
            running.stream.cancel()  # ends at its next commit, with what it has
        until = time.monotonic() + self.config.timeouts.write
        while self._running and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if self.sessions is not None and not self.stalled_seconds():
            self.notifier.status("stopping: saving sessions")
            for problem in await self.on_thread(self.sessions.save_all):
                log.error("not saved: %s", problem)

    def close(self) -> None:
        """Release the engine; blocks."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self.planner is not None:
            self.planner.close()
