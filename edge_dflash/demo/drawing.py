"""A scene of two rooms as a picture from above: everything has its spot on a grid of 16-pixel squares.

The picture shows rooms and doors, furniture (and which of it is closed), objects by colour and outline, the dock, the
robot and a person. It does not show the battery, the goal or the house rules.

Letters are bitmaps of 3 x 5 pixels, outlines of nouns of 12 x 12.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from edge_dflash.demo.world import DOCK, Place, Scene, Thing
from edge_dflash.errors import RequestError

Mask = npt.NDArray[np.bool_]

LETTER_STEP = 4  # pixels from one letter to the next

# Each letter as five rows from the top, a row as an octal digit: 4 is its left pixel, 1 its right one.
_LETTERS = dict(
    zip(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        (
            *("25755", "65656", "34443", "65556", "74647", "74644", "34553", "55755", "72227", "11152", "55655"),
            *("44447", "57755", "65555", "25552", "65644", "25563", "65655", "34216", "72222", "55557", "55552"),
            *("55775", "55255", "55222", "71247"),
        ),
        strict=True,
    )
)

# Each noun as twelve rows from the top, a row as three hexadecimal digits: 800 is its left pixel, 001 its right one.
_NOUNS = {
    "mug": "000 000 7f8 7fc 7fa 7f9 7f9 7fa 7fc 7f8 7f8 3f0",
    "plate": "0f0 3fc 7fe 70e ee7 df7 df7 ee7 70e 7fe 3fc 0f0",
    "bottle": "060 060 060 060 0f0 1f8 3fc 3fc 3fc 3fc 3fc 3fc",
    "can": "000 1f8 3fc 204 3fc 3fc 3fc 3fc 3fc 204 3fc 1f8",
    "book": "000 000 79e ffb bfd bfd bfd bfd bfd ffb 79e 000",
    "hammer": "000 ff8 ffe ff8 060 060 060 060 060 060 060 060",
    "wrench": "c30 c30 e70 7e0 3c0 1c0 0e0 070 038 01c 00e 006",
    "lamp": "0f0 1f8 1f8 3fc 3fc 7fe 060 060 060 060 1f8 3fc",
    "clock": "0f0 3fc 71e 6f6 ef7 ef7 e17 fff 7fe 7fe 3fc 0f0",
    "phone": "1f8 108 108 108 108 108 108 108 1f8 198 198 1f8",
    "ball": "000 0f0 3fc 3fc 7fe 7fe 7fe 7fe 3fc 3fc 0f0 000",
    "vase": "3fc 1f8 0f0 0f0 1f8 3fc 7fe 7fe 7fe 3fc 1f8 1f8",
    "kettle": "0f0 108 204 0f0 1f9 3fb 7fe 7fe 7fc 7fc 7fc 3f8",
    "helmet": "000 0f0 3fc 7fe 7fe fff fff f01 e00 e00 000 000",
    "radio": "001 002 004 008 fff fff 8e5 8e7 8e5 fff fff 000",
    "flask": "1f8 090 090 090 090 108 108 204 3fc 7fe 7fe 3fc",
}

NOUNS = tuple(_NOUNS)  # that can be drawn
ICON = 12  # pixels a side


@cache
def icon(noun: str) -> Mask:
    """The pixels of a noun [12, 12]. KeyError for one that cannot be drawn."""
    rows = [int(row, 16) for row in _NOUNS[noun].split()]
    return np.array([[bool(row >> (ICON - 1 - x) & 1) for x in range(ICON)] for row in rows])


@cache
def word(text: str) -> Mask:
    """The pixels of a word of Latin letters, [5, 4 a letter]. KeyError for another character."""
    mask = np.zeros((5, LETTER_STEP * len(text)), dtype=np.bool_)
    for index, letter in enumerate(text.upper()):
        for y, digit in enumerate(_LETTERS[letter]):
            for x in range(3):
                mask[y, index * LETTER_STEP + x] = bool(int(digit) >> (2 - x) & 1)
    return mask


SQUARE = 16  # pixels
ROOM_SQUARES = (12, 18)  # width and height of a room with its piece of corridor
WIDTH, HEIGHT = 2 * ROOM_SQUARES[0] * SQUARE, ROOM_SQUARES[1] * SQUARE

Colour = tuple[int, int, int]
Pixels = npt.NDArray[np.uint8]

OBJECT_COLOURS: dict[str, Colour] = {
    "red": (214, 40, 40),
    "blue": (40, 80, 220),
    "green": (30, 150, 60),
    "yellow": (245, 205, 30),
    "white": (255, 255, 255),
    "black": (15, 15, 15),
    "orange": (245, 130, 30),
    "purple": (130, 50, 170),
    "grey": (125, 125, 125),
    "pink": (250, 140, 190),
}
_FLOORS: tuple[Colour, Colour] = ((236, 226, 206), (212, 224, 230))
_WALL, _CORRIDOR, _LABEL, _INK = (70, 66, 62), (190, 190, 186), (250, 250, 246), (30, 30, 40)
_TOP, _FRONT, _INSIDE, _LID, _HANDLE = (196, 158, 112), (150, 112, 72), (96, 82, 70), (168, 124, 80), (60, 44, 30)
_DOOR = (140, 84, 40)


@dataclass(frozen=True)
class Furniture:
    """Where a room's n-th place stands: the square of its label, and the squares of the objects on or in it."""

    label: tuple[int, int]  # row and column in the room
    spots: tuple[tuple[int, int], ...]


