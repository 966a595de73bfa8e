"""Lanes on the native backend: whoever shares the passes, each request has the bits that it has alone."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property
from random import Random

import numpy as np
import pytest
from golden_pairs import same_bits
from native_backend_support import native, prompt
from test_native_drafters import native as walking

from edge_dflash.backends.cuda.driver import Graph
from edge_dflash.bench.device import force
from edge_dflash.decode.backend import Asked, Cycle
from edge_dflash.decode.logprobs import token_logprobs
from edge_dflash.decode.sampling import Sampling, choose, pack
from edge_dflash.errors import RequestError

pytestmark = pytest.mark.gpu

PAIRS = {
    "demo": (native, "demo", "nvfp4"),
    "dense": (native, "dense", "mixed"),
    "hybrid": (native, "hybrid", "nvfp4"),
    "experts": (native, "experts", "mixed"),
    "selector": (walking, "hybrid", "dflash2"),
    "markov": (walking, "dense", "rnn"),
}
LANES, NEW, MIXES, TURNS = 4, 40, 17, 40  # tokens of a request, mixes of a pair, turns of a mix
SAMPLINGS = (Sampling(), Sampling(), Sampling(0.8, 20, 0.9, 3), Sampling(2.0, seed=2**63), Sampling(1.0, 0, 0.5, 5))


class Steered:
    """Masks by position alone, drafts that are right up to some row, or the drafter's own; it may give up."""

    tolerant = False

    def __init__(self, request, at, right=None, fails=None):
        self.request, self.at, self.right, self.fails = request, at, right, fails

    def drafts(self, rows, position):
        if self.fails == "drafts":
            raise RequestError("gave up before the verify")
        if self.right is None:
            return choose(rows, self.request.sampling, position)
        truth = self.request.truth[0][self.at + 1 :][: len(rows)]
        return [*truth[: self.right], *((token + 1) % self.request.vocabulary for token in truth[self.right :])]

    def masks(self, drafts):
        if self.fails == "masks":
            raise RequestError("gave up while the verify ran")
        return [self.request.mask(self.at + row) for row in range(len(drafts) + 1)]

    def tolerated(self, rows, drafts, choices):
        return []


@dataclass(eq=False)
class Request:
    """A prompt, how its tokens are chosen, and what it is alone: plain, on a backend of one lane."""

    alone: object
    ids: list[int]
    sampling: Sampling
    masked: bool
    states: dict = field(default_factory=dict)

    @property
    def vocabulary(self):
        return self.alone.shape.vocab_size

    def mask(self, at):
        """Of the token behind token ``at`` of the answer."""
        if not self.masked or at % 3 == 0:
            return None
        return pack(np.arange(self.vocabulary) % (2 + at % 5) != 0)

    @cached_property
    def truth(self):
        """Tokens, and the logits that token i + 1 was chosen by, and its log-probability."""
        self.alone.reset()
        tokens, rows, logprobs = [choose(self.alone.prefill(self.ids), self.sampling, len(self.ids))[0]], [], []
        for at in range(NEW):
            steering = Steered(self, at) if self.masked else None
            cycle = self.alone.cycle(Asked(tokens[-1], self.sampling, steering, drafts=0, logits=True))
            rows.append(cycle.logits()[0].tobytes())
            logprobs += cycle.logprobs()
            self.alone.commit(1)
            tokens += cycle.tokens
        return tokens, rows, logprobs

    def state(self, count):
        """Flushed state with so many tokens of the answer in it."""
        if count not in self.states:
            self.alone.reset()
            self.alone.prefill(self.ids)
            for token in self.truth[0][:count]:
                self.alone.verify([token])
                self.alone.commit(1)
            self.states[count] = self.alone.snapshot()
        return self.states[count]


@dataclass
class Running:
    request: Request
    read: int = 0  # ids of the prompt that are in the lane
    count: int = 0  # tokens of the answer that are


