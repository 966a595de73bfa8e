"""Sequences with pictures: where they stand, which positions their rows have, and what makes two sequences equal.

Positions after transformers' ``Qwen3_5Model.get_rope_index``: a text token has one position on three axes, time, height
and width. An image that begins at position p has time p, height p + row and width p + column over its grid of rows of
the language model, and the text after it continues at p + max(rows, columns). KV rows stay at the sequence index; only
the rotary embedding of the target uses positions. A token's position minus its index is the *delta* there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import RequestError
from edge_dflash.model.specs import PatchSpec


@dataclass(frozen=True, eq=False)
class Picture:
    """A decoded picture, resized and cut into patches. N = rows x columns of the grid."""

    levels: npt.NDArray[np.uint8]  # [N, 3 * patch^2], merge-block-major; columns by channel, row, column. Read-only
    grid: tuple[int, int]  # rows and columns of patches, both multiples of the merge size
    spec: PatchSpec = field(repr=False)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of the grid and the levels: of all that the tower reads, so no other picture has its name."""
        digest = blake2b(b"%d %d " % self.grid, digest_size=16)
        digest.update(np.ascontiguousarray(self.levels).data)
        return digest.digest()

    @property
    def tokens(self) -> int:
        """Rows of the language model."""
        return len(self.levels) // self.spec.merge**2

    def values(self) -> npt.NDArray[np.float32]:
        """The tower's input [N, 3 * temporal * patch^2]: normalised, a still in every time slot."""
        spec = self.spec
        mean, std = (np.array(part, np.float32)[:, None] * np.float32(255) for part in (spec.mean, spec.std))
        levels = self.levels.reshape(len(self.levels), 3, -1).astype(np.float32)
        return np.repeat(((levels - mean) / std)[:, :, None], spec.temporal, axis=2).reshape(len(levels), -1)


class Seen(Protocol):
    """Rows of one picture as its target reads them [tokens, H], on the backend's side."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory that they take."""

    def host(self) -> npt.NDArray[np.float32]:
        """The rows [tokens, H] on the host, to compare them."""


@dataclass(frozen=True)
class SeenRows:
    """Rows of a chunk that a picture fills."""

    row: int  # the first of them in the chunk
    seen: Seen
    first: int  # of the picture's rows
    count: int


@dataclass(frozen=True)
class Sight:
    """What a chunk of a prompt has of pictures."""

    positions: npt.NDArray[np.int32]  # [3, rows]: time, height and width of the chunk's rows
    delta: int  # of the text after the chunk; inside a picture, that before it
    rows: tuple[SeenRows, ...]

    def part(self, first: int, stop: int) -> Sight:
        """Of the chunk's rows ``first``, ..., ``stop`` - 1. Its delta is that after the chunk."""
        rows = []
        for one in self.rows:
            begin, end = max(one.row, first), min(one.row + one.count, stop)
            if begin < end:
                rows.append(SeenRows(begin - first, one.seen, one.first + begin - one.row, end - begin))
        return Sight(self.positions[:, first:stop], self.delta, tuple(rows))


