"""A task and its plan in lines for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from edge_dflash.demo.world import Room, Scene

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
