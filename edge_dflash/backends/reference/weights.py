"""Weights of a Program as torch tensors, converted from a WeightStore on first use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edge_dflash.weights.formats import Nvfp4Weight, WeightStore, WideWeight
from edge_dflash.weights.quantize import dequantize, unscaled


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
