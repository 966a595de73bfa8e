"""The DFlash2 drafter: DFlash with grouped dynamic convolutions around attention and MLP, and a candidate selector.

Maths after vLLM (vllm/model_executor/models/qwen3_dflash2.py at 030da624, v1/worker/gpu/spec_decode/dflash2) and
speculators 0.9.0 (models/dflash2/model_definitions.py). In a layer with h = RMS(x) and c = W h of both sublayers:

    x + conv(sublayer(conv(h, side 0)), side 1)      conv: :class:`~edge_dflash.model.ops.GroupedConv`

The context's keys and values are DFlash's: they are not convolved. Drafts are chosen by
:class:`~edge_dflash.model.ops.SelectorWalk`.
"""

from __future__ import annotations

from dataclasses import replace

from edge_dflash.model import dflash
from edge_dflash.model.blocks import draft_rows, logits
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.config import trained
from edge_dflash.model.fields import Fields, integer
from edge_dflash.model.ops import SelectorWalk
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
        return int(trained(name, fields.child("dflash_config"), fields))

    conv = GroupedConvSpec(own("conv_kernel_size"), own("conv_group_size"))
    if spec.hidden_size % conv.group_size:
        raise fields.error("conv_group_size", conv.group_size, f"a divisor of hidden_size ({spec.hidden_size})")
    head = SelectorSpec(own("selector_rank"), own("selector_top_k"))
    if head.top_k > spec.vocab_size:
        raise fields.error("selector_top_k", head.top_k, f"at most vocab_size ({spec.vocab_size})")
    return replace(spec, kind=KIND, conv=conv, head=head)


def propose(g: GraphBuilder, target: TargetSpec, spec: DrafterSpec) -> Program:
    """[anchor, mask x (B-1)] -> logits of the B-1 draft rows, and the walk over their candidates."""
    if spec.conv is None or not isinstance(head := spec.head, SelectorSpec):
        raise ValueError(f"a {KIND} drafter has the convolutions {spec.conv} and the head {spec.head}")
    x = dflash.block(g, target, spec)
    drafts = draft_rows(g, x, spec)
    scores = logits(g, drafts, target)
    walk(g, drafts, scores, head)
    return g.program(logits=scores, hidden=x, draft_hidden=drafts)


def walk(g: GraphBuilder, rows: str, scores: str, head: SelectorSpec) -> None:
    """The selector over the draft rows. Raises ValueError for candidates that are not."""
    name, rank, vocab = "drafter.candidate_selector", head.rank, g.columns(scores)
    if not 1 <= head.top_k <= vocab:
        raise ValueError(f"{head} takes candidates from {vocab} tokens")
    op = SelectorWalk(
        inputs=(rows, scores),
        output="walk",
        **vars(head),
        projection=g.weight(f"{name}.hidden_projection", (rank, g.columns(rows)), "walk", "walk"),
        predecessor=g.weight(f"{name}.predecessor_codebook", (vocab, rank), "walk", "walk"),
        successor=g.weight(f"{name}.successor_codebook", (vocab, rank), "walk", "walk"),
    )
    g.emit(op, 0)
