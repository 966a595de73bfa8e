"""Rotary tables on the host: cosine and sine of every position, for kernels/attend.cu."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edge_dflash.model.specs import RopeSpec

Table = npt.NDArray[np.float32]


def rope_table(rope: RopeSpec, positions: int) -> tuple[Table, Table]:
    """Cosine and sine [positions, dims / 2] float32; YaRN blending after arXiv 2309.00071 when the spec has scaling.

    Angles are float32 products as in the models' own code: at position 32,000 a wider product would be a different
    angle from the one the weights were trained with.
    """
    dims = rope.dims
    exponent = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    frequency = (1.0 / np.power(rope.theta, exponent.astype(np.float64))).astype(np.float32)
    factor = 1.0
    if rope.scaling is not None:
        yarn = rope.scaling
        low, high = yarn.ramp(rope.theta, dims)
        ramp = ((np.arange(dims // 2, dtype=np.float32) - low) / max(high - low, 1e-3)).clip(0, 1)
        frequency = (frequency * (1 - ramp) + frequency / yarn.factor * ramp).astype(np.float32)
        given = yarn.attention_factor
        factor = (0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0) if given is None else given
    angles = (np.arange(positions, dtype=np.float32)[:, None] * frequency[None, :]).astype(np.float64)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)
