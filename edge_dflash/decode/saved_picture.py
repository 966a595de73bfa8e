"""A picture of a saved session: levels of its patches, and the values that the vision tower reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_dflash.model.specs import PatchSpec


@dataclass(frozen=True, eq=False)
class SavedPicture:
    """A resized picture. Patches stand merge-block-major: the patches of one row of the language model are neighbours.

    ``levels`` [patches, 3 * side * side] are 0..255 in (channel, y, x) order, of one frame; a still fills all frames.
    """

    levels: npt.NDArray[np.uint8]
    grid: tuple[int, int]  # patches, rows by columns
    digest: bytes  # 16 bytes, of the size and the decoded pixels before the resize
    spec: PatchSpec

    @property
    def tokens(self) -> int:
        """Rows of the language model."""
        return len(self.levels) // self.spec.merge**2

    def values(self) -> npt.NDArray[np.float32]:
        """The tower's input [patches, 3 * frames * side * side] in (channel, frame, y, x) order, normalised."""
        spec, shape = self.spec, (len(self.levels), 3, 1, self.spec.patch**2)
        mean, std = (np.array(three, np.float32).reshape(3, 1, 1) * np.float32(255) for three in (spec.mean, spec.std))
        values = (self.levels.reshape(shape).astype(np.float32) - mean) / std
        return np.repeat(values, spec.temporal, axis=2).reshape(len(self.levels), spec.columns)
