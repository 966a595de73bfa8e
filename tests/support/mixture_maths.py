"""Small random mixtures of experts, and the op in float64 NumPy."""

from dataclasses import dataclass

import numpy as np
import torch

from edge_dflash.backends.reference.dense import TorchWeights, pad, padded_rows
from edge_dflash.backends.reference.experts import experts
from edge_dflash.model.blocks import experts as block
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.ops import Experts
from edge_dflash.model.specs import ExpertsSpec
from edge_dflash.weights.formats import WideWeight

ROUNDINGS = {"float32": lambda x: x, "bfloat16": lambda x: x.bfloat16().float()}
NOTED = ("router_logits", "experts", "weights", "routed")


def rounded(values, precision):
    """Values as activations of a precision are kept, in float64."""
    return ROUNDINGS[precision](torch.tensor(values).float()).double().numpy() if precision == "bfloat16" else values


@dataclass
class Mixture:
    """An op and its weights by name, which are BF16 numbers."""

    op: Experts
    weights: dict

    @classmethod
    def random(cls, spec, hidden, seed=0):
        """Matrices that give their input's RMS; logits of the router about 3 times it."""
        g = GraphBuilder("verify", commits=False)
        block(g, g.embed("ids", "table", 8, hidden, "x"), "target.layers.0", spec)
        program = g.program()
        (op,) = (op for op in program.ops if isinstance(op, Experts))
        rng = np.random.default_rng(seed)
        weights = {}
        for name in op.weights:
            shape = program.weights[name].shape
            values = rng.standard_normal(shape) * ((3 if name == op.router else 1) / np.sqrt(shape[1]))
            weights[name] = rounded(values, "bfloat16")
        return cls(op, weights)

    def get(self, name):
        """See WeightStore."""
        return WideWeight(self.weights[name].astype(np.float32))

    def kv_scale(self, state):
        """See WeightStore."""
        return 1.0, 1.0

    def run(self, x, precision="float32", **options):
        """The reference on rows x: its output and what it notes, by name."""
        found = {name: [] for name in NOTED}
        rows, keep = torch.as_tensor(x, dtype=torch.float32), ROUNDINGS[precision]
        padded = pad(rows, padded_rows(len(rows)))
        out = experts(
            *(self.op, padded, len(rows), TorchWeights(self, **options), keep),
            lambda role, values: found.setdefault(role, []).append(values.clone()),
        )
        return {name: torch.cat(parts) for name, parts in found.items()} | {"out": keep(out[: len(rows)])}

    def maths(self, x, precision="float32"):
        """The same in float64, row by row, with the roundings of the op."""
        x, w, found = np.asarray(x, np.float64), self.weights, {name: [] for name in (*NOTED, "out")}
        for row in x:
            z = rounded(w[self.op.router] @ row, precision)
            p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            chosen = sorted(range(len(p)), key=lambda e: (-p[e], e))[: self.op.top_k]
            share = p[chosen] / (p[chosen].sum() if self.op.renormalised else 1)
            routed = np.zeros_like(row)
            for e in sorted(chosen):
                names = self.op.gates[e], self.op.ups[e], self.op.downs[e]
                routed += share[chosen.index(e)] * self._expert(row, names, precision)
            out = routed
            if (shared := self.op.shared) is not None:
                judged = 1 / (1 + np.exp(-rounded(w[shared.judge] @ row, precision)))
                out = routed + judged * self._expert(row, (shared.gate, shared.up, shared.down), precision)
            for name, value in zip(found, (z, chosen, share, routed, rounded(out, precision)), strict=True):
                found[name].append(value)
        return {name: np.array(values) for name, values in found.items()}

    def _expert(self, row, names, precision):
        gate, up, down = (self.weights[name] for name in names)
        g, u = rounded(gate @ row, precision), rounded(up @ row, precision)
        return down @ rounded(g / (1 + np.exp(-g)) * u, precision)


def mixture(count=8, chosen=2, inner=32, shared=None, hidden=64, seed=0, renormalised=True):
    """A random mixture of these sizes."""
    return Mixture.random(ExpertsSpec(count, chosen, inner, shared, renormalised), hidden, seed)


def random_rows(rows, hidden=64, seed=1):
    """Rows of RMS 1, BF16 numbers."""
    return rounded(np.random.default_rng(seed).standard_normal((rows, hidden)), "bfloat16")
