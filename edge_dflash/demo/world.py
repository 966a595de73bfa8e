"""What a task is about, as values: rooms, places, objects, people, a robot, and a goal; and how people read it.

Every room opens onto one corridor. A surface holds objects openly; a container may be closed or locked. Keys go on the
robot's belt, so that they do not fill its gripper.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

WIDTH = 80  # columns
_BREAK = 48  # column from which on a step goes on in the next line: its fields are shorter than the rest


def scene_lines(scene: Scene) -> Iterator[str]:
    """The scene room by room: places, with the objects on or in them, people and the robot."""
    yield f"scene: the robot is in {scene.robot_room}, battery {scene.battery} %"
    for room in scene.rooms:
        yield from textwrap.wrap(_room(scene, room), WIDTH, initial_indent="  ", subsequent_indent="    ")


def _room(scene: Scene, room: Room) -> str:
    door = "" if room.door == "open" else f" (door {room.door})"
    places = []
    for place in (one for one in scene.places if one.room == room.name):
        things = [t.name + (f", {t.trait}" if t.trait else "") for t in scene.things if t.place == place.name]
        state = "" if place.state == "open" else f" ({place.state})"
        places.append(place.name + state + (f" with {' and '.join(things)}" if things else ""))
    people = [name for name, where in scene.people if where == room.name]
    return f"{room.name}{door}: {'; '.join([*places, *people]) or 'empty'}"


class PlanLines:
    """Breaks the compact JSON of a plan into lines while it is made; text that is no JSON stays as it is.

    A step has a line, or two. The JSON stays the same value.
    """

    def __init__(self) -> None:
        self._json: bool | None = None  # not known before the first character
        self._depth = self._column = 0
        self._quoted = self._escaped = False

    def __call__(self, text: str) -> str:
        """What is to be printed of the next piece."""
        if self._json is None and text.strip():
            self._json = text.lstrip().startswith("{")
        return "".join(map(self._placed, text)) if self._json else text

    def _placed(self, character: str) -> str:
        placed = self._in_string(character) if self._quoted else self._outside(character)
        self._column = len(placed) - placed.rfind("\n") - 1 if "\n" in placed else self._column + len(placed)
        return placed

    def _in_string(self, character: str) -> str:
        self._quoted = self._escaped or character != '"'
        self._escaped = character == "\\" and not self._escaped
        return character

    def _outside(self, character: str) -> str:
        if character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
            return character + (self._line() if self._depth < 3 else "")
        elif character in "}]":
            self._depth -= 1
            return (self._line() if self._depth < 2 else "") + character
        elif character == ",":
            return "," + (self._line() if self._depth < 3 or self._column > _BREAK else " ")
        elif character == ":":
            return ": "
        return character

    def _line(self) -> str:
        return "\n" + "  " * self._depth


Access = Literal["open", "closed", "locked"]
Trait = Literal["", "fragile", "heavy", "hot"]

GoalKind = Literal["put", "bring", "tidy", "gather", "check", "swap", "close"]
Rule = Literal["close", "inspect", "announce", "gentle", "report"]

KEYS = ("brass_key", "steel_key", "gold_key", "copper_key")
DOCK = "dock"
COOLING_SECONDS = 60  # that a hot object is waited for
LOW_BATTERY = 20  # percent: below it, a plan ends at the dock


@dataclass(frozen=True)
class Room:
    """A room and its door to the corridor."""

    name: str
    door: Access = "open"
    key: str = ""  # opens the door when it is locked


@dataclass(frozen=True)
class Place:
    """A surface, a container or the dock."""

    name: str
    room: str
    container: bool = False
    state: Access = "open"
    key: str = ""


@dataclass(frozen=True)
class Thing:
    """An object the robot can carry."""

    name: str  # colour_noun, or a key
    place: str
    trait: Trait = ""

    @property
    def noun(self) -> str:
        """Its kind: the name without the colour."""
        return self.name.rpartition("_")[2]


@dataclass(frozen=True)
class Scene:
    """The robot's world before it plans."""

    rooms: tuple[Room, ...]
    places: tuple[Place, ...]
    things: tuple[Thing, ...]
    people: tuple[tuple[str, str], ...]  # (person, room)
    robot_room: str
    battery: int  # percent

    def room(self, name: str) -> Room:
        """The room called ``name``. Raises KeyError."""
        return next_named(self.rooms, name)

    def place(self, name: str) -> Place:
        """The place called ``name``. Raises KeyError."""
        return next_named(self.places, name)

    def thing(self, name: str) -> Thing:
        """The object called ``name``. Raises KeyError."""
        return next_named(self.things, name)

    @property
    def doors(self) -> tuple[str, ...]:
        """Names of all doors."""
        return tuple(door_name(room.name) for room in self.rooms)


@dataclass(frozen=True)
class Goal:
    """What is wanted.

    put: ``things`` to place ``to``. bring: ``things`` to person ``to``. tidy: everything on place ``things[0]`` to
    ``to``. gather: every object of noun ``things[0]`` to ``to``. check: inspect ``things`` (objects or places). swap:
    the two ``things``. close: every open container of room ``to``.
    """

    kind: GoalKind
    things: tuple[str, ...]
    to: str = ""


def scene_from_json(value: dict[str, Any]) -> Scene:
    """The scene of a task's JSON object."""
    return Scene(
        rooms=tuple(Room(*r) for r in value["rooms"]),
        places=tuple(Place(*p) for p in value["places"]),
        things=tuple(Thing(*t) for t in value["things"]),
        people=tuple((name, room) for name, room in value["people"]),
        robot_room=value["robot_room"],
        battery=value["battery"],
    )


Named = TypeVar("Named", Room, Place, Thing)


def next_named(items: tuple[Named, ...], name: str) -> Named:
    """The item with that name. Raises KeyError."""
    return {item.name: item for item in items}[name]


def door_name(room: str) -> str:
    """Name of a room's door."""
    return f"{room}_door"


def subjects(scene: Scene, goal: Goal) -> tuple[str, ...]:
    """Names of the objects (or places) that a goal is about, in the order in which they are handled."""
    if goal.kind == "tidy":
        return tuple(t.name for t in scene.things if t.place == goal.things[0] and t.name not in KEYS)
    if goal.kind == "gather":
        return tuple(t.name for t in scene.things if t.noun == goal.things[0] and t.place != goal.to)
    if goal.kind == "close":
        return tuple(p.name for p in scene.places if p.container and p.room == goal.to and p.state == "open")
    return goal.things
