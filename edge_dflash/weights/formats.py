"""Number formats of weights: the one table of them, and a tensor in each. NumPy arrays over file bytes, no torch.

Arrays hold raw codes: ``uint16`` for BF16, ``uint8`` for E4M3 and for packed E2M1 pairs (low nibble first). What makes
the codes of wide matrices, and values of codes, is :mod:`edge_dflash.weights.quantize`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Take = Callable[[str, str, tuple[tuple[int, ...], ...]], Array]
"""Gives the tensor with a suffix, which must have a safetensors dtype and one of some shapes; ValueError if not."""

BLOCK = 16  # values along K that share an NVFP4 block scale
E4M3_NAN = 0x7F  # E4M3 byte without its sign; as bytes, all negative numbers are above
SCALAR: tuple[tuple[int, ...], ...] = ((),)


class Weight(ABC):
    """One weight tensor as stored."""

    input_scale: float | None = None  # W4A4: factor of NVFP4 activations; None: the linear reads wide ones

    @property
    @abstractmethod
    def format(self) -> WeightFormat:
        """Name of its number format."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Logical shape, [out, in] of a linear."""

    @abstractmethod
    def parts(self) -> dict[str, tuple[str, Array]]:
        """What a bundle stores, by the suffix of ModelOpt's names: safetensors dtype and values."""

    @classmethod
    @abstractmethod
    def of(cls, data: Array, shape: tuple[int, ...], take: Take) -> Weight:
        """Undo :meth:`parts`: ``data`` is that of the suffix ``weight``, ``take`` gives the others."""

    @abstractmethod
    def rows(self, rows: slice) -> Weight:
        """Views of some rows."""

    @property
    def nbytes(self) -> int:
        """Bytes that one read of the weight costs."""
        return sum(array.nbytes for _, array in self.parts().values())

    def damaged(self) -> bool:
        """Whether a code or a scale is no finite number that its format may have; wide values are not looked at."""
        return False


@dataclass(frozen=True)
class WideWeight(Weight):
    """An unquantized tensor of any shape. ``data`` is float32, or uint16 holding BF16 bit patterns."""

    data: Array

    @property
    def format(self) -> WeightFormat:
        """See :class:`Weight`."""
        return "bf16" if self.data.dtype == np.uint16 else "f32"

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`Weight`."""
        return self.data.shape

    def parts(self) -> dict[str, tuple[str, Array]]:
        """See :class:`Weight`."""
        return {"weight": (FORMATS[self.format].dtype, self.data)}

    @classmethod
    def of(cls, data: Array, shape: tuple[int, ...], take: Take) -> WideWeight:
        """See :class:`Weight`."""
        return cls(data)

    def rows(self, rows: slice) -> WideWeight:
        """See :class:`Weight`."""
        return WideWeight(self.data[rows])

    def bf16(self) -> npt.NDArray[np.uint16] | None:
        """BF16 bit patterns; None: they cannot hold the values."""
        if self.data.dtype == np.uint16:
            return np.ascontiguousarray(self.data)
        bits = np.ascontiguousarray(self.data, np.float32).view(np.uint32)
        return None if (bits & 0xFFFF).any() else (bits >> 16).astype(np.uint16)

    def float32(self) -> npt.NDArray[np.float32]:
        """The values."""
        return bf16_to_f32(self.data) if self.data.dtype == np.uint16 else np.asarray(self.data, np.float32)


@dataclass(frozen=True)
class Fp8Weight(Weight):
    """E4M3 linear [out, in]; value = e4m3(data) * scale. ``scale`` is float32 [1] (tensor) or [out] (channel)."""

    format = "fp8"
    data: Array
    scale: Array
    input_scale: float | None = None  # static activation scale of the checkpoint; kept, not needed for W8A16

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`Weight`."""
        return self.data.shape

    def parts(self) -> dict[str, tuple[str, Array]]:
        """See :class:`Weight`."""
        return {"weight": ("F8_E4M3", self.data), "weight_scale": ("F32", self.scale)}

    @classmethod
    def of(cls, data: Array, shape: tuple[int, ...], take: Take) -> Fp8Weight:
        """See :class:`Weight`."""
        return cls(data, take("weight_scale", "F32", ((1,), (shape[0],))))

    def rows(self, rows: slice) -> Fp8Weight:
        """See :class:`Weight`."""
        return replace(self, data=self.data[rows], scale=self.scale[rows] if self.scale.size > 1 else self.scale)

    def damaged(self) -> bool:
        """See :class:`Weight`."""
        return _has_nan(self.data) or not _positive(self.scale)


