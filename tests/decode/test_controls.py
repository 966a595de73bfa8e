from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import SHAPE

from edge_dflash.decode import drafts as drafts_module
from edge_dflash.decode.controls import RECENT, Pace, Patience
from edge_dflash.decode.drafts import EVERY, LIMIT_SECONDS, REPEATS, DraftChoice

GOOD = (0.2, 1.0)
PLAIN = (0.0, 1.0)


def feed(pace, cycle, times):
    for _ in range(times):
        pace.record(*cycle)


def test_nothing_is_known_at_first():
    pace = Pace()
    assert pace.drafts is None
    assert pace.cycle_seconds(speculative=True) == 0.0
    assert pace.prefill_seconds(100) == 0.0


def test_the_estimate_is_the_longest_recent_cycle():
    pace = Pace()
    pace.record(1.0, 4.0)
    feed(pace, GOOD, RECENT - 1)
    assert pace.cycle_seconds(speculative=True) == 5.0
    pace.record(*GOOD)
    assert pace.cycle_seconds(speculative=True) == 1.2
    assert pace.cycle_seconds(speculative=False) == 1.2  # no plain cycle is known
    pace.record(*PLAIN)
    assert pace.cycle_seconds(speculative=False) == 1.0


def test_prefill_is_estimated_by_the_slowest_recent_rate():
    pace = Pace()
    pace.prefills.append(50, 1.0)
    assert pace.prefill_seconds(100) == 2.0
    for _ in range(RECENT - 1):
        pace.prefills.append(50, 0.1)
    assert pace.prefill_seconds(100) == 2.0
    pace.prefills.append(50, 0.1)
    assert pace.prefill_seconds(100) == 0.2


def test_one_very_long_pass_does_not_refuse_all_for_ever():
    pace = Pace()
    pace.prefills.append(50, 0.1)
    pace.prefills.append(50, 60.0)
    for cycle in (GOOD, (0.2, 60.0), PLAIN, (0.0, 60.0)):
        pace.record(*cycle)
    pace.refuse(Patience(cancelled=lambda: True), lambda: 0.0)
    assert pace.cycle_seconds(speculative=True) == 60.2
    for _ in range(3):
        pace.refuse(Patience(deadline=0.0), lambda: 0.0)
        assert pace.cycle_seconds(speculative=True) == 1.2
        assert pace.cycle_seconds(speculative=False) == 1.0
        assert pace.prefill_seconds(50) == 0.1


def test_short_prefills_say_nothing_about_long_ones():
    pace = Pace()
    pace.prefills.append(2, 0.1)
    assert pace.prefill_seconds(9) == 0.0
    assert pace.prefill_seconds(8) == 0.4
    pace.prefills.append(200, 1.0)
    assert pace.prefill_seconds(400) == 2.0
    assert pace.prefill_seconds(50) == 0.25


def test_every_cycle_drafts_all_or_what_was_asked_for_unless_the_number_is_chosen():
    for fixed in (None, 0, 2):
        pace = Pace(fixed)
        feed(pace, (5.0, 1.0, fixed, fixed or 4, 0), 50)
        assert pace.drafts == fixed


def test_a_chosen_number_follows_the_cycles_that_were_of_its_choice():
    choice = DraftChoice(4, {0: 1.0, 4: 4.0})
    pace = Pace(choice)
    assert pace.drafts == 4
    feed(pace, (0.0, 1.0), 50)  # plain decoding that was asked for says nothing of the drafter
    assert pace.drafts == 4
    feed(pace, (1.0, 3.0, 4, 4, 0), 8)
    assert pace.drafts == 0


# lanes ---------------------------------------------------------------------------------------------------------------


class Clocked:
    """A backend whose cycles take what ``cost`` (rows of all lanes) says, by a clock of its own."""

    def __init__(self, monkeypatch, lanes, cost, drafts=7):
        self.shape = replace(SHAPE, lanes=lanes, drafts=drafts, max_context=512)
        self.now, self.cost, self.cycles_of, self.longest = 0.0, cost, {}, 0.0
        monkeypatch.setattr(drafts_module.time, "perf_counter", lambda: self.now)

    def cycles(self, asked):
        seconds = self.cost(sum(one.drafts + 1 for one in asked))
        self.now, self.longest = self.now + seconds, max(self.longest, seconds)
        self.cycles_of[len(asked)] = self.cycles_of.get(len(asked), 0) + 1

    def cycle(self, asked):
        self.cycles([asked])

    def prefill(self, ids, lane=0, sight=None):
        return SimpleNamespace(argmax=lambda: [0])

    def reset(self, lane=0):
        """Nothing is held."""

    def commit(self, rows, lane=0, path=None):
        """Nothing is held."""


def rows_that_cost(rows):
    """Free up to 16, then each one costs: a pass that is bound by its products."""
    return 0.01 + 0.002 * max(0, rows - 16)


def test_a_load_whose_rows_cost_more_chooses_fewer_drafts(monkeypatch):
    backend, pace = Clocked(monkeypatch, 8, rows_that_cost), Pace(DraftChoice(7))
    pace.begin(backend, 4.0)
    chosen = {}
    for load in (1, 2, 4, 8):
        pace.load = load
        for _ in range(EVERY):
            drafts = pace.drafts
            accepted = min(3, drafts)
            pace.record(0.0, rows_that_cost(load * (drafts + 1)), drafts, drafts, accepted)
        chosen[load] = pace.drafts
    assert chosen[1] == chosen[2] == 7
    assert chosen[8] < chosen[4] <= 7
    pace.load = 1
    assert pace.drafts == 7


def test_a_load_that_was_not_measured_has_the_choice_of_the_next_one_above(monkeypatch):
    backend, pace = Clocked(monkeypatch, 8, rows_that_cost), Pace(DraftChoice(7))
    pace.begin(backend, None)
    assert {load: pace._choices[load].seconds.of(7) for load in pace._choices} == {
        load: pytest.approx(rows_that_cost(8 * load)) for load in (1, 2, 4, 8)
    }
    pace.load = 3
    assert pace._chooser is pace._choices[4]


@pytest.mark.parametrize("seconds", [0.001, 0.2, 1.0])
def test_measuring_all_loads_takes_about_as_long_as_two(monkeypatch, seconds):
    """Each number of drafts has a cycle at least, beyond the limit one at most."""
    backend = Clocked(monkeypatch, 8, lambda rows: seconds)
    Pace(DraftChoice(7)).begin(backend, None)
    numbers = len(drafts_module.row_steps(8))
    assert all(numbers <= cycles <= numbers * (REPEATS + 1) for cycles in backend.cycles_of.values())
    assert set(backend.cycles_of) == {1, 2, 4, 8}
    assert backend.now <= 2 * LIMIT_SECONDS + 4 * (numbers + 1) * backend.longest
