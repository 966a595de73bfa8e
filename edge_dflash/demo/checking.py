"""Is a text a valid plan for a task, and does it reach the goal? Two separate answers.

Validity: JSON of the plan schema whose names exist in the scene. Success: a simulation of the steps, written apart from
the planner, meets every precondition, keeps the rules and ends with the goal reached.

The action schema of plans is fixed: JSON Schema, and a validator for the part of it that it uses.
"""

from __future__ import annotations

import json
from typing import Any

from edge_dflash.demo.world import COOLING_SECONDS, DOCK, LOW_BATTERY, Goal, Rule, Scene, Thing, door_name, subjects

GRIPS = ("normal", "gentle", "both_arms")

# action -> arguments in the order in which plans write them, each with its JSON Schema
_NAME: dict[str, Any] = {"type": "string"}
ACTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "navigate": {"to": _NAME},
    "open": {"target": _NAME},
    "close": {"target": _NAME},
    "unlock": {"target": _NAME, "with": _NAME},
    "pick": {"object": _NAME, "from": _NAME, "grip": {"enum": list(GRIPS)}},
    "place": {"object": _NAME, "to": _NAME},
    "handover": {"object": _NAME, "to": _NAME},
    "inspect": {"target": _NAME},
    "wait": {"seconds": {"type": "integer"}},
    "say": {"text": {"type": "string"}},
}

Step = dict[str, Any]  # {"action": name, argument: value, ...}


def step(action: str, *arguments: str | int) -> Step:
    """A step with its arguments in schema order."""
    return {"action": action, **dict(zip(ACTIONS[action], arguments, strict=True))}


def plan_schema() -> dict[str, Any]:
    """JSON Schema of a plan: goal, steps of the fixed actions, notes; nothing else is allowed."""
    steps = [
        {
            "type": "object",
            "properties": {"action": {"const": name}, **arguments},
            "required": ["action", *arguments],
            "additionalProperties": False,
        }
        for name, arguments in ACTIONS.items()
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Robot plan",
        "type": "object",
        "properties": {
            "goal": {"type": "string"},
            "steps": {"type": "array", "items": {"oneOf": steps}},
            "notes": {"type": "string"},
        },
        "required": ["goal", "steps", "notes"],
        "additionalProperties": False,
    }


def schema_problems(value: Any, schema: dict[str, Any], where: str = "plan") -> list[str]:
    """What of ``value`` breaks ``schema``: type, enum, const, required, properties, additionalProperties, items, oneOf.

    Of the choices of a oneOf, the problems of the one whose constants fit are told.
    """
    if "const" in schema and value != schema["const"]:
        return [f"{where} is {value!r}, not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where} is {value!r}, none of {schema['enum']}"]
    if "oneOf" in schema:
        return _one_of(value, schema["oneOf"], where)
    kinds: dict[str, type] = {"string": str, "integer": int, "array": list, "object": dict}
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, kinds[kind]) or isinstance(value, bool)):
        return [f"{where} is {type(value).__name__}, not {kind}"]
    found: list[str] = []
    if kind == "object":
        properties = schema["properties"]
        found += [f"{where} lacks {key!r}" for key in schema["required"] if key not in value]
        found += [f"{where} has unknown key {key!r}" for key in value if key not in properties]
        for key in properties:
            if key in value:
                found += schema_problems(value[key], properties[key], f"{where}.{key}")
    if kind == "array":
        for index, item in enumerate(value):
            found += schema_problems(item, schema["items"], f"{where}[{index}]")
    return found


def _one_of(value: Any, choices: list[dict[str, Any]], where: str) -> list[str]:
    action = value.get("action") if isinstance(value, dict) else None
    for choice in choices:
        if choice["properties"]["action"]["const"] == action:
            return schema_problems(value, choice, where)
    return [f"{where} is no known action: {action!r}"]


_SCHEMA = plan_schema()


