"""One weight tensor as stored: wide (BF16/FP32), FP8 or NVFP4. NumPy arrays over file bytes, no torch.

Arrays hold raw codes: ``uint16`` for BF16, ``uint8`` for E4M3 and for packed E2M1 pairs (low nibble first).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class WideWeight:
    """An unquantized tensor. ``data`` is float32, or uint16 holding BF16 bit patterns."""

    data: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes that one read of the weight costs."""
        return int(self.data.nbytes)


@dataclass(frozen=True)
class Fp8Weight:
    """E4M3 linear [out, in]; value = e4m3(data) * scale. ``scale`` is float32 [1] (tensor) or [out] (channel)."""

    data: Array
    scale: Array
    input_scale: float | None = None  # static activation scale of the checkpoint; kept, not needed for W8A16

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [out, in]."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes that one read of the weight costs."""
        return int(self.data.nbytes + self.scale.nbytes)


@dataclass(frozen=True)
class Nvfp4Weight:
    """NVFP4 linear; value[o, i] = e2m1(packed) * e4m3(block_scale[o, i // 16]) * global_scale."""

    packed: Array  # uint8 [out, in / 2]
    block_scale: Array  # uint8 (E4M3) [out, in / 16]
    global_scale: float  # a multiplier, as in ModelOpt's weight_scale_2
    input_scale: float | None = None  # W4A4: sx, a multiplier; None: activations stay wide

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [out, in]."""
        return (self.packed.shape[0], self.packed.shape[1] * 2)

    @property
    def nbytes(self) -> int:
        """Bytes that one read of the weight costs."""
        return int(self.packed.nbytes + self.block_scale.nbytes + 4)


Weight = WideWeight | Fp8Weight | Nvfp4Weight


class WeightStore(Protocol):
    """Where weights come from: a checkpoint pair, a bundle, or a test's synthetic model.

    Names are canonical: ``target.`` or ``drafter.`` followed by the Hugging Face module path without prefix and
    without ``.weight`` (``target.layers.3.mlp.gate_proj``, ``target.layers.0.linear_attn.A_log``, ``drafter.fc``).
    ``target.lm_head`` always exists; for a tied model its values are the embedding's.
    """

    def get(self, name: str) -> Weight:
        """Return the weight; arrays may be views of a mapped file. Raises KeyError for an unknown name."""
        ...

    def kv_scale(self, state: str) -> tuple[float, float]:
        """Return the FP8 scales (k, v) of a KV state such as ``target.layers.3.kv``; (1.0, 1.0) when unknown."""
        ...


def bf16_to_f32(bits: Array) -> npt.NDArray[np.float32]:
    """Widen BF16 bit patterns (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
