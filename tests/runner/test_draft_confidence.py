"""``draft_confidence``: drafts from the first unsure one on are not verified. Planner, service and settings."""

import pytest
from golden_pairs import NAMES, WALKS, golden, pair
from service_support import client_of, fake_service
from verify_support import exact

from edge_dflash.planner import Planner

SAMPLED = {"temperature": 1.5, "seed": 4}
SURE = "qwen3-dspark-rnn"


def prompt(name):
    return golden(name)["p0.prompt"].tolist()


def middle(name):
    """A confidence above some of the drafts and below others; one half where there is no head."""
    return float(golden(name).get("p0.threshold", [0.5])[0])


def has_head(name):
    return getattr(getattr(pair(name).drafter, "head", None), "confidence", None) is not None


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*WALKS, NAMES[0]])
def test_no_token_changes_and_a_head_cuts_blocks_early(name, options):
    with Planner(exact(name), None, fallback=False) as planner:

        def plan(confidence, **more):
            return planner.plan(prompt(name), max_new_tokens=24, draft_confidence=confidence, **options, **more)

        plain, found = plan(0.0, speculative=False), [plan(confidence) for confidence in (0.0, middle(name), 1.0)]
    assert all(one.tokens == plain.tokens for one in found)
    everything, some, none = (one.drafting for one in found)
    assert set(everything.drafts) == {7}
    if has_head(name):
        assert everything.mean > some.mean > none.mean == 0
        assert len(set(some.drafts)) > 1
    else:
        assert everything == some == none


def test_a_head_and_a_number_of_drafts_cut_together():
    with Planner(exact(SURE), None, drafts=3) as planner:
        every, some = (
            planner.plan(prompt(SURE), max_new_tokens=24, draft_confidence=one) for one in (0.0, middle(SURE))
        )
    assert some.tokens == every.tokens
    assert set(every.drafting.drafts) == {3}
    assert max(some.drafting.drafts) <= 3
    assert some.drafting.mean < 3


def answered(service, **extra):
    body = {"prompt": prompt(SURE), "max_tokens": 24, "edge_dflash": {"tokens": True, **extra}}
    with client_of(service) as client:
        answer = client.post("/v1/completions", json=body)
    return answer.status_code, answer.json()


def test_a_request_over_http_says_it_and_the_service_has_a_default(tmp_path):
    services = [
        fake_service(tmp_path / str(default), exact(SURE), None, defaults={"draft_confidence": default})
        for default in (0.0, 1.0)
    ]
    whole = answered(services[0])[1]["edge_dflash"]
    assert set(whole["drafts"]) == {7}
    for service, extra in ((services[0], {"draft_confidence": 1.0}), (services[1], {})):
        status, found = answered(service, **extra)
        assert status == 200
        assert set(found["edge_dflash"]["drafts"]) == {0}
        assert found["edge_dflash"]["tokens"] == whole["tokens"]
    assert answered(services[1], draft_confidence=0)[1]["edge_dflash"]["drafts"] == whole["drafts"]
    for wrong in (-0.1, 1.5, "0.5", True):
        status, found = answered(services[0], draft_confidence=wrong)
        assert (status, found["error"]["param"]) == (400, "edge_dflash.draft_confidence")
    for service in services:
        service.close()
