"""What the kernel bench_weights (kernels/bench.cu) writes, in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_dflash.weights.layout import Format


def random_words(first: int, count: int, seed: int, format: Format, exponent: int) -> npt.NDArray[np.uint32]:
    """Words ``first`` .. ``first + count - 1`` that bench_weights (kernels/bench.cu) writes."""
    index = np.arange(first, first + count, dtype=np.uint64)
    z = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word = (z >> np.uint64(32)).astype(np.uint32)
    if format == "nvfp4":
        scales = (word & np.uint32(0x0F0F0F0F)) + np.uint32(0x48484848)
        return np.where(index % np.uint64(288) >= 256, scales, word).astype(np.uint32)
    each = 0x01010101 if format == "fp8" else 0x00010001
    keep, place = (0x87878787, 3) if format == "fp8" else (0x807F807F, 7)
    field = ((word >> np.uint32(place)) & np.uint32(3 * each)) + np.uint32(exponent * each)
    return np.asarray((word & np.uint32(keep)) | (field << np.uint32(place)), np.uint32)
