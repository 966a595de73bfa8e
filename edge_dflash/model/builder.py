"""Writing a Program: a model file calls these methods in the order of its equations.

The builder names tensors, collects the weights and states an architecture needs, and checks column counts while it
goes, so that a wrong model file fails here and not in a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from edge_dflash.model.ops import (
    Add,
    Attend,
    Concat,
    Elementwise,
    Embed,
    GatedDelta,
    GroupedConv,
    Linear,
    Op,
    RmsNorm,
    SelectRows,
)
from edge_dflash.model.program import DeltaState, KvState, Program, State, WeightKind, WeightSpec
from edge_dflash.model.specs import AttentionSpec, GatedDeltaSpec, GroupedConvSpec, LayerSpec


class GraphBuilder:
    """Collects the ops of one pass. Methods return the name of the tensor they produce."""

    def __init__(self, name: str, *, commits: bool, inputs: Mapping[str, int] | None = None) -> None:
        self._name = name
        self._commits = commits
        self._ops: list[Op] = []
        self._inputs: Mapping[str, int] = {"ids": 1} if inputs is None else inputs  # and their columns
        self._columns: dict[str, int] = dict(self._inputs)
        self._weights: dict[str, WeightSpec] = {}
        self._states: dict[str, State] = {}

    def program(self, **outputs: str) -> Program:
        """Finish. ``outputs`` maps roles to tensor names."""
        return Program(
            *(self._name, tuple(self._ops), self._weights, self._states, self._columns, outputs, self._commits),
            inputs=tuple(self._inputs),
        )

    def columns(self, tensor: str) -> int:
        """Columns of a tensor made earlier."""
        return self._columns[tensor]

    def weight(self, name: str, shape: tuple[int, ...], kind: WeightKind, module: str) -> str:
        """A weight that an op reads; returns its name. ``module`` is its class in recipes."""
        spec = WeightSpec(shape, kind, module)
        if self._weights.setdefault(name, spec).shape != shape:
            raise ValueError(f"{self._name}: weight {name} is used as {self._weights[name].shape} and as {shape}")
        return name

    def emit(self, op: Op, columns: int) -> str:
        """Append an op whose output has ``columns``; returns the output's name."""
        for tensor in op.inputs:
            if tensor not in self._columns:
                raise ValueError(f"{self._name}: {type(op).__name__} reads {tensor!r}, which no earlier op produced")
        if op.output in self._columns:
            raise ValueError(f"{self._name}: tensor {op.output!r} is produced twice")
        self._ops.append(op)
        self._columns[op.output] = columns
        return op.output

    def embed(self, ids: str, weight: str, vocab: int, hidden: int, out: str) -> str:
        """Rows of the embedding matrix."""
        self.weight(weight, (vocab, hidden), "embedding", "embedding")
        return self.emit(Embed(inputs=(ids,), output=out, weight=weight), hidden)

    def linear(self, x: str, weight: str, columns: int, module: str, out: str) -> str:
        """Linear layer of ``columns`` outputs; ``module`` is its class in recipes."""
        self.weight(weight, (columns, self._columns[x]), "linear", module)
        return self.emit(Linear(inputs=(x,), output=out, weight=weight), columns)

    def rms_norm(self, x: str, weight: str, eps: float, out: str, *, plus_one: bool) -> str:
        """RMS norm over the columns."""
        self.weight(weight, (self._columns[x],), "vector", "norm")
        op = RmsNorm(inputs=(x,), output=out, weight=weight, eps=eps, plus_one=plus_one)
        return self.emit(op, self._columns[x])

    def add(self, a: str, b: str, out: str) -> str:
        """Residual sum."""
        return self.elementwise(Add, (a, b), out)

    def elementwise(self, op: type[Elementwise], inputs: tuple[str, ...], out: str) -> str:
        """An op on tensors with the same columns."""
        for other in inputs[1:]:
            self._expect(other, self._columns[inputs[0]])
        return self.emit(op(inputs=inputs, output=out), self._columns[inputs[0]])

    def concat(self, tensors: tuple[str, ...], out: str) -> str:
        """Concatenate columns in the order given."""
        return self.emit(Concat(inputs=tensors, output=out), sum(self._columns[t] for t in tensors))

    def select_rows(self, x: str, which: Literal["last", "drafts"], out: str) -> str:
        """Keep the last row, or all rows but the first."""
        return self.emit(SelectRows(inputs=(x,), output=out, which=which), self._columns[x])

    def attend(self, q: str, k: str, v: str, prefix: str, spec: AttentionSpec, layer: LayerSpec) -> str:
        """Attention of the layer ``prefix`` (for example ``target.layers.3``) over its KV cache: ``{prefix}.attn``."""
        columns = spec.heads * spec.head_dim
        self._expect(q, columns * (2 if spec.gated else 1))
        op = Attend(
            inputs=(q, k, v),
            output=f"{prefix}.attn",
            state=self.kv_state(k, v, prefix, spec),
            q_norm=self.weight(f"{prefix}.self_attn.q_norm", (spec.head_dim,), "vector", "norm"),
            k_norm=self.weight(f"{prefix}.self_attn.k_norm", (spec.head_dim,), "vector", "norm"),
            eps=layer.eps,
            plus_one=layer.plus_one,
            bidirectional=layer.bidirectional,
            window=layer.window,
            **vars(spec),  # the op has the fields of the geometry
        )
        return self.emit(op, columns)

    def gated_delta(self, qkv: str, z: str, a: str, b: str, prefix: str, spec: GatedDeltaSpec, eps: float) -> str:
        """Gated delta rule of the layer ``prefix``: ``{prefix}.delta``."""
        name, state, width = f"{prefix}.linear_attn", f"{prefix}.delta", spec.value_heads * spec.value_dim
        for tensor, columns in ((qkv, spec.conv_channels), (z, width), (a, spec.value_heads), (b, spec.value_heads)):
            self._expect(tensor, columns)
        self._states[state] = DeltaState(**vars(spec))
        op = GatedDelta(
            inputs=(qkv, z, a, b),
            output=state,
            state=state,
            conv=self.weight(f"{name}.conv1d", (spec.conv_channels, 1, spec.conv_kernel), "conv", "conv"),
            a_log=self.weight(f"{name}.A_log", (spec.value_heads,), "vector", "norm"),
            dt_bias=self.weight(f"{name}.dt_bias", (spec.value_heads,), "vector", "norm"),
            norm=self.weight(f"{name}.norm", (spec.value_dim,), "vector", "norm"),
            eps=eps,
            **vars(spec),
        )
        return self.emit(op, width)

    def grouped_conv(self, u: str, c: str, base: str, spec: GroupedConvSpec, side: Literal[0, 1], out: str) -> str:
        """Convolve rows u by the kernel ``base`` plus the coefficients c of each row."""
        hidden, size = self._columns[u], spec.group_size
        if spec.taps < 1 or size < 1 or hidden % size:
            raise ValueError(f"{self._name}: {spec} does not divide {hidden} channels into groups")
        self._expect(c, 2 * spec.taps * (hidden // size))
        self.weight(base, (2, spec.taps, hidden), "conv", "conv")
        op = GroupedConv(inputs=(u, c), output=out, base=base, side=side, **vars(spec))
        return self.emit(op, hidden)

    def kv_state(self, k: str, v: str, prefix: str, spec: AttentionSpec) -> str:
        """The KV cache of the layer ``prefix``, which k and v are for."""
        for tensor in (k, v):
            self._expect(tensor, spec.kv_heads * spec.head_dim)
        self._states[f"{prefix}.kv"] = KvState(spec.kv_heads, spec.head_dim)
        return f"{prefix}.kv"

    def _expect(self, tensor: str, columns: int) -> None:
        if self._columns[tensor] != columns:
            raise ValueError(f"{self._name}: {tensor} has {self._columns[tensor]} columns, {columns} wanted")
