"""Small works of other threads, done on the engine's own between two rounds of the requests."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TypeVar

from edge_dflash.errors import DeviceLostError, RequestCancelledError

T = TypeVar("T")
_OVER = object()


class EngineCall(Future[T]):
    """One of them, done step by step between several rounds."""

    def __init__(self, steps: Callable[[], Generator[None, None, T]]) -> None:
        super().__init__()
        self.begun = False
        self._steps = self._run(steps)

    def _run(self, steps: Callable[[], Generator[None, None, T]]) -> Generator[None, None, None]:
        self.set_result((yield from steps()))

    def step(self) -> bool:
        """Do one step; whether it was the last. Its error is its own, unless no engine survives it."""
        self.begun = True
        try:
            return next(self._steps, _OVER) is _OVER
        except BaseException as error:
            if is_fatal(error):
                raise
            self.set_exception(error)
            return True

    def drop(self) -> None:
        """Give it up: the engine was closed."""
        self._steps.close()
        self.set_exception(RequestCancelledError("the engine was closed meanwhile; open it again"))


def is_fatal(error: BaseException) -> bool:
    """Whether no engine survives an error of a request or call."""
    return isinstance(error, MemoryError | DeviceLostError) or not isinstance(error, Exception)
