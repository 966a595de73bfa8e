import time
from dataclasses import replace

import numpy as np
import pytest
from fakes import Grammar, Stepped
from golden_pairs import ENGINE, NAMES, backend, golden, same_bits

from edge_dflash.decode.controls import Controls, CycleTime, Pace
from edge_dflash.decode.drafts import DraftChoice
from edge_dflash.decode.loop import generate, stream
from edge_dflash.decode.options import Options

PROMPT = golden("qwen3_5")["p1.prompt"].tolist()
FULL = golden("qwen3_5")["p1.dflash_tokens"].tolist()
OPTIONS = Options(max_new_tokens=40)


class Alternating(Grammar):
    """Even positions take even ids, odd positions odd ids; the fourth token is always 77; STOP after 12."""

    STOP = 511

    def allowed(self):
        ids, depth = np.arange(512), len(self.path)
        if forced := self.forced():
            return ids == forced[0]
        return (ids % 2 == depth % 2) & (ids != self.STOP)

    def forced(self):
        return {3: (77,)}.get(len(self.path), () if len(self.path) < 12 else (self.STOP,))


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


def test_a_passed_deadline_gives_what_was_committed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("edge_dflash.decode.controls.time.perf_counter", lambda: now[0])
    steps = stream(backend("qwen3_5"), PROMPT, OPTIONS, controls=Controls(deadline=1.0))
    seen = [*next(steps).tokens, *next(steps).tokens]
    now[0] = 2.0
    assert [step.finish_reason for step in steps] == ["deadline"]
    assert seen == FULL[: len(seen)]


def test_plain_fallback_changes_the_time_and_not_the_tokens():
    b = backend("qwen3_5")
    pace = Pace(DraftChoice(b.shape.drafts))
    for _ in range(16):
        pace.record(CycleTime(1e3, 1e-3, b.shape.drafts, b.shape.drafts, 0))
    assert pace.drafts == 0
    result = generate(b, PROMPT, OPTIONS, controls=Controls(pace=pace))
    assert list(result.tokens) == FULL[:40]
    assert set(result.accept_lengths[:20]) == {1}
