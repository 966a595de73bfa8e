"""Levels of the resize beside torch's, of which torchvision's are made."""

import numpy as np
import pytest

from edge_dflash.pictures.picture import resize


@pytest.mark.parametrize(
    ("shape", "size"), [((3, 1080, 1920), (256, 448)), ((1, 2160, 900), (480, 160)), ((3, 90, 70), (96, 64))]
)
def test_levels_are_torchs_at_any_ratio(shape, size):
    torch = pytest.importorskip("torch")
    planes = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    wanted = torch.nn.functional.interpolate(torch.from_numpy(planes)[None], size=size, mode="bicubic", antialias=True)
    assert np.array_equal(resize(planes, size), wanted[0].numpy())
