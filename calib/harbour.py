"""Tasks of another world than the demo's: a container harbour, its cranes and trucks, plans of another schema.

``python -m calib.harbour OUT`` writes OUT/train.jsonl (2,000 tasks) and OUT/heldout.jsonl (200), a line each:
``messages`` and ``schema``, with ``--answers`` also the right ``answer``. Task ``n`` of a split is made from its number
alone; the splits share no task. A drafter of the demo pair knows nothing of this world, nor does its target.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from edge_dflash.demo.checking import schema_problems

Split = Literal["train", "heldout"]
Kind = Literal["dry", "cold", "acid"]

TRAIN, HELDOUT = 2000, 200  # tasks
_BASE = {"heldout": 0, "train": 1_000_000}  # seed of the first task
SYSTEM = "You run the cranes of a harbour. Answer with one JSON work order."
LINES = ("ABLU", "CORU", "DELU", "FENU", "GALU", "HASU")
SHIPS = ("Aurora", "Borealis", "Cygnus", "Dorado", "Electra", "Fornax")
_WORDING = {
    "unload": ("Unload {units} from {ship}.", "Take {units} off {ship}.", "{units}: from {ship} to the yard."),
    "load": ("Load {units} onto {ship}.", "{ship} takes {units}.", "Bring {units} aboard {ship}."),
}


@dataclass(frozen=True)
class Crane:
    """A crane of the quay."""

    name: str
    tonnes: int  # that it lifts


@dataclass(frozen=True)
class Block:
    """A part of the yard, for units of one kind."""

    name: str
    kind: Kind
    free: int  # places


@dataclass(frozen=True)
class Unit:
    """A container: on the ship, or in a block of the yard."""

    name: str
    tonnes: int
    kind: Kind
    place: str


@dataclass(frozen=True)
class HarbourTask:
    """A scene and an order."""

    seed: int
    ship: str
    cranes: tuple[Crane, ...]
    blocks: tuple[Block, ...]
    units: tuple[Unit, ...]
    trucks: tuple[str, ...]
    order: Literal["unload", "load"]
    asked: tuple[str, ...]  # names of units
    wording: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The task as a conversation."""
        cranes = ", ".join(f"{crane.name} {crane.tonnes} t" for crane in self.cranes)
        blocks = ", ".join(f"{block.name} {block.kind} {block.free} free" for block in self.blocks)
        units = ", ".join(f"{unit.name} {unit.tonnes} t {unit.kind} at {unit.place}" for unit in self.units)
        content = (
            f"Ship: {self.ship}\nCranes: {cranes}\nTrucks: {', '.join(self.trucks)}\nBlocks: {blocks}\n"
            f"Units: {units}\nOrder: {self.wording}"
        )
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]

    def line(self, *, answer: bool) -> dict[str, Any]:
        """A line of a file to train a drafter on."""
        body: dict[str, Any] = {"messages": self.messages, "schema": order_schema()}
        return body | ({"answer": right_answer(self)} if answer else {})


def order_schema() -> dict[str, Any]:
    """JSON Schema of a work order: moves of units by crane and truck, units that stay, tonnes moved."""
    name = {"type": "string", "maxLength": 12}
    move = {
        "type": "object",
        "properties": {
            "unit": name,
            "crane": name,
            "truck": name,
            "from": name,
            "to": name,
            "tier": {"type": "integer"},
        },
        "required": ["unit", "crane", "truck", "from", "to", "tier"],
        "additionalProperties": False,
    }
    stay = {
        "type": "object",
        "properties": {"unit": name, "because": {"enum": ["too heavy", "no place"]}},
        "required": ["unit", "because"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            "ship": name,
            "moves": {"type": "array", "items": move, "maxItems": 4},
            "stays": {"type": "array", "items": stay, "maxItems": 4},
            "tonnes": {"type": "integer"},
        },
        "required": ["ship", "moves", "stays", "tonnes"],
        "additionalProperties": False,
    }


def make_task(seed: int) -> HarbourTask:
    """The task of a seed: about 1 unit in 10 is too heavy for every crane, or finds no place."""
    rng = Random(seed)
    order: Literal["unload", "load"] = rng.choice(("unload", "unload", "load"))
    ship = rng.choice(SHIPS)
    cranes = tuple(Crane(f"Q{n + 1}", rng.choice((20, 25, 30, 40))) for n in range(rng.choice((2, 2, 3))))
    kinds: list[Kind] = rng.sample(["dry", "cold", "acid"], rng.choice((2, 3)))
    blocks = tuple(Block(f"B{n + 1}", kind, rng.choice((1, 2, 3, 4))) for n, kind in enumerate(kinds))
    numbers = rng.sample(range(100, 1000), rng.choice((3, 4, 5)))
    units = []
    for number in numbers:
        block = rng.choice(blocks)
        place = ship if order == "unload" else block.name
        units.append(Unit(f"{rng.choice(LINES)}{number}", rng.randint(4, 42), block.kind, place))
    asked = tuple(unit.name for unit in rng.sample(units, rng.choice((1, 2, 2, 3))))
    names = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + " and " + asked[-1]
    wording = rng.choice(_WORDING[order]).format(units=names, ship=ship)
    trucks = tuple(f"T{n}" for n in rng.sample(range(1, 9), rng.choice((1, 2))))
    return HarbourTask(seed, ship, cranes, blocks, tuple(units), trucks, order, asked, wording)


