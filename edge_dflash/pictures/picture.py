"""A picture as a vision tower takes it, of whatever a caller hands over: decoded, resized, cut into patches.

Frames are resized as the published processor does it: the reference is torchvision's resize of uint8 with
antialiasing (ATen's ``_upsample_bicubic2d_aa``): weights in fixed point, along the width first, then along the
height, each rounded to levels. Pillow's differs from it, mostly by one level.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import ImageError
from edge_dflash.model.specs import PatchSpec
from edge_dflash.pictures.decode import DEFAULT_LIMITS, Gate, ImageLimits, Opened, PixelBudget, in_flight, opened
from edge_dflash.pictures.pictured import Picture

Planes = npt.NDArray[np.uint8]
_LONGEST = 200  # times the shorter side
_SUPPORT = 2.0  # of the cubic filter
_BITS = 15  # of a weight
_BLOCK = 32  # new rows of a product
_PRODUCT = 1 << 18  # multiplications of a product: for more, NumPy's library starts threads


def target_size(height: int, width: int, spec: PatchSpec) -> tuple[int, int]:
    """Height and width after the resize (``smart_resize`` of Qwen2-VL's processor). Raises ImageError."""
    factor, longer, shorter = spec.factor, max(height, width), min(height, width)
    if longer > _LONGEST * shorter:
        raise ImageError(f"an image has {height} x {width} pixels; one side may be {_LONGEST} times the other at most")
    found = tuple(round(side / factor) * factor for side in (height, width))
    if found[0] * found[1] > spec.max_pixels:
        share = math.sqrt(height * width / spec.max_pixels)
        found = tuple(max(factor, math.floor(side / share / factor) * factor) for side in (height, width))
    elif found[0] * found[1] < spec.min_pixels:
        share = math.sqrt(spec.min_pixels / (height * width))
        found = tuple(math.ceil(side * share / factor) * factor for side in (height, width))
    return found[0], found[1]


def resize(planes: Planes, size: tuple[int, int]) -> Planes:
    """Levels [channels, height, width] at another size."""
    height, width = size
    if planes.shape[2] != width:
        planes = np.ascontiguousarray(_resized(planes.transpose(0, 2, 1), width).transpose(0, 2, 1))
    return _resized(planes, height) if planes.shape[1] != height else planes


def _resized(planes: Planes, rows: int) -> Planes:
    """Levels [channels, ``rows``, columns]: products with a band of weights, some rows and columns at a time.

    Levels are whole numbers, weights and sums in steps of 2^-precision: exact in any order where a mantissa holds as
    many. Other threads run during a product.
    """
    first, weights, precision = _weights(planes.shape[1], rows)
    most = 256 * int(np.abs(weights).sum(axis=1).max())
    kind = np.float32 if most < 1 << 24 else np.float64
    out = np.empty((planes.shape[0], rows, planes.shape[2]), np.uint8)
    block = max(1, _BLOCK * min(planes.shape[1], 4 * rows) // planes.shape[1])  # a band is not much wider than high
    for begin in range(0, rows, block):
        end, low = min(begin + block, rows), int(first[begin])
        high = min(planes.shape[1], int(first[end - 1]) + weights.shape[1])
        band = np.zeros((end - begin, high - low + weights.shape[1]), kind)
        at = first[begin:end, None] - low + np.arange(weights.shape[1])
        np.put_along_axis(band, at, weights[begin:end] / kind(1 << precision), axis=1)
        columns = max(1, _PRODUCT // band.size)
        for left in range(0, planes.shape[2], columns):
            part = slice(left, left + columns)
            found = band[:, : high - low] @ planes[:, low:high, part].astype(kind)
            found += kind(0.5)
            out[:, begin:end, part] = np.clip(found, 0, 255, out=found)
    return out


def _weights(rows: int, wanted: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], int]:
    """For each new row the first old one that counts, and weights [wanted, taps] in steps of 2^-precision."""
    scale = rows / wanted
    support, inverse = _SUPPORT * max(scale, 1.0), 1.0 / max(scale, 1.0)
    center = scale * (np.arange(wanted) + 0.5)
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    count = np.minimum((center + support + 0.5).astype(np.int64), rows) - first
    tap = np.arange(int(count.max()))
    found = _cubic((tap + first[:, None] - center[:, None] + 0.5) * inverse)
    found = np.where(tap < count[:, None], found, 0.0)
    found /= found.sum(axis=1, keepdims=True)
    precision = 0
    while precision < 22 and int(0.5 + found.max() * (1 << (precision + 1))) < 1 << _BITS:
        precision += 1
    fixed = np.trunc(found * (1 << precision) + np.copysign(0.5, found))
    return first, fixed.astype(np.int32), precision


def _cubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Keys' cubic convolution kernel with a = -1/2."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = -0.5 * (((x - 5.0) * x + 8.0) * x - 4.0)
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


MOST_THREADS = 8


def picture_of(source: object, spec: PatchSpec, limits: ImageLimits = DEFAULT_LIMITS) -> Picture:
    """The picture of anything that :func:`~edge_dflash.pictures.decode.opened` takes. Raises ImageError."""
    return pictures_of([source], spec, limits)[0]


def pictures_of(
    sources: Sequence[object],
    spec: PatchSpec,
    limits: ImageLimits = DEFAULT_LIMITS,
    gate: Gate | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Picture, ...]:
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


def _patched(image: Opened, size: tuple[int, int], spec: PatchSpec) -> Picture:
    pixels = image.pixels()
    if pixels.shape[:2] != (image.height, image.width):  # turned by its EXIF orientation
        size = target_size(pixels.shape[0], pixels.shape[1], spec)
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    del pixels
    levels = _patches(resize(planes, size), spec)
    levels.flags.writeable = False
    picture = Picture(levels, (size[0] // spec.patch, size[1] // spec.patch), spec)
    _ = picture.digest  # made here, beside other pictures
    return picture


def _patches(planes: npt.NDArray[np.uint8], spec: PatchSpec) -> npt.NDArray[np.uint8]:
    """[channels, height, width] -> [N, channels * patch^2]; rows of a patch are moved whole."""
    patch, merge = spec.patch, spec.merge
    channels, height, width = planes.shape
    blocks = (height // spec.factor, merge, patch, width // spec.factor, merge)
    rows = planes.reshape(channels, height, width).view(f"V{patch}").reshape(channels, *blocks)
    moved = np.ascontiguousarray(rows.transpose(1, 4, 2, 5, 0, 3))
    return moved.view(np.uint8).reshape(-1, channels * patch**2)
