"""Dense ops in torch, each read once: by a pass of a backend, by a vision tower, and by a drafter in training.

Tensors are [..., rows, columns]; training has many sequences and blocks in front. A backend's are float32 [R, C],
written so that no row's result depends on the other rows: matrix products run tile by tile with a fixed
shape, because a BLAS may sum in another order for another shape. Transcendental functions go through :func:`pointwise`,
because torch computes the elements that do not fill a SIMD vector by a scalar routine whose last bit differs. Add,
multiply, divide and square root are exactly rounded by IEEE 754 and need no such care.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from edge_dflash.model.ops import (
    UNDRAFTED,
    Add,
    Bias,
    Concat,
    Embed,
    Fold,
    GeluErf,
    GeluTanh,
    GroupedConv,
    LayerNorm,
    Linear,
    Op,
    PositionRows,
    Remap,
    RmsNorm,
    SwiGlu,
    Walk,
)
from edge_dflash.weights.formats import Nvfp4Weight, Weight, WeightStore, WideWeight
from edge_dflash.weights.quantize import dequantize, quantize_activations, unscaled

ROW_TILE = 16
_LANES = 64  # elements; a multiple of two SIMD vectors on every CPU
_SLICE = 16_384  # elements; below torch's threading threshold, so that a slice is never split


def padded_rows(rows: int) -> int:
    """Smallest multiple of ROW_TILE that is not below ``rows``."""
    return -(-rows // ROW_TILE) * ROW_TILE


def pad(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero rows appended to ``x`` up to ``rows``."""
    if x.shape[0] == rows:
        return x
    return torch.cat((x, x.new_zeros(rows - x.shape[0], *x.shape[1:])))


def pointwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function so that each element's bits do not depend on where it lies."""
    count = x.numel()
    if count <= _SLICE and not count % _LANES and x.is_contiguous():
        return function(x)  # as one row of vectors: the same as below
    flat = x.reshape(-1)
    if count % _LANES:
        flat = torch.cat((flat, flat.new_zeros(_LANES - count % _LANES)))
    if flat.numel() <= _SLICE:
        result = function(flat)
    else:
        result = torch.cat([function(flat[i : i + _SLICE]) for i in range(0, flat.numel(), _SLICE)])
    return result[:count].view(x.shape)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), position-independent."""
    return pointwise(torch.sigmoid, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), position-independent."""
    return x * sigmoid(x)


class Arithmetic(Protocol):
    """Weights by their canonical names, and what may be computed in another way: exactly by rows, or with gradients."""

    def tensor(self, name: str) -> torch.Tensor:
        """A vector, convolution or embedding."""

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x [..., K] times a matrix [N, K], transposed."""

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(x)."""


