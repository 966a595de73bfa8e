"""The DSpark drafter: DFlash whose anchor row drafts, too, and a Markov head with a confidence head.

Maths and keys after DeepSpec (deepseek-ai/DeepSpec at afdfa7c: deepspec/modeling/dspark), further keys after vLLM
(vllm/model_executor/models/qwen3_dspark.py at 0302ff40). Row k of the block predicts position s + k + 1, where the
anchor stands at s: B drafts of B rows. ``sample_from_anchor`` false gives DFlash's rows. Drafts are chosen by
:class:`~edge_dflash.model.ops.MarkovWalk`; with ``markov_rank`` 0 by each row's logits alone.
"""

from __future__ import annotations

from dataclasses import replace

from edge_dflash.model import dflash
from edge_dflash.model.blocks import draft_rows, logits
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.config import either, trained
from edge_dflash.model.fields import Fields, flag, free, integer, only, text
from edge_dflash.model.ops import MarkovWalk
from edge_dflash.model.program import Program
from edge_dflash.model.specs import Confidence, DrafterSpec, MarkovKind, MarkovSpec, TargetSpec

KIND = "dspark"
NAMES = ("Qwen3DSparkModel", "DSparkDraftModel")
BARE = (".bias",)  # ends of names without ``.weight``
KINDS: dict[str, MarkovKind] = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}
WHOLE = 4096  # tokens of a vocabulary up to which the walk chooses among all
TOP_K = 64  # tokens of each row that it chooses among else: a step then reads 65 rows of W1 and W2
TABLE = dflash.table(
    {
        "sample_from_anchor": flag(True, null=True, beside="shift_label says the same"),
        "shift_label": flag(null=True, beside="it says what sample_from_anchor says"),
        "markov_rank": integer(least=0, null=True),
        "markov_head_type": text(*KINDS, default="vanilla", null=True),
        "enable_confidence_head": flag(False, null=True, beside="use_confidence_head says the same"),
        "use_confidence_head": flag(null=True, beside="it says what enable_confidence_head says"),
        "confidence_head_with_markov": flag(False, null=True),
        "dspark_draft_topk": integer(null=True),
        **only("shift_labels shifted", None, why="rows that sample_from_anchor does not name"),
        **only("projector_type", None, KIND, "dflash", why="another drafter design"),
        **free("used in training alone", "confidence_head_alpha"),
    }
)


def read(fields: Fields, target_layers: int | None) -> DrafterSpec:
    """Spec of a drafter; see :func:`dflash.read`. Raises CheckpointError."""
    spec = dflash.read(fields, target_layers)
    dflash.whole_vocabulary(fields, spec)
    anchor_drafts = _flag(fields, "sample_from_anchor", "shift_label")
    return replace(spec, kind=KIND, anchor_drafts=anchor_drafts, head=_head(fields, spec.vocab_size))


def _head(fields: Fields, vocab: int) -> MarkovSpec | None:
    rank = trained("markov_rank", fields.child("dflash_config"), fields)
    judges = _flag(fields, "enable_confidence_head", "use_confidence_head")
    if not rank:
        if judges:
            raise fields.error("enable_confidence_head", True, "false, or a markov_rank above 0")
        return None
    confidence: Confidence | None = None
    if judges:
        with_markov = _at(fields, "confidence_head_with_markov")["confidence_head_with_markov"]
        confidence = "markov" if with_markov else "hidden"
    kind = KINDS[_at(fields, "markov_head_type")["markov_head_type"]]
    top_k = None if vocab <= WHOLE else TOP_K
    if (source := _at(fields, "dspark_draft_topk")).has("dspark_draft_topk"):
        top_k = min(source["dspark_draft_topk"], vocab)
    return MarkovSpec(kind, rank, top_k, confidence)


def _flag(fields: Fields, name: str, other: str) -> bool:
    """A flag that files write by either name; where both are there, they must agree."""
    source, second = _at(fields, name), _at(fields, other)
    if not second.has(other):
        return bool(source[name])
    if source.has(name) and source[name] != second[other]:
        raise second.error(other, second[other], f"the same as {name}")
    return bool(second[other])


def _at(fields: Fields, name: str) -> Fields:
    """Which object of the file holds a key: the outer one, or ``dflash_config``."""
    return either(name, fields.child("dflash_config"), fields)


def propose(g: GraphBuilder, target: TargetSpec, spec: DrafterSpec) -> Program:
    """[anchor, mask x (B-1)] -> logits of the draft rows, and the walk over them."""
    x = dflash.block(g, target, spec)
    rows = draft_rows(g, x, spec)
    scores = logits(g, rows, target)
    if isinstance(head := spec.head, MarkovSpec):
        walk(g, rows, scores, head)
    return g.program(logits=scores, hidden=x, draft_hidden=rows)


def walk(g: GraphBuilder, rows: str, scores: str, head: MarkovSpec) -> None:
    """The Markov head over the draft rows, and its confidence head. Raises ValueError for candidates that are not."""
    vocab, rank, hidden = g.columns(scores), head.rank, g.columns(rows)
    if head.top_k is not None and not 1 <= head.top_k <= vocab:
        raise ValueError(f"{head} takes candidates from {vocab} tokens")

    def matrix(name: str, shape: tuple[int, int]) -> str:
        return g.weight(f"drafter.{name}", shape, "walk", "walk")

    def affine(name: str, shape: tuple[int, int]) -> tuple[str, str]:
        bias = g.weight(f"drafter.{name}.bias", shape[:1], "vector", "walk")
        return matrix(name, shape), bias

    mix = judge = None
    if head.kind == "gated":
        mix = affine("markov_head.gate_proj", (rank, hidden + rank))
    elif head.kind == "rnn":
        mix = affine("markov_head.joint_proj", (3 * rank, 2 * rank + hidden))
    if head.confidence is not None:
        judge = affine("confidence_head.proj", (1, hidden + (rank if head.confidence == "markov" else 0)))
    op = MarkovWalk(
        inputs=(rows, scores),
        output="walk",
        predecessor=matrix("markov_head.markov_w1", (vocab, rank)),
        successor=matrix("markov_head.markov_w2", (vocab, rank)),
        mix=mix,
        judge=judge,
        **vars(head),
    )
    g.emit(op, 0)
