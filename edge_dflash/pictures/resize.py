"""Resizing as the published processor does: which size, and bicubic interpolation to the same levels.

The reference is torchvision's resize of uint8 with antialiasing (ATen's ``_upsample_bicubic2d_aa``): weights in fixed
point, along the width first, then along the height, each rounded to levels. Pillow's differs from it, mostly by one
level. Sums are of whole numbers, so they are exact in any order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import ImageError
from edge_dflash.model.specs import PatchSpec

Planes = npt.NDArray[np.uint8]
Planes32 = npt.NDArray[np.int32]
_LONGEST = 200  # times the shorter side
_SUPPORT = 2.0  # of the cubic filter
_BITS = 15  # of a weight
_PART = 1 << 17  # values that are summed at a time: half a megabyte
_WIDE = 1 << 21  # values that are widened at a time: 8 megabytes
_RUN = 16  # rows that follow each other, mean, from which on they are read where they lie


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
    """Levels [channels, ``rows``, columns], some columns at a time: sums are four times as wide as levels."""
    found = _weights(planes.shape[1], rows)
    out = np.empty((planes.shape[0], rows, planes.shape[2]), np.uint8)
    columns = max(1, _WIDE // (planes.shape[0] * (planes.shape[1] + found[1].shape[1])))
    for left in range(0, planes.shape[2], columns):
        _sum_rows(planes[:, :, left : left + columns], out[:, :, left : left + columns], *found)
    return out


def _sum_rows(planes: Planes, out: Planes, first: npt.NDArray[np.int64], weights: Planes32, precision: int) -> None:
    """Tap by tap over large parts, during which other threads run."""
    taps = weights.shape[1]
    levels = np.zeros((planes.shape[0], planes.shape[1] + taps, planes.shape[2]), np.int32)  # what is behind weighs 0
    levels[:, : planes.shape[1]] = planes
    for begin, end in _parts(first, max(1, _PART // max(1, out[:, 0].size))):
        shape, runs = (len(out), end - begin, out.shape[2]), first[end - 1] - first[begin] == end - 1 - begin
        total, part = np.full(shape, 1 << (precision - 1), np.int32), np.empty(shape, np.int32)
        for tap in range(taps):
            start = int(first[begin]) + tap
            old = levels[:, start : start + end - begin] if runs else levels[:, first[begin:end] + tap]
            np.multiply(old, weights[begin:end, tap, None], out=part)
            total += part
        total >>= precision
        out[:, begin:end] = np.clip(total, 0, 255, out=total)


def _parts(first: npt.NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Ranges of new rows, at most ``most`` each; where old rows follow each other for long, such runs."""
    ends = [*(np.flatnonzero(np.diff(first) != 1) + 1).tolist(), len(first)]
    if len(ends) * _RUN > len(first):
        ends = [len(first)]
    found, begin = [], 0
    for end in ends:
        found += [(at, min(at + most, end)) for at in range(begin, end, most)]
        begin = end
    return found


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
