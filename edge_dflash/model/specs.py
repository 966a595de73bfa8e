"""What a model is, as frozen values: dimensions, rotary embedding, layer kinds, drafter geometry.

These are made from ``config.json`` by :mod:`edge_dflash.model.registry` and read by everything after it. Symbols in
brackets are those of the model papers: H hidden size, I intermediate size, L layers, Hq/Hkv query/key-value heads, D
head dim, V vocabulary, B block size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from edge_dflash.common.tables import UNWRITTEN

MAX_LAYERS = 1024  # of a model: deeper ones are not known, and all work on a model grows with its layers
MAX_BLOCK = 512  # rows of a block
MAX_EXPERTS = 512  # of a layer
EMBEDDING = -1  # the tap that is the embedding's output, among layer ids

LayerType = Literal["full_attention", "linear_attention"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
Activation = Literal["silu"]
Confidence = Literal["hidden", "markov"]


@dataclass(frozen=True)
class YarnScaling:
    """YaRN context extension: inverse frequencies are blended and cos/sin multiplied by ``attention_factor``."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None  # None: 0.1 * ln(factor) + 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def ramp(self, theta: float, dims: int) -> tuple[int, int]:
        """Pairs of ``dims`` rotated dimensions between which the blend rises from 0 to 1; ``theta`` is above 1."""

        def dimension(rotations: float) -> float:
            span = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return dims * math.log(span) / (2 * math.log(theta))

        low = max(math.floor(dimension(self.beta_fast)), 0)
        return low, min(math.ceil(dimension(self.beta_slow)), dims - 1)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the first ``dims`` of each head, halves convention: pairs (j, j + dims/2)."""

    theta: float
    dims: int
    scaling: YarnScaling | None = None
    # Of a target that sees: pairs j that take the positions T, H and W of a token. H has those with j % 3 == 1, W
    # those with j % 3 == 2, from the front; T has all others. None: a token has one position.
    mrope_section: tuple[int, int, int] | None = field(default=None, metadata=UNWRITTEN)


@dataclass(frozen=True)
class AttentionSpec:
    """Geometry of softmax attention."""

    heads: int  # Hq
    kv_heads: int  # Hkv
    head_dim: int  # D
    rope: RopeSpec
    gated: bool  # Qwen3.5: q_proj yields [query | gate] per head; output is multiplied by sigmoid(gate)


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated DeltaNet layer: value head j reads key head j // (value_heads // key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: query, key and value, each head-major."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts in the place of the MLP of every layer."""

    count: int  # E
    chosen: int  # of a row
    intermediate: int  # I of an expert
    shared_intermediate: int | None  # of the expert that every row takes; None: no such expert
    renormalised: bool  # whether the weights of a row's experts are made to sum to 1


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: attention of some kind, then an MLP or experts, each after an RMS norm, with a residual.

    An architecture describes its layers one by one; :func:`edge_dflash.model.blocks.decoder_layer` writes any of them.
    """

    mixer: AttentionSpec | GatedDeltaSpec
    feed_forward: int | ExpertsSpec  # I of an MLP
    eps: float  # of all norms
    activation: Activation = "silu"  # of an MLP's gate; experts have silu
    plus_one: bool = False  # RMS norms by 1 + w; that inside a gated delta layer is by w
    bidirectional: bool = False  # what a row of attention sees, with ``window``: see DrafterLayerMask
    window: int | None = None
    conv: GroupedConvSpec | None = None  # before and after both sublayers


@dataclass(frozen=True)
class PatchSpec:
    """How a picture becomes patches: sizes in pixels, bounds of the resized picture, normalisation of each channel."""

    patch: int  # side of a patch
    merge: int  # patches along each side of the block that becomes one row of the language model
    temporal: int  # frames of a patch; a still fills them all
    min_pixels: int  # of the resized picture
    max_pixels: int
    mean: tuple[float, float, float]  # of R, G and B as 0..1: a value becomes (level / 255 - mean) / std
    std: tuple[float, float, float]

    @property
    def factor(self) -> int:
        """What both sides of a resized picture are multiples of."""
        return self.patch * self.merge

    @property
    def columns(self) -> int:
        """Values of a patch: channels, frames, rows, columns."""
        return 3 * self.temporal * self.patch**2


@dataclass(frozen=True)
class VisionSpec:
    """The tower that turns a picture's patches into rows of the language model."""

    depth: int  # blocks
    hidden_size: int
    intermediate_size: int
    heads: int
    positions: int  # side of the square table of position embeddings
    theta: float  # of the 2-D rotary embedding
    out: int  # columns of the rows: the language model's hidden size
    image_token_id: int  # stands in a prompt once for each row
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    patches: PatchSpec

    @property
    def head_dim(self) -> int:
        """Columns of a head; a quarter of them are the angles of each of two axes."""
        return self.hidden_size // self.heads


