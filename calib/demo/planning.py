"""A rule planner: from a scene, a goal and house rules to the steps of a plan, or to a refusal with its reason.

The rules are deterministic, so that every task has one right plan. Knows the action schema and the scene; nothing of
text, tokens or models.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.demo.checking import Step, step
from edge_dflash.demo.world import COOLING_SECONDS, DOCK, LOW_BATTERY, Goal, Rule, Scene, door_name, subjects

RULES: tuple[Rule, ...] = ("close", "inspect", "announce", "gentle", "report")


@dataclass(frozen=True)
class Derivation:
    """A plan's steps, what was worth noting, and whether it is a refusal."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    refused: bool = False


class CannotPlan(Exception):
    """The goal cannot be reached; the message says why."""


def derive(scene: Scene, goal: Goal, rules: tuple[Rule, ...]) -> Derivation:
    """Steps that reach ``goal`` under ``rules``; a refusal is one ``say`` step."""
    robot = _Robot(scene, rules)
    try:
        robot.pursue(goal)
    except CannotPlan as reason:
        return Derivation((step("say", f"I cannot do this: {reason}."),), ("Refused.",), refused=True)
    return Derivation(tuple(robot.steps), tuple(robot.notes))


class _Robot:
    """The state that the steps so far lead to."""

    def __init__(self, scene: Scene, rules: tuple[Rule, ...]) -> None:
        self.scene = scene
        self.rules = rules
        self.steps: list[Step] = []
        self.notes: list[str] = []
        self.at = self.room = scene.robot_room
        self.doors = {r.name: (r.door, r.key) for r in scene.rooms}
        self.lids = {p.name: (p.state, p.key) for p in scene.places}
        self.where = {t.name: t.place for t in scene.things}
        self.keys: set[str] = set()
        self.greeted: set[str] = set()

    def pursue(self, goal: Goal) -> None:
        names = subjects(self.scene, goal)
        if goal.kind == "check":
            for name in names:
                self.check(name)
        elif goal.kind == "close":
            for name in names:
                self.go(name)
                self.add("close", name)
        else:
            for name, to in self.moves(goal, names):
                self.move(name, to)
        if "report" in self.rules:
            self.add("say", "The task is done.")
        if self.scene.battery < LOW_BATTERY:
            self.notes.append("The battery is low.")
            self.go(DOCK)

    def moves(self, goal: Goal, names: tuple[str, ...]) -> list[tuple[str, str]]:
        """(object, destination) of each move; all objects must exist."""
        for name in names:
            if name not in self.where:
                raise CannotPlan(f"there is no {name}")
        if goal.kind == "swap":
            return [(names[0], self.where[names[1]]), (names[1], self.where[names[0]])]
        return [(name, goal.to) for name in names]

    def add(self, action: str, *arguments: str | int) -> None:
        self.steps.append(step(action, *arguments))

    def room_of(self, place: str) -> str:
        return place if place in self.doors else str(self.scene.place(place).room)

    def move(self, name: str, to: str) -> None:
        person = to in dict(self.scene.people)
        source, spot = self.where[name], dict(self.scene.people)[to] if person else to
        if source == spot:
            return
        self.fetch_keys(source, spot)
        self.take(name)
        self.go(spot)
        if person:
            self.add("handover", name, to)
            return
        opened = self.open_place(spot)
        self.add("place", name, spot)
        self.where[name] = spot
        self.close_after(spot, opened)

    def take(self, name: str) -> None:
        """Go to an object and pick it."""
        thing, place = self.scene.thing(name), self.where[name]
        self.go(place)
        opened = self.open_place(place)
        if "inspect" in self.rules:
            self.add("inspect", name)
        grip = {"fragile": "gentle", "heavy": "both_arms"}.get(thing.trait, "normal")
        if "gentle" in self.rules and grip == "normal":
            grip = "gentle"
        if thing.trait == "hot":
            self.add("wait", COOLING_SECONDS)
        if thing.trait:
            self.notes.append(f"{name} is {thing.trait}.")
        self.add("pick", name, place, grip)
        self.close_after(place, opened)

    def check(self, name: str) -> None:
        place = self.where.get(name, name)
        if place not in self.lids:
            raise CannotPlan(f"there is no {name}")
        self.fetch_keys(place)
        self.go(place)
        opened = self.open_place(place)
        self.add("inspect", name)
        self.close_after(place, opened)

    def fetch_keys(self, *spots: str) -> None:
        """Pick the keys of everything locked on the way to ``spots``, before anything is carried."""
        for spot in spots:
            for what, (state, key) in (
                (door_name(self.room_of(spot)), self.doors[self.room_of(spot)]),
                (spot, self.lids.get(spot, ("open", ""))),
            ):
                if state != "locked" or key in self.keys:
                    continue
                if key not in self.where:
                    raise CannotPlan(f"{what} is locked and there is no {key}")
                self.take(key)
                self.keys.add(key)

    def go(self, place: str) -> None:
        """Navigate, opening the doors of the room left and the room entered."""
        room = self.room_of(place)
        if place == self.at:
            return
        if room != self.room:
            self.open_door(self.room)
            self.open_door(room)
            if "announce" in self.rules and room not in self.greeted and room in dict(self.scene.people).values():
                self.add("say", f"Entering the {room}.")
                self.greeted.add(room)
        self.add("navigate", place)
        self.at, self.room = place, room

    def open_door(self, room: str) -> None:
        state, key = self.doors[room]
        if state == "locked" and key not in self.keys:
            self.fetch_keys(room)
            state = self.doors[room][0]
        if state != "open":
            self.unlock_and_open(door_name(room), state, key)
            self.doors[room] = ("open", key)

    def open_place(self, place: str) -> bool:
        """Open a container where it is closed; True when it was."""
        state, key = self.lids[place]
        if state != "open":
            self.unlock_and_open(place, state, key)
            self.lids[place] = ("open", key)
        return state != "open"

    def unlock_and_open(self, name: str, state: str, key: str) -> None:
        if state == "locked":
            self.add("unlock", name, key)
            self.notes.append(f"{name} was locked.")
        self.add("open", name)

    def close_after(self, place: str, opened: bool) -> None:
        if opened and "close" in self.rules:
            self.add("close", place)
            self.lids[place] = ("closed", self.lids[place][1])
