"""Random goals for a scene, and their wording. Knows nothing of how a goal is reached."""

from __future__ import annotations

from random import Random

from calib.demo.scenes import COLOURS, NOUNS
from edge_dflash.demo.world import DOCK, KEYS, Goal, Rule, Scene, subjects

_WORDING: dict[str, tuple[str, ...]] = {
    "put": ("Put {things} on {to}.", "Move {things} to {to}.", "Please place {things} at {to}."),
    "put_in": ("Put {things} in {to}.", "Store {things} in {to}.", "Please place {things} inside {to}."),
    "bring": ("Bring {things} to {to}.", "Hand {things} to {to}.", "{to} needs {things}."),
    "tidy": ("Clear {first}: everything on it belongs in {to}.", "Move everything from {first} to {to}."),
    "gather": ("Gather every {first} at {to}.", "Bring each {first} to {to}.", "All {first} objects belong at {to}."),
    "check": ("Check {things}.", "Inspect {things}.", "Have a look at {things}."),
    "swap": ("Swap {things}.", "Exchange {things}: each goes where the other is."),
    "close": ("Close every container in the {to}.", "Make sure that nothing in the {to} is left open."),
}
_RULES: dict[Rule, str] = {
    "close": "close every container you open",
    "inspect": "inspect each object before picking it",
    "announce": "announce yourself before entering a room with people",
    "gentle": "handle everything gently",
    "report": "say when the task is done",
}


def random_goal(rng: Random, scene: Scene) -> Goal | None:
    """A goal that asks for something to be done in this scene, or None when the kind drawn does not fit it.

    About one goal in 14 names an object that is not there.
    """
    things = [t.name for t in scene.things if t.name not in KEYS]
    places = [p.name for p in scene.places if p.name != DOCK]
    kind = rng.choice(("put", "put", "put", "put", "bring", "bring", "tidy", "gather", "check", "swap", "close"))
    to = rng.choice(places)
    if kind == "put" or kind == "bring":
        chosen = rng.sample(things, min(len(things), rng.choice((1, 2, 2, 3))))
        if rng.random() < 0.06:
            chosen[-1] = _absent(rng, things)
        if kind == "bring":
            return Goal("bring", tuple(chosen), rng.choice(scene.people)[0]) if scene.people else None
        if any(t.name in chosen and t.place == to for t in scene.things):
            return None
        return Goal("put", tuple(chosen), to)
    if kind == "check":
        return Goal("check", tuple(rng.sample(things + places, rng.randint(1, 3))))
    if kind == "swap":
        pair = tuple(rng.sample(things, min(2, len(things))))
        return Goal("swap", pair) if len({scene.thing(name).place for name in pair}) == 2 else None
    goal = {
        "tidy": Goal("tidy", (rng.choice(places),), to),
        "gather": Goal("gather", (scene.thing(rng.choice(things)).noun,), to),
        "close": Goal("close", (), rng.choice(scene.rooms).name),
    }[kind]
    return goal if 1 <= len(subjects(scene, goal)) <= 4 and goal.things != (to,) else None


def _absent(rng: Random, things: list[str]) -> str:
    while True:
        name = f"{rng.choice(COLOURS)}_{rng.choice(NOUNS)}"
        if name not in things:
            return name


def goal_text(rng: Random, scene: Scene, goal: Goal) -> str:
    """One of the wordings of a goal."""
    kind: str = goal.kind
    if kind == "put" and scene.place(goal.to).container:
        kind = "put_in"
    return rng.choice(_WORDING[kind]).format(things=listing(goal.things), first=(*goal.things, "")[0], to=goal.to)


def listing(names: tuple[str, ...]) -> str:
    """``a, b and c``."""
    if len(names) < 2:
        return "".join(names)
    return ", ".join(names[:-1]) + " and " + names[-1]


def rules_text(rules: tuple[Rule, ...]) -> str:
    """House rules as a line of a prompt."""
    return "Rules: " + ("; ".join(_RULES[rule] for rule in rules) or "none")
