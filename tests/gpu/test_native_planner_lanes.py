"""A planner of several lanes on the native backend: what callers share passes of, and what they get."""

import threading

import pytest
from native_backend_support import native, prompt

from edge_dflash.backends.cuda.rows import NativeRows
from edge_dflash.checks.mixes import Watching
from edge_dflash.planner import Planner

pytestmark = pytest.mark.gpu
LANES, TOKENS = 4, 48
KINDS = {"demo": "nvfp4", "hybrid": "nvfp4", "dense": "mixed"}
OPTIONS = (
    {}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.2, "top_k": 20, "seed": 9}, {"speculative": False},
    {"temperature": 0.7, "top_p": 0.9, "seed": 1}, {}, {"logprobs": 0}, {"temperature": 1.0, "seed": 2, "logprobs": 2},
)  # fmt: skip


@pytest.fixture(params=KINDS)
def name(request):
    return request.param


def planner(name, lanes, **settings):
    """Around a backend that outlives it."""
    return Planner(native(name, KINDS[name], lanes=lanes), None, fallback=False, **settings)


def test_callers_share_passes_and_get_what_they_get_alone(name):
    prompts = [prompt(name, 5 + 9 * number, seed=number) for number in range(len(OPTIONS))]
    alone = planner(name, 1)
    wanted = [alone.plan(ids, max_new_tokens=TOKENS, **more) for ids, more in zip(prompts, OPTIONS, strict=True)]
    watching, start, found = Watching(), threading.Barrier(len(OPTIONS)), {}
    together = planner(name, LANES, observer=watching)

    def call(number):
        start.wait()
        found[number] = together.plan(prompts[number], max_new_tokens=TOKENS, caller=str(number), **OPTIONS[number])

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(OPTIONS))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for number, plan in enumerate(wanted):
        assert found[number].tokens == plan.tokens
        assert found[number].logprobs == plan.logprobs
    assert max(one.lanes for one in watching.passes) == LANES
    assert max(one.rows for one in watching.passes) > LANES  # of one pass
    alone._engine.close()
    together._engine.close()


def test_candidates_are_ordered_without_logits_on_the_host(name, monkeypatch):
    ids, watching = prompt(name, 30), Watching()
    alone, together = planner(name, 1), planner(name, LANES, observer=watching)
    asked = {"max_new_tokens": TOKENS, "temperature": 0.9}
    wanted = [alone.plan(ids, seed=seed, logprobs=0, **asked) for seed in range(LANES)]
    read = NativeRows.logits

    def logits(rows):
        assert len(rows) == 1, "the logits of a cycle were read"  # the prompt's last row
        return read(rows)

    monkeypatch.setattr(NativeRows, "logits", logits)
    best = together.plan(ids, n=LANES, seed=0, **asked)
    plans = {plan.seed: plan for plan in (best, *best.alternatives)}
    for plan in wanted:
        assert plans[plan.seed].tokens == plan.tokens
        assert plans[plan.seed].score == sum(one.logprob for one in plan.logprobs) / len(plan.logprobs)
    assert best.score == max(plan.score for plan in plans.values())
    assert max(one.lanes for one in watching.passes) == LANES
    alone._engine.close()
    together._engine.close()
