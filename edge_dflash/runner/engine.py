"""The worker that owns a loaded pair."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from edge_dflash.decode.backend import Backend
from edge_dflash.decode.controls import Pace
from edge_dflash.decode.drafts import draft_choice
from edge_dflash.decode.session import SessionManager
from edge_dflash.decode.store import PrefixStore
from edge_dflash.errors import RequestError
from edge_dflash.runner.job import Observer, Work
from edge_dflash.runner.settings import EngineSettings
from edge_dflash.runner.worker import Worker

T = TypeVar("T")

_SOON = 1_000_000  # priority of the engine's own small works


class Engine(Worker):
    """The worker that owns a loaded pair: its sessions, its measured pace. Only it touches the backend."""

    def __init__(
        self,
        backend: Backend,
        fingerprint: str,
        settings: EngineSettings,
        observer: Observer | None = None,
    ) -> None:
        """Take the backend over; ``fingerprint`` binds its sessions to a bundle."""
        self.backend = backend
        self.manager = SessionManager(backend, fingerprint, PrefixStore(settings.prefix_bytes))
        self.pace = Pace(draft_choice(backend.shape.drafts, settings.drafts, measured=settings.fallback))
        lanes, share = backend.shape.lanes, settings.prompt_share
        super().__init__(queue_limit=settings.queue, observer=observer, lanes=lanes, share=share)

    def _loaded(self, lanes: int) -> None:
        self.pace.load = max(lanes, 1)

    def run(self, steps: Callable[[], Generator[None, None, T]]) -> T:
        """Run a small work between two requests or two chunks of a prompt, and wait for it.

        Raises RequestError on the engine's own thread.
        """
        if self.here:
            raise RequestError("the engine's own thread, as of an observer, cannot wait for it; call on another thread")
        work: Work[None, T] = Work(steps, priority=_SOON, caller=None)
        self.submit(work)
        return work.ticket.result()

    def call(self, function: Callable[[], T]) -> T:
        """:meth:`run` for a function."""

        def steps() -> Generator[None, None, T]:
            yield
            return function()

        return self.run(steps)
