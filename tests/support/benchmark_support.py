"""A device that only keeps time: a backend whose passes take known seconds on a clock that nothing else moves."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from fakes import FakeBackend, FakeRows

from edge_dflash.bench import measure
from edge_dflash.bench import run as bench
from edge_dflash.bench.device import Device
from edge_dflash.bench.workload import Subject
from edge_dflash.checks.footprint import Traffic
from edge_dflash.decode import drafts, loop
from edge_dflash.decode.backend import Cycle
from edge_dflash.decode.cycle import host_cycle
from edge_dflash.decode.shape import PairShape
from edge_dflash.planner import Planner
from edge_dflash.runner import job, planning
from edge_dflash.runner.observer import Observer

SHAPE = PairShape(vocab_size=64, block_size=4, mask_token_id=63, max_context=4096, prefill_chunk=64, drafts=3)
PROPOSE, VERIFY, REST, PLAIN = 0.001, 0.003, 0.0005, 0.0025  # seconds
PREFILL, FIRST = 0.0001, 4.0  # seconds a token; the first cycle takes so many times as long


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def install(self, monkeypatch):
        for module in (measure, drafts, loop, planning, job):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=self.perf_counter))
        monkeypatch.setattr(bench, "force", lambda device, accept: device.force(accept))
        monkeypatch.setattr(bench, "profile", lambda device, anchor: device.profile(anchor))
        return self


@dataclass
class FakeGpu:
    allocations: int = 7
    allocated_bytes: int = 1000

    def enter(self):
        pass

    def free_bytes(self):
        return 6000, 10000


class TimedRows(FakeRows):
    """Rows that choose these tokens."""

    def __init__(self, tokens, vocab_size):
        self.tokens, self.vocab_size = tokens, vocab_size

    def __len__(self):
        return len(self.tokens)

    def argmax(self):
        return list(self.tokens)

    def logits(self):
        found = np.zeros((len(self.tokens), self.vocab_size), np.float32)
        found[np.arange(len(self.tokens)), self.tokens] = 1.0
        return found


class TimedBackend(FakeBackend):
    """Every token is 1. Accepts ``natural`` drafts until told otherwise. Two passes take as long as a whole cycle."""

    def __init__(self, clock, shape=SHAPE, natural=1, allocates=False):
        super().__init__(shape)
        self.clock, self.natural, self.gpu, self.allocates = clock, natural, FakeGpu(), allocates
        self.budget = {"weights": 900, "kv": 100}
        self.pattern, self.cycled, self.lengths = None, 0, []

    def prefill(self, ids, lane=0, sight=None):
        self.clock.now += PREFILL * len(ids)
        self.lengths.append(len(ids))
        self.committed = [*self.committed, *ids]
        return self._rows([1])

    def propose(self, anchor, lane=0):
        accepted = self._begin_cycle()
        self.clock.now += self._slow * PROPOSE
        return self._rows([1] * accepted + [0] * (self.shape.block_size - 1 - accepted))

    def verify(self, ids, lane=0, parents=None):
        self.clock.now += PLAIN if len(ids) == 1 else self._slow * (VERIFY + REST)
        self._flight, self._parents = list(ids), list(range(-1, len(ids) - 1))
        return self._rows([1] * len(ids))

    def cycle(self, asked):
        if asked.steering is not None or not asked.drafting:
            return host_cycle(self, asked)
        most = self.shape.block_size - 1 if asked.drafts is None else asked.drafts
        accepted = min(self._begin_cycle(), most)
        self.clock.now += self._slow * (PROPOSE + VERIFY + REST)
        self._flight, self._parents = [1] * (accepted + 1), list(range(-1, accepted))
        return Cycle((1,) * (accepted + 1), accepted, most, PROPOSE, VERIFY)

    def _begin_cycle(self):
        self._slow = FIRST if self.cycled == 0 else 1.0
        accepted = self.pattern[self.cycled % len(self.pattern)] if self.pattern else self.natural
        self.cycled += 1
        self.gpu.allocations += self.allocates
        return accepted

    def _rows(self, tokens):
        return TimedRows(tokens, self.shape.vocab_size)

    def force(self, accept):
        self.gpu.allocations += 1  # of the pattern: before counting begins
        self.pattern = accept

    def profile(self, anchor=0):
        names = (
            "target.layers.0.mlp.down_proj nvfp4",
            "target.layers.1.mlp.down_proj nvfp4",
            "Attend target.layers.3.kv",
        )
        return [
            SimpleNamespace(name=name, seconds=0.001 * (i + 1), weight_bytes=10 * i) for i, name in enumerate(names)
        ]


class FakeCosts:
    """Propose moves 0.5 GB, verify 2 GB and a byte a token of context and pending row; a token is 1e9 operations."""

    def propose(self, context):
        return Traffic({"nvfp4": 500_000_000}, 0, 0, 0, 0)

    expert_layers = 0

    def verify(self, context, pending, rows=None, experts=None):
        return Traffic({"nvfp4": 1_500_000_000, "fp8": 500_000_000}, 0, context, 0, pending)

    def prefill_operations(self, tokens):
        return 10**9 * tokens


BANDWIDTH = 1e12


class SlowHost(Observer):
    """The host takes ``seconds`` a step."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def step(self, step):
        self.clock.now += self.seconds


def subject(backend, costs=True, prompt=100, observer=None):
    return Subject(
        title="a <fake> pair",
        kind="native",
        weights="nvfp4",
        kv="fp8",
        planner=Planner(backend, None, fallback=False, observer=observer),
        costs=FakeCosts() if costs else None,
        source="a prompt of ones",
        prompts=([1] * prompt,),
        form=None,
        filler=[1, 2, 3],
        load_seconds=12.5,
    )


def device():
    description = {"device": "Fake GPU", "sm": 90, "multiprocessors": 132}
    return Device(description, 9000, BANDWIDTH, 2e13, "a slide rule")
