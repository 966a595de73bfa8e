import json
import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from golden_pairs import GOLDEN, golden
from safetensors.torch import load_file

from calib.demo.corpus import task_json
from calib.demo.eyes import Eyes, EyesConfig, patch_places, patches
from calib.demo.eyes_files import BYTES, PREFIX, load_eyes
from calib.demo.gazing import gaze
from calib.demo.pictured import GRID, WORDS, heldout, pictured_scene, training_scene, words
from calib.demo.scenes import scene_text
from calib.demo.train_eyes import EyesRun, train_eyes
from edge_dflash.demo.drawing import NOUNS, OBJECT_COLOURS, draw, icon, png
from edge_dflash.demo.tasks import PICTURED, TARGET, assemble, messages, task_from_json
from edge_dflash.demo.world import Room, Thing
from edge_dflash.errors import RequestError
from edge_dflash.pictures.picture import picture_of
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.checkpoint import checkpoint_pair

SCENES = [training_scene(index) for index in range(20)]


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    """Eyes after two steps."""
    output = tmp_path_factory.mktemp("eyes")
    return output / "eyes", train_eyes(EyesRun(steps=2, batch=2, check_scenes=2), output, log=lambda line: None)


def test_pictures_show_what_differs():
    shown = {draw(scene).tobytes() for scene in SCENES}
    for scene in SCENES[:5]:
        first, *things = scene.things
        for other in (
            replace(scene, things=(replace(first, name="grey_radio"), *things)),
            replace(scene, things=tuple(things)),
            replace(scene, robot_room=next(r.name for r in scene.rooms if r.name != scene.robot_room)),
            replace(scene, people=(("Paul", scene.rooms[0].name),)),
            replace(scene, rooms=(replace(scene.rooms[0], door="closed"), replace(scene.rooms[1], door="open"))),
        ):
            if other != scene:
                assert draw(other).tobytes() not in shown, other
    assert draw(replace(SCENES[0], battery=3)).tobytes() in shown


def test_nouns_look_different():
    icons = [icon(noun) for noun in NOUNS]
    least = min((a ^ b).sum() for i, a in enumerate(icons) for b in icons[:i])
    assert least >= 12
    assert len(set(OBJECT_COLOURS.values())) == len(OBJECT_COLOURS)


def test_scenes_that_a_picture_has_no_room_for_are_refused():
    scene = SCENES[0]
    with pytest.raises(RequestError, match="two rooms"):
        draw(replace(scene, rooms=(*scene.rooms, Room("attic"))))
    place = scene.things[0].place
    crowd = tuple(Thing(f"red_{noun}", place) for noun in NOUNS[:3])
    with pytest.raises(RequestError, match="the scene has 3"):
        draw(replace(scene, things=crowd))
    with pytest.raises(RequestError, match="red_anvil cannot be drawn"):
        draw(replace(scene, things=(Thing("red_anvil", place),)))


def test_a_png_is_the_picture():
    image = pytest.importorskip("PIL.Image")
    from io import BytesIO

    drawn = draw(SCENES[0])
    assert (np.asarray(image.open(BytesIO(png(drawn)))) == drawn).all()


def test_shipped_tasks_are_those_of_their_seeds():
    lines = PICTURED.read_text(encoding="utf-8").splitlines()
    assert lines == [json.dumps(task_json(task), separators=(",", ":")) for task in heldout(64)]
    pictures = {draw(task_from_json(json.loads(line)).scene).tobytes() for line in lines}
    assert len(pictures) == 64
    assert not pictures & {draw(scene).tobytes() for scene in SCENES}


def test_words_are_the_scene_s_text():
    tokenizer = Tokenizer.open(TARGET)
    for scene in SCENES:
        said = words(scene)
        assert len(said) == WORDS == len(gaze()) == GRID[0] * GRID[1]
        assert all(len(tokenizer.encode(word)) == 1 for word in said), said
        text = re.sub(r",\n+", ",", re.sub(r"\n+", "\n", "".join(said).strip()))
        head, _, rest = text.partition("Objects: ")
        listed, _, rest = rest.partition("\n")
        once = ", ".join(dict.fromkeys(listed.split(", ")))
        assert f"{head}Objects: {once}\n{rest}" == scene_text(scene)


def test_training_scenes_are_no_held_out_ones():
    kept = {task.scene for task in heldout(64)}
    assert not kept & {training_scene(index) for index in range(2000)}
    assert pictured_scene(Random(1)) == pictured_scene(Random(1))


def test_the_tower_is_that_of_the_golden_run():
    found, tensors = golden("vision"), load_file(GOLDEN / "vision-tiny" / "model.safetensors")
    c = EyesConfig(depth=2, hidden=64, heads=4, intermediate=96, out=64, positions=6)
    for number in range(3):
        _, *grid = found[f"img{number}.grid_thw"].tolist()
        eyes = Eyes(c, tuple(grid))
        eyes.load_state_dict({n.removeprefix(PREFIX): t.float() for n, t in tensors.items() if n.startswith(PREFIX)})
        still = found[f"img{number}.pixel_values"].reshape(-1, 3, 2, 256)[:, :, 0].reshape(-1, 768)
        with torch.no_grad():
            rows = eyes(torch.from_numpy(still[None] + 1) * 127.5)[0].numpy()
        assert np.abs(rows - found[f"img{number}.tower_rows"]).max() <= 1e-4


def test_words_look_at_squares_that_are_drawn_on():
    c = EyesConfig()
    places = patch_places((GRID[0] * 2, GRID[1] * 2), 2).tolist()
    seen = np.stack([patches(draw(training_scene(index)), c) for index in range(60)])
    varies = {
        tuple(place) for place, patch in zip(places, seen.swapaxes(0, 1), strict=True) if (patch != patch[0]).any()
    }
    assert {square for squares in gaze() for square in squares} <= varies
    said = np.array([words(training_scene(index)) for index in range(60)])
    assert all(squares or len(set(column)) == 1 for squares, column in zip(gaze(), said.T, strict=True))


def test_training_writes_a_checkpoint_that_sees(eyes, tmp_path):
    directory, record = eyes
    assert record["heldout"]["words"] > 0
    assert [step for step, _ in record["loss"]] == [2]
    assemble(tmp_path / "seeing", directory)
    pair = checkpoint_pair(tmp_path / "seeing", TARGET.parent / "drafter")
    assert pair.target.vision is not None
    assert pair.target.vision.image_token_id == 191
    again, scene = load_eyes(directory), SCENES[0]
    picture = picture_of(draw(scene), pair.target.vision.patches)
    assert picture.tokens == WORDS
    assert (picture.levels == patches(draw(scene), again.c)).all()


def test_tokens_of_pictures_take_no_text_s_place(eyes):
    seeing, plain = Tokenizer.open(eyes[0]), Tokenizer.open(TARGET)
    text = "Grüße, Zoë: 日本 🤖 ÿ þ\nGoal: Put red_mug in lab_locker."
    assert seeing.encode(text) == plain.encode(text)
    assert [seeing.control_id(token) for token in BYTES.values()] == [190, 191, 192, 193]
    (task,) = heldout(1)
    image, words_of_it = messages(task)[0]["content"]
    assert (image["image"] == draw(task.scene)).all()
    assert words_of_it["text"] == task.messages[0]["content"]
