"""Dense ops in torch, written so that no row's result depends on the other rows (invariant I8).

Every tensor here is float32 [R, C] with R a multiple of ROW_TILE: a pass pads its rows. Matrix products run tile by
tile with a fixed shape, because a BLAS may sum in another order for another shape. Transcendental functions go
through :func:`pointwise`, because torch computes the elements that do not fill a SIMD vector by a scalar routine
whose last bit differs. Add, multiply, divide and square root are exactly rounded by IEEE 754 and need no such care.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from edge_dflash.model.ops import UNDRAFTED, GroupedConv, Remap
from edge_dflash.weights.formats import Nvfp4Weight, WeightStore, WideWeight
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


def linear(x: torch.Tensor, weight: LinearWeight, row_tile: int | None = ROW_TILE) -> torch.Tensor:
    """x [R, K] times ``weight`` [N, K], scaled after the product; ``row_tile`` None gives up row invariance."""
    scale = weight.scale
    if weight.input_scale is not None:
        x = quantize_activations(x, weight.input_scale)
        scale = weight.input_scale * (torch.ones(()) if scale is None else scale)
    if row_tile is None or x.shape[0] == row_tile:
        y = F.linear(x, weight.matrix)
    else:
        y = torch.cat([F.linear(tile, weight.matrix) for tile in x.view(-1, row_tile, x.shape[1]).unbind()])
    return y if scale is None else y * scale


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool) -> torch.Tensor:
    """RMS norm over the last dimension, unrounded float32."""
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * inverse * (1.0 + weight if plus_one else weight)


def remap(op: Remap, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Columns of ``x`` at ``ids``."""
    return x.new_full((x.shape[0], op.vocab), UNDRAFTED).index_copy_(1, ids.long(), x)


def grouped_conv(op: GroupedConv, u: torch.Tensor, c: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Convolution of the rows of a block, unrounded float32; ``base`` is [2, taps, H]."""
    dynamic = c.view(c.shape[0], 2, op.taps, -1)[:, op.side].repeat_interleave(op.group_size, dim=-1)
    y = torch.zeros_like(u)
    for tap in range(op.taps):
        y = y + (base[op.side, tap] + dynamic[:, tap]) * torch.cat((u.new_zeros(tap, u.shape[1]), u))[: len(u)]
    return y


@dataclass(frozen=True)
class LinearWeight:
    """A linear layer ready to multiply: y = (x @ matrix^T) * scale."""

    matrix: torch.Tensor  # [N, K] float32: e2m1 * e4m3 block scale, e4m3 codes, or the wide values
    scale: torch.Tensor | None  # [] or [N] float32; None when it is 1
    input_scale: float | None  # W4A4: global scale of the dynamic NVFP4 activations


class TorchWeights:
    """Converts weights of a store to torch. ``cache`` False reads anew on each use: a pass then streams the model."""

    def __init__(self, store: WeightStore, *, cache: bool = True) -> None:
        self._store = store
        self._cache = cache
        self._linears: dict[str, LinearWeight] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def linear(self, name: str) -> LinearWeight:
        """Return a linear layer's weight."""
        if name in self._linears:
            return self._linears[name]
        weight = self._store.get(name)
        matrix, scale = unscaled(weight)
        linear = LinearWeight(
            matrix,
            None if isinstance(weight, WideWeight) else scale,
            weight.input_scale if isinstance(weight, Nvfp4Weight) else None,
        )
        if self._cache:
            self._linears[name] = linear
        return linear

    def tensor(self, name: str) -> torch.Tensor:
        """Return a vector, convolution or embedding as float32."""
        if name in self._tensors:
            return self._tensors[name]
        tensor = dequantize(self._store.get(name))
        if self._cache:
            self._tensors[name] = tensor
        return tensor


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