FURNITURE = (
    Furniture((3, 1), ((4, 1), (4, 3))),  # a surface for two objects
    Furniture((3, 7), ((4, 8),)),  # a surface for one
    Furniture((8, 1), ((9, 2),)),  # a container for one
)
ROOM_LABEL, DOOR, DOCK_SQUARE, ROBOT, PERSON, PERSON_LABEL = (1, 1), (15, 5), (8, 8), (12, 2), (12, 8), (11, 8)


def places(scene: Scene, room: str) -> tuple[Place, ...]:
    """The places of a room in the order of FURNITURE. RequestError for a scene that the picture has no room for."""
    found = tuple(p for p in scene.places if p.room == room and p.name != DOCK)
    if len(scene.rooms) != 2 or [p.container for p in found] != [False, False, True]:
        raise RequestError("a picture shows two rooms, each with two surfaces and a container; the scene has others")
    return found


def spots(scene: Scene) -> tuple[tuple[int, tuple[int, int], Place, Thing | None], ...]:
    """Every spot for an object in reading order: its room (0 or 1), its square, its place, and the object there.

    RequestError for a scene that the picture has no room for.
    """
    found = []
    for index, room in enumerate(scene.rooms):
        for place, furniture in zip(places(scene, room.name), FURNITURE, strict=True):
            things = [t for t in scene.things if t.place == place.name]
            if len(things) > len(furniture.spots):
                raise RequestError(f"{place.name} shows {len(furniture.spots)} objects, the scene has {len(things)}")
            filled = (*things, *[None] * len(furniture.spots))
            found += [(index, square, place, thing) for square, thing in zip(furniture.spots, filled, strict=False)]
    return tuple(found)


