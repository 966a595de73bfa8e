"""Where each word of a pictured scene looks, and a tower that starts out looking there.

A square of the picture stands for a word that mostly depends on squares elsewhere. To find them by gradient takes a
tower hours on a CPU; so in its last block queries and keys start from codes in the position table, and training does
the rest.
"""

from __future__ import annotations

import torch

from calib.demo.eyes import Block, Eyes
from calib.demo.pictured import WORDS
from edge_dflash.demo.drawing import DOCK_SQUARE, DOOR, FURNITURE, PERSON_LABEL, ROBOT, ROOM_LABEL, ROOM_SQUARES

Square = tuple[int, int]
SHARPNESS = 2.4  # factor of query and key codes: a square scores about 12 more than one that is no source
_MAY_BE_EMPTY = (1, 3)  # spots of a room whose words are those of the spot before when they are empty
_CODE = 8  # numbers of a code, as many as rotate little in a head of 16


def gaze() -> list[tuple[Square, ...]]:
    """The squares that each word depends on, in the order of :func:`calib.demo.pictured.words`."""
    looks: list[tuple[Square, ...]] = [(), ()]
    for room in range(2):
        label, door = _square(room, ROOM_LABEL), _square(room, DOOR)
        looks += [(label,), *[(door,)] * 4]
    looks += [(), ()]
    for room in range(2):
        for index, furniture in enumerate(FURNITURE):
            label, lid = _square(room, furniture.label), _square(room, furniture.spots[0])
            looks += [(_square(room, ROOM_LABEL),), (label,), *[(lid,)] * (3 if index == 2 else 1)]
    looks += [(), (), _either(DOCK_SQUARE), (), (), ()]
    for room in range(2):
        here = [(_square(room, f.label), _square(room, spot)) for f in FURNITURE for spot in f.spots]
        for number, (label, spot) in enumerate(here):
            before = here[number - 1] if number in _MAY_BE_EMPTY else here[number]
            thing: tuple[Square, ...] = (spot, before[1]) if number in _MAY_BE_EMPTY else (spot,)
            place: tuple[Square, ...] = (spot, label, before[0]) if before[0] != label else (label,)
            looks += [thing, thing, (), (_square(room, ROOM_LABEL),), place, ()]
    person = (_square(0, PERSON_LABEL), _square(1, PERSON_LABEL))
    looks += [(), (), person, person, _either(PERSON_LABEL)]
    looks += [(), (), (), (), _either(ROBOT)]
    return looks + [()] * (WORDS - len(looks))


def _square(room: int, square: Square) -> Square:
    return square[0], square[1] + room * ROOM_SQUARES[0]


def _either(square: Square) -> tuple[Square, ...]:
    """A square of both rooms and what the rooms are called."""
    return tuple(_square(room, what) for what in (square, ROOM_LABEL) for room in range(2))


@torch.no_grad()
def look(eyes: Eyes, places: torch.Tensor) -> None:
    """Let the last block look where the words do; ``places`` are row and column of every patch [N, 2]."""
    c = eyes.c
    words = gaze()
    sources = sorted({square for squares in words for square in squares})
    codes = dict(zip(sources, _codes(len(sources)), strict=True))
    wanted = torch.zeros(len(places), c.hidden)
    for patch, place in enumerate(places.tolist()):
        if tuple(place) in codes:
            wanted[patch, :_CODE] = codes[tuple(place)]
        word, part = divmod(patch, c.merge**2)
        squares = words[word]
        for head in range(c.heads if squares else 0):
            at = _CODE * (1 + head)
            wanted[patch, at : at + _CODE] = codes[squares[(head + part) % len(squares)]]
    index, weight = eyes.taps
    mixing = torch.zeros(len(places), c.positions**2)
    for rows, part_of in zip(index, weight, strict=True):
        mixing[torch.arange(len(places)), rows] += part_of
    eyes.pos_embed.weight.copy_(torch.linalg.pinv(mixing) @ wanted)
    used = _CODE * (1 + c.heads)
    eyes.patch_embed.proj.weight[:used] = 0
    last = eyes.blocks[-1]
    assert isinstance(last, Block)
    _aim(last, c.hidden, c.heads)


def _aim(block: Block, hidden: int, heads: int) -> None:
    """Queries read a head's code and keys that of the square, into the numbers of a head that rotate least."""
    qkv = block.attn.qkv
    size = hidden // heads
    quarter = size // 4
    slow = [side + i for side in range(0, size, quarter) for i in range(quarter // 2, quarter)]
    qkv.weight[: 2 * hidden] *= 0.1
    qkv.bias.zero_()
    for head in range(heads):
        for number, row in enumerate(slow):
            qkv.weight[head * size + row, _CODE * (1 + head) + number] = SHARPNESS
            qkv.weight[hidden + head * size + row, number] = SHARPNESS


def _codes(count: int) -> list[torch.Tensor]:
    """Rows of signs, as unlike each other as can be found one after the other."""
    every = torch.tensor([[1.0 if n >> b & 1 else -1.0 for b in range(_CODE)] for n in range(2**_CODE)])
    chosen = [0]
    while len(chosen) < count:
        likeness = (every @ every[chosen].T).amax(1)
        likeness[chosen] = torch.inf
        chosen.append(int(likeness.argmin()))
    return [every[n] for n in chosen]
