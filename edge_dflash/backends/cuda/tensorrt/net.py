"""A strongly typed TensorRT network under construction: one method for each kind of layer that the lowering emits.

Layers are named ``op output#number``, so that TensorRT's own messages say which op they are about. Weights are not
copied: TensorRT reads them from the arrays' memory until the engine is built, and this object keeps them alive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from edge_dflash.errors import BackendError
from edge_dflash.weights.formats import BLOCK, Array

DType = Literal["FLOAT", "BF16", "FP8", "FP4", "INT32"]
_STORAGE: dict[DType, type[np.generic]] = {
    "FLOAT": np.float32,
    "BF16": np.uint16,
    "FP8": np.uint8,
    "FP4": np.uint8,
    "INT32": np.int32,
}


class Net:
    """Wraps a network definition. Tensors are TensorRT's; ``scope`` is the output of the op being lowered."""

    def __init__(self, trt: Any, network: Any) -> None:
        self.trt, self.network = trt, network
        self.scope = ""
        self.held: list[Array] = []  # memory that TensorRT reads during the build

    def dtype(self, name: DType) -> Any:
        """TensorRT's constant for a type."""
        return getattr(self.trt.DataType, name)

    def input(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Any:
        """A network input; -1 is ``rows``."""
        return self._made(self.network.add_input(name, self.dtype(dtype), shape), f"input {name}")

    def output(self, tensor: Any, name: str) -> None:
        """Mark a tensor as an output under ``name``."""
        tensor.name = name
        self.network.mark_output(tensor)

    def columns(self, x: Any) -> int:
        """Columns of a matrix. Raises BackendError when TensorRT finds no shape for what made it."""
        try:
            return int(x.shape[1])
        except RuntimeError as error:
            raise BackendError(f"{self.scope}: TensorRT finds no shape for {x.name} ({error})") from None

    def constant(self, array: Array, dtype: DType, shape: tuple[int, ...] | None = None) -> Any:
        """A constant over the array's memory. ``shape`` is the logical one; FP4 has two values in a byte."""
        array = np.ascontiguousarray(array)
        shape = array.shape if shape is None else shape
        size, stored = math.prod(shape), array.size * (2 if dtype == "FP4" else 1)
        if array.dtype != _STORAGE[dtype] or stored != size:
            raise BackendError(
                f"{self.scope}: a {dtype} constant {list(shape)} needs {size} values, found {stored} of {array.dtype}"
            )
        self.held.append(array)
        weights = self.trt.Weights(self.dtype(dtype), array.ctypes.data, size)
        return self._layer(self.network.add_constant(shape, weights), "constant")

    def ones(self, *shape: int) -> Any:
        """BF16 ones."""
        return self.constant(np.full(shape, 0x3F80, np.uint16), "BF16")

    def cast(self, x: Any, dtype: DType) -> Any:
        """Round to another type."""
        return self._layer(self.network.add_cast(x, self.dtype(dtype)), "cast")

    def elementwise(self, a: Any, b: Any, operation: Literal["SUM", "SUB", "PROD", "EQUAL"]) -> Any:
        """a op b; dimensions of 1 are broadcast."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self._layer(self.network.add_elementwise(a, b, kind), operation)

    def unary(self, x: Any, operation: Literal["SQRT", "RECIP"]) -> Any:
        """Square root or reciprocal."""
        return self._layer(self.network.add_unary(x, getattr(self.trt.UnaryOperation, operation)), operation)

    def activation(self, x: Any, form: Literal["SIGMOID", "GELU_TANH", "GELU_ERF"]) -> Any:
        """1 / (1 + exp(-x)); GELU, by tanh or exact."""
        return self._layer(self.network.add_activation(x, getattr(self.trt.ActivationType, form)), form)

    def softmax(self, x: Any) -> Any:
        """Shares of the last dimension that sum to one."""
        return self._layer(self.network.add_softmax(x), "softmax", axes=1 << len(x.shape) - 1)

    def reduce(self, x: Any, operation: Literal["AVG", "MAX", "MIN", "SUM"], *, keep: bool) -> Any:
        """Reduce dimension 1, the columns of a matrix; ``keep`` leaves one."""
        kind = getattr(self.trt.ReduceOperation, operation)
        return self._layer(self.network.add_reduce(x, kind, 1 << 1, keep), operation)

    def select(self, condition: Any, a: Any, b: Any) -> Any:
        """Elements of a where the condition holds, else of b."""
        return self._layer(self.network.add_select(condition, a, b), "select")

    def concat(self, tensors: list[Any], axis: int = 1) -> Any:
        """Columns, or elements along another axis, side by side."""
        return self._layer(self.network.add_concatenation(tensors), "concat", axis=axis)

    def split_columns(self, x: Any, counts: Sequence[int], axis: int = 1) -> list[Any]:
        """The first ``counts[0]`` columns, the next ``counts[1]`` and so on, or of another axis; one part is all."""
        if len(counts) == 1:
            return [x]
        firsts = [0, *accumulate(counts)]
        slices = (self.network.add_slice(x, (at,), (count,), (1,)) for at, count in zip(firsts, counts, strict=False))
        return [self._layer(layer, "slice", axes=(axis,)) for layer in slices]

    def gather_rows(self, table: Any, ids: Any) -> Any:
        """Rows of a table."""
        return self._layer(self.network.add_gather(table, ids, 0), "gather")

    def shaped(self, x: Any, shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> Any:
        """The same elements in another shape, -1 for what is left; ``order``: of its dimensions, turned afterwards."""
        turned = {} if order is None else {"second_transpose": order}
        return self._layer(self.network.add_shuffle(x), "shuffle", reshape_dims=shape, **turned)

    def turned(self, x: Any, order: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        """Dimensions in another order, then another shape."""
        return self._layer(self.network.add_shuffle(x), "shuffle", first_transpose=order, reshape_dims=shape)

    def times(self, a: Any, b: Any) -> Any:
        """Matrices [..., M, K] times [..., K, N]."""
        none = self.trt.MatrixOperation.NONE
        return self._layer(self.network.add_matrix_multiply(a, none, b, none), "matmul")

    def times_transposed(self, x: Any, w: Any) -> Any:
        """x [..., rows, K] times w [..., N, K] transposed."""
        operation = self.trt.MatrixOperation
        return self._layer(self.network.add_matrix_multiply(x, operation.NONE, w, operation.TRANSPOSE), "matmul")

    def dequantize(self, codes: Any, scale: Any, axis: int | None = None) -> Any:
        """Codes times scale, in BF16. ``axis`` is that of the channels of a vector scale, or of a matrix's blocks."""
        given = {} if axis is None else {"axis": axis}
        return self._layer(self.network.add_dequantize(codes, scale, self.dtype("BF16")), "dequantize", **given)

    def quantize_blocks(self, x: Any, scale: Any) -> tuple[Any, Any]:
        """NVFP4 codes and E4M3 block scales of activations [rows, K]; ``scale`` is the FP32 scale of the scales."""
        layer = self.network.add_dynamic_quantize(x, 1, BLOCK, self.dtype("FP4"), self.dtype("FP8"))
        codes = self._layer(layer, "quantize")
        layer.set_input(1, scale)
        return codes, layer.get_output(1)

    def _layer(self, layer: Any, kind: str, **attributes: Any) -> Any:
        """Name a layer and set its attributes; its first output."""
        layer = self._made(layer, kind.lower())
        layer.name = f"{self.scope}#{self.network.num_layers} {kind.lower()}"
        for name, value in attributes.items():
            setattr(layer, name, value)
        return layer.get_output(0)

    def _made(self, made: Any, what: str) -> Any:
        if made is None:
            raise BackendError(f"{self.scope}: TensorRT {self.trt.__version__} refuses the {what}")
        return made
