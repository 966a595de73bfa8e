"""Log-probabilities of a prompt on the native backend: those of decoding, bit for bit, alone and in shared passes."""

import threading
from dataclasses import replace

import pytest
from native_backend_support import ENGINE, native, prompt, reference

from edge_dflash.backends.cuda.rows import NativeRows
from edge_dflash.checks.mixes import Watching
from edge_dflash.decode.replay import scored
from edge_dflash.planner import Planner

pytestmark = pytest.mark.gpu
LANES, TOKENS = 4, 60
KINDS = {"demo": "nvfp4", "hybrid": "nvfp4", "dense": "mixed"}


@pytest.fixture(params=KINDS)
def name(request):
    return request.param


def planner(name, lanes, **settings):
    """Around a backend that outlives it."""
    return Planner(native(name, KINDS[name], lanes=lanes), None, fallback=False, **settings)


def test_a_score_is_what_decoding_found(name):
    """After one token all rows are of verifies, whatever was drafted: the same kernels, the same bits."""
    alone = planner(name, 1)
    for first in prompt(name, 3):
        for top in (0, 3):
            plan = alone.plan([first], max_new_tokens=TOKENS, logprobs=top)
            assert alone.score([first, *plan.tokens], logprobs=top).logprobs == plan.logprobs
    ids = prompt(name, 40)
    plan = alone.plan(ids, max_new_tokens=TOKENS, logprobs=0)
    score = alone.score([*ids, *plan.tokens])
    for one, other in zip(score.logprobs[-len(plan.tokens) :], plan.logprobs, strict=True):
        assert one.token == other.token
        assert abs(one.logprob - other.logprob) < 0.5  # a prompt's pass sums in another order
    alone._engine.close()


def test_same_bits_next_to_others(name, monkeypatch):
    texts = [list(prompt(name, 20 + 31 * number, seed=number)) for number in range(6)]
    alone, watching = planner(name, 1), Watching()
    wanted = [alone.score(text).logprobs for text in texts]
    together = planner(name, LANES, observer=watching)
    others = [threading.Thread(target=together.plan, args=(prompt(name, 9, seed=seed),),
                               kwargs={"max_new_tokens": 120, "temperature": 0.9, "seed": seed, "caller": str(seed)})
              for seed in range(2)]  # fmt: skip
    for one in others:
        one.start()
    read = NativeRows.logits

    def logits(rows):
        assert len(rows) == 1, "the logits of a cycle were read"  # the first token's
        return read(rows)

    monkeypatch.setattr(NativeRows, "logits", logits)
    assert [one.logprobs for one in together.score(texts)] == wanted
    for one in others:
        one.join()
    assert max(one.lanes for one in watching.passes) == LANES
    alone._engine.close()
    together._engine.close()


def test_it_goes_on_and_takes_sampled_and_plain_answers_after_it(name):
    one, ids = planner(name, 2), prompt(name, 30)
    wanted = one.score(ids).logprobs
    for more in ({}, {"speculative": False}, {"temperature": 0.9, "seed": 3}):
        plan = one.plan(ids, prompt_logprobs=True, logprobs=0, max_new_tokens=20, **more)
        assert plan.prompt_logprobs[1:] == wanted
        assert len(plan.tokens) == len(plan.logprobs) == 20
    one._engine.close()


def test_it_is_as_near_the_reference_as_rounded_activations_allow(name):
    ids, kind = prompt(name, 60), KINDS[name]
    backends = native(name, kind), reference(name, kind), reference(name, kind, replace(ENGINE, activations="float32"))
    here, there, wide = (list(scored(backend, ids)) for backend in backends)

    def away(found):
        return sum(abs(one - other) for one, other in zip(found, there, strict=True)) / len(there)

    assert away(here) < 2 * away(wide)