class Mix:
    """Requests that come, go, are copied, kept and put back as a seed says."""

    def __init__(self, name, seed):
        load, *what = PAIRS[name]
        self.alone, self.backend = load(*what), load(*what, lanes=LANES)
        self.random, self.running, self.kept, self.joint_cycles = Random(seed), {}, [], 0
        self.requests = [self.request(greedy=seed % 3 == 0) for _ in range(5)]
        for lane in range(LANES):
            self.backend.reset(lane)

    def request(self, greedy):
        pick = self.random
        ids = [pick.randrange(1, self.alone.shape.vocab_size - 2) for _ in range(pick.choice((1, 5, 21, 70)))]
        if greedy:
            return Request(self.alone, ids, SAMPLINGS[0], masked=False)
        return Request(self.alone, ids, pick.choice(SAMPLINGS), pick.random() < 0.3)

    def free(self):
        return [lane for lane in range(LANES) if lane not in self.running]

    def arrive(self):
        if free := self.free():
            self.backend.reset(lane := self.random.choice(free))
            self.running[lane] = Running(self.random.choice(self.requests))

    def prompts(self):
        """A piece of one prompt."""
        for lane, run in self.running.items():
            left = run.request.ids[run.read :]
            if left:
                piece = left[: self.random.randint(1, len(left))]
                rows, run.read = self.backend.prefill(piece, lane), run.read + len(piece)
                if run.read == len(run.request.ids):
                    assert choose(rows, run.request.sampling, run.read) == run.request.truth[0][:1]
                return

    def asked(self, lane, run):
        pick, at = self.random, run.count
        request, most = run.request, self.backend.shape.drafts
        drafts = pick.choice((None, None, 0, pick.randint(0, most)))
        right = pick.choice((None, pick.randint(0, most)))
        steering = None
        if request.masked or pick.random() < 0.2:
            steering = Steered(request, at, right, pick.choice((None,) * 8 + ("drafts", "masks")))
        logits, threshold = pick.random() < 0.3, pick.choice((0.0, 0.0, 0.4))
        token = request.truth[0][at]
        return Asked(token, request.sampling, steering, drafts, logits, threshold=threshold, lane=lane)

    def cycles(self):
        ready = [lane for lane, run in self.running.items() if run.read == len(run.request.ids)]
        ready = self.random.sample(
            ready, self.random.randint(0, len(ready)) if self.random.random() < 0.3 else len(ready)
        )
        asked = [self.asked(lane, self.running[lane]) for lane in ready]
        outcomes = self.backend.cycles(asked)
        self.joint_cycles += len(asked) > 1
        for one, outcome in zip(asked, outcomes, strict=True):
            self.check(one, self.running[one.lane], outcome)
        for one, outcome in zip(asked, outcomes, strict=True):
            if isinstance(outcome, Cycle):
                self.commit(one.lane, self.running[one.lane], len(outcome.tokens))

    def check(self, asked, run, outcome):
        gave_up = asked.steering and (asked.steering.fails == "masks" or (asked.steering.fails and asked.drafting))
        assert isinstance(outcome, RequestError if gave_up else Cycle)
        if gave_up:
            return
        tokens, rows, _ = run.request.truth
        wanted = tokens[run.count + 1 :]
        count = min(len(outcome.tokens), len(wanted))
        assert list(outcome.tokens[:count]) == wanted[:count]
        if asked.steering and asked.steering.right is not None and asked.drafting:
            assert outcome.accepted == min(asked.steering.right, outcome.drafts)
        if asked.logits:
            found, logprobs = outcome.logits(), outcome.logprobs()
            alone = token_logprobs(lambda: found, outcome.tokens, 0)
            np.testing.assert_allclose(logprobs, [one.logprob for one in alone], rtol=1e-6, atol=1e-5)
            assert logprobs[:count] == run.request.truth[2][run.count :][:count]
            assert [row.tobytes() for row in found[:count]] == rows[run.count :][:count]

    def commit(self, lane, run, tokens):
        kept = min(self.random.choice((tokens, tokens, tokens, self.random.randint(0, tokens))), NEW - run.count)
        self.backend.commit(kept, lane)
        run.count += kept
        if run.count == NEW:
            self.end(lane)

    def end(self, lane):
        run = self.running.pop(lane)
        if run.read == len(run.request.ids):
            assert same_bits(self.backend.snapshot(lane), run.request.state(run.count))

    def move(self):
        """A copy to a free lane, a state that is kept, one that is put back, or one that leaves."""
        pick, free, there = self.random, self.free(), sorted(self.running)
        match pick.randrange(5):
            case 0 if there and free:
                source, target = pick.choice(there), pick.choice(free)
                self.backend.copy(source, target)
                self.running[target] = Running(**vars(self.running[source]))
            case 1 if there:
                lane = pick.choice(there)
                self.kept.append((self.backend.snapshot(lane), Running(**vars(self.running[lane]))))
            case 2 if self.kept and free:
                snapshot, run = pick.choice(self.kept)
                self.backend.restore(snapshot, lane := pick.choice(free))
                self.running[lane] = Running(**vars(run))
            case 3 if there:
                self.end(pick.choice(there))
            case 4 if there:
                self.backend.flush(pick.choice(there))

    def run(self):
        for _ in range(TURNS):
            if self.random.random() < 0.5:
                self.arrive()
            if self.random.random() < 0.2:
                self.move()
            self.prompts()
            self.cycles()
        for lane in sorted(self.running):
            self.end(lane)


