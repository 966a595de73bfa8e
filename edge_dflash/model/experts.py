"""A mixture of experts: the op, and the block of a decoder layer that it stands in.

Formulas: the configuration and modelling code of transformers' ``qwen3_5_moe``; what that leaves open (ties, precision,
the order of a sum) is fixed here, so that a row never depends on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.ops import DenseOp
from edge_dflash.model.specs import ExpertsSpec

MODULE, ROUTER = "experts", "router"  # of recipes


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that every row takes, times the sigmoid of one number a row. Canonical names of its weights."""

    gate: str  # [Is, H]
    up: str
    down: str  # [H, Is]
    judge: str  # [1, H]

    @property
    def weights(self) -> tuple[str, ...]:
        """All of them."""
        return (self.gate, self.up, self.down, self.judge)


@dataclass(frozen=True, kw_only=True)
class Experts(DenseOp):
    """Input x [rows, H]: y = sum over the row's experts e of w_e D_e (silu(G_e x) * U_e x), and the shared expert.

    z = R x, rounded as any linear; p = softmax(z) in FP32. A row's experts are its ``top_k`` largest p, the lower index
    first on a tie (a kernel may go by z instead: it differs where two z give one p); w = p, divided by the sum of the
    chosen ones in ascending order of experts where ``renormalised``. G x, U x and their product are rounded as those of
    a dense MLP are; D_e a is not. y is summed in FP32 in ascending order of experts, the shared expert last with weight
    sigmoid(S x), S x rounded as any linear; then one rounding.
    """

    router: str  # R [E, H]
    gates: tuple[str, ...]  # of each expert: [I, H]
    ups: tuple[str, ...]
    downs: tuple[str, ...]  # [H, I]
    top_k: int
    renormalised: bool
    shared: SharedExpert | None

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`~edge_dflash.model.ops.Op`."""
        shared = self.shared.weights if self.shared else ()
        return (self.router, *self.gates, *self.ups, *self.downs, *shared)


def experts(g: GraphBuilder, x: str, prefix: str, spec: ExpertsSpec, eps: float, *, plus_one: bool) -> str:
    """The residual x + y, y of m = RMS(x; post_attention_layernorm). Returns the layer's output."""
    m = g.rms_norm(x, f"{prefix}.post_attention_layernorm", eps, f"{prefix}.mlp_in", plus_one=plus_one)
    name, hidden = f"{prefix}.mlp", g.columns(x)

    def mlp(module: str, columns: int) -> tuple[str, str, str]:
        shapes = {"gate_proj": (columns, hidden), "up_proj": (columns, hidden), "down_proj": (hidden, columns)}
        gate, up, down = (
            g.weight(f"{name}.{module}.{part}", shape, "linear", MODULE) for part, shape in shapes.items()
        )
        return gate, up, down

    gates, ups, downs = zip(*(mlp(f"experts.{index}", spec.intermediate) for index in range(spec.count)), strict=True)
    shared = None
    if spec.shared_intermediate is not None:
        judge = g.weight(f"{name}.shared_expert_gate", (1, hidden), "linear", ROUTER)
        shared = SharedExpert(*mlp("shared_expert", spec.shared_intermediate), judge)
    op = Experts(
        inputs=(m,),
        output=f"{prefix}.experts",
        router=g.weight(f"{name}.gate", (spec.count, hidden), "linear", ROUTER),
        gates=gates,
        ups=ups,
        downs=downs,
        top_k=spec.chosen,
        renormalised=spec.renormalised,
        shared=shared,
    )
    return g.add(x, g.emit(op, hidden), f"{prefix}.out")
