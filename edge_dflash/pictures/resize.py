"""Resizing as the published processor does: which size, and bicubic interpolation to the same levels.

The reference is torchvision's resize of uint8 with antialiasing (ATen's ``_upsample_bicubic2d_aa``): weights in fixed
point, along the width first, then along the height, each rounded to levels. Pillow's differs from it, mostly by one
level. Sums of levels times weights stay below 2^24, so that float32 products by any library are exact.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import ImageError
from edge_dflash.model.specs import PatchSpec

Planes = npt.NDArray[np.uint8]
_LONGEST = 200  # times the shorter side
_SUPPORT = 2.0  # of the cubic filter
_BITS = 15  # of a weight
_BLOCK = 16  # output rows of a product
_PRODUCT = 200_000  # multiplications of one: libraries of linear algebra use one thread up to 262,144


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
        planes = np.ascontiguousarray(_resize_rows(planes.transpose(0, 2, 1), width).transpose(0, 2, 1))
    return _resize_rows(planes, height) if planes.shape[1] != height else planes


def _resize_rows(planes: Planes, rows: int) -> Planes:
    """Levels [channels, ``rows``, columns]."""
    first, weights = _weights(planes.shape[1], rows)
    taps, levels = weights.shape[1], planes.astype(np.float32)
    out = np.empty((planes.shape[0], rows, planes.shape[2]), np.uint8)
    for begin in range(0, rows, _BLOCK):
        end = min(begin + _BLOCK, rows)
        low, high = int(first[begin]), min(int(first[end - 1]) + taps, planes.shape[1])
        dense = np.zeros((end - begin, high - low + taps), np.float32)
        places = first[begin:end, None] - low + np.arange(taps)
        np.put_along_axis(dense, places, weights[begin:end], axis=1)
        _multiply(dense[:, : high - low], levels[:, low:high], out[:, begin:end])
    return out


def _multiply(weights: npt.NDArray[np.float32], levels: npt.NDArray[np.float32], out: Planes) -> None:
    """Out [channels, m, n] = the nearest levels to weights [m, k] times levels [channels, k, n], part by part."""
    step = max(_PRODUCT // weights.size, 64)
    for plane, into in zip(levels, out, strict=True):
        for left in range(0, plane.shape[1], step):
            sums = weights @ plane[:, left : left + step]
            sums += np.float32(0.5)
            into[:, left : left + step] = np.clip(sums, 0.0, 255.0, out=sums)  # truncated: sums are not negative


def _weights(rows: int, wanted: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """For each new row the first old one that counts, and weights [wanted, taps]: multiples of a power of two."""
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
    return first, (fixed / (1 << precision)).astype(np.float32)


def _cubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Keys' cubic convolution kernel with a = -1/2."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = -0.5 * (((x - 5.0) * x + 8.0) * x - 4.0)
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
