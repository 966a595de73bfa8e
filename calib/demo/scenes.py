"""Random scenes, and a scene as prompt text."""

from __future__ import annotations

from random import Random
from typing import Any

from edge_dflash.demo.world import DOCK, KEYS, Access, Place, Room, Scene, Thing, Trait

ROOMS = (
    *("kitchen", "office", "lab", "workshop", "pantry", "bedroom", "bathroom", "garage"),
    *("storage", "library", "lounge", "clinic", "nursery", "cellar", "studio", "laundry"),
)
SURFACES = ("table", "desk", "shelf", "bench", "counter", "cart", "rack", "stand")
CONTAINERS = ("cupboard", "drawer", "locker", "cabinet", "fridge", "crate", "chest", "wardrobe")
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "orange", "purple", "grey", "pink")
NOUNS = (
    *("mug", "cup", "plate", "bowl", "bottle", "jar", "can", "book", "folder", "towel", "sponge", "brush"),
    *("hammer", "wrench", "drill", "pliers", "tape", "rope", "battery", "charger", "cable", "lamp", "clock"),
    *("phone", "tablet", "camera", "ball", "pillow", "blanket", "vase", "pot", "pan", "kettle", "tray"),
    *("basket", "helmet", "medkit", "vial", "flask", "sensor", "toolbox", "radio"),
)
PEOPLE = (
    *("Anna", "Ben", "Clara", "David", "Elena", "Farid", "Grace", "Hugo"),
    *("Ines", "Jonas", "Kira", "Leon", "Maya", "Nils", "Olga", "Paul"),
)


def scene_json(scene: Scene) -> dict[str, Any]:
    """A JSON object that :func:`~edge_dflash.demo.world.scene_from_json` reads."""
    return {
        "rooms": [[r.name, r.door, r.key] for r in scene.rooms],
        "places": [[p.name, p.room, p.container, p.state, p.key] for p in scene.places],
        "things": [[t.name, t.place, t.trait] for t in scene.things],
        "people": [list(p) for p in scene.people],
        "robot_room": scene.robot_room,
        "battery": scene.battery,
    }


def random_scene(rng: Random) -> Scene:
    """A scene of 2 to 4 rooms and 3 to 8 objects; at most one thing is locked, and mostly its key can be found."""
    names = rng.sample(ROOMS, rng.randint(2, 4))
    rooms = [Room(name, rng.choice(("open", "open", "closed"))) for name in names]
    places = _random_places(rng, names)
    home = rng.choice(names)
    keys: list[Thing] = []
    if rng.random() < 0.35:
        key = rng.choice(KEYS)
        containers = [i for i, p in enumerate(places) if p.container]
        others = [i for i, room in enumerate(rooms) if room.name != home]
        if containers and rng.random() < 0.5:
            index = rng.choice(containers)
            locked_room, locked_place = "", places[index].name
            places[index] = Place(places[index].name, places[index].room, True, "locked", key)
        else:
            index = rng.choice(others)
            locked_room, locked_place = rooms[index].name, ""
            rooms[index] = Room(rooms[index].name, "locked", key)
        spots = [p.name for p in places if p.room != locked_room and p.name != locked_place]
        if spots and rng.random() < 0.85:
            keys.append(Thing(key, rng.choice(spots)))
    things = _random_things(rng, [p.name for p in places]) + keys
    rng.shuffle(things)
    people = [(name, rng.choice(names)) for name in rng.sample(PEOPLE, rng.choice((0, 1, 1, 2)))]
    reachable = [room.name for room in rooms if room.door != "locked"]
    places.insert(rng.randint(0, len(places)), Place(DOCK, rng.choice(reachable)))
    return Scene(tuple(rooms), tuple(places), tuple(things), tuple(people), home, rng.randint(5, 99))


def _random_places(rng: Random, rooms: list[str]) -> list[Place]:
    places = []
    for room in rooms:
        for kind in rng.sample(SURFACES, rng.randint(1, 2)):
            places.append(Place(f"{room}_{kind}", room))
        for kind in rng.sample(CONTAINERS, rng.randint(0, 2)):
            places.append(Place(f"{room}_{kind}", room, True, rng.choice(("open", "closed", "closed"))))
    rng.shuffle(places)
    return places


def _random_things(rng: Random, spots: list[str]) -> list[Thing]:
    """Objects of few kinds, so that colours tell some of them apart."""
    kinds = rng.sample(NOUNS, 5)
    names = dict.fromkeys(f"{rng.choice(COLOURS)}_{rng.choice(kinds)}" for _ in range(rng.randint(3, 8)))
    traits: tuple[Trait, ...] = ("", "", "", "", "fragile", "heavy", "hot")
    return [Thing(name, rng.choice(spots), rng.choice(traits)) for name in names]


def scene_text(scene: Scene) -> str:
    """The scene as the lines of a prompt."""
    rooms = ", ".join(room.name + _access("door ", room.door, room.key) for room in scene.rooms)
    places = ", ".join(
        f"{p.name} in {p.room}" if p.name == DOCK else p.name + _access("", p.state, p.key) for p in scene.places
    )
    things = ", ".join(f"{t.name} at {t.place}" + (f" ({t.trait})" if t.trait else "") for t in scene.things)
    people = ", ".join(f"{name} in {room}" for name, room in scene.people) or "nobody"
    return (
        f"Rooms: {rooms}\nPlaces: {places}\nObjects: {things}\nPeople: {people}\n"
        f"Robot: in {scene.robot_room}, battery {scene.battery}%"
    )


def _access(what: str, state: Access, key: str) -> str:
    if state == "open":
        return ""
    return f" ({what}locked by {key})" if state == "locked" else f" ({what}closed)"
