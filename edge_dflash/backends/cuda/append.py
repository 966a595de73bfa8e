"""``kv_append``: keys and values of layers without queries, several of one shape in one launch (kernels/attend.cu)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_dflash.backends.cuda.memory import Matrix, Words

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.attend import AttendShape
    from edge_dflash.backends.cuda.driver import Gpu, Module
    from edge_dflash.backends.cuda.states import KvMemory

_LAYERS, _THREADS = 8, 256  # of one launch, of a block


class _Appended(ctypes.Structure):
    """``Appended`` of kernels/attend.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_norm", "cosine", "sine", "k_memory", "v_memory")),
        *((name, ctypes.c_float) for name in ("k_scale", "v_scale")),
        *((name, ctypes.c_int32) for name in ("k_stride", "v_stride")),
    )

    @classmethod
    def of(cls, k: Matrix, v: Matrix, memory: KvMemory) -> _Appended:
        """One layer."""
        pointers = (k.pointer, v.pointer, memory.k_norm, memory.cosine, memory.sine, memory.k, memory.v)
        scales = (memory.k_scale, memory.v_scale)
        return cls(*(pointer.address for pointer in pointers), *scales, k.stride, v.stride)


class _Layers(ctypes.Structure):
    """``AppendedLayers`` of kernels/attend.cu."""

    _fields_ = (("layer", _Appended * _LAYERS),)


class Appends:
    """Loaded kernel for one shape."""

    def __init__(self, gpu: Gpu, module: Module, shape: AttendShape) -> None:
        self._gpu, self._shape = gpu, shape
        self._kernel = module.kernel("attend_append_fp8" if shape.kv == "fp8" else "attend_append_bf16")

    def run(self, layers: Sequence[tuple[Matrix, Matrix, KvMemory]], words: Words) -> None:
        """Norm, rotate and store keys and values of each layer, in every slot that has a lane."""
        shape = self._shape
        rows = words.block or (shape.prefill_rows if words.prefill else shape.rows)
        for first in range(0, len(layers), _LAYERS):
            some = layers[first : first + _LAYERS]
            launched = _LAYERS * (words.slots - 1) + len(some)
            self._gpu.launch(
                self._kernel,
                (-(-2 * shape.kv_heads // (_THREADS // 32)), rows, launched),
                _THREADS,
                (
                    _Layers((_Appended * _LAYERS)(*(_Appended.of(*layer) for layer in some))),
                    *(len(some), words.control, words.rows, rows, shape.kv_heads, shape.head_dim),
                    *(shape.rope_dims // 2, shape.kv_rows, shape.eps),
                ),
                overlap=True,
            )