def dense(op: Op, inputs: Sequence[torch.Tensor], how: Arithmetic) -> torch.Tensor:
    """A dense op over tensors [..., rows, columns], unrounded; SelectRows and Experts are the pass's own.

    Raises TypeError for an op that has no function.
    """
    x, *others = inputs
    match op:
        case Embed():
            return F.embedding(x, how.tensor(op.weight)).float()
        case Linear():
            return how.linear(x, op.weight)
        case RmsNorm():
            return rms_norm(x, how.tensor(op.weight), op.eps, plus_one=op.plus_one)
        case Add():
            return x + others[0]
        case SwiGlu():
            return how.silu(x) * others[0]
        case Concat():
            return torch.cat((x, *others), -1)
        case GroupedConv():
            return grouped_conv(op, x, others[0], how.tensor(op.base))
        case Remap():
            wide = x.new_full((*x.shape[:-1], op.vocab), UNDRAFTED)
            return wide.index_copy(-1, how.tensor(op.weight).long(), x)
        case Walk():  # its tokens are chosen when it is known how
            return x.new_zeros(*x.shape[:-1], 0)
        case Bias():
            return x + how.tensor(op.weight)
        case LayerNorm():
            away = x - x.mean(-1, keepdim=True)
            scaled = away * torch.rsqrt(away.square().mean(-1, keepdim=True) + op.eps)
            return scaled * how.tensor(op.weight) + how.tensor(op.bias)
        case GeluTanh():
            return pointwise(lambda part: F.gelu(part, approximate="tanh"), x)
        case GeluErf():
            return pointwise(F.gelu, x)
        case PositionRows():
            return _position_rows(x, others[0], how.tensor(op.weight))
        case Fold():
            return x.reshape(x.shape[0] // op.count, -1)
        case _:
            raise TypeError(f"the reference backend has no function for op {type(op).__name__}")


def linear(x: torch.Tensor, weight: LinearWeight, row_tile: int | None = ROW_TILE) -> torch.Tensor:
    """x [R, K] times ``weight`` [N, K], scaled after the product; ``row_tile`` None gives up row invariance."""
    scale, rows = weight.scale, x.shape[0]
    if weight.input_scale is not None:
        x = quantize_activations(x, weight.input_scale)
        scale = weight.input_scale * (torch.ones(()) if scale is None else scale)
    if row_tile is None or rows == row_tile:
        y = F.linear(x, weight.matrix)
    else:
        tiles = pad(x, -(-rows // row_tile) * row_tile).view(-1, row_tile, x.shape[1])
        y = torch.cat([F.linear(tile, weight.matrix) for tile in tiles.unbind()])[:rows]
    return y if scale is None else y * scale


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool) -> torch.Tensor:
    """RMS norm over the last dimension, unrounded float32."""
    return F.rms_norm(x.float(), x.shape[-1:], 1.0 + weight if plus_one else weight, eps)


def grouped_conv(op: GroupedConv, u: torch.Tensor, c: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Convolution of the rows of a block: u [..., R, H], c [..., R, 2 * taps * groups], base [2, taps, H]; float32."""
    dynamic = torch.unflatten(c.float(), -1, (2, op.taps, -1))[..., op.side, :, :].repeat_interleave(op.group_size, -1)
    u = u.float()
    y = torch.zeros_like(u)
    for tap in range(op.taps):
        before = F.pad(u, (0, 0, tap, 0))[..., : u.shape[-2], :]
        y = y + (base[op.side, tap] + dynamic[..., tap, :]) * before
    return y


def _position_rows(corners: torch.Tensor, shares: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Weighted sum of four rows of the table for each patch."""
    y = torch.zeros(corners.shape[0], table.shape[1])
    for corner, share in zip(corners.long().unbind(1), shares.unbind(1), strict=True):
        y = y + share[:, None] * table[corner]
    return y


@dataclass(frozen=True)
class LinearWeight:
    """A linear layer ready to multiply: y = (x @ matrix^T) * scale."""

    matrix: torch.Tensor  # [N, K] float32: e2m1 * e4m3 block scale, e4m3 codes, or the wide values
    scale: torch.Tensor | None  # [] or [N] float32; None when it is 1
    input_scale: float | None  # W4A4: global scale of the dynamic NVFP4 activations

    @classmethod
    def of(cls, weight: Weight) -> LinearWeight:
        """A weight of any format."""
        matrix, scale = unscaled(weight)
        input_scale = weight.input_scale if isinstance(weight, Nvfp4Weight) else None
        return cls(matrix, None if isinstance(weight, WideWeight) else scale, input_scale)


class TorchWeights:
    """Weights of a store in torch, and products with them that do not depend on a pass's other rows.

    ``cache`` False reads anew on each use: a pass then streams the model. ``row_tile`` None multiplies all rows at
    once: faster on long passes, but a row's last bits then depend on how many there are (never for decoding).
    """

    def __init__(self, store: WeightStore, *, cache: bool = True, row_tile: int | None = ROW_TILE) -> None:
        self._store, self._cache, self.row_tile = store, cache, row_tile
        self._matrices: dict[str, LinearWeight] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """See :class:`Arithmetic`."""
        matrix = self._matrices.get(name) or LinearWeight.of(self._store.get(name))
        if self._cache:
            self._matrices[name] = matrix
        return linear(x, matrix, self.row_tile)

    def tensor(self, name: str) -> torch.Tensor:
        """See :class:`Arithmetic`; float32."""
        if (tensor := self._tensors.get(name)) is None:
            tensor = dequantize(self._store.get(name))
        if self._cache:
            self._tensors[name] = tensor
        return tensor

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Arithmetic`."""
        return silu(x)


_CPU_INFO = Path("/proc/cpuinfo")


def arithmetic() -> str:
    """Library, processor, instruction set and threads in one line: where it is the same, results are equal bit for bit.

    Matrix products sum in another order with other vector widths or threads, and libraries pick kernels by maker.
    """
    processor = " ".join([platform.machine(), _maker(), torch.backends.cpu.get_cpu_capability()])
    return f"torch {torch.__version__}, {processor}, threads: {torch.get_num_threads()}"


def _maker() -> str:
    """Maker of the processor as Linux names it; empty when it does not."""
    try:
        lines = _CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    found = [line.partition(":")[2].strip() for line in lines if line.startswith(("vendor_id", "CPU implementer"))]
    return found[0] if found else ""
