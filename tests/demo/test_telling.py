"""The demo as people read it: the scene by rooms, the plan in lines that are still the same JSON."""

import json

import pytest

from edge_dflash.demo.tasks import HELDOUT, task_from_json
from edge_dflash.demo.world import WIDTH, PlanLines, scene_lines

TASKS = [task_from_json(json.loads(line)) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_a_plan_has_short_lines_and_stays_the_same_value(piece):
    for task in TASKS:
        lines, text = PlanLines(), task.answer
        shown = "".join(lines(text[i : i + piece]) for i in range(0, len(text), piece))
        assert json.loads(shown) == json.loads(text)
        steps = [line for line in shown.splitlines() if '"action"' in line]
        assert len(steps) == len(json.loads(text)["steps"])
        assert max(map(len, steps)) <= WIDTH
        said = [line for line in shown.splitlines() if line.lstrip().startswith(('"goal"', '"notes"'))]
        assert len(said) == 2


def test_strings_with_brackets_commas_and_quotes_stay_whole():
    plan = {"goal": 'Say "a, {b}: [c]\\" ,', "steps": [{"action": "say", "text": "]},{"}], "notes": "\\"}
    text = json.dumps(plan, separators=(",", ":"))
    shown = "".join(map(PlanLines(), text))
    assert json.loads(shown) == plan
    assert len(shown.splitlines()) == 7


@pytest.mark.parametrize("text", ["I cannot, {really}: no.", "", "  plain, text", "[1,2]"])
def test_text_that_is_no_plan_stays_as_it_is(text):
    assert "".join(map(PlanLines(), text)) == text


def test_a_scene_names_everything_in_it_once_in_short_lines():
    for task in TASKS:
        lines = list(scene_lines(task.scene))
        assert max(map(len, lines)) <= WIDTH
        words = " ".join(lines).replace(";", " ").replace(",", " ").replace(":", " ").split()
        names = [place.name for place in task.scene.places] + [thing.name for thing in task.scene.things]
        assert all(words.count(name) == 1 for name in names)
        assert all(person in words for person, _ in task.scene.people)
