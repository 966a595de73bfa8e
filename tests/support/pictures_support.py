"""Pictures of the golden run and made-up ones, without any decoder."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from golden_pairs import golden

from edge_dflash.decode.controls import NO_CONTROLS
from edge_dflash.decode.loop import decode
from edge_dflash.decode.options import admit
from edge_dflash.decode.pictured import Pictured, Placed

IMAGE = 186
"""The placeholder of the golden pair."""


@dataclass(frozen=True, eq=False)
class GivenPicture:
    """A picture by the tower's own input."""

    given: np.ndarray  # [patches, columns]
    grid: tuple[int, int]

    @property
    def tokens(self):
        return self.grid[0] * self.grid[1] // 4

    @cached_property
    def digest(self):
        return blake2b(self.given.tobytes(), digest_size=16).digest()

    def values(self):
        return self.given


def picture(number):
    """One of the golden run's."""
    found = golden("vision")
    _, *grid = found[f"img{number}.grid_thw"].tolist()
    return GivenPicture(found[f"img{number}.pixel_values"], tuple(grid))


def noise(seed, grid=(4, 4), columns=1536):
    """A picture of random values."""
    rng = np.random.default_rng(seed)
    return GivenPicture(rng.uniform(-1, 1, (grid[0] * grid[1], columns)).astype(np.float32), tuple(grid))


def prompt(number):
    """A prompt of the golden run with its pictures."""
    found = golden("vision")
    ids, images = found[f"p{number}.prompt"].tolist(), found[f"p{number}.images"].tolist()
    return mixed(*parts_of(ids, images))


def parts_of(ids, images):
    """Texts and pictures in their order."""
    parts, at = [], 0
    for image in images:
        first = ids.index(IMAGE, at)
        parts += [ids[at:first], picture(image)]
        at = first + parts[-1].tokens
    return [*parts, ids[at:]]


def mixed(*parts):
    """A prompt of ids and pictures in turns."""
    ids, pictures = [], []
    for part in parts:
        if isinstance(part, GivenPicture):
            pictures.append(Placed(len(ids), part))
            ids += [IMAGE] * part.tokens
        else:
            ids += part
    return Pictured(tuple(ids), tuple(pictures))


def filled(backend, said, lane=0):
    """Rows of a prefill of a whole prompt in one call."""
    sight = said.sight(0, len(said.ids), lambda placed: backend.see(placed.picture))
    return backend.prefill(said.ids, lane, sight)


def ask(session, said, options, controls=NO_CONTROLS, keep=()):
    """Steps of an answer to a prompt with pictures in a session."""
    request = admit(session.backend.shape, said.ids, options, (), keep, said.pictures)
    return decode(session, request, controls)
