from edge_dflash.decode.controls import PROBE, RECENT, REST, CycleTime, Pace, Patience

GOOD = CycleTime(0.2, 1.0, 4)  # 0.3 s a token against 1.0 s plain
BAD = CycleTime(0.2, 1.0, 1)
PLAIN = CycleTime(0.0, 1.0, 1)


def feed(pace, cycle, times):
    for _ in range(times):
        pace.record(cycle)


def test_nothing_is_known_at_first():
    pace = Pace()
    assert pace.drafting
    assert pace.cycle_seconds(speculative=True) == 0.0
    assert pace.prefill_seconds(100) == 0.0


def test_the_estimate_is_the_longest_recent_cycle():
    pace = Pace()
    pace.record(CycleTime(1.0, 4.0, 3))
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
    for cycle in (GOOD, CycleTime(0.2, 60.0, 4), PLAIN, CycleTime(0.0, 60.0, 1)):
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


def test_drafting_that_pays_goes_on():
    pace = Pace()
    feed(pace, GOOD, 200)
    assert pace.drafting


def test_drafting_rests_when_it_costs_more_than_it_gives_and_is_tried_again():
    pace = Pace()
    feed(pace, BAD, PROBE - 1)
    assert pace.drafting
    pace.record(BAD)
    assert not pace.drafting
    feed(pace, PLAIN, REST - 1)
    assert not pace.drafting
    pace.record(PLAIN)
    assert pace.drafting
    feed(pace, BAD, PROBE)  # still bad: the next rest is twice as long
    feed(pace, PLAIN, REST)
    assert not pace.drafting
    feed(pace, PLAIN, REST)
    assert pace.drafting
    feed(pace, GOOD, RECENT)
    feed(pace, BAD, 200)
    assert not pace.drafting  # a drafter that turns bad later is noticed too


def test_a_costly_drafter_needs_a_higher_accept_length():
    pace = Pace()
    feed(pace, CycleTime(2.0, 1.0, 2), PROBE)  # 1.5 s a token
    assert not pace.drafting
    pace = Pace()
    feed(pace, CycleTime(2.0, 1.0, 4), 50)  # 0.75 s a token
    assert pace.drafting
