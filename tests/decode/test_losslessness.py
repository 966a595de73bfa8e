"""Every accept length 0..B-1, forced by an adversarial drafter: same tokens, same state bits as token by token."""

from dataclasses import replace
from functools import cache

import pytest
from golden_pairs import NAMES, golden, same_bits
from verify_support import BACKENDS

from edge_dflash.checks.lossless import Adversary, oracle_until
from edge_dflash.decode.loop import generate
from edge_dflash.decode.options import Options

OPTIONS = {
    "greedy": Options(max_new_tokens=19),
    "sampled": Options(max_new_tokens=19, temperature=4.0, top_k=40, top_p=0.9, seed=7),
}
CASES = [(n, k, m) for n in NAMES for k, m in (("engine", "greedy"), ("engine", "sampled"), ("float32", "greedy"))]


@cache
def plain(name, kind, mode):
    """Plain tokens, and the state after a fresh run of them, one verified and committed row at a time."""
    backend, prompt = BACKENDS[kind](name), golden(name)["p1.prompt"].tolist()
    tokens = generate(backend, prompt, replace(OPTIONS[mode], speculative=False)).tokens
    backend.reset()
    backend.prefill(prompt)
    for token in tokens[:-1]:
        backend.verify([token])
        backend.commit(1)
        backend.flush()
    return prompt, tokens, backend.snapshot()


@pytest.mark.parametrize(("name", "kind", "mode"), CASES)
@pytest.mark.parametrize("right", range(8))
def test_every_accept_length_leaves_tokens_and_state_of_plain_decoding(name, kind, mode, right):
    prompt, tokens, state = plain(name, kind, mode)
    backend = BACKENDS[kind](name)
    found = generate(Adversary(backend, [*prompt, *tokens], oracle_until(right)), prompt, OPTIONS[mode])
    assert found.tokens == tokens
    assert set(found.accept_lengths[:-1]) <= {right + 1}  # the budget may cut the last cycle
    assert len(found.accept_lengths) == -(-18 // (right + 1))
    assert same_bits(backend.snapshot(), state)


@pytest.mark.parametrize("name", NAMES)
def test_engine_and_float32_states_differ_so_equality_is_not_trivial(name):
    states = [plain(name, kind, "greedy")[2] for kind in BACKENDS]
    assert not same_bits(*states)
    assert any(array.any() for array in states[0].arrays.values())