def validity_problems(scene: Scene, text: str) -> list[str]:
    """What is wrong with ``text`` as a plan in ``scene``: not JSON, not of the schema, or a name that is not there."""
    try:
        plan = json.loads(text.rpartition("</think>")[2])
    except (ValueError, RecursionError) as error:
        return [f"not JSON: {error}"]
    found = schema_problems(plan, _SCHEMA)
    return found or [p for i, s in enumerate(plan["steps"]) for p in _unknown_names(scene, s, f"step {i}")]


def known_names(scene: Scene) -> dict[tuple[str, str], set[str]]:
    """The names that may stand in each argument, by (action, argument)."""
    things = {t.name for t in scene.things}
    places = {p.name for p in scene.places}
    rooms = {r.name for r in scene.rooms}
    people = {name for name, _ in scene.people}
    openable = {p.name for p in scene.places if p.container} | set(scene.doors)
    return {
        ("navigate", "to"): places | rooms,
        ("open", "target"): openable,
        ("close", "target"): openable,
        ("unlock", "target"): openable,
        ("unlock", "with"): things,
        ("pick", "object"): things,
        ("pick", "from"): places,
        ("place", "object"): things,
        ("place", "to"): places,
        ("handover", "object"): things,
        ("handover", "to"): people,
        ("inspect", "target"): things | places,
    }


def _unknown_names(scene: Scene, step: Step, where: str) -> list[str]:
    known = known_names(scene)
    return [
        f"{where}: {key} {value!r} of {step['action']} is not in the scene"
        for key, value in step.items()
        if (step["action"], key) in known and value not in known[step["action"], key]
    ]


def goal_problems(scene: Scene, goal: Goal, rules: tuple[Rule, ...], refusal: bool, text: str) -> list[str]:
    """Why the steps of a valid plan do not do the task; ``refusal``: it cannot be done and should be refused."""
    steps: list[Step] = json.loads(text.rpartition("</think>")[2])["steps"]
    refused = len(steps) == 1 and str(steps[0].get("text", "")).startswith("I cannot do this")
    if refused or refusal:
        return [] if refused and refusal else ["refused" if refused else "did not refuse"]
    world = _World(scene, rules)
    for index, step in enumerate(steps):
        problem = world.run(step)
        if problem:
            return [f"step {index} ({step['action']}): {problem}"]
    return world.unreached(goal)


