"""The three passes of a pair: prefill, verify, propose. The only place that puts a target and a drafter together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from edge_dflash.model import dflash, qwen3, qwen3_5
from edge_dflash.model.blocks import embed, logits
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import PairSpec, TargetSpec

Layer = Callable[[GraphBuilder, str, TargetSpec, int], str]

LAYERS: dict[str, tuple[Layer, bool]] = {
    "qwen3": (qwen3.layer, qwen3.NORM_PLUS_ONE),
    "qwen3_5": (qwen3_5.layer, qwen3_5.NORM_PLUS_ONE),
}


def pair_programs(spec: PairSpec) -> PairPrograms:
    """Write all passes of a pair."""
    return PairPrograms(_target(spec, "prefill"), _target(spec, "verify"), _propose(spec))


def _target(spec: PairSpec, name: Literal["prefill", "verify"]) -> Program:
    """ids -> logits, with the drafter's context appended from the same rows' taps."""
    target, prefill = spec.target, name == "prefill"
    layer, plus_one = LAYERS[target.architecture]
    g = GraphBuilder(name, commits=prefill)
    x = embed(g, target)
    outputs: list[str] = []  # outputs[i] is the output of layer i: HF hidden_states[i + 1] (invariant I3)
    for index in range(target.num_layers):
        x = layer(g, x, target, index)
        outputs.append(x)
    taps = g.concat(tuple(outputs[i] for i in spec.drafter.target_layer_ids), "taps")
    dflash.append_context(g, taps, spec.drafter)
    if prefill:
        x = g.select_rows(x, "last", "last_row")
    x = g.rms_norm(x, "target.norm", target.rms_norm_eps, "hidden", plus_one=plus_one)
    return g.program(logits=logits(g, x, target), hidden=x, taps=taps)


def _propose(spec: PairSpec) -> Program:
    """[anchor, mask x (B-1)] -> logits of the B-1 draft rows."""
    g = GraphBuilder("propose", commits=False)
    x = embed(g, spec.target)
    x = dflash.block(g, x, spec.drafter)
    drafts = g.select_rows(x, "drafts", "draft_rows")  # row 0 is the anchor, never a draft (invariant I4)
    return g.program(logits=logits(g, drafts, spec.target), hidden=x)
