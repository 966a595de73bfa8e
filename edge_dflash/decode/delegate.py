"""A backend around another one: what measures or records a backend wraps it from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from edge_dflash.decode.backend import Asked, Backend, Cycle, Outcome
from edge_dflash.decode.cycle import host_cycle, host_cycles
from edge_dflash.decode.shape import PairShape

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _passed_on(method: _Method) -> _Method:
    """A method of Backend, as the other backend has it."""

    def call(self: Delegate, *given: Any, **named: Any) -> Any:
        return getattr(self._backend, method.__name__)(*given, **named)

    return cast("_Method", call)


class Delegate:
    """A backend that passes every call on to another; subclasses replace some of them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def shape(self) -> PairShape:
        """Sizes of the loaded pair."""
        return self._backend.shape

    length, reset, see = _passed_on(Backend.length), _passed_on(Backend.reset), _passed_on(Backend.see)
    prefill, propose = _passed_on(Backend.prefill), _passed_on(Backend.propose)
    verify, commit, flush = _passed_on(Backend.verify), _passed_on(Backend.commit), _passed_on(Backend.flush)
    copy, close = _passed_on(Backend.copy), _passed_on(Backend.close)
    snapshot, restore = _passed_on(Backend.snapshot), _passed_on(Backend.restore)

    def cycle(self, asked: Asked) -> Cycle:
        """See Backend. Made of this backend's own passes, so that a subclass may replace one."""
        return host_cycle(self, asked)

    def cycles(self, asked: Sequence[Asked]) -> list[Outcome]:
        """See Backend. Made of this backend's own cycles."""
        return host_cycles(self, asked)
