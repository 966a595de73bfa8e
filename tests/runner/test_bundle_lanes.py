"""Lanes of a bundle: what it was built for, what is asked at open, and what whoever watches is told."""

from __future__ import annotations

import pytest
from builder_support import SHORT, config_of, recipe
from golden_pairs import golden

from edge_dflash.builder.write import build
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.runner.observer import Observer

NAME = "qwen3_5"
PROMPT = tuple(golden(NAME)["p1.prompt"].tolist())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Built by a recipe that asks for two lanes."""
    root = tmp_path_factory.mktemp("lanes")
    two = recipe(root, f"{SHORT}context: {{lanes: 2, max_context: 160}}\n")
    return build(config_of(NAME, root / "bundle", recipe=two, calibrate=False)).bundle


def test_a_build_is_asked_for_lanes_by_its_recipe_or_by_name(bundle, tmp_path):
    assert read_manifest(bundle).lanes == 2
    three = config_of(NAME, tmp_path / "three", max_context=160, lanes=3, calibrate=False)
    assert "--lanes 3" in three.command
    assert read_manifest(build(three).bundle).lanes == 3


@pytest.mark.parametrize(("asked", "lanes"), [(None, 2), (1, 1), (3, 3)])
def test_a_number_that_is_given_wins(bundle, asked, lanes):
    with Planner.open(bundle, lanes=asked, fallback=False, self_test="off") as planner:
        assert planner.shape.lanes == lanes


def test_lanes_that_no_backend_has_are_refused(bundle):
    with pytest.raises(RequestError, match="lanes is 9; give a whole number from 1 to 8, or None"):
        Planner.open(bundle, lanes=9)


class Watching(Observer):
    """Keeps what it is told."""

    def __init__(self):
        self.passes, self.steps = [], []

    def step(self, step):
        self.steps.append(step)

    def passed(self, lanes, rows):
        self.passes.append((lanes, rows))


def test_every_cycle_is_told_with_its_lanes_and_rows(bundle):
    watching = Watching()
    with Planner.open(bundle, observer=watching, fallback=False, self_test="off") as planner:
        streams = [planner.stream(PROMPT[:n], max_new_tokens=12, speculative=n > 5) for n in (5, 9)]
        plans = [stream.plan for stream in streams]
    cycles = [step for step in watching.steps if step.tokens and not step.first]
    assert sum(lanes for lanes, _ in watching.passes) == len(cycles) == sum(len(p.accept_lengths) for p in plans)
    assert sum(rows for _, rows in watching.passes) == sum(step.drafts + 1 for step in cycles)
    assert {lanes for lanes, _ in watching.passes} == {1, 2}