@pytest.mark.parametrize("name", PAIRS)
def test_requests_of_random_mixes_have_the_bits_that_they_have_alone(name, monkeypatch):
    greedy(name)  # loads and warms up
    launched, launch = Counter(), Graph.launch
    monkeypatch.setattr(Graph, "launch", lambda graph: launched.update([graph]) or launch(graph))
    for seed in range(MIXES):
        Mix(name, seed).run()
    by_slots = Mix(name, 0).backend.graphs
    assert max(by_slots) == LANES, "the linears take too few rows"
    for graphs in (graphs for slots, graphs in by_slots.items() if slots > 1):
        kinds = {
            "greedy": graphs.greedy, "sampled": graphs.sampled, "verify": graphs.verify,
            "accept": graphs.accept, "choose": graphs.choose,
        }  # fmt: skip
        found = {kind: sum(launched[graph] for graph in by_rows.graphs.values()) for kind, by_rows in kinds.items()}
        assert min(found.values()) > 0, found
        assert launched[graphs.propose] > 0


@cache
def greedy(name):
    """A request of each kind of one pair, and its backend of several lanes."""
    load, *what = PAIRS[name]
    return load(*what), load(*what, lanes=LANES)


@pytest.mark.parametrize("name", PAIRS)
def test_a_greedy_lane_beside_sampled_ones_chooses_the_largest(name):
    alone, backend = greedy(name)
    requests = [
        Request(alone, prompt(PAIRS[name][1], 9, seed=lane), sampling, False)
        for lane, sampling in enumerate((Sampling(), SAMPLINGS[2], Sampling(), SAMPLINGS[4]))
    ]
    truths = [request.truth[0] for request in requests]
    for lane, request in enumerate(requests):
        backend.reset(lane)
        backend.prefill(request.ids, lane)
    counts = [0] * LANES
    while min(counts) < NEW - backend.shape.verify_rows:
        asked = [Asked(truths[i][counts[i]], requests[i].sampling, lane=i) for i in range(LANES)]
        for lane, cycle in enumerate(backend.cycles(asked)):
            wanted = truths[lane][counts[lane] + 1 :][: len(cycle.tokens)]
            assert list(cycle.tokens[: len(wanted)]) == wanted
            keep = min(len(cycle.tokens), max(0, NEW - backend.shape.verify_rows - counts[lane]))
            backend.commit(keep, lane)
            counts[lane] += keep


def test_forced_patterns_are_counted_in_each_lane():
    _, backend = greedy("demo")
    most = backend.shape.drafts
    pattern = [0, most, 1, 2, most]
    force(backend, pattern)
    try:
        for lane in range(LANES):
            backend.reset(lane)
            backend.prefill(prompt("demo", 4 + lane), lane)
        accepted = []
        for _ in pattern:
            found = backend.cycles([Asked(5, lane=lane) for lane in range(LANES)])
            assert len({cycle.accepted for cycle in found}) == 1
            accepted.append(found[0].accepted)
            for lane, cycle in enumerate(found):
                backend.commit(len(cycle.tokens), lane)
        assert accepted in [pattern[at:] + pattern[:at] for at in range(len(pattern))]  # cycles of before count, too
    finally:
        force(backend, None)


def test_nothing_is_allocated_by_lanes():
    _, backend = greedy("hybrid")
    before = backend.gpu.allocations
    Mix("hybrid", 99).run()
    assert backend.gpu.allocations == before
