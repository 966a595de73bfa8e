from edge_dflash.decode.controls import RECENT, CycleTime, Pace, Patience
from edge_dflash.decode.drafts import DraftChoice

GOOD = CycleTime(0.2, 1.0)
PLAIN = CycleTime(0.0, 1.0)


def feed(pace, cycle, times):
    for _ in range(times):
        pace.record(cycle)


def test_nothing_is_known_at_first():
    pace = Pace()
    assert pace.drafts is None
    assert pace.cycle_seconds(speculative=True) == 0.0
    assert pace.prefill_seconds(100) == 0.0


def test_the_estimate_is_the_longest_recent_cycle():
    pace = Pace()
    pace.record(CycleTime(1.0, 4.0))
    feed(pace, GOOD, RECENT - 1)
    assert pace.cycle_seconds(speculative=True) == 5.0
    pace.record(GOOD)
    assert pace.cycle_seconds(speculative=True) == 1.2
    assert pace.cycle_seconds(speculative=False) == 1.2  # no plain cycle is known
    pace.record(PLAIN)
    assert pace.cycle_seconds(speculative=False) == 1.0


def test_prefill_is_estimated_by_the_slowest_recent_rate():
    pace = Pace()
    pace.record_prefill(50, 1.0)
    assert pace.prefill_seconds(100) == 2.0
    for _ in range(RECENT - 1):
        pace.record_prefill(50, 0.1)
    assert pace.prefill_seconds(100) == 2.0
    pace.record_prefill(50, 0.1)
    assert pace.prefill_seconds(100) == 0.2


def test_one_very_long_pass_does_not_refuse_all_for_ever():
    pace = Pace()
    pace.record_prefill(50, 0.1)
    pace.record_prefill(50, 60.0)
    for cycle in (GOOD, CycleTime(0.2, 60.0), PLAIN, CycleTime(0.0, 60.0)):
        pace.record(cycle)
    pace.refuse(Patience(cancelled=lambda: True), lambda: 0.0)
    assert pace.cycle_seconds(speculative=True) == 60.2
    for _ in range(3):
        pace.refuse(Patience(deadline=0.0), lambda: 0.0)
        assert pace.cycle_seconds(speculative=True) == 1.2
        assert pace.cycle_seconds(speculative=False) == 1.0
        assert pace.prefill_seconds(50) == 0.1


def test_short_prefills_say_nothing_about_long_ones():
    pace = Pace()
    pace.record_prefill(2, 0.1)
    assert pace.prefill_seconds(9) == 0.0
    assert pace.prefill_seconds(8) == 0.4
    pace.record_prefill(200, 1.0)
    assert pace.prefill_seconds(400) == 2.0
    assert pace.prefill_seconds(50) == 0.25


def test_every_cycle_drafts_all_or_what_was_asked_for_unless_the_number_is_chosen():
    for fixed in (None, 0, 2):
        pace = Pace(fixed)
        feed(pace, CycleTime(5.0, 1.0, fixed, fixed or 4, 0), 50)
        assert pace.drafts == fixed


def test_a_chosen_number_follows_the_cycles_that_were_of_its_choice():
    choice = DraftChoice(4, {0: 1.0, 4: 4.0})
    pace = Pace(choice)
    assert pace.drafts == 4
    feed(pace, CycleTime(0.0, 1.0), 50)  # plain decoding that was asked for says nothing of the drafter
    assert pace.drafts == 4
    feed(pace, CycleTime(1.0, 3.0, 4, 4, 0), 8)
    assert pace.drafts == 0
