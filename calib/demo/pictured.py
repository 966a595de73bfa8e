"""Scenes that can be drawn, tasks in them, and the words that the rows of their pictures stand for.

The demo's target has only ever read text. So a picture's rows are taught to be the words of the scene's text, one for
each square of 32 x 32 pixels. Where a spot is empty they say once more what the spot before holds, and elsewhere line
ends: the target reads on over both. Task ``n`` of a split is made from its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from calib.demo.corpus import plan_json
from calib.demo.goals import goal_text, random_goal, rules_text
from calib.demo.planning import RULES, derive
from calib.demo.scenes import CONTAINERS, PEOPLE, ROOMS, SURFACES
from edge_dflash.demo.drawing import HEIGHT, NOUNS, OBJECT_COLOURS, SQUARE, WIDTH, places, spots
from edge_dflash.demo.tasks import Task
from edge_dflash.demo.world import DOCK, Place, Room, Rule, Scene, Thing

GRID = (HEIGHT // (2 * SQUARE), WIDTH // (2 * SQUARE))  # rows and columns of words
WORDS = GRID[0] * GRID[1]
BATTERY = 80  # percent: a picture does not show it
MAX_STEPS = 14
KINDS = ("put", "bring", "check", "swap", "close")  # of goals; the demo's target is weaker at the others
FILLER = "\n"
_HELDOUT_BASE, _TRAIN_BASE = 2_000_000, 3_000_000  # seeds of the first tasks of the splits


def pictured_scene(rng: Random) -> Scene:
    """Two rooms, each with a surface for one or two objects, one for one, and a container that is empty when closed."""
    names = rng.sample(ROOMS, 2)
    rooms = tuple(Room(name, rng.choice(("open", "open", "closed"))) for name in names)
    found: list[Place] = []
    taken: list[str] = []
    for name in names:
        first, second = (Place(f"{name}_{kind}", name) for kind in rng.sample(SURFACES, 2))
        third = Place(f"{name}_{rng.choice(CONTAINERS)}", name, True, rng.choice(("open", "closed")))
        found += [first, second, third]
        taken += [first.name] * rng.randint(1, 2) + [second.name]
        taken += [third.name] * (third.state == "open" and rng.random() < 0.5)
    every = [f"{colour}_{noun}" for colour in OBJECT_COLOURS for noun in NOUNS]
    objects = dict(zip(rng.sample(every, len(taken)), taken, strict=True))
    people = ((rng.choice(PEOPLE), rng.choice(names)),) if rng.random() < 0.7 else ()
    things = tuple(Thing(name, place) for name, place in objects.items())
    found.append(Place(DOCK, rng.choice(names)))
    return Scene(rooms, tuple(found), things, people, rng.choice(names), BATTERY)


def pictured_task(seed: int) -> Task:
    """The task of a seed; its message is the text beside the picture."""
    rng = Random(seed)
    while True:
        scene = pictured_scene(rng)
        goal = random_goal(rng, scene)
        if goal is None or goal.kind not in KINDS:
            continue
        rules: tuple[Rule, ...] = (rng.choice(RULES),) if rng.random() < 0.4 else ()
        derivation = derive(scene, goal, rules)
        if 1 <= len(derivation.steps) <= MAX_STEPS:
            break
    wording = goal_text(rng, scene, goal)
    content = f"{rules_text(rules)}\nGoal: {wording}"
    answer = plan_json(wording, derivation)
    messages = ({"role": "user", "content": content},)
    return Task(seed, "plan", scene, goal, rules, wording, messages, "", answer, derivation.refused)


def heldout(count: int, start: int = 0) -> Iterator[Task]:
    """Tasks that training does not see."""
    return (pictured_task(_HELDOUT_BASE + index) for index in range(start, start + count))


def training_scene(index: int) -> Scene:
    """Scene ``index`` of the training split: too many there are for one of the held-out scenes to come twice."""
    return pictured_scene(Random(_TRAIN_BASE + index))


def words(scene: Scene) -> list[str]:
    """The words of a scene, WORDS of them, in the order of the picture's rows.

    Joined they are the scene's text of the demo's tasks, apart from line ends more.
    """
    said = ["Rooms", ":"]
    for room, end in zip(scene.rooms, (",", "\n"), strict=True):
        said += [
            " " + room.name,
            *((" (", "door", " closed", ")" + end) if room.door != "open" else (end, *[FILLER] * 3)),
        ]
    said += ["Places", ":"]
    for room in scene.rooms:
        for place in places(scene, room.name):
            said += _name(place.name)
            if place.container:
                said += [" (", "closed", "),"] if place.state != "open" else [",", FILLER, FILLER]
            else:
                said.append(",")
    said += [" dock", " in", " " + scene.place(DOCK).room, "\n", "Objects", ":"]
    shown: list[Thing] = []
    for _, _, _, thing in spots(scene):
        shown.append(shown[-1] if thing is None else thing)
        said += [*_name(shown[-1].name), " at", *_name(shown[-1].place), ","]
    said[-1:] = ["\n", "People", ":"]
    said += (
        [" nobody", "\n", FILLER] if not scene.people else [" " + scene.people[0][0], " in", " " + scene.people[0][1]]
    )
    said += ["\n", "Robot", ":", " in", " " + scene.robot_room, ",", " battery", " ", *str(scene.battery), "%\n"]
    return said + [FILLER] * (WORDS - len(said))


def _name(name: str) -> list[str]:
    first, _, second = name.partition("_")
    return [" " + first, "_" + second]
