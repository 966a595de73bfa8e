"""Pictures of a golden file: what the vision tower makes of them, and where they stand in the golden's prompts.

Keys: ``img{i}.pixel_values`` [N, C], the tower's input, with ``img{i}.grid_thw`` (frames, rows and columns of patches);
``clip.*`` the same of several frames. Of each ``tower_embed`` and ``tower_hidden`` [N, H] before the first block and
behind the last, ``tower_rows`` [N / merge^2, out]. Pictures whose files lie beside the checkpoint are cut into patches
again. A prompt's ``images`` name the pictures at its placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edge_dflash.common.files import is_there
from edge_dflash.decode.pictured import Pictured, Placed
from edge_dflash.errors import VerificationError
from edge_dflash.model.specs import PatchSpec, TargetSpec
from edge_dflash.pictures.picture import picture_of

if TYPE_CHECKING:
    from edge_dflash.backends.reference.tower import TorchTower

ROLES = {"tower_embed": "embedded", "tower_hidden": "hidden", "tower_rows": "rows"}  # keys by a pass's outputs
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class GoldenPicture:
    """A picture by the tower's input. See :class:`~edge_dflash.decode.pictured.Picture`."""

    patches: npt.NDArray[np.float32]
    grid: tuple[int, int]
    spec: PatchSpec

    @property
    def tokens(self) -> int:
        """Rows of the language model."""
        return len(self.patches) // self.spec.merge**2

    @property
    def levels(self) -> npt.NDArray[np.uint8]:
        """Those of the first frame."""
        frame = self.patches.reshape(len(self.patches), 3, self.spec.temporal, -1)[:, :, 0]
        mean, std = (np.array(numbers)[:, None] for numbers in (self.spec.mean, self.spec.std))
        levels: npt.NDArray[np.uint8] = np.rint(255 * (frame * std + mean)).astype(np.uint8)
        return levels.reshape(len(self.patches), -1)

    @property
    def digest(self) -> bytes:
        """Of the patches."""
        return blake2b(self.patches.tobytes(), digest_size=16).digest()

    def values(self) -> npt.NDArray[np.float32]:
        """The patches."""
        return self.patches


def picture_names(golden: Arrays) -> tuple[str, ...]:
    """Names of the golden's pictures and clips."""
    names = dict.fromkeys(key.partition(".")[0] for key in golden if key.endswith(".pixel_values"))
    return tuple(name for name in names if f"{name}.grid_thw" in golden)


def tower_arrays(golden: Arrays, tower: TorchTower) -> dict[str, npt.NDArray[Any]]:
    """What the tower makes of every picture and every frame of a clip, by the golden's keys.

    Raises VerificationError for patches that are not those of the grid.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    for name in picture_names(golden):
        patches, (frames, rows, columns) = golden[f"{name}.pixel_values"], golden[f"{name}.grid_thw"].tolist()
        if len(patches) != frames * rows * columns:
            raise VerificationError(
                f"golden {name}: {len(patches)} patches, its grid has {frames} x {rows} x {columns}; copy it again"
            )
        runs = [tower.run(frame, (rows, columns)) for frame in np.split(patches, frames)]
        found |= {f"{name}.{key}": np.concatenate([run[role].numpy() for run in runs]) for key, role in ROLES.items()}
    return found


def patch_arrays(golden: Arrays, directory: Path, spec: PatchSpec) -> dict[str, npt.NDArray[Any]]:
    """Patches and grid of the pictures whose files lie in ``directory`` as ``img{i}.png``, by the golden's keys.

    Raises ImageError for files that are no pictures.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    for name in picture_names(golden):
        if is_there(file := directory / f"{name}.png"):
            picture = picture_of(file, spec)
            found |= {f"{name}.pixel_values": picture.values(), f"{name}.grid_thw": np.array([1, *picture.grid])}
    return found


def said(golden: Arrays, given: Arrays, prompt: Sequence[int], target: TargetSpec) -> Pictured:
    """A golden's prompt with its pictures: one for each run of placeholders that its rows fill.

    Raises VerificationError where pictures and placeholders do not belong together.
    """
    if "images" not in given:
        return Pictured(tuple(prompt))
    if target.vision is None:
        raise VerificationError("a golden prompt has images, and the target has no vision tower; give its checkpoint")
    placed, at, token = list[Placed](), 0, target.vision.image_token_id
    for number in given["images"].reshape(-1).tolist():
        name = f"img{number}"
        if f"{name}.pixel_values" not in golden or f"{name}.grid_thw" not in golden or token not in prompt[at:]:
            raise VerificationError(f"the golden file lacks {name}, or a placeholder {token} for it; copy it again")
        _, rows, columns = golden[f"{name}.grid_thw"].tolist()
        patches = np.asarray(golden[f"{name}.pixel_values"], np.float32)
        placed.append(Placed(prompt.index(token, at), GoldenPicture(patches, (rows, columns), target.vision.patches)))
        at = placed[-1].end
    return Pictured(tuple(prompt), tuple(placed))