@dataclass(frozen=True)
class TargetSpec:
    """A target language model, and its vision tower if it sees."""

    architecture: str  # a name of the registry
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP; 0 where there are experts
    rms_norm_eps: float
    attention: AttentionSpec
    gated_delta: GatedDeltaSpec | None  # None when no layer is "linear_attention"
    layer_types: tuple[LayerType, ...]
    tied: bool  # lm_head shares the embedding matrix
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]  # from config.json and generation_config.json, may be empty
    experts: ExpertsSpec | None = field(default=None, metadata=UNWRITTEN)  # None: a dense MLP
    vision: VisionSpec | None = field(default=None, metadata=UNWRITTEN)  # None: no image comes in

    @property
    def num_layers(self) -> int:
        """L, the number of decoder layers."""
        return len(self.layer_types)

    @property
    def feed_forward(self) -> int | ExpertsSpec:
        """What follows attention in every layer: I of an MLP, or experts."""
        return self.experts or self.intermediate_size

    @property
    def text_only(self) -> TargetSpec:
        """The target without its tower."""
        rope = replace(self.attention.rope, mrope_section=None)
        return replace(self, vision=None, attention=replace(self.attention, rope=rope))


@dataclass(frozen=True)
class DrafterLayerMask:
    """What a block row of one drafter layer may see besides the committed context.

    ``bidirectional``: rows of the block see each other in both directions; otherwise the row sees positions up to its
    own. ``window`` S: only keys with abs(q - k) < S (bidirectional) or 0 <= q - k < S (causal) are seen; None: all.
    """

    bidirectional: bool
    window: int | None


@dataclass(frozen=True)
class GroupedConvSpec:
    """Grouped dynamic convolutions over the rows of a block, before and after attention and MLP (DFlash2)."""

    taps: int
    group_size: int  # channels that share a dynamic coefficient


@dataclass(frozen=True)
class SelectorSpec:
    """DFlash2's candidate selector: a walk over the ``top_k`` tokens of each row."""

    rank: int  # of the codebooks
    top_k: int


@dataclass(frozen=True)
class MarkovSpec:
    """DSpark's Markov head: each row's logits get a bias by the token before, along a walk."""

    kind: MarkovKind
    rank: int
    top_k: int | None = None  # tokens of each row that the walk chooses among; None: all
    confidence: Confidence | None = None  # what the confidence head reads: hidden rows, or the token before as well


@dataclass(frozen=True)
class DrafterSpec:
    """A block-diffusion drafter: DFlash, or one that adds to it. Embedding and lm_head are the target's."""

    block_size: int  # B: one anchor and B - 1 masks
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # taps, as concatenated; id i: output of target layer i, or EMBEDDING
    num_target_layers: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    attention: AttentionSpec  # gated is False
    layers: tuple[DrafterLayerMask, ...]
    kind: str = field(default="dflash", metadata=UNWRITTEN)  # a name of the registry
    # The anchor's row drafts, too: row r predicts position s + r + 1, where the anchor stands at s (DSpark).
    anchor_drafts: bool = field(default=False, metadata=UNWRITTEN)
    conv: GroupedConvSpec | None = field(default=None, metadata=UNWRITTEN)
    head: SelectorSpec | MarkovSpec | None = field(default=None, metadata=UNWRITTEN)  # None: each row's argmax
    draft_vocab: int | None = field(default=None, metadata=UNWRITTEN)  # tokens of a smaller head; None: the target's

    @property
    def drafts(self) -> int:
        """K, the drafts of a propose pass."""
        return self.block_size if self.anchor_drafts else self.block_size - 1

    @property
    def verify_rows(self) -> int:
        """Rows of a verify pass of all drafts: the anchor and K drafts."""
        return self.drafts + 1

    @property
    def num_layers(self) -> int:
        """Number of drafter layers."""
        return len(self.layers)

    def block(self, anchor: int) -> list[int]:
        """Ids of a propose pass: the anchor, and masks in the place of the drafts."""
        return [anchor] + [self.mask_token_id] * (self.block_size - 1)


@dataclass(frozen=True)
class PairSpec:
    """A target and its drafter, checked to belong together; or a target alone, which decodes plainly."""

    target: TargetSpec
    drafter: DrafterSpec | None

    @property
    def text_only(self) -> PairSpec:
        """The pair without the target's tower."""
        return replace(self, target=self.target.text_only)

    @property
    def drafts(self) -> int:
        """K, drafts of one propose pass; 0 without a drafter."""
        return self.drafter.drafts if self.drafter else 0

    @property
    def verify_rows(self) -> int:
        """Most rows of a verify pass; 1 without a drafter."""
        return self.drafts + 1

    @property
    def block_size(self) -> int:
        """B, rows of a propose pass; 1 without a drafter: the anchor."""
        return self.drafter.block_size if self.drafter else 1

    @property
    def rows(self) -> int:
        """Most rows after the committed ones: a block, or a verify pass."""
        return max(self.block_size, self.verify_rows)

    @property
    def mask_token_id(self) -> int | None:
        """The drafter's, if there is one."""
        return self.drafter.mask_token_id if self.drafter else None

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The drafter's taps; none without a drafter."""
        return self.drafter.target_layer_ids if self.drafter else ()
