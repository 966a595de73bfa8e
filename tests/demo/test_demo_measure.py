from calib.demo.measure_sessions import callers, conversation


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
