"""Candidates of the demo pair: with a form, behind a system prompt that is kept, in a thinking span."""

from __future__ import annotations

import pytest

from calib.demo.evaluate import heldout_tasks
from edge_dflash.demo.checking import plan_schema, schema_problems
from edge_dflash.planner import Planner

TASK = heldout_tasks()[0].messages
BEHIND = [{"role": "system", "content": "You are careful. " * 6}, {"role": "user", "content": "Say hello."}]
DRAWN = {"temperature": 1.1, "seed": 4, "max_new_tokens": 24}


@pytest.fixture(scope="module", params=[1, 2])
def planner(request, demo_bundle, opened_once):
    with Planner.open(demo_bundle, lanes=request.param, fallback=False) as planner:
        yield planner


@pytest.fixture(scope="module")
def alones():
    """Plans of requests alone, of either number of lanes."""
    return {}


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (TASK, {"schema": plan_schema()}),
        ("Say hello.", {"regex": "[a-f]{8}"}),
        (BEHIND, {}),
        ("Say hello.", {"thinking": True}),
        ("Say hello.", {"stop": ["e", "o"]}),
        ("Say hello.", {"speculative": False, "logprobs": 2}),
    ],
)
def test_each_is_the_plan_of_a_request_alone(planner, alones, task, options):
    n = planner.shape.lanes + 1
    found = [stream.plan for stream in planner.streams(task, n, **DRAWN, **options)]
    for index, plan in enumerate(found):
        key = repr((task, options, index))
        if key not in alones:
            alones[key] = planner.plan(task, **{**DRAWN, "seed": 4 + index}, **options)
        alone = alones[key]
        for name in ("tokens", "text", "object", "thinking", "accept_lengths", "logprobs", "finish_reason", "seed"):
            assert getattr(plan, name) == getattr(alone, name), name


def test_a_system_prompt_that_is_kept_serves_candidates_and_is_kept_by_them(demo_bundle):
    with Planner.open(demo_bundle, lanes=2) as planner:
        first = planner.streams(BEHIND, 2, **DRAWN)[0].plan
        again = planner.streams([BEHIND[0], {"role": "user", "content": "Stop."}], 2, **DRAWN)[0].plan
    assert first.reused_tokens == 0
    assert 0 < again.reused_tokens < again.prompt_tokens - 1


def test_the_best_of_a_form_is_of_the_form(planner):
    plan = planner.plan(TASK, n=2, schema=plan_schema(), temperature=0.5, rank=lambda one: len(one.object["steps"]))
    for one in (plan, *plan.alternatives):
        assert schema_problems(one.object, plan_schema()) == []
        assert one.score == len(one.object["steps"])
