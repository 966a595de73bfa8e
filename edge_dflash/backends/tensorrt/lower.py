"""One unit -> a strongly typed network definition, op by op. Asks for the weights of one op at a time; builds nothing.

Linears that multiply the same 4-bit activations are one op here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edge_dflash.backends.tensorrt import dense
from edge_dflash.backends.tensorrt.linear import linear, nvfp4
from edge_dflash.backends.tensorrt.net import DType, Net
from edge_dflash.backends.tensorrt.units import CHOICES, LOGITS, Binding, Unit
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Add, Concat, DenseOp, Embed, Linear, RmsNorm, SwiGlu
from edge_dflash.weights.formats import Nvfp4Weight, WeightStore, WideWeight

DTYPES: dict[str, DType] = {"bf16": "BF16", "int32": "INT32"}


@dataclass
class Lowered:
    """A network and the memory that it reads its weights from, which must outlive the build."""

    unit: Unit
    net: Net

    @property
    def network(self) -> Any:
        """The network definition."""
        return self.net.network

    @property
    def weight_bytes(self) -> int:
        """Bytes of all constants."""
        return sum(array.nbytes for array in self.net.held)


def lower(unit: Unit, store: WeightStore, trt: Any, builder: Any) -> Lowered:
    """Write a unit as a network of ``builder``. Inputs, outputs and every op's result carry their tensors' names.

    Raises BackendError naming the tensor for what TensorRT refuses or what has no lowering.
    """
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    net = Net(trt, network)
    tensors = {b.name: net.input(b.name, DTYPES[b.dtype], _shape(b)) for b in unit.inputs}
    for op in unit.ops:
        if op.output in tensors:  # made with a linear before it
            continue
        net.scope = op.output
        inputs = [tensors[name] for name in op.inputs]
        if isinstance(op, Linear):
            made = _linears(net, op, unit, inputs[0], store)
        else:
            made = {op.output: _op(net, op, inputs, store)}
        for name, tensor in made.items():
            tensor.name = name
        tensors |= made
    for binding in unit.outputs:
        if binding.name == CHOICES:
            net.scope = CHOICES
            tensors[CHOICES] = dense.argmax(net, tensors[LOGITS], _columns(unit, LOGITS))
        net.output(tensors[binding.name], binding.name)
    return Lowered(unit, net)


def _linears(net: Net, op: Linear, unit: Unit, x: Any, store: WeightStore) -> dict[str, Any]:
    """A linear, and with it those behind it that multiply the same 4-bit activations; results by tensor."""
    weight = store.get(op.weight)
    if not isinstance(weight, Nvfp4Weight) or weight.input_scale is None:
        return {op.output: linear(net, x, weight)}
    weights = {op.output: weight}
    for other in unit.ops[unit.ops.index(op) + 1 :]:
        if isinstance(other, Linear) and other.inputs == op.inputs:
            found = store.get(other.weight)
            if isinstance(found, Nvfp4Weight) and found.input_scale == weight.input_scale:
                weights[other.output] = found
    net.scope = "+".join(weights)
    return dict(zip(weights, nvfp4(net, x, list(weights.values())), strict=True))


def _op(net: Net, op: DenseOp, inputs: list[Any], store: WeightStore) -> Any:
    match op:
        case Embed():
            return dense.embed(net, inputs[0], _wide(store, op.weight))
        case RmsNorm():
            return dense.rms_norm(net, inputs[0], _wide(store, op.weight), op.eps, plus_one=op.plus_one)
        case Add():
            return dense.add(net, *inputs)
        case SwiGlu():
            return dense.swiglu(net, *inputs)
        case Concat():
            return dense.concat(net, inputs)
        case _:
            raise BackendError(f"{op.output}: {type(op).__name__} has no TensorRT lowering; run it beside the plans")


def _wide(store: WeightStore, name: str) -> WideWeight:
    weight = store.get(name)
    if not isinstance(weight, WideWeight):
        raise BackendError(f"{name} is stored as {type(weight).__name__}, wanted BF16 or F32: keep it wide")
    return weight


def _shape(binding: Binding) -> tuple[int, ...]:
    return (-1,) if binding.columns is None else (-1, binding.columns)


def _columns(unit: Unit, name: str) -> int:
    return next(b.columns for b in unit.outputs if b.name == name and b.columns is not None)
