"""A backend that verifies another number of drafts in every cycle: none of them may change a token."""

from __future__ import annotations

from dataclasses import replace

from edge_dflash.backends.host_cycle import Delegate
from edge_dflash.decode.backend import Asked, Backend, Cycle


class ByTurns(Delegate):
    """``backend``, whose cycle c verifies at most c mod (K + 1) drafts: in so many cycles each number once, plain decoding too."""

    def __init__(self, backend: Backend, start: int = 0) -> None:
        super().__init__(backend)
        self._cycle = start

    def cycle(self, asked: Asked) -> Cycle:
        """The backend's own cycle of fewer drafts."""
        drafts = self._cycle % self.shape.verify_rows
        self._cycle += 1
        return self._backend.cycle(replace(asked, drafts=drafts if asked.drafts is None else min(drafts, asked.drafts)))
