"""Cycles of one lane: one graph where logits and sampling alone decide, else separate passes."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from edge_dflash.backends.cuda.graphs import Cycles
from edge_dflash.backends.cuda.joint import Together
from edge_dflash.backends.cuda.memory import ControlBlock
from edge_dflash.backends.cuda.rows import NativeRows, WalkedRows
from edge_dflash.backends.cuda.small import Result
from edge_dflash.backends.cuda.states import Lane
from edge_dflash.backends.host_cycle import host_cycle
from edge_dflash.decode.backend import Asked, Cycle
from edge_dflash.decode.walk import confident

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.backend import NativeBackend


class Cycling(Together):
    """The part of :class:`~edge_dflash.backends.cuda.backend.NativeBackend` that runs and ends cycles."""

    _cycles: Cycles
    _own_cycles: Cycles

    @property
    @abstractmethod
    def _whole_backend(self) -> NativeBackend:
        """What this is a part of."""

    @abstractmethod
    def propose(self, anchor: int, lane: int = 0) -> NativeRows:
        """See Backend."""

    @abstractmethod
    def verify(self, ids: Sequence[int], lane: int = 0) -> NativeRows:
        """See Backend."""

    def cycle(self, asked: Asked) -> Cycle:
        """Propose, verify, accept and commit on the device; :meth:`commit` may then keep fewer rows.

        One graph where logits and sampling alone decide (sampled where ``logits`` are asked for). Plain and steered
        cycles are a verify and its end. Only relaxed acceptance is the host's.
        """
        if asked.steering is not None and asked.steering.tolerant:
            return host_cycle(self._whole_backend, asked)
        if asked.steering is not None or not asked.drafting or not self._shape.drafts:
            return self._split(asked)
        lane, most = self._begin_at(asked.anchor, asked.lane, self._shape.verify_rows), self._shape.drafts
        graphs, drafts = self._cycles.greedy, most if asked.drafts is None else min(asked.drafts, most)
        if asked.sampling.temperature > 0.0 or asked.logits:
            self.chooser.prepare(asked.sampling)
            graphs = self._cycles.sampled
        self._host.count((drafts + 1, asked.threshold))
        self._slots.forget([0])  # until it is known what the device committed
        graphs.of(drafts + 1).launch()
        (result,) = self._host.read(self._shape.verify_rows)
        return self._cycle(lane, result, asked, result.counted)

    def _split(self, asked: Asked) -> Cycle:
        """A cycle of separate passes, decided on the device; seconds are the host's."""
        sampling, steering, lane = asked.sampling, asked.steering, self._lane(asked.lane)
        position, began, drafts = lane.wanted.length + 1, time.perf_counter(), list[int]()
        drafting = asked.drafting and self._shape.drafts > 0
        if steering is not None and drafting:
            rows = self.propose(asked.anchor, asked.lane)
            drafts = steering.drafts(rows, position)
            if asked.threshold and isinstance(rows, WalkedRows):
                drafts = drafts[: confident(rows.confidence(), asked.threshold)]
            drafts = drafts[: asked.drafts]
        proposed = time.perf_counter()
        self.verify([asked.anchor, *drafts], asked.lane)
        masks = [None] if steering is None else steering.masks(drafts)  # while it runs
        self.chooser.write(sampling, position, masks)
        free = sampling.temperature == 0.0 and all(mask is None for mask in masks)
        self._slots.forget([0])
        (self._cycles.accept if free else self._cycles.choose).of(1).launch()
        (result,), propose_seconds = self._host.read(self._shape.verify_rows), proposed - began if drafting else 0.0
        timed = replace(result, propose_seconds=propose_seconds, verify_seconds=time.perf_counter() - proposed)
        return self._cycle(lane, timed, asked, len(drafts), drafts)

    def _cycle(
        self,
        lane: Lane,
        result: Result,
        asked: Asked,
        count: int,
        drafts: Sequence[int] = (),
        slot: int = 0,
        block: int = 0,
    ) -> Cycle:
        """Note what the device has committed; it is real when :meth:`commit` has said so.

        ``slot`` of a pass that had ``block`` rows in each.
        """
        tokens = result.choices[: result.accepted + 1]
        if drafts and self._cycles is not self._own_cycles:  # forced: a grammar goes on behind the drafts that stand
            tokens = (*drafts[: result.accepted], tokens[-1])
        lane.wanted = ControlBlock(lane.wanted.length, 0, lane.wanted.anchor)
        self._slots.left(slot, asked.lane, ControlBlock(lane.wanted.length + len(tokens), len(tokens), tokens[-1]))
        lane.verified = len(tokens)
        rows = NativeRows(self._whole_backend, len(tokens), 0, self._host.choices, slot, block)
        found = Cycle(tokens, result.accepted, count, result.propose_seconds, result.verify_seconds)
        if not asked.logits:
            return found
        return replace(found, logits=rows.logits, logprobs=partial(rows.logprobs, tokens))

    @abstractmethod
    def _begin_at(self, anchor: int, lane: int, rows: int) -> Lane:
        """A new pass that drafts from ``anchor``."""
