"""Where a native backend's weights come from: a protocol, and those of a bundle.

A backend asks for stacks (linears in streaming order), for the embedding and for small vectors, each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.kernels.linear import LinearWeights
from edge_dflash.backends.cuda.memory import DevicePointer
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import BackendError
from edge_dflash.weights.formats import WeightFormat, WeightStore, WideWeight
from edge_dflash.weights.layout import UNIT_ROWS, pack, row_blocks, words_of
from edge_dflash.weights.safetensors import forget_pages
from edge_dflash.weights.stacks import Stack


class NativeWeights(Protocol):
    """Weights of one pair on their way to a device."""

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """Format of every weight of the pair."""

    def stack(self, gpu: Gpu, stack: Stack) -> LinearWeights:
        """Allocate and fill a stack; of experts, all members behind each other, with the layout of one."""

    def embedding(self, gpu: Gpu, name: str) -> DevicePointer:
        """Allocate and fill a BF16 matrix [V, H]."""

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm, gate or convolution weight as float32 on the host, in its own shape."""

    def kv_scale(self, state: str) -> tuple[float, float]:
        """FP8 scales (k, v) of a KV state."""


class BundleWeights:
    """:class:`NativeWeights` of an open native bundle: stacks go from the mapped file to the device as they lie there.

    Pages of the mapped files are given back as soon as the device has their bytes.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """Format of every weight of the pair."""
        return self._bundle.manifest.weights

    def stack(self, gpu: Gpu, stack: Stack) -> LinearWeights:
        """Allocate and fill a stack. Raises BundleError when the bundle lacks it, BackendError from the device."""
        if any(self.formats[name] == "tied" for name in stack.names):
            return self._tied(gpu, stack)
        packed = self._bundle.repacked(stack)
        loaded = LinearWeights.of(gpu, packed)
        forget_pages(packed.data)
        forget_pages(packed.scale)
        return loaded

    def embedding(self, gpu: Gpu, name: str) -> DevicePointer:
        """Allocate and fill a BF16 matrix [V, H]."""
        bits = embedding_bits(self._bundle, name)
        pointer = gpu.upload(bits)
        forget_pages(bits)
        return pointer

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm, gate or convolution weight as float32 on the host, in its own shape."""
        return vector(self._bundle, name)

    def kv_scale(self, state: str) -> tuple[float, float]:
        """FP8 scales (k, v) of a KV state."""
        return self._bundle.kv_scale(state)

    def _tied(self, gpu: Gpu, stack: Stack) -> LinearWeights:
        """The output head of a tied target: the embedding, repacked a few MB at a time on its way to the device."""
        layout = stack.layout
        data, scale = gpu.allocate(layout.nbytes), np.empty(layout.units * UNIT_ROWS, np.float32)
        offset = row = 0
        for block in row_blocks([self._bundle.get(name) for name in stack.names], layout):
            packed = pack(block, words_of(gpu.sm))
            gpu.write(data.at(offset, packed.data.nbytes), packed.data)
            scale[row : row + packed.scale.size] = packed.scale
            offset, row = offset + packed.data.nbytes, row + packed.scale.size
        return LinearWeights(layout, data, gpu.upload(scale))


def embedding_bits(store: WeightStore, name: str) -> npt.NDArray[np.uint16]:
    """BF16 bit patterns [V, H]. Raises BackendError for quantized or wider values."""
    weight = store.get(name)
    if not isinstance(weight, WideWeight):
        raise BackendError(f"{name} is quantized; the native backend gathers BF16 rows: build it as bf16")
    if (bits := weight.bf16()) is None:
        raise BackendError(f"{name} holds float32 values that BF16 cannot hold; build it as bf16")
    return bits


def vector(store: WeightStore, name: str) -> npt.NDArray[np.float32]:
    """A wide weight as float32. Raises BackendError for a quantized one."""
    weight = store.get(name)
    if not isinstance(weight, WideWeight):
        raise BackendError(f"{name} is quantized; norms, gates and convolutions stay wide")
    return weight.float32()
