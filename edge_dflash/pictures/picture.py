"""A picture as a vision tower takes it: patches, their grid, and what tells it from every other picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from edge_dflash.model.specs import PatchSpec
from edge_dflash.pictures.decode import DEFAULT_LIMITS, ImageLimits, Opened, PixelBudget, opened
from edge_dflash.pictures.gate import Gate, in_flight
from edge_dflash.pictures.resize import resize, target_size

MOST_THREADS = 8


@dataclass(frozen=True, eq=False)
class PatchedPicture:
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

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.levels.nbytes

    def values(self) -> npt.NDArray[np.float32]:
        """The tower's input [N, 3 * temporal * patch^2]: normalised, a still in every time slot."""
        spec = self.spec
        mean, std = (np.array(part, np.float32)[:, None] * np.float32(255) for part in (spec.mean, spec.std))
        levels = self.levels.reshape(len(self.levels), 3, -1).astype(np.float32)
        return np.repeat(((levels - mean) / std)[:, :, None], spec.temporal, axis=2).reshape(len(levels), -1)


def picture_of(source: object, spec: PatchSpec, limits: ImageLimits = DEFAULT_LIMITS) -> PatchedPicture:
    """The picture of anything that :func:`~edge_dflash.pictures.decode.opened` takes. Raises ImageError."""
    return pictures_of([source], spec, limits)[0]


def pictures_of(
    sources: Sequence[object],
    spec: PatchSpec,
    limits: ImageLimits = DEFAULT_LIMITS,
    gate: Gate | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[PatchedPicture, ...]:
    """:func:`picture_of` of those of a request, several at the same time, with the same bytes.

    They are decoded when ``gate`` has room for all of them; ``check`` is asked meanwhile, see :meth:`Gate.hold`.
    """
    check()
    images, left = [opened(source, limits) for source in sources], PixelBudget(limits)
    for image in images:
        left.take(image.height, image.width)
    sizes = [target_size(image.height, image.width, spec) for image in images]
    wanted = sum(image.nbytes(*size) for image, size in zip(images, sizes, strict=True))
    with (gate or Gate(in_flight(limits.pixels))).hold(wanted, check):
        if len(images) < 2:
            return tuple(_patched(image, size, spec) for image, size in zip(images, sizes, strict=True))
        with ThreadPoolExecutor(min(len(images), os.cpu_count() or 1, MOST_THREADS)) as pool:
            return tuple(pool.map(lambda image, size: _patched(image, size, spec), images, sizes))


def _patched(image: Opened, size: tuple[int, int], spec: PatchSpec) -> PatchedPicture:
    pixels = image.pixels()
    if pixels.shape[:2] != (image.height, image.width):  # turned by its EXIF orientation
        size = target_size(pixels.shape[0], pixels.shape[1], spec)
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    del pixels
    levels = _patches(resize(planes, size), spec)
    levels.flags.writeable = False
    return PatchedPicture(levels, (size[0] // spec.patch, size[1] // spec.patch), spec)


def _patches(planes: npt.NDArray[np.uint8], spec: PatchSpec) -> npt.NDArray[np.uint8]:
    """[channels, height, width] -> [N, channels * patch^2]; rows of a patch are moved whole."""
    patch, merge = spec.patch, spec.merge
    channels, height, width = planes.shape
    blocks = (height // spec.factor, merge, patch, width // spec.factor, merge)
    rows = planes.reshape(channels, height, width).view(f"V{patch}").reshape(channels, *blocks)
    moved = np.ascontiguousarray(rows.transpose(1, 4, 2, 5, 0, 3))
    return moved.view(np.uint8).reshape(-1, channels * patch**2)
