import json

import pytest
from paths import ROOT

from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.common.files import directory
from edge_dflash.demo.drawing import draw, png
from edge_dflash.demo.seeing import PICTURED, assemble, messages
from edge_dflash.demo.tasks import MODELS, task_from_json
from edge_dflash.planner import Planner

pytestmark = pytest.mark.usefixtures("opened_once")

TASKS = [task_from_json(json.loads(line)) for line in PICTURED.read_text(encoding="utf-8").splitlines()]


def last_json(out):
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def seeing_bundle(tmp_path_factory):
    """The demo's target with its eyes, and its drafter."""
    root = tmp_path_factory.mktemp("seeing")
    assemble(root / "target")
    recipe = directory("engines") / "demo-cpu.yaml"
    build(BuildConfig(root / "target", MODELS / "drafter", root / "bundle", recipe=recipe))
    return root / "bundle"


def test_demo_plans_from_a_picture(cli, seeing_bundle, tmp_path):
    code, out, err = cli("demo", "--image", "--bundle", seeing_bundle, "--save", tmp_path / "scene.png")
    assert code == 0
    assert out.endswith("valid plan\n")
    assert "the same tokens" in out
    assert f"task: {TASKS[0].goal_text}" in err
    assert (tmp_path / "scene.png").read_bytes() == png(draw(TASKS[0].scene))
    found = last_json(cli("demo", "--image", "--bundle", seeing_bundle, "--index", 5, "--json")[1])
    assert (found["identical"], found["valid"], found["task"]) == (True, True, TASKS[5].goal_text)
    assert found["accept_length"] > 5


def test_a_goal_of_ones_own_in_a_picture(cli, seeing_bundle):
    thing = TASKS[0].scene.things[-1]
    found = last_json(cli("demo", "--image", "--bundle", seeing_bundle, "--task", f"Check {thing.name}.", "--json")[1])
    assert found["valid"], found["problems"]
    assert {"action": "navigate", "to": thing.place} in found["object"]["steps"]


def test_plans_follow_the_picture(seeing_bundle):
    """The same words beside another scene's picture are another plan."""
    asked, other = messages(TASKS[0])[0]["content"], messages(TASKS[1])[0]["content"]
    with Planner.open(seeing_bundle) as planner:
        seen = planner.plan([{"role": "user", "content": asked}], max_new_tokens=96)
        blind = planner.plan([{"role": "user", "content": [other[0], asked[1]]}], max_new_tokens=96)
    assert seen.text == TASKS[0].answer
    assert blind.text != seen.text


def test_mistakes_are_named(refused, demo_bundle, tmp_path):
    code, line = refused("demo", "--image", "--bundle", demo_bundle)
    assert code
    assert "vision tower" in line
    _, line = refused("demo", "--image", "--bundle", demo_bundle, "--index", 64)
    assert "held-out tasks are 0 to 63" in line
    _, line = refused("demo", "--bundle", demo_bundle, "--save", tmp_path / "scene.png")
    assert "--image" in line


def test_the_readme_shows_the_first_picture():
    image = pytest.importorskip("PIL.Image")
    import numpy as np

    shown = np.asarray(image.open(ROOT / "docs" / "pictures" / "world.png").convert("RGB"))
    assert (shown == draw(TASKS[0].scene).repeat(2, 0).repeat(2, 1)).all()
