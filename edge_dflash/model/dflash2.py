"""The DFlash2 drafter: DFlash with grouped dynamic convolutions around attention and MLP, and a candidate selector.

Maths after vLLM (vllm/model_executor/models/qwen3_dflash2.py at 030da624, v1/worker/gpu/spec_decode/dflash2) and
speculators 0.9.0 (models/dflash2/model_definitions.py). In a layer with h = RMS(x) and c = W h of both sublayers:

    x + conv(sublayer(conv(h, side 0)), side 1)      conv: :class:`~edge_dflash.model.ops.GroupedConv`

The context's keys and values are DFlash's: they are not convolved. Drafts are chosen by
:class:`~edge_dflash.model.ops.SelectorWalk`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from edge_dflash.model import dflash
from edge_dflash.model.blocks import attend, draft_rows, gated_linear, logits
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.config import trained
from edge_dflash.model.fields import Fields, integer
from edge_dflash.model.program import Program
from edge_dflash.model.specs import DrafterSpec, GroupedConvSpec, SelectorSpec, TargetSpec

KIND = "dflash2"
NAMES = ("DFlash2DraftModel",)
BARE = (".base_kernel", "_codebook")  # ends of names without ``.weight``
TABLE = dflash.table(
    {
        **dflash.ROWS,
        "conv_kernel_size": integer(most=16, null=True),
        "conv_group_size": integer(null=True),
        "selector_rank": integer(null=True),
        "selector_top_k": integer(null=True),
    }
)


def read(fields: Fields, target_layers: int | None) -> DrafterSpec:
    """Spec of a drafter; see :func:`dflash.read`. Raises CheckpointError."""
    spec = dflash.read(fields, target_layers)
    dflash.whole_vocabulary(fields, spec)

    def own(name: str) -> int:
        return trained(name, fields.child("dflash_config"), fields).integer(name)

    conv = GroupedConvSpec(own("conv_kernel_size"), own("conv_group_size"))
    if spec.hidden_size % conv.group_size:
        raise fields.error("conv_group_size", conv.group_size, f"a divisor of hidden_size ({spec.hidden_size})")
    head = SelectorSpec(own("selector_rank"), own("selector_top_k"))
    if head.top_k > spec.vocab_size:
        raise fields.error("selector_top_k", head.top_k, f"at most vocab_size ({spec.vocab_size})")
    return replace(spec, kind=KIND, conv=conv, head=head)


def layer(g: GraphBuilder, x: str, spec: DrafterSpec, index: int) -> str:
    """Output rows of one layer."""
    prefix, mask, eps = f"drafter.layers.{index}", spec.layers[index], spec.rms_norm_eps
    name = f"{prefix}.attention_conv"
    h = g.rms_norm(x, f"{prefix}.input_layernorm", eps, f"{prefix}.attn_in", plus_one=False)
    c = _coefficients(g, h, name, spec)
    h = _conv(g, h, c, name, spec, 0)
    a = attend(g, h, prefix, spec.attention, eps, plus_one=False, bidirectional=mask.bidirectional, window=mask.window)
    x = g.add(x, _conv(g, a, c, name, spec, 1), f"{prefix}.mid")
    name = f"{prefix}.mlp_conv"
    m = g.rms_norm(x, f"{prefix}.post_attention_layernorm", eps, f"{prefix}.mlp_in", plus_one=False)
    c = _coefficients(g, m, name, spec)
    down = gated_linear(g, _conv(g, m, c, name, spec, 0), prefix, spec.intermediate_size)
    return g.add(x, _conv(g, down, c, name, spec, 1), f"{prefix}.out")


def propose(g: GraphBuilder, target: TargetSpec, spec: DrafterSpec) -> Program:
    """[anchor, mask x (B-1)] -> logits of the B-1 draft rows, and the walk over their candidates."""
    x = dflash.block(g, target, spec, layer)
    drafts = draft_rows(g, x, spec)
    scores = logits(g, drafts, target)
    if not isinstance(head := spec.head, SelectorSpec):
        raise ValueError(f"a {KIND} drafter has the head {head}")
    g.selector_walk(drafts, scores, "drafter.candidate_selector", head, "walk")
    return g.program(logits=scores, hidden=x, draft_hidden=drafts)


def _conv_spec(spec: DrafterSpec) -> GroupedConvSpec:
    if spec.conv is None:
        raise ValueError(f"a {KIND} drafter has no convolutions")
    return spec.conv


def _coefficients(g: GraphBuilder, h: str, name: str, spec: DrafterSpec) -> str:
    """The dynamic coefficients of both sides of a sublayer, from its normed input."""
    conv = _conv_spec(spec)
    columns = 2 * conv.taps * (spec.hidden_size // conv.group_size)
    return g.linear(h, f"{name}.kernel_projection", columns, "conv", f"{name}.coefficients")


def _conv(g: GraphBuilder, rows: str, c: str, name: str, spec: DrafterSpec, side: Literal[0, 1]) -> str:
    out = f"{name}.{('before', 'after')[side]}"
    return g.grouped_conv(rows, c, f"{name}.base_kernel", _conv_spec(spec), side, out)
