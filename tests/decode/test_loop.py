import time
from dataclasses import replace

import numpy as np
import pytest
from fakes import SHAPE, FakeBackend, FakeRows, Grammar, Stepped
from golden_pairs import ENGINE, NAMES, WALKS, backend, golden, same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_dflash.decode.controls import Controls, Pace
from edge_dflash.decode.generation import collect, generate, stream
from edge_dflash.decode.options import Options
from edge_dflash.decode.sampling import Sampling, choose_row

PROMPT = golden("qwen3_5")["p1.prompt"].tolist()
FULL = golden("qwen3_5")["p1.dflash_tokens"].tolist()


def run(options, *, speculative=True, stop=(), name="qwen3_5", prompt=PROMPT, **kwargs):
    b = backend(name, **kwargs)
    return generate(b, prompt, replace(options, speculative=speculative), stop_token_ids=stop), b


@pytest.mark.parametrize("name", NAMES)
def test_cycles_follow_the_golden(name):
    g = golden(name)
    for p in ("p0", "p1", "p2"):
        result, _ = run(Options(max_new_tokens=64), name=name, prompt=g[f"{p}.prompt"].tolist())
        assert list(result.tokens) == g[f"{p}.dflash_tokens"].tolist()
        accepted = g[f"{p}.cycle_accepted"].tolist()
        assert [n - 1 for n in result.accept_lengths[:-1]] == accepted[: len(result.accept_lengths) - 1]


@pytest.mark.parametrize("budget", range(1, 26))
def test_the_budget_cuts_at_any_offset_of_a_span(budget):
    result, b = run(Options(max_new_tokens=budget))
    assert list(result.tokens) == FULL[:budget]
    assert result.finish_reason == "length"
    assert sum(result.accept_lengths) == budget - 1
    assert b.length() == len(PROMPT) + budget - 1  # the last token is the next anchor


@pytest.mark.parametrize("stop", sorted(set(FULL[:17])))
def test_a_stop_token_ends_at_any_offset_of_a_span_and_is_kept(stop):
    speculative, a = run(Options(max_new_tokens=64), stop=(stop,))
    plain, b = run(Options(max_new_tokens=64), stop=(stop,), speculative=False)
    assert list(speculative.tokens) == FULL[: FULL.index(stop) + 1]
    assert speculative.finish_reason == "stop"
    assert plain.tokens == speculative.tokens
    assert same_bits(a.snapshot(), b.snapshot())


@settings(max_examples=8)
@example(temperature=1.5, top_k=0, top_p=1.0, seed=5)  # hot: any other noise draws other tokens
@example(temperature=3.0, top_k=50, top_p=0.9, seed=2**64 - 1)
@given(st.floats(0.3, 3.0), st.sampled_from([0, 1, 5, 50]), st.sampled_from([0.3, 0.9, 1.0]), st.integers(0, 2**64 - 1))
def test_sampled_speculative_equals_sampled_plain(temperature, top_k, top_p, seed):
    options = Options(max_new_tokens=20, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    speculative, a = run(options, precision=ENGINE)
    plain, b = run(options, speculative=False, precision=ENGINE)
    assert speculative.tokens == plain.tokens
    assert same_bits(a.snapshot(), b.snapshot())


NOISY = Sampling(temperature=2.0, seed=7)


class Drawn(FakeBackend):
    """Its drafter's rows are the target's of the tokens that are drawn."""

    def propose(self, anchor, lane=0):
        context, rows = [*self.committed, anchor], []
        for _ in range(self.shape.block_size - 1):
            rows.append(self._logits(context))
            context.append(choose_row(rows[-1], NOISY, len(context)))
        wrong = self._right(len(self.committed))
        others = (
            1e6
            * np.eye(self.shape.vocab_size)[[(token + 1) % self.shape.vocab_size for token in context[-len(rows) :]]]
        )
        return FakeRows([*rows[:wrong], *others[wrong:]])


@pytest.mark.parametrize("right", range(SHAPE.block_size))
def test_the_noise_of_a_token_is_that_of_its_position(right):
    """However many drafts stand, and without any: a place off by one draws other tokens."""
    context, logits = [3, 1, 4], FakeBackend()._logits
    for _ in range(30):
        context.append(choose_row(logits(context), NOISY, len(context)))
    options = Options(max_new_tokens=30, temperature=2.0, seed=7)
    for speculative in (True, False):
        b = Drawn(right=lambda position: right)
        result = generate(b, [3, 1, 4], replace(options, speculative=speculative))
        assert list(result.tokens) == context[3:]
        assert set(result.drafting.drafts) == {(SHAPE.block_size - 1) * speculative}
        assert result.accept_lengths[0] == (right + 1 if speculative else 1)


def test_an_unfinished_stream_has_no_result():
    steps = stream(backend("qwen3_5"), PROMPT, Options(max_new_tokens=9))
    with pytest.raises(ValueError, match="not finished"):
        collect([next(steps)])


# what steers and ends it ----------------------------------------------------------------------------------------------

FORTY = Options(max_new_tokens=40)


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


@pytest.mark.parametrize("name", [*NAMES, *WALKS])
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
    pace.prefills.append(10, 10.0)  # 1 s a token
    controls = Controls(deadline=time.perf_counter() + 5.0, pace=pace)
    assert generate(b, PROMPT, FORTY, controls=controls).finish_reason == "deadline"
    assert b.length() == 0


def test_no_cycle_starts_that_cannot_end_in_time():
    b, pace = backend("qwen3_5"), Pace()
    pace.record(50.0, 50.0)
    controls = Controls(deadline=time.perf_counter() + 30.0, pace=pace)
    result = generate(b, PROMPT, FORTY, controls=controls)
    assert (result.tokens, result.finish_reason) == ((FULL[0],), "deadline")


def test_a_passed_deadline_gives_what_was_committed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("edge_dflash.decode.controls.time.perf_counter", lambda: now[0])
    steps = stream(backend("qwen3_5"), PROMPT, FORTY, controls=Controls(deadline=1.0))
    seen = [*next(steps).tokens, *next(steps).tokens]
    now[0] = 2.0
    assert [step.finish_reason for step in steps] == ["deadline"]
    assert seen == FULL[: len(seen)]
