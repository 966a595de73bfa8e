"""Where the service stands, and what it tells who started it: loading, ready, at work, stopping; alive or hung.

Times and states; HTTP, systemd's protocol and plans are elsewhere.

The watchdog is fed from the work itself. While a request runs, only a step of the engine (every chunk of the prompt,
then every cycle) feeds it; a timer that merely finds the process alive would keep a hung engine going. Without a
request nothing could step, and the timer feeds it. So the watchdog's limit must be longer than the longest pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol, TypeAlias

from edge_dflash.common.progress import IN_BYTES
from edge_dflash.common.progress import Progress as Report
from edge_dflash.decode.loop import Step
from edge_dflash.runner.worker import Observer

log = logging.getLogger("edge_dflash.serve")
Showing: TypeAlias = Callable[[str], AbstractContextManager[Report]]  # shows the progress of what is named
State = Literal["loading", "ready", "draining", "failed"]


class Notifier(Protocol):
    """Who started the service. Called from any thread; must not block and must not raise."""

    def ready(self) -> None:
        """The pair is loaded, its self-test passed, and requests are answered; or a :meth:`reloading` is over."""
        ...

    def reloading(self) -> None:
        """What a reload asks for has begun; :meth:`ready` says that it is done."""
        ...

    def status(self, text: str) -> None:
        """One line for people about what goes on."""
        ...

    def watchdog(self) -> None:
        """The service is alive: called at least once a second while it is."""
        ...

    def stopping(self) -> None:
        """No more requests are taken."""
        ...


class NullNotifier:
    """Nobody wants to know."""

    def ready(self) -> None:
        """See Notifier."""

    def reloading(self) -> None:
        """See Notifier."""

    def status(self, text: str) -> None:
        """See Notifier."""

    def watchdog(self) -> None:
        """See Notifier."""

    def stopping(self) -> None:
        """See Notifier."""


@contextmanager
def logged(what: str) -> Iterator[Report]:
    """Progress as lines of the log: one when ``what`` begins, one for each of its stages."""
    log.info("%s", what)
    begun: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in begun:
            begun.add(stage)
            log.info("%s%s", stage, f", {total / 1e6:,.1f} MB" if stage in IN_BYTES else "")

    yield report


class Watchers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.started()

    def step(self, step: Step) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.step(step)

    def ended(self) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.ended()


class Progress:
    """Whether the engine gets on. Told by its worker, asked by the loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs = 0  # that have begun and not ended: one runs, those before it were interrupted
        self._last = clock()
        self._steps = self._fed = 0

    def started(self) -> None:
        """A request has begun to run."""
        self._note(1)

    def step(self, step: Step) -> None:
        """It committed something."""
        self._note(0)

    def ended(self) -> None:
        """It has ended."""
        self._note(-1)

    def _note(self, jobs: int) -> None:
        with self._lock:
            self._jobs, self._last = self._jobs + jobs, self._clock()
            self._steps += 1

    @property
    def running(self) -> bool:
        """Whether a request runs."""
        return self._jobs > 0

    def stalled_seconds(self, waiting: int) -> float:
        """Seconds since the engine last got on; 0 when it has nothing to do. ``waiting``: requests in the queue."""
        with self._lock:
            return self._clock() - self._last if self._jobs or waiting else 0.0

    def feeds(self, waiting: int) -> bool:
        """Whether there is reason to feed the watchdog: a step since the last call, or nothing to do."""
        with self._lock:
            stepped, self._fed = self._steps != self._fed, self._steps
            if idle := not (self._jobs or waiting):
                self._last = self._clock()  # time without work is not held against the request that ends it
            return stepped or idle