def draw(scene: Scene) -> Pixels:
    """The picture of a scene, [288, 384, 3]; the same scene gives the same bytes.

    RequestError for a scene that the picture has no room for, or an object whose noun or colour cannot be drawn.
    """
    picture = np.empty((HEIGHT, WIDTH, 3), dtype=np.uint8)
    picture[:] = _CORRIDOR
    placed = spots(scene)
    for index, room in enumerate(scene.rooms):
        canvas = picture[:, index * WIDTH // 2 : (index + 1) * WIDTH // 2]
        _room(canvas, index, room.name, closed=room.door != "open")
        for place, furniture in zip(places(scene, room.name), FURNITURE, strict=True):
            _furniture(canvas, place, furniture)
        for at, square, place, thing in placed:
            if at == index and thing is not None and place.state == "open":
                _object(canvas, square, thing)
        if scene.place(DOCK).room == room.name:
            _dock(canvas)
        if scene.robot_room == room.name:
            _robot(canvas)
        for name, where in scene.people[:1]:
            if where == room.name:
                _person(canvas, name)
    return picture


def png(pixels: Pixels) -> bytes:
    """Pixels [H, W, 3] as a PNG file."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # filter 0 each
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _fill(canvas: Pixels, square: tuple[int, int], box: tuple[int, int, int, int], colour: Colour) -> None:
    """Fill a box (x, y, width, height in pixels from the square's corner)."""
    y, x = square[0] * SQUARE + box[1], square[1] * SQUARE + box[0]
    canvas[y : y + box[3], x : x + box[2]] = colour


def _stamp(canvas: Pixels, square: tuple[int, int], offset: tuple[int, int], mask: Mask, colour: Colour) -> None:
    """Colour the pixels of a mask, ``offset`` (x, y) pixels from the square's corner."""
    y, x = square[0] * SQUARE + offset[1], square[1] * SQUARE + offset[0]
    canvas[y : y + mask.shape[0], x : x + mask.shape[1]][mask] = colour


def _label(canvas: Pixels, square: tuple[int, int], text: str) -> None:
    _fill(canvas, square, (0, 4, 2 * SQUARE, 10), _LABEL)
    _stamp(canvas, square, (1, 6), word(text)[:, : 2 * SQUARE - 1], _INK)


def _room(canvas: Pixels, index: int, name: str, *, closed: bool) -> None:
    width, height = ROOM_SQUARES[0] * SQUARE, (ROOM_SQUARES[1] - 2) * SQUARE
    canvas[:height] = _WALL
    canvas[5 : height - 5, 5 : width - 5] = _FLOORS[index]
    _label(canvas, ROOM_LABEL, name)
    _fill(canvas, DOOR, (0, 11, 2 * SQUARE, 5), _DOOR if closed else _CORRIDOR)
    if closed:
        _fill(canvas, DOOR, (4, 12, 4, 3), _HANDLE)
    else:
        _fill(canvas, DOOR, (0, 0, 4, 11), _DOOR)


def _furniture(canvas: Pixels, place: Place, furniture: Furniture) -> None:
    row, column = furniture.label
    below = (row + 1, column)
    _label(canvas, furniture.label, place.name.rpartition("_")[2])
    _fill(canvas, below, (0, 0, 4 * SQUARE, 26), _FRONT)
    _fill(canvas, below, (0, 0, 4 * SQUARE, SQUARE), _TOP)
    if place.container:
        _fill(canvas, below, (0, 0, 4 * SQUARE, SQUARE), _INSIDE if place.state == "open" else _LID)
        if place.state != "open":
            _fill(canvas, below, (20, 6, 24, 4), _HANDLE)


def _object(canvas: Pixels, square: tuple[int, int], thing: Thing) -> None:
    colour = thing.name.partition("_")[0]
    if thing.noun not in NOUNS or colour not in OBJECT_COLOURS:
        raise RequestError(
            f"{thing.name} cannot be drawn; colours: {', '.join(OBJECT_COLOURS)}; nouns: {', '.join(NOUNS)}"
        )
    shape = icon(thing.noun)
    margin = (SQUARE - ICON) // 2
    _stamp(canvas, square, (margin, margin), shape, OBJECT_COLOURS[colour])


def _dock(canvas: Pixels) -> None:
    _fill(canvas, DOCK_SQUARE, (0, 0, 2 * SQUARE, 2 * SQUARE), (60, 60, 66))
    _fill(canvas, DOCK_SQUARE, (3, 3, 2 * SQUARE - 6, 2 * SQUARE - 6), (250, 220, 60))
    _stamp(canvas, DOCK_SQUARE, (8, 13), word("dock"), _INK)


def _robot(canvas: Pixels) -> None:
    _fill(canvas, ROBOT, (4, 8, 24, 22), (40, 120, 130))
    _fill(canvas, ROBOT, (8, 2, 16, 10), (90, 190, 200))
    for x in (11, 18):
        _fill(canvas, ROBOT, (x, 5, 3, 3), _INK)
    for x in (0, 28):
        _fill(canvas, ROBOT, (x, 12, 4, 12), (30, 70, 80))


def _person(canvas: Pixels, name: str) -> None:
    _label(canvas, PERSON_LABEL, name)
    _fill(canvas, PERSON, (4, 12, 24, 16), (180, 60, 90))
    _fill(canvas, PERSON, (10, 1, 12, 12), (236, 190, 150))
    _fill(canvas, PERSON, (10, 1, 12, 4), (80, 50, 30))
