import json

import pytest
from cli_support import last_json
from paths import ROOT

from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.common.files import directory
from edge_dflash.demo.drawing import draw, png
from edge_dflash.demo.tasks import MODELS, PICTURED, assemble, messages, task_from_json
from edge_dflash.planner import Planner

pytestmark = pytest.mark.usefixtures("opened_once")

TASKS = [task_from_json(json.loads(line)) for line in PICTURED.read_text(encoding="utf-8").splitlines()]


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
    assert np.array_equal(shown, draw(TASKS[0].scene))


def test_the_picture_and_the_prompt_that_are_shown_give_the_plan(cli, seeing_bundle):
    """The command of the demo's README."""
    files = ("--image", ROOT / "docs/pictures/world.png", "--prompt-file", ROOT / "edge_dflash/demo/pictured.txt")
    code, out, _ = cli("generate", seeing_bundle, *files)
    assert code == 0
    assert out.strip() == TASKS[0].answer
    command = "generate demo-image-bundle --image docs/pictures/world.png --prompt-file edge_dflash/demo/pictured.txt"
    assert command in (ROOT / "edge_dflash" / "demo" / "README.md").read_text()


def test_what_a_bundle_cannot_see_is_refused_before_it_is_loaded(
    refused, demo_bundle, seeing_bundle, tmp_path, monkeypatch
):
    monkeypatch.setattr("edge_dflash.planner.Planner.open", lambda *_, **__: pytest.fail("the bundle is loaded"))
    world = ROOT / "docs" / "pictures" / "world.png"
    _, line = refused("generate", demo_bundle, "--image", world, "--prompt", "Go")
    assert "has no vision tower; leave it out" in line
    (tmp_path / "frame.gif").write_bytes(b"GIF89a")
    for file, why in (
        ("frame.gif", "no PNG or JPEG file"),
        ("none.png", "cannot be read"),
        (".", "cannot be read"),
    ):
        _, line = refused("generate", seeing_bundle, "--image", tmp_path / file, "--prompt", "Go")
        assert why in line
