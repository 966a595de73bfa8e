"""Rows that choose by themselves, packed masks, and what the loop leaves to a backend that runs whole cycles."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import SHAPE, FakeBackend, FakeRows, Grammar, Stepped

from edge_dflash.decode.accept import Relaxation
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.generation import collect, generate, stream
from edge_dflash.decode.options import Options
from edge_dflash.decode.sampling import Choosing, choose_row

PROMPT = (3, 1, 4)
SAMPLED = Options(max_new_tokens=30, temperature=1.5, top_k=30, top_p=0.9, seed=5)


class ChoosingRows(FakeRows):
    """Chooses, and does not give its logits away."""

    calls = 0

    def choose(self, sampling, position, masks, first=0):
        ChoosingRows.calls += 1
        assert 0 <= first <= first + len(masks) <= len(self)
        assert all(mask is None or (mask.dtype, mask.shape) == (np.uint32, (2,)) for mask in masks)
        return [choose_row(self._logits[first + i], sampling, position + i, mask) for i, mask in enumerate(masks)]

    def logits(self):
        raise AssertionError("logits were read although the rows choose by themselves")


class ChoosingBackend(FakeBackend):
    def prefill(self, ids, lane=0, sight=None):
        return ChoosingRows(super().prefill(ids, lane, sight).logits())

    def propose(self, anchor, lane=0):
        return ChoosingRows(super().propose(anchor, lane).logits())

    def verify(self, ids, lane=0, parents=None):
        return ChoosingRows(super().verify(ids, lane).logits())


class CyclingBackend(ChoosingBackend):
    """Runs the cycles that it is asked for, and notes how they were to choose."""

    def cycle(self, asked):
        self.noted = [*getattr(self, "noted", []), (asked.sampling, asked.steering is None, asked.drafting)]
        cycle = super().cycle(asked)
        self._flight = [asked.anchor, *cycle.tokens[:-1]]
        return replace(cycle, propose_seconds=0.25 if asked.drafting else 0.0, verify_seconds=0.5, logits=None)


class Parity(Grammar):
    """Even ids after an even number of tokens, else odd ones below 40; 7 is forced after five."""

    def allowed(self):
        ids = np.arange(SHAPE.vocab_size)
        if len(self.path) % 6 == 5:
            return ids == 7
        return None if len(self.path) % 6 == 4 else (ids % 2 == len(self.path) % 2) & (ids < 40)

    def forced(self):
        return (7,) if len(self.path) % 6 == 5 else ()


def right(position):
    return position % SHAPE.block_size


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("grammar", [None, Parity])
@pytest.mark.parametrize("options", [SAMPLED, Options(max_new_tokens=30)], ids=["sampled", "greedy"])
def test_rows_that_choose_give_the_same_answer_without_their_logits(options, grammar, speculative):
    found = []
    for backend in (ChoosingBackend(right=right), FakeBackend(right=right)):
        controls = Controls(constraint=grammar and Stepped(grammar()))
        found.append(generate(backend, PROMPT, replace(options, speculative=speculative), controls=controls))
    assert found[0].tokens == found[1].tokens
    assert found[0].accept_lengths == found[1].accept_lengths


def test_the_largest_logits_are_not_chosen_twice():
    ChoosingRows.calls = 0
    generate(ChoosingBackend(), PROMPT, Options(max_new_tokens=9))
    assert ChoosingRows.calls == 0
    generate(ChoosingBackend(), PROMPT, SAMPLED)
    assert ChoosingRows.calls > 0
    assert not isinstance(FakeRows([[0.0]]), Choosing)


@pytest.mark.parametrize("options", [SAMPLED, Options(max_new_tokens=30)], ids=["sampled", "greedy"])
@pytest.mark.parametrize("kind", ["free", "grammar", "relaxation", "plain"])
def test_every_request_runs_in_cycles_of_the_backend(kind, options):
    class Cycling(CyclingBackend):
        if kind == "relaxation":  # reads logits
            prefill, propose, verify = FakeBackend.prefill, FakeBackend.propose, FakeBackend.verify

    controls = {
        "grammar": lambda: Controls(constraint=Stepped(Parity())),
        "relaxation": lambda: Controls(relaxation=Relaxation((60,))),
    }
    backends, runs = [Cycling(right=right), FakeBackend(right=right)], []
    for backend in backends:
        steering = controls.get(kind, Controls)()
        asked = replace(options, speculative=kind != "plain")
        runs.append(list(stream(backend, PROMPT, asked, controls=steering)))
    found = [collect(steps) for steps in runs]
    assert found[0].tokens == found[1].tokens
    asked, free = backends[0].noted, kind in ("free", "plain")
    assert asked == [(options.sampling, free, kind != "plain")] * len(found[0].accept_lengths)
    assert sum(step.propose_seconds for step in runs[0]) == pytest.approx(0.25 * (kind != "plain") * len(asked))
