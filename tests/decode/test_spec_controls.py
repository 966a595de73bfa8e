import time
from dataclasses import replace

import numpy as np
import pytest
from fakes import Stepped
from golden_pairs import ENGINE, NAMES, backend, golden, same_bits

from edge_dflash.decode.controls import Controls, CycleTime, Pace
from edge_dflash.decode.drafts import DraftChoice
from edge_dflash.decode.loop import generate, stream
from edge_dflash.decode.options import Options

PROMPT = golden("qwen3_5")["p1.prompt"].tolist()
FULL = golden("qwen3_5")["p1.dflash_tokens"].tolist()
OPTIONS = Options(max_new_tokens=40)


class Alternating:
    """A grammar: even positions take even ids, odd positions odd ids; the fourth token is always 77; STOP after 12."""

    STOP = 511

    def __init__(self):
        self.path = []
        self.deepest = 0

    def allowed(self):
        ids = np.arange(512)
        depth = len(self.path)
        if depth == 3:
            return ids == 77
        if depth >= 12:
            return ids == self.STOP
        return (ids % 2 == depth % 2) & (ids != self.STOP)

    def push(self, token):
        if not self.allowed()[token]:
            return False
        self.path.append(token)
        self.deepest = max(self.deepest, len(self.path))
        return True

    def pop(self, count):
        if count:
            del self.path[-count:]

    def forced(self):
        return {3: (77,), 12: (self.STOP,)}.get(len(self.path), ())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_constrained_speculative_equals_constrained_plain(name, temperature):
    prompt = golden(name)["p0.prompt"].tolist()
    options = Options(max_new_tokens=40, temperature=temperature, seed=3)
    results, states = [], []
    for speculative in (True, False):
        b, grammar = backend(name, ENGINE), Alternating()
        result = generate(
            b,
            prompt,
            replace(options, speculative=speculative),
            stop_token_ids=(Alternating.STOP,),
            controls=Controls(constraint=Stepped(grammar)),
        )
        assert grammar.path == list(result.tokens)  # the grammar ends where the answer does
        results.append(result)
        states.append(b.snapshot())
    speculative, plain = results
    assert speculative.tokens == plain.tokens
    assert same_bits(*states)
    assert plain.finish_reason == "stop"
    assert len(plain.tokens) == 13
    assert plain.tokens[3] == 77
    assert all(token % 2 == i % 2 for i, token in enumerate(plain.tokens[:3]))
    assert len(speculative.accept_lengths) < len(plain.accept_lengths)  # forced tokens at least


def test_a_cancelled_request_ends_at_a_commit():
    b, seen = backend("qwen3_5"), []
    controls = Controls(cancelled=lambda: len(seen) >= 9)
    for step in stream(b, PROMPT, OPTIONS, controls=controls):
        seen += step.tokens
    assert (step.tokens, step.finish_reason) == ((), "cancelled")
    assert seen == FULL[: len(seen)]
    assert 9 <= len(seen) <= 9 + 8
    assert b.length() == len(PROMPT) + len(seen) - 1


def test_a_request_cancelled_before_it_starts_touches_nothing():
    b = backend("qwen3_5")
    result = generate(b, PROMPT, OPTIONS, controls=Controls(cancelled=lambda: True))
    assert (result.tokens, result.finish_reason, result.accept_lengths) == ((), "cancelled", ())
    assert b.length() == 0


def test_a_deadline_that_the_prefill_cannot_meet_starts_nothing():
    b, pace = backend("qwen3_5"), Pace()
    pace.record_prefill(10, 10.0)  # 1 s a token
    controls = Controls(deadline=time.perf_counter() + 5.0, pace=pace)
    assert generate(b, PROMPT, OPTIONS, controls=controls).finish_reason == "deadline"
    assert b.length() == 0


def test_no_cycle_starts_that_cannot_end_in_time():
    b, pace = backend("qwen3_5"), Pace()
    pace.record(CycleTime(50.0, 50.0))
    controls = Controls(deadline=time.perf_counter() + 30.0, pace=pace)
    result = generate(b, PROMPT, OPTIONS, controls=controls)
    assert (result.tokens, result.finish_reason) == ((FULL[0],), "deadline")


def test_a_passed_deadline_gives_what_was_committed():
    b = backend("qwen3_5")
    steps = stream(b, PROMPT, OPTIONS, controls=Controls(deadline=time.perf_counter() + 0.3))
    seen = [*next(steps).tokens, *next(steps).tokens]
    time.sleep(0.3)
    last = next(steps)
    assert last.finish_reason == "deadline"
    assert seen == FULL[: len(seen)]
    assert not list(steps)


def test_plain_fallback_changes_the_time_and_not_the_tokens():
    b = backend("qwen3_5")
    pace = Pace(DraftChoice(b.shape.drafts))
    for _ in range(16):
        pace.record(CycleTime(1e3, 1e-3, b.shape.drafts, b.shape.drafts, 0))
    assert pace.drafts == 0
    result = generate(b, PROMPT, OPTIONS, controls=Controls(pace=pace))
    assert list(result.tokens) == FULL[:40]
    assert set(result.accept_lengths[:20]) == {1}
