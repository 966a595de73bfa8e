"""Device buffers for the GPU tests of the state kernels."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from edge_dflash.backends.cuda.compile import cached_cubin
from edge_dflash.backends.cuda.driver import Gpu, Module
from edge_dflash.backends.cuda.memory import CONTROL_BYTES, Control, DevicePointer, Matrix, Words, control_word

CACHE = Path(__file__).parents[2] / "build" / "cubins"  # git-ignored


def threads(most):
    """So many for torch, or a worker's share of the cores where there are several workers."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    return max(1, min(most, (os.cpu_count() or 1) // workers))


def cubin(unit, arch):
    """The cubin of a unit; compiled once for each state of the sources."""
    return cached_cubin(unit, arch, CACHE)


class Device:
    """A Gpu with loaded modules, and torch tensors in and out."""

    def __init__(self):
        self.gpu = Gpu()
        self._modules = {}
        self.control = self.gpu.allocate(8 * CONTROL_BYTES)  # of 8 slots
        self.gpu.fill(self.control)

    def module(self, unit) -> Module:
        if unit not in self._modules:
            arch = f"sm{self.gpu.sm}" + ("a" if self.gpu.sm >= 90 else "")
            self._modules[unit] = self.gpu.load(cubin(unit, arch))
        return self._modules[unit]

    def word(self, word: Control, slot=0) -> DevicePointer:
        return control_word(self.control.at(slot * CONTROL_BYTES, CONTROL_BYTES), word)

    def words(self, *, prefill=False, block=None, slots=1) -> Words:
        return Words(self.control, prefill, block, slots)

    def set(self, slot=0, **words):
        for name, value in words.items():
            self.gpu.write(self.word(Control[name.upper()], slot), np.array([value], np.int32))

    def get(self, word: Control) -> int:
        return int(self.gpu.read(self.word(word), (1,), np.int32)[0])

    def poisoned(self, nbytes) -> DevicePointer:
        pointer = self.gpu.allocate(nbytes)
        self.gpu.fill(pointer, 0xFF)  # NaN in every format
        return pointer

    def up(self, tensor: torch.Tensor) -> DevicePointer:
        tensor = tensor.contiguous()
        return self.gpu.upload(tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy())

    def rows(self, tensor: torch.Tensor) -> Matrix:
        """A float tensor that holds BF16 values, as a BF16 matrix."""
        return Matrix(self.up(tensor.bfloat16()), tensor.shape[1])

    def read(self, pointer, shape, dtype) -> torch.Tensor:
        if dtype == torch.bfloat16:
            return torch.from_numpy(self.gpu.read(pointer, shape, np.int16)).view(torch.bfloat16)
        return torch.from_numpy(self.gpu.read(pointer, shape, torch.zeros(0, dtype=dtype).numpy().dtype))


def bf16(*shape, generator, scale=1.0) -> torch.Tensor:
    """Random float32 values that BF16 holds exactly."""
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().float()


def commit(small, control, rows):
    """Commit so many rows of the last verify of a slot by a kernel: they become pending. Below 0: none are pending."""
    small._launch("commit_rows", (1, 1, 1), 32, control=control, rows=rows, slots=1)
