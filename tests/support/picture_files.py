"""Pictures as arrays and files."""

from io import BytesIO

import numpy as np
from PIL import Image

from edge_dflash.model.specs import PatchSpec

HALF = (0.5, 0.5, 0.5)
GOLDEN = PatchSpec(16, 2, 2, 4096, 65536, HALF, HALF)
PUBLISHED = PatchSpec(16, 2, 2, 65536, 16777216, HALF, HALF)


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encoded(image, form="PNG", **options):
    file = BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, form, **options)
    return file.getvalue()
