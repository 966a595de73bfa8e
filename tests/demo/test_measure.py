from types import SimpleNamespace

from calib.demo import measure_candidates, measure_planner
from calib.demo.corpus import heldout_keys, task_key
from calib.demo.measure_sessions import callers, conversation
from edge_dflash.planner import Planner


def test_a_conversation_that_is_killed_between_turns_goes_on_as_if_it_were_not(demo_bundle):
    found = conversation(demo_bundle, 8)
    assert found["turns"] == 8
    assert found["kills"] == 2
    assert found["tokens_equal"]
    assert found["accept_lengths_equal"]
    assert found["files_left_over"] == []


def test_every_caller_gets_its_own_answers_and_its_turn(demo_bundle):
    found = callers(demo_bundle, 10, 2.0)
    assert (found["wrong"], found["errors"]) == (0, 0)
    fewest, most = found["answers_of_a_caller"]
    assert fewest >= 1
    assert most - fewest <= 1


def test_candidates_are_judged_in_two_ways(demo_bundle):
    tasks = measure_candidates.other_tasks(3)
    assert not {task_key(task) for task in tasks} & heldout_keys()
    with Planner.open(demo_bundle, lanes=2) as planner:
        found = measure_candidates.measure(planner, tasks[:1], 2, 0.3)
    assert found["tasks"] == 1
    assert found["simulated"]["success"] >= found["likeliest"]["success"]
    assert found["simulated"]["valid"] >= found["likeliest"]["valid"]
    assert min(found["seconds"]) > 0
    for text, verdict in ((tasks[0].answer, 2), ("{}", 0)):
        assert measure_candidates.verdict(tasks[0], SimpleNamespace(text=text)) == verdict


def test_figures_of_plans_of_a_form(demo_bundle):
    tasks = measure_planner.heldout_tasks()[:1]
    with Planner.open(demo_bundle) as planner:
        found = measure_planner.measure_form(planner, tasks)
    assert found["constrained_of_schema"] == found["constrained_equal_to_free"] == found["plain_equal"] == 1.0
    assert found["accept_length_free"] > 4
    assert 0 < found["verify_ms"] < found["free_cycle_ms"]
