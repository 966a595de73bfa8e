"""The service without HTTP: a planner that is loaded, watched and stopped, and what systemd is told of that."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from starlette.responses import Response

from edge_dflash.board.state import BoardState, EnergyMeter
from edge_dflash.common import progress
from edge_dflash.pictures.decode import INSTALL, reads_files
from edge_dflash.planner import Planner
from edge_dflash.runner.astream import AsyncPlanStream
from edge_dflash.serve.config import MIB, ServeConfig
from edge_dflash.serve.errors import Refusal, dump, refusal
from edge_dflash.serve.limits import own
from edge_dflash.serve.metrics import Metrics, Watcher
from edge_dflash.serve.sessions import AllSessions, Sessions
from edge_dflash.serve.state_dir import recording_in

log = logging.getLogger("edge_dflash.serve")
Board = Callable[[], BoardState]
State = Literal["loading", "ready", "draining", "failed"]
MOST_SECONDS = 600.0  # that a client is asked to wait before it tries again
TICK = 0.5  # seconds between two looks at the engine
PREPARE = 0.5  # seconds that a stop waits for requests that are not queued yet: their form is compiled


class SystemdNotifier:
    """Sends the states of a service to the socket of its manager, as sd_notify(3) says. Used from any thread.

    Neither blocks nor raises: a message that cannot be sent at once is lost.
    """

    def __init__(self, address: str | None = None) -> None:
        """Talk to ``address``, a path or ``@`` and an abstract name (of NOTIFY_SOCKET); else to nobody."""
        self._address = address if address and address[0] in "/@" else None

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self.say("STATUS=" + " ".join(text.split()))

    def say(self, message: str) -> None:
        """Send a state: READY=1, RELOADING=1, WATCHDOG=1 or STOPPING=1."""
        if self._address is None:
            return
        name = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        gone = suppress(OSError)  # a manager that went away must not take the planner with it
        with gone, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel:
            channel.sendto(message.encode(), name)


class Service:
    """One bundle, served. Its methods are called on the loop's thread, if they do not say otherwise."""

    def __init__(
        self,
        config: ServeConfig,
        notifier: SystemdNotifier | None = None,
        board: Board = BoardState,
        power: EnergyMeter | None = None,
    ) -> None:
        """``board`` says its state, ``power`` its energy; without them they are unknown."""
        self.config = config
        self.notifier = notifier or SystemdNotifier()
        self.board = board
        self.power = power or EnergyMeter(lambda: None)
        self.state: State = "loading"
        self.metrics = Metrics(board)
        self.observer = Watcher(self.metrics, self.power)  # what the planner is to be opened with
        self.planner: Planner | None = None
        self.sessions: AllSessions | None = None
        self.streams: set[AsyncPlanStream] = set()  # of admitted requests
        self.seconds: deque[float] = deque(maxlen=16)  # that the last requests ran
        self.large = asyncio.Semaphore(2)  # large bodies are worked on two at a time: the loop is one thread among many
        self.threads = ThreadPoolExecutor(2 * config.limits.connections + 4, thread_name_prefix="edge-dflash request")

    # Loading ----------------------------------------------------------------------------------------------------------

    def load(self, show: progress.Progress = progress.unheard) -> None:
        """Open the bundle and go through its self-test; ``show`` is told how far it is. Blocks: called on a thread."""
        service = self.config.service

        def report(stage: str, done: int, total: int) -> None:
            if not done:
                self.notifier.status(f"loading {self.config.model}: {stage}")
            show(stage, done, total)

        options = self.config.engine.options
        options |= {"check_hashes": service.check_hashes, "self_test": service.self_test}
        if service.record:
            options["record"] = recording_in(Path(service.state_dir), service.record_mib * MIB)
        planner = Planner.open(service.bundle, progress=report, observer=self.observer, **options)
        planner.warm_up()
        self.take(planner)

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
        if planner.shape.image_token_id is not None and self.config.engine.images and not reads_files():
            log.warning("%s sees, and Pillow is missing: every image is refused; %s", self.config.model, INSTALL)
        metrics, sessions, tested = self.metrics, self.sessions, planner.self_test
        metrics.tested("none" if tested is None else "passed" if tested.ok else "failed")
        lanes = planner.shape.lanes
        metrics.lanes.set(lanes)
        metrics.lanes_in_use.set_function(lambda: min(self.observer.jobs, lanes))
        metrics.queue_depth.set_function(lambda: self.waiting)
        metrics.running.set_function(lambda: self.observer.jobs > 0)
        metrics.drafting.set_function(lambda: planner.drafting)
        metrics.stalled.set_function(self.stalled_seconds)
        metrics.ready.set_function(lambda: self.state == "ready")
        metrics.sessions.set_function(lambda: len(sessions))
        metrics.pictures.labels("kept").set_function(lambda: planner.pictures.hits)
        metrics.pictures.labels("made").set_function(lambda: planner.pictures.misses)
        metrics.recorded.labels("written").set_function(lambda: planner.recorded.written)
        metrics.recorded.labels("dropped").set_function(lambda: planner.recorded.dropped)
        metrics.recorded.labels("failed").set_function(lambda: planner.recorded.failed)
        metrics.picture_bytes.set_function(lambda: planner.pictures.bytes)

    def open_doors(self) -> None:
        """Answer requests from now on."""
        self.state = "ready"
        self.notifier.say("READY=1")
        self.notifier.status(f"serving {self.config.model}")

    async def reload(self) -> None:
        """Save the sessions; one whose turn runs is saved when it ends. A stop saves them anyway."""
        if self.state != "ready" or self.sessions is None:
            return
        self.notifier.say(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        try:
            for problem in await self.on_thread(partial(self.sessions.save_all, soon=True)):
                log.error("not saved: %s", problem)
            never = self.config.sessions.save == "never"
            log.info("reload: sessions %s", 'are not saved, sessions.save is "never"' if never else "are saved")
        except Exception:
            log.exception("reload: sessions are not saved")
        finally:
            if self.state == "ready":  # and not stopping meanwhile
                self.notifier.say("READY=1")

    # Watching ---------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self.planner.waiting if self.planner is not None else 0

    def stalled_seconds(self) -> float:
        """Seconds since the engine last got on; 0 when it has nothing to do. From any thread."""
        return self.observer.stalled_seconds(self.waiting)

    def health(self) -> dict[str, Any]:
        """What to say of the engine; its ``status`` is ok while it gets on or has nothing to do."""
        stalled = self.stalled_seconds()
        hung = stalled >= self.config.timeouts.stall
        return {
            "status": "failed" if self.state == "failed" else "hung" if hung else "ok",
            "state": self.state,
            "running": self.observer.jobs > 0,
            "waiting": self.waiting,
            "stalled_seconds": round(stalled, 3),
        }

    async def watch(self) -> BaseException:
        """Feed the watchdog for as long as there is reason to, and say what goes on.

        Returns what ended the engine's worker: from then on nothing is answered, and the process should end.
        """
        said = ""
        while True:
            await asyncio.sleep(TICK)
            if self.planner is None:
                continue
            if (failure := self.planner.failure) is not None:
                self.state = "failed"
                self.notifier.status(f"failed: {type(failure).__name__}: {failure}")
                return failure
            if self.observer.feeds(self.waiting):
                self.notifier.say("WATCHDOG=1")
            if self.state == "ready":
                what = f"serving {self.config.model}: {self.observer.jobs} running, {self.waiting} waiting"
                if what != said:
                    self.notifier.status(said := what)

    # Requests ---------------------------------------------------------------------------------------------------------

    def loaded(self, account: str | None = None) -> tuple[Planner, Sessions]:
        """The planner, the sessions of an account (None: the service's own). Raises Refusal while none are taken."""
        if self.state != "ready" or self.planner is None or self.sessions is None:
            why = {"loading": "is loading", "failed": "has failed"}.get(self.state, "is stopping")
            raise Refusal(f"the service {why}; try again soon", status=503, code=self.state, retry_after=5)
        return self.planner, self.sessions.of(account or own())

    def retry_after(self) -> float:
        """Seconds in which what waits now is served, at the pace of the last requests."""
        pace = sum(self.seconds) / len(self.seconds) if self.seconds else 1.0
        return min(MOST_SECONDS, pace * max(1, self.waiting))

    def check_model(self, name: str | None, param: str | None = None) -> None:
        """Refuse the name of another model; None is none."""
        if name is not None and name != self.config.model:
            message = f"there is no model {name[:60]!r}; this service has {self.config.model!r}"
            raise Refusal(message, status=404, code="model_not_found", param=param)

    def refusal(self, error: Exception) -> Refusal:
        """The refusal that an error of a request becomes; a defect is logged."""
        refused = refusal(error, retry_after=self.retry_after())
        if refused.status == 500:
            log.error("a request failed", exc_info=error)
        return refused

    async def on_thread(self, function: Callable[[], Any]) -> Any:
        """Run what may wait for the engine."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function)

    async def written(self, make: Callable[[], dict[str, Any]]) -> Response:
        """The response that ``make`` gives, made and written on a thread."""
        body: bytes = await self.on_thread(lambda: dump(make(), sharing=True))
        return Response(body, media_type="application/json")

    # Stopping ---------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse new requests, let those that run end, cut them when they take too long, save the sessions."""
        if self.state == "draining":
            return
        self.state = "draining"
        self.notifier.say("STOPPING=1")
        self.notifier.status("stopping: waiting for the running request")
        prepared = time.monotonic() + PREPARE

        async def until_none(seconds: float, *, cut: bool) -> None:
            """Wait for the requests; ``cut``: those that run end at their next commit, with what they have."""
            end = time.monotonic() + seconds
            while self.streams and time.monotonic() < end:
                for stream in self.streams if cut or time.monotonic() > prepared else ():
                    if cut or not stream.queued:
                        stream.cancel()
                await asyncio.sleep(0.02)

        await until_none(self.config.timeouts.drain, cut=False)
        await until_none(self.config.timeouts.write, cut=True)
        if self.sessions is not None and not self.stalled_seconds():
            self.notifier.status("stopping: saving sessions")
            for problem in await self.on_thread(self.sessions.save_all):
                log.error("not saved: %s", problem)

    def close(self) -> None:
        """Release the engine; blocks."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self.planner is not None:
            self.planner.close()
