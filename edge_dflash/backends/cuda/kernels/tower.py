"""Launches of kernels/tower.cu: what a vision tower has beside linears."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from edge_dflash.backends.cuda.kernels.source import Signature, structure
from edge_dflash.backends.cuda.memory import PADDING, DevicePointer, Matrix
from edge_dflash.errors import BackendError
from edge_dflash.model.specs import PatchSpec, VisionSpec

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Module

UNIT = "tower"
_THREADS, _ATTEND_THREADS, _QUERIES, _KEYS = 256, 128, 64, 64
MOST_HEAD_DIM = 128
MOST_PATCHES = 16384  # of a picture, whatever the context: activations grow with them
_NAMES = ("patches", "positions", "norm", "finish", "turn")
_SIGNATURES = {name: Signature("tower.cu", f"tower_{name}") for name in _NAMES}
_ATTEND = Signature("tower.cu", "ATTEND")
_Channels = structure("tower.cu", "Channels")


class Activation(IntEnum):
    """What a linear's output goes through (kernels/tower.cu)."""

    NONE = 0
    GELU_TANH = 1
    GELU_ERF = 2


def check_tower(spec: VisionSpec) -> None:
    """Raise BackendError for dimensions that the kernels do not take."""
    dim = spec.head_dim
    if dim % 8 or not 0 < dim <= MOST_HEAD_DIM:
        raise BackendError(
            f"the tower's heads have {dim} dims; the native kernels take multiples of 8 up to {MOST_HEAD_DIM}"
        )
    if spec.hidden_size % PADDING:
        raise BackendError(f"the tower has {spec.hidden_size} columns; the native kernels take multiples of {PADDING}")


def most_patches(spec: VisionSpec) -> int:
    """Patches of the largest picture that a tower takes, whatever the context."""
    return min(MOST_PATCHES, spec.patches.max_pixels // spec.patches.patch**2)


class TowerKernels:
    """Loaded kernels for one head dim. Matrices are BF16 in rows, vectors FP32."""

    def __init__(self, gpu: Gpu, module: Module, head_dim: int) -> None:
        self._gpu, self._dim = gpu, head_dim
        self._kernels = {name: module.kernel(f"tower_{name}") for name in _NAMES}
        steps = -(-head_dim // 16)
        self._shared = 4 * _KEYS * (32 * steps + 16)  # Heads::BYTES
        self._attend = module.kernel(f"tower_attend_{steps}", shared_bytes=self._shared)

    def patches(self, levels: DevicePointer, out: Matrix, rows: int, spec: PatchSpec) -> None:
        """Out [rows, 3 * temporal * patch^2] = normalised ``levels`` [rows, 3 * patch^2] uint8, in every time slot."""
        mean, spread = ([255 * value for value in values] for values in (spec.mean, spec.std))
        given = {"levels": levels, "out": out, "channels": 3, "area": spec.patch**2, "times": spec.temporal}
        self._launch("patches", rows, **given, stride=out.stride, by=_Channels.of(mean=mean, spread=spread))

    def positions(
        self, x: Matrix, table: DevicePointer, corners: DevicePointer, shares: DevicePointer, rows: int, columns: int
    ) -> None:
        """Add to row r of x the rows ``corners`` [rows, 4] int32 of a BF16 table by their ``shares`` [rows, 4] FP32."""
        given = {"x": x, "table": table, "corners": corners, "shares": shares, "columns": columns}
        self._launch("positions", rows, **given, stride=x.stride)

    def norm(
        self, x: Matrix, weight: DevicePointer, bias: DevicePointer, out: Matrix, rows: int, columns: int, eps: float
    ) -> None:
        """LayerNorm of each row."""
        self._launch("norm", rows, x=x, weight=weight, bias=bias, out=out, columns=columns, eps=eps)

    def finish(
        self,
        x: Matrix,
        bias: DevicePointer,
        out: Matrix,
        rows: int,
        columns: int,
        activation: Activation = Activation.NONE,
        residual: Matrix | None = None,
    ) -> None:
        """Out = [residual +] activation(x + bias); out may be x or the residual. All have one stride."""
        if out.stride != x.stride or (residual is not None and residual.stride != x.stride):
            raise ValueError(f"rows of strides {x.stride} and {out.stride}; what follows a linear keeps its stride")
        given = {"x": x, "bias": bias, "residual": residual, "out": out, "columns": columns, "stride": x.stride}
        self._launch("finish", rows, **given, activation=activation)

    def rotate(self, qkv: Matrix, cosine: DevicePointer, sine: DevicePointer, rows: int, heads: int) -> None:
        """Rotate queries and keys of qkv [rows, 3 * heads * dim] by angles [rows, dim / 2]."""
        given = {"qkv": qkv, "cosine": cosine, "sine": sine, "heads": heads, "dim": self._dim}
        self._launch("turn", rows, **given, stride=qkv.stride)

    def attend(self, qkv: Matrix, out: Matrix, rows: int, heads: int) -> None:
        """Out [rows, heads * dim]: every row sees all rows."""
        scale, stride = self._dim**-0.5 * math.log2(math.e), qkv.stride
        what = _ATTEND(qkv=qkv, out=out, rows=rows, heads=heads, dim=self._dim, stride=stride, scale=scale)
        grid = (-(-rows // _QUERIES), heads, 1)
        self._gpu.launch(self._attend, grid, _ATTEND_THREADS, what, shared_bytes=self._shared, overlap=True)

    def _launch(self, name: str, rows: int, **values: Any) -> None:
        self._gpu.launch(self._kernels[name], (rows, 1, 1), _THREADS, _SIGNATURES[name](**values), overlap=True)
