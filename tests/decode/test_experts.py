"""A target that is a mixture of experts: no drafter changes what it decodes, chunks of a prompt neither."""

from dataclasses import replace

import pytest
from golden_pairs import EXPERTS, golden, pair, same_bits
from verify_support import BACKENDS

from edge_dflash.checks.lossless import Adversary, noise, oracle_until, verify_lossless
from edge_dflash.decode.loop import generate
from edge_dflash.decode.options import Options

SAMPLED = Options(temperature=4.0, top_k=40, top_p=0.9, seed=7)


def prompts(count=3):
    return [golden(EXPERTS)[f"p{i}.prompt"].tolist() for i in range(count)]


@pytest.mark.parametrize("kind", BACKENDS)
def test_speculative_is_plain_with_every_drafter_and_accept_length(kind):
    result = verify_lossless(BACKENDS[kind](EXPERTS), prompts(), max_new_tokens=40, sampled=SAMPLED)
    assert result.differences == ()
    assert result.untried == ()
    assert set(range(1, pair(EXPERTS).verify_rows + 1)) <= set(result.histogram["staircase"])


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("mode", [Options(), SAMPLED], ids=["greedy", "sampled"])
def test_every_accept_length_leaves_tokens_and_state_of_plain_decoding(mode, kind):
    backend, prompt, options = BACKENDS[kind](EXPERTS), prompts()[1], replace(mode, max_new_tokens=19)
    plain = generate(backend, prompt, replace(options, speculative=False)).tokens
    state = backend.snapshot()
    for drafter in (*map(oracle_until, range(backend.shape.verify_rows)), noise(3)):
        backend.reset()
        found = generate(Adversary(backend, [*prompt, *plain], drafter), prompt, options)
        assert found.tokens == plain
        assert same_bits(backend.snapshot(), state)


@pytest.mark.parametrize("kind", BACKENDS)
def test_chunks_of_a_prompt_leave_the_same_bits(kind):
    prompt = prompts()[2]
    whole = BACKENDS[kind](EXPERTS)
    logits = whole.prefill(prompt).logits()
    for chunk in (1, 5, 16):
        parts = BACKENDS[kind](EXPERTS, prefill_chunk=chunk)
        assert (parts.prefill(prompt).logits() == logits).all()
        assert same_bits(parts.snapshot(), whole.snapshot())