class _World:
    """What the steps do, and what stops them."""

    def __init__(self, scene: Scene, rules: tuple[Rule, ...]) -> None:
        self.scene, self.rules = scene, rules
        self.at = self.room = scene.robot_room
        self.state = {p.name: p.state for p in scene.places} | {door_name(r.name): r.door for r in scene.rooms}
        self.lock = {p.name: p.key for p in scene.places} | {door_name(r.name): r.key for r in scene.rooms}
        self.where = {t.name: t.place for t in scene.things}
        self.gripper = ""
        self.belt: set[str] = set()
        self.inspected: set[str] = set()
        self.opened: set[str] = set()
        self.given: dict[str, str] = {}
        self.last: Step = {"action": ""}
        self.said: list[str] = []

    def run(self, step: Step) -> str:
        """Do a step; the problem, or an empty string."""
        problem = str(getattr(self, "_" + step["action"])(*list(step.values())[1:]) or "")
        self.last = step
        return problem

    def _navigate(self, to: str) -> str:
        room = to if to in {r.name for r in self.scene.rooms} else self.scene.place(to).room
        if room != self.room:
            shut = [d for d in (door_name(self.room), door_name(room)) if self.state[d] != "open"]
            if shut:
                return f"{shut[0]} is {self.state[shut[0]]}"
            people = room in dict(self.scene.people).values()
            if "announce" in self.rules and people and not any(room in text for text in self.said):
                return f"entered the {room} unannounced"
        self.at, self.room = to, room
        return ""

    def _near(self, name: str) -> str:
        """Doors are worked from the corridor: the door of the robot's own room must be open, or be the one meant."""
        if name in self.scene.doors:
            own = door_name(self.room)
            return "" if name == own or self.state[own] == "open" else f"{own} is {self.state[own]}"
        return "" if self.at == name else f"robot is at {self.at}, not {name}"

    def _open(self, target: str) -> str:
        if self.state[target] != "closed":
            return f"{target} is {self.state[target]}"
        self.state[target] = "open"
        if target not in self.scene.doors:
            self.opened.add(target)
        return self._near(target)

    def _close(self, target: str) -> str:
        if self.state[target] != "open":
            return f"{target} is {self.state[target]}"
        self.state[target] = "closed"
        self.opened.discard(target)
        return self._near(target)

    def _unlock(self, target: str, key: str) -> str:
        if self.state[target] != "locked" or self.lock[target] != key or key not in self.belt:
            return f"{target} is {self.state[target]}, belt holds {sorted(self.belt)}"
        self.state[target] = "closed"
        return self._near(target)

    def _pick(self, name: str, place: str, grip: str) -> str:
        thing: Thing = self.scene.thing(name)
        if self.where[name] != place or self.at != place or self.state[place] != "open":
            return f"{name} at {self.where[name]}, robot at {self.at}, place {self.state[place]}"
        if "inspect" in self.rules and name not in self.inspected:
            return f"{name} was not inspected"
        needed = {"fragile": "gentle", "heavy": "both_arms"}.get(
            thing.trait, "gentle" if "gentle" in self.rules else ""
        )
        if needed and grip != needed:
            return f"grip {grip}, needs {needed}"
        if thing.trait == "hot" and (self.last["action"] != "wait" or self.last["seconds"] < COOLING_SECONDS):
            return f"{name} is hot"
        if name.endswith("_key"):
            self.belt.add(name)
        elif self.gripper:
            return f"gripper holds {self.gripper}"
        else:
            self.gripper = name
        self.where[name] = ""
        return ""

    def _place(self, name: str, to: str) -> str:
        if self.gripper != name or self.at != to or self.state[to] != "open":
            return f"gripper holds {self.gripper!r}, robot at {self.at}, place {self.state[to]}"
        self.gripper, self.where[name] = "", to
        return ""

    def _handover(self, name: str, to: str) -> str:
        if self.gripper != name or self.room != dict(self.scene.people)[to]:
            return f"gripper holds {self.gripper!r}, robot in {self.room}"
        self.gripper, self.given[name] = "", to
        return ""

    def _inspect(self, target: str) -> str:
        place = self.where.get(target, target)
        self.inspected.add(target)
        return "" if self.at == place and self.state[place] == "open" else f"robot at {self.at}, {target} at {place}"

    def _wait(self, seconds: int) -> str:
        return "" if seconds > 0 else "no time"

    def _say(self, text: str) -> str:
        self.said.append(text)
        return ""

    def unreached(self, goal: Goal) -> list[str]:
        """What of the goal and of the closing rules is not so at the end."""
        names = subjects(self.scene, goal)
        wanted: dict[str, Any] = {}
        if goal.kind in ("put", "tidy", "gather"):
            wanted = dict.fromkeys(names, goal.to)
        if goal.kind == "swap":
            wanted = {names[0]: self.scene.thing(names[1]).place, names[1]: self.scene.thing(names[0]).place}
        found = [f"{n} is at {self.where[n]}, not {to}" for n, to in wanted.items() if self.where[n] != to]
        if goal.kind == "bring":
            found += [f"{n} was not given to {goal.to}" for n in names if self.given.get(n) != goal.to]
        if goal.kind == "check":
            found += [f"{n} was not inspected" for n in names if n not in self.inspected]
        if goal.kind == "close":
            found += [f"{n} is open" for n in names if self.state[n] == "open"]
        if "close" in self.rules:
            found += [f"{n} was left open" for n in sorted(self.opened)]
        if "report" in self.rules and not any("done" in text for text in self.said):
            found.append("the end was not reported")
        if self.scene.battery < LOW_BATTERY and self.at != DOCK:
            found.append("the battery is low and the robot is not at its dock")
        return found