@dataclass(frozen=True)
class Nvfp4Weight(Weight):
    """NVFP4 linear; value[o, i] = e2m1(packed) * e4m3(block_scale[o, i // 16]) * global_scale."""

    format = "nvfp4"
    packed: Array  # uint8 [out, in / 2]
    block_scale: Array  # uint8 (E4M3) [out, in / 16]
    global_scale: float  # a multiplier, as in ModelOpt's weight_scale_2
    input_scale: float | None = None  # W4A4: sx, a multiplier; None: activations stay wide

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`Weight`."""
        return (self.packed.shape[0], self.packed.shape[1] * 2)

    def parts(self) -> dict[str, tuple[str, Array]]:
        """See :class:`Weight`."""
        return {
            "weight": ("U8", self.packed),
            "weight_scale": ("F8_E4M3", self.block_scale),
            "weight_scale_2": ("F32", np.array(self.global_scale, dtype=np.float32)),
        }

    @classmethod
    def of(cls, data: Array, shape: tuple[int, ...], take: Take) -> Nvfp4Weight:
        """See :class:`Weight`."""
        blocks = take("weight_scale", "F8_E4M3", ((shape[0], shape[-1] // BLOCK),))
        return cls(data, blocks, float(take("weight_scale_2", "F32", SCALAR)))

    def rows(self, rows: slice) -> Nvfp4Weight:
        """See :class:`Weight`."""
        return replace(self, packed=self.packed[rows], block_scale=self.block_scale[rows])

    def damaged(self) -> bool:
        """See :class:`Weight`. Tensor cores would drop the sign of a block scale."""
        return bool((self.block_scale >= E4M3_NAN).any()) or not _positive(np.array([self.global_scale]))


@dataclass(frozen=True, kw_only=True)
class Format:
    """A number format: all that is said of it outside the code that computes with it."""

    name: str  # in recipes, manifests and reports
    weight: type[Weight]
    dtype: str  # safetensors dtype of the codes in a bundle
    bits: int  # of a value
    block: int = 0  # values along K that share a block scale; 0: no block scales
    block_scale_bytes: int = 0
    scales: Literal["none", "tensor", "channel"] = "none"  # most FP32 factors next to them
    wished: bool = True  # a recipe may ask for it
    streamed: str | None = None  # form in which the native kernels read it; None: they do not take it
    tensorrt: int | None = None  # first SM on which TensorRT takes it; None: it does not
    modelopt: tuple[str, ...] = ()  # quant_algo of checkpoints

    @property
    def quantized(self) -> bool:
        """Whether values are codes with scales; only linears may be."""
        return self.weight is not WideWeight

    def row_bytes(self, values: int) -> int:
        """Bytes of some values of a row with their block scales."""
        scales = values // self.block * self.block_scale_bytes if self.block else 0
        return values * self.bits // 8 + scales

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes that one read of a weight [out, in] costs."""
        return self.row_bytes(prod(shape)) + 4 * {"none": 0, "tensor": 1, "channel": shape[0]}[self.scales]


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format(name="bf16", weight=WideWeight, dtype="BF16", bits=16, streamed="bf16", tensorrt=0),
        Format(name="f32", weight=WideWeight, dtype="F32", bits=32, streamed="bf16", tensorrt=0, wished=False),
        Format(
            name="fp8",
            weight=Fp8Weight,
            dtype="F8_E4M3",
            bits=8,
            scales="channel",
            streamed="fp8",
            tensorrt=0,
            modelopt=("FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
        ),
        Format(
            name="nvfp4",
            weight=Nvfp4Weight,
            dtype="U8",
            bits=4,
            block=BLOCK,
            block_scale_bytes=1,
            scales="tensor",
            streamed="nvfp4",
            tensorrt=100,  # tensor cores that read it
            modelopt=("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"),
        ),
    )
}
QUANTIZED = tuple(form for form in FORMATS.values() if form.quantized)
TIED = "tied"  # an lm_head without a tensor: it is read from the embedding

if TYPE_CHECKING:
    WeightFormat = str
else:  # what manifests are read against
    WeightFormat = Literal[(*FORMATS, TIED)]


def read_as(word: WeightFormat) -> Format:
    """The format that a manifest's word means: a tied head is read from an embedding, in BF16 as a rule."""
    return FORMATS["bf16" if word == TIED else word]


KvFormat = Literal["float32", "bfloat16", "fp8"]  # of stored keys and values
KV_BYTES: Mapping[KvFormat, int] = {"fp8": 1, "bfloat16": 2, "float32": 4}


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


def _has_nan(codes: Array, at_once: int = 8 << 20) -> bool:
    """Whether an E4M3 byte is NaN; mapped codes are looked at a few MB at a time."""
    flat = codes.reshape(-1)
    return any(((flat[i : i + at_once] & E4M3_NAN) == E4M3_NAN).any() for i in range(0, flat.size, at_once))


def _positive(scales: Array) -> bool:
    return bool(np.isfinite(scales).all() and (scales > 0).all())
