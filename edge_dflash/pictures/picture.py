"""A picture as a vision tower takes it: patches, their grid, and what tells it from every other picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from edge_dflash.model.specs import PatchSpec
from edge_dflash.pictures.decode import DEFAULT_LIMITS, ImageLimits, PixelBudget, Pixels, decode
from edge_dflash.pictures.resize import resize, target_size

MOST_THREADS = 8


@dataclass(frozen=True, eq=False)
class PatchedPicture:
    """A decoded picture, resized and cut into patches. N = rows x columns of the grid."""

    levels: npt.NDArray[np.uint8]  # [N, 3 * patch^2], merge-block-major; columns by channel, row, column. Read-only
    grid: tuple[int, int]  # rows and columns of patches, both multiples of the merge size
    digest: bytes  # 16 bytes of its size and pixels before the resize
    spec: PatchSpec = field(repr=False)

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


def picture_of(
    source: object, spec: PatchSpec, limits: ImageLimits = DEFAULT_LIMITS, left: PixelBudget | None = None
) -> PatchedPicture:
    """The picture of anything that :func:`~edge_dflash.pictures.decode.decode` takes. Raises ImageError."""
    pixels = decode(source, limits, left)
    size = target_size(pixels.shape[0], pixels.shape[1], spec)
    planes = resize(np.ascontiguousarray(pixels.transpose(2, 0, 1)), size)
    levels = _patches(planes, spec)
    levels.flags.writeable = False
    return PatchedPicture(levels, (size[0] // spec.patch, size[1] // spec.patch), _digest(pixels), spec)


def pictures_of(
    sources: Sequence[object], spec: PatchSpec, limits: ImageLimits = DEFAULT_LIMITS
) -> tuple[PatchedPicture, ...]:
    """:func:`picture_of` of those of a request, several at the same time, with the same bytes."""
    left = PixelBudget(limits)
    if len(sources) < 2:
        return tuple(picture_of(source, spec, limits, left) for source in sources)
    with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1, MOST_THREADS)) as pool:
        return tuple(pool.map(lambda source: picture_of(source, spec, limits, left), sources))


def _digest(pixels: Pixels) -> bytes:
    digest = blake2b(b"%d %d " % pixels.shape[:2], digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def _patches(planes: npt.NDArray[np.uint8], spec: PatchSpec) -> npt.NDArray[np.uint8]:
    """[channels, height, width] -> [N, channels * patch^2]; rows of a patch are moved whole."""
    patch, merge = spec.patch, spec.merge
    channels, height, width = planes.shape
    blocks = (height // spec.factor, merge, patch, width // spec.factor, merge)
    rows = planes.reshape(channels, height, width).view(f"V{patch}").reshape(channels, *blocks)
    moved = np.ascontiguousarray(rows.transpose(1, 4, 2, 5, 0, 3))
    return moved.view(np.uint8).reshape(-1, channels * patch**2)