def harbour_tasks(split: Split, count: int | None = None) -> Iterator[HarbourTask]:
    """The tasks of a split, ``count`` of them or all."""
    most = TRAIN if split == "train" else HELDOUT
    yield from map(make_task, range(_BASE[split], _BASE[split] + (most if count is None else count)))


def right_answer(task: HarbourTask) -> str:
    """The work order: the lightest crane that lifts a unit, trucks in turn, the first block of its kind with room."""
    free = {block.name: block.free for block in task.blocks}
    units = {unit.name: unit for unit in task.units}
    moves: list[dict[str, Any]] = []
    stays: list[dict[str, str]] = []
    for name in task.asked:
        unit = units[name]
        strong = sorted((crane for crane in task.cranes if crane.tonnes >= unit.tonnes), key=lambda one: one.tonnes)
        room = [b.name for b in task.blocks if b.kind == unit.kind and free[b.name] > 0]
        if not strong:
            stays.append({"unit": name, "because": "too heavy"})
        elif task.order == "unload" and not room:
            stays.append({"unit": name, "because": "no place"})
        else:
            to = task.ship if task.order == "load" else room[0]
            tier = 1 + sum(move["to"] == to for move in moves)
            free[to] = free.get(to, 0) - 1
            truck = task.trucks[len(moves) % len(task.trucks)]
            move = {"unit": name, "crane": strong[0].name, "truck": truck, "from": unit.place, "to": to, "tier": tier}
            moves.append(move)
    tonnes = sum(units[move["unit"]].tonnes for move in moves)
    return json.dumps({"ship": task.ship, "moves": moves, "stays": stays, "tonnes": tonnes}, separators=(",", ":"))


def order_problems(task: HarbourTask, text: str) -> list[str]:
    """What is wrong with an answer: no JSON, not of the schema, names that are not there, what cannot be done."""
    try:
        order = json.loads(text)
    except ValueError as error:
        return [f"no JSON: {error}"]
    if found := schema_problems(order, order_schema(), "order"):
        return found
    if order["ship"] != task.ship:
        found.append(f"ship is {order['ship']!r}, not {task.ship!r}")
    done = [entry["unit"] for entry in (*order["moves"], *order["stays"])]
    found += [f"{name} is not asked for" for name in done if name not in task.asked]
    found += [f"{name} is missing" for name in task.asked if name not in done]
    found += [f"{name} is there twice" for name in set(done) if done.count(name) > 1]
    return found or _undoable(task, order)


def _undoable(task: HarbourTask, order: dict[str, Any]) -> list[str]:
    """Moves that cranes and yard do not allow, of an order whose units are those that were asked for."""
    found, units = [], {unit.name: unit for unit in task.units}
    cranes = {crane.name: crane.tonnes for crane in task.cranes}
    blocks = {block.name: block for block in task.blocks}
    used: dict[str, int] = {}
    for move in order["moves"]:
        unit, to = units[move["unit"]], move["to"]
        if move["from"] != unit.place:
            found.append(f"{unit.name} is at {unit.place}, not {move['from']}")
        if cranes.get(move["crane"], -1) < unit.tonnes:
            found.append(f"{move['crane']} does not lift {unit.name}")
        if move["truck"] not in task.trucks:
            found.append(f"{move['truck']} is no truck here")
        used[to] = used.get(to, 0) + 1
        if task.order == "load" and to != task.ship:
            found.append(f"{unit.name} goes to {to}, not aboard {task.ship}")
        if task.order == "unload" and (to not in blocks or blocks[to].kind != unit.kind or used[to] > blocks[to].free):
            found.append(f"{to} has no place for {unit.name}")
        if move["tier"] != used[to]:
            found.append(f"tier of {unit.name} is {move['tier']}, not {used[to]}")
    for stay in order["stays"]:
        heavy = all(tonnes < units[stay["unit"]].tonnes for tonnes in cranes.values())
        kind = units[stay["unit"]].kind
        room = task.order == "load" or any(b.kind == kind and used.get(b.name, 0) < b.free for b in task.blocks)
        if heavy != (stay["because"] == "too heavy") or (room and not heavy):
            found.append(f"{stay['unit']} need not stay as {stay['because']}")
    moved = sum(units[move["unit"]].tonnes for move in order["moves"])
    if order["tonnes"] != moved:
        found.append(f"tonnes is {order['tonnes']}, not {moved}")
    return found


def write_tasks(output: Path, *, answers: bool = False) -> dict[str, int]:
    """Write both files into a directory; the number of tasks of each."""
    output.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split, most in (("train", TRAIN), ("heldout", HELDOUT)):
        lines = [json.dumps(make_task(_BASE[split] + n).line(answer=answers)) for n in range(most)]
        (output / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        counts[split] = len(lines)
    return counts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--answers", action="store_true", help="with the right answers, to train a target on")
    given = parser.parse_args()
    print(json.dumps({"output": str(given.output), **write_tasks(given.output, answers=given.answers)}))


if __name__ == "__main__":
    main()
