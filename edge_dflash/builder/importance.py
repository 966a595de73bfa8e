"""What rounding by search weighs errors with: second moments E[x_k^2] of the inputs of linears, from calibration.

Collected in the pass that measures scales; 4 bytes for each input of each linear that is to be rounded, 16 MB for 27B.
The experts of a layer share the moments of its input; what reaches an expert's down projection is its own, drawn to
the layer's mean where few rows chose it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from edge_dflash.bundle.parts import Piece, Tensor, tensor_file
from edge_dflash.errors import BuildError
from edge_dflash.model.ops import Experts, Linear, Op
from edge_dflash.model.program import Program
from edge_dflash.weights.formats import Array
from edge_dflash.weights.safetensors import TensorFiles

FILE = "importance.safetensors"  # in a build's working directory, never in a bundle
SHRINK = 0.1  # of the mean, added to every moment: what a few rows did not show may still come
PRIOR = 16  # rows of the layer's mean that are counted beside an expert's own
Keep = Callable[[str, torch.Tensor], object]  # told a linear's name and its input [R, K]
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate|up|down)_proj")


def input_of(name: str) -> str:
    """The name by which the moments of a linear's input are kept: one for gate and up of a layer's experts."""
    found = _EXPERT.fullmatch(name)
    return found[1] if found and found[2] != "down" else name


def shared_inputs(program: Program, linears: Collection[str]) -> dict[str, str]:
    """The target's among ``linears``, its experts' left out, and the first of them that reads the same input."""
    ops = (op for op in program.ops if isinstance(op, Linear) and op.weight in linears)
    first: dict[str, str] = {}
    return {op.weight: first.setdefault(op.inputs[0], op.weight) for op in ops if op.weight.startswith("target.")}


def inputs_file(name: str) -> str:
    """What a build's working directory has the rows of a linear's input in: BF16 [R, K] and nothing else."""
    return f"{name}.inputs"


class Moments:
    """Sums of squares of the inputs of some linears, as an interpreter's observer is told them."""

    def __init__(self, linears: Collection[str] = (), keep: Keep = lambda name, values: None) -> None:
        """``keep`` is told each input of a linear that is added."""
        self._keep = keep
        self.wanted = frozenset(map(input_of, linears))
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}  # float64 [K], and rows

    def reads(self, op: Op) -> bool:
        """Whether moments of the op's input, or of an expert's, are wanted."""
        return isinstance(op, Linear | Experts) and not self.wanted.isdisjoint(map(input_of, op.weights))

    def observe(self, op: Op, role: str, values: torch.Tensor) -> None:
        """See :data:`~edge_dflash.backends.reference.interpreter.Observer`."""
        if isinstance(op, Linear):
            self.add(op.weight, values)
        elif isinstance(op, Experts):
            inputs = (input_of(op.gates[0]), *(op.shared[:2] if op.shared else ()))
            for name in inputs if role == "x" else (role,):
                self.add(name, values)

    def add(self, name: str, values: torch.Tensor) -> None:
        """Count rows ``values`` [R, K]."""
        if name not in self.wanted:
            return
        self._keep(name, values)
        total, rows = self._sums.get(name, (torch.zeros(values.shape[1], dtype=torch.float64), 0))
        parts = (values[first : first + 64] for first in range(0, len(values), 64))  # rows that stay in the cache
        self._sums[name] = sum((part.square().sum(0) for part in parts), total), rows + len(values)

    def result(self) -> dict[str, Array]:
        """Importance [K], float32 of mean 1 + SHRINK, by :func:`input_of`. Raises BuildError where it is not finite."""
        layers: dict[str, tuple[torch.Tensor, int]] = {}  # of all experts of one
        for name, (total, rows) in self._sums.items():
            if found := _EXPERT.fullmatch(name):
                summed, counted = layers.get(found[1], (torch.zeros_like(total), 0))
                layers[found[1]] = summed + total, counted + rows
        result = {}
        for name in sorted(self.wanted):
            found = _EXPERT.fullmatch(name)
            total, rows = self._sums.get(name, (torch.zeros(()), 0))
            if found and found[1] in layers:
                summed, counted = layers[found[1]]
                total = total + PRIOR * summed / counted
            mean = float(total.mean())
            if not np.isfinite(mean):
                raise BuildError(
                    f"calibration found {mean} in what {name} reads: the checkpoint's weights are damaged or unsuitable"
                )
            if mean > 0:
                result[name] = (total / mean + SHRINK).float().numpy()
        return result


def dump_importance(importance: Mapping[str, Array]) -> Iterator[Piece]:
    """The file's content."""
    return tensor_file([Tensor(name, "F32", h.shape, partial(iter, [h])) for name, h in importance.items()])


def load_importance(path: Path) -> dict[str, Array]:
    """Undo :func:`dump_importance`."""
    files = TensorFiles.open([path])
    return {name: files.array(name)[1].copy() for name in files.names()}