@dataclass(frozen=True)
class Placed:
    """A picture of a sequence."""

    at: int  # index of its first row
    picture: Picture

    @property
    def end(self) -> int:
        """Index after its last row."""
        return self.at + self.picture.tokens

    @property
    def key(self) -> tuple[bytes, tuple[int, int]]:
        """What pictures with the same rows have in common."""
        return self.picture.digest, self.picture.grid

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the language model as a grid, height by width."""
        height, width = self.picture.grid
        merge = math.isqrt(height * width // self.picture.tokens)
        return height // merge, width // merge

    @property
    def shift(self) -> int:
        """What it adds to the delta; not above 0."""
        return max(self.shape) - self.picture.tokens


@dataclass(frozen=True)
class Pictured:
    """Token ids, and the pictures among them in their order."""

    ids: Sequence[int]  # in the place of a picture its placeholder, once a row
    pictures: tuple[Placed, ...] = ()

    @cached_property
    def identities(self) -> tuple[int, ...]:
        """What sequences are compared by: ids, and for a picture's rows negative numbers made of its digest and grid.

        Rows have 63 bits of a 128-bit hash each, its two halves alternating.
        """
        found = list(self.ids)
        for placed in self.pictures:
            picture = placed.picture
            hashed = blake2b(b"%d %d " % picture.grid + picture.digest, digest_size=16).digest()
            halves = [-1 - (int.from_bytes(half) >> 1) for half in (hashed[:8], hashed[8:])]
            rows = len(found[placed.at : placed.end])  # fewer of one that is cut
            found[placed.at : placed.at + rows] = (halves * -(-rows // 2))[:rows]
        return tuple(found)

    def until(self, length: int) -> Pictured:
        """The first ``length`` rows; the last picture may be cut."""
        return Pictured(self.ids[:length], tuple(placed for placed in self.pictures if placed.at < length))

    def delta(self, length: int) -> int:
        """Of the text after the first ``length`` rows; inside a picture, that before it."""
        return sum(placed.shift for placed in self.pictures if placed.end <= length)

    def within(self, first: int, stop: int) -> tuple[Placed, ...]:
        """Pictures that have some of the rows ``first``, ..., ``stop`` - 1."""
        return tuple(placed for placed in self.pictures if placed.at < stop and placed.end > first)

    def positions(self, first: int, stop: int) -> npt.NDArray[np.int32]:
        """Positions [3, rows] of time, height and width of the rows ``first``, ..., ``stop`` - 1."""
        index = np.arange(first, stop, dtype=np.int32)
        found, delta = np.tile(index, (3, 1)), 0
        for placed in self.pictures:
            begin, end = (min(max(at - first, 0), len(index)) for at in (placed.at, placed.end))
            row, start = index[begin:end] - placed.at, placed.at + delta
            found[:, begin:end] = start + np.stack((0 * row, *np.divmod(row, placed.shape[1])))
            delta += placed.shift
            found[:, end:] = index[end:] + delta
        return found

    def sight(self, first: int, stop: int, seen: Callable[[Placed], Seen]) -> Sight | None:
        """What the rows ``first``, ..., ``stop`` - 1 have of pictures; None where they are text alone."""
        if not (within := self.within(first, stop)):
            return None
        rows = []
        for placed in within:
            begin, end = max(placed.at, first), min(placed.end, stop)
            rows.append(SeenRows(begin - first, seen(placed), begin - placed.at, end - begin))
        return Sight(self.positions(first, stop), self.delta(stop), tuple(rows))


def text_ids(ids: Sequence[int], image_token_id: int | None) -> list[int]:
    """Made-up ids as a text: in the place of a picture's placeholder, which a text cannot have, the id before it."""
    return [token - (token == image_token_id) for token in ids]


def check_pictures(prompt: Pictured, image_token_id: int | None) -> None:
    """Raise RequestError for pictures that do not stand on the placeholders of their rows, or a target without tower.

    ``image_token_id``: the placeholder; None where the target has no tower.
    """
    end = 0
    if prompt.pictures and image_token_id is None:
        raise RequestError(
            f"the prompt has images ({len(prompt.pictures)}), and this target has no vision tower; "
            "leave them out, or build a bundle from a checkpoint that has one"
        )
    for number, placed in enumerate(prompt.pictures, 1):
        rows = prompt.ids[placed.at : placed.end] if placed.at >= end else ()
        if len(rows) != placed.picture.tokens or any(token != image_token_id for token in rows):
            raise RequestError(
                f"image {number} has {placed.picture.tokens} rows from token {placed.at} on, and the prompt does not "
                f"have as many placeholders {image_token_id} there; give each image its own, in the order of the prompt"
            )
        end = placed.end
