"""Where a native backend's weights come from, and the source that repacks a canonical store while it loads.

A backend asks for stacks (linears in streaming order), for the embedding and for small vectors, each once. Bundles keep
stacks repacked (edge_dflash.bundle); benchmarks make random ones on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.driver import DevicePointer, Gpu
from edge_dflash.backends.cuda.linear import LinearWeights
from edge_dflash.bundle.manifest import WeightFormat
from edge_dflash.errors import BackendError
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WeightStore, WideWeight, bf16_to_f32
from edge_dflash.weights.layout import Repacked, repack
from edge_dflash.weights.stacks import Stack


class NativeWeights(Protocol):
    """Weights of one pair on their way to a device."""

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """Format of every weight of the pair."""
        ...

    def stack(self, gpu: Gpu, stack: Stack) -> LinearWeights:
        """Allocate and fill a stack."""
        ...

    def embedding(self, gpu: Gpu, name: str) -> DevicePointer:
        """Allocate and fill a BF16 matrix [V, H]."""
        ...

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm, gate or convolution weight as float32 on the host, in its own shape."""
        ...

    def kv_scale(self, state: str) -> tuple[float, float]:
        """FP8 scales (k, v) of a KV state."""
        ...


class StoreWeights:
    """Weights of any :class:`~edge_dflash.weights.formats.WeightStore`, repacked one stack at a time."""

    def __init__(self, store: WeightStore, formats: Mapping[str, WeightFormat]) -> None:
        self._store, self._formats = store, formats

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """See :class:`NativeWeights`."""
        return self._formats

    def stack(self, gpu: Gpu, stack: Stack) -> LinearWeights:
        """See :class:`NativeWeights`. Raises BackendError for weights that the kernels do not take."""
        return upload(gpu, repack([self._store.get(name) for name in stack.names], swiglu=stack.layout.swiglu))

    def embedding(self, gpu: Gpu, name: str) -> DevicePointer:
        """See :class:`NativeWeights`. Raises BackendError for values that BF16 cannot hold."""
        return gpu.upload(embedding_bits(self._store, name))

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """See :class:`NativeWeights`."""
        return vector(self._store, name)

    def kv_scale(self, state: str) -> tuple[float, float]:
        """See :class:`NativeWeights`."""
        return self._store.kv_scale(state)


def stored_formats(store: WeightStore, names: Mapping[str, object]) -> dict[str, WeightFormat]:
    """Formats of a store's weights as they are."""
    found: dict[str, WeightFormat] = {}
    for name in names:
        match store.get(name):
            case Nvfp4Weight():
                found[name] = "nvfp4"
            case Fp8Weight():
                found[name] = "fp8"
            case WideWeight() as wide:
                found[name] = "bf16" if wide.data.dtype == np.uint16 else "f32"
    return found


def upload(gpu: Gpu, repacked: Repacked) -> LinearWeights:
    """Put a stack on the device."""
    return LinearWeights(repacked.layout, gpu.upload(repacked.data), gpu.upload(repacked.scale))


def embedding_bits(store: WeightStore, name: str) -> npt.NDArray[np.uint16]:
    """BF16 bit patterns [V, H]. Raises BackendError for quantized or wider values."""
    weight = store.get(name)
    if not isinstance(weight, WideWeight):
        raise BackendError(f"{name} is quantized; the native backend gathers BF16 rows: build it as bf16")
    if weight.data.dtype == np.uint16:
        return np.ascontiguousarray(weight.data)
    bits = np.ascontiguousarray(weight.data, np.float32).view(np.uint32)
    if (bits & 0xFFFF).any():
        raise BackendError(f"{name} holds float32 values that BF16 cannot hold; build it as bf16")
    return (bits >> 16).astype(np.uint16)


def vector(store: WeightStore, name: str) -> npt.NDArray[np.float32]:
    """A wide weight as float32. Raises BackendError for a quantized one."""
    weight = store.get(name)
    if not isinstance(weight, WideWeight):
        raise BackendError(f"{name} is quantized; norms, gates and convolutions stay wide")
    return bf16_to_f32(weight.data) if weight.data.dtype == np.uint16 else np.asarray(weight.data, np.float32)
