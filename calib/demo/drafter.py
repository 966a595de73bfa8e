"""The drafters for training: every block of a sequence in one pass, module names those of their checkpoints.

One backbone with three switches: DFlash as it is, DFlash2 (convolutions, candidate selector), DSpark (the anchor's row
drafts, Markov head). A block [anchor token, mask, mask, ...] at position a sees the context (target taps) of positions
before a, and its own rows. The last K rows propose the tokens at a + 1 .. a + K. Plain-w norms, RoPE over the whole
head. Embedding and lm_head are the target's and stay outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn

from calib.demo.fakequant import Linear
from calib.demo.heads import Confidence, MarkovConfig, MarkovHead, Selector, SelectorConfig
from calib.demo.modules import GroupedConv, Mlp, Norm, initialise, rope
from calib.demo.tokenizer import MASK_ID
from edge_dflash.training.fakequant import fake_fp8

Kind = Literal["dflash", "dflash2", "dspark"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class ConvConfig:
    """The convolutions around attention and MLP."""

    taps: int = 2
    group_size: int = 16  # channels that share the part of a kernel which depends on the row


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter; the defaults are those of the shipped demo drafter."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 768
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    sliding: tuple[bool, ...] = (True, True, False)  # one for each layer
    sliding_window: int = 256
    causal: bool = True  # on sliding layers a row sees no later rows of its block
    anchor_drafts: bool = False  # the anchor's row proposes too
    conv: ConvConfig | None = None
    head: SelectorConfig | MarkovConfig | None = None
    block_size: int = 16
    mask_token_id: int = MASK_ID
    target_layer_ids: tuple[int, ...] = (1, 3, 5, 6)
    num_target_layers: int = 8
    rope_theta: float = 1e7
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    @property
    def kind(self) -> Kind:
        """What the drafter is called."""
        if isinstance(self.head, MarkovConfig):
            return "dspark"
        return "dflash" if self.head is None else "dflash2"

    @property
    def drafts(self) -> int:
        """Tokens that a block proposes, K."""
        return self.block_size - (not self.anchor_drafts)


def of_kind(kind: Kind, sizes: DrafterConfig) -> DrafterConfig:
    """A drafter of some kind with the sizes, window and K of a DFlash drafter."""
    if kind == "dflash2":
        return replace(sizes, causal=False, conv=ConvConfig(), head=SelectorConfig())
    if kind == "dspark":
        full = (False,) * len(sizes.sliding)
        return replace(sizes, sliding=full, block_size=sizes.drafts, anchor_drafts=True, head=MarkovConfig())
    return sizes


class BlockAttention(nn.Module):
    """Attention of block rows over the context and their own block."""

    def __init__(self, c: DrafterConfig, *, sliding: bool) -> None:
        super().__init__()
        self.c, self.sliding = c, sliding
        self.fp8 = False
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps, plus_one=False)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps, plus_one=False)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K (normed, rotated) and V [B, Hkv, rows, D] of x [B, rows, H]."""
        c = self.c
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, c.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        k = rope(k, positions, c.head_dim, c.rope_theta)
        return (fake_fp8(k), fake_fp8(v)) if self.fp8 else (k, v)

    def forward(self, x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """x [B, A * block, H] at anchors [B, A]; context features [B, T, H] of positions 0..T-1."""
        c = self.c
        batch, count, block = x.shape[0], anchors.shape[1], x.shape[1] // anchors.shape[1]
        positions = (anchors[..., None] + torch.arange(block, device=x.device)).flatten(1)  # [B, A * block]
        shape = (batch, c.num_key_value_heads, -1, count, block, c.head_dim)  # queries: [B, Hkv, group, A, block, D]
        q = rope(
            self.q_norm(self.q_proj(x).unflatten(-1, (-1, c.head_dim))).transpose(1, 2),
            positions,
            c.head_dim,
            c.rope_theta,
        ).reshape(shape)
        length = context.shape[1]
        place = torch.arange(length, device=x.device)
        k, v = self.keys_values(context, place)
        own_k, own_v = (torch.unflatten(y, 2, (count, block)).unsqueeze(2) for y in self.keys_values(x, positions))
        seen = (place < anchors[..., None])[:, :, None, :].expand(-1, -1, block, -1)  # [B, A, block, T]
        own_seen = torch.ones(block, block, dtype=torch.bool, device=x.device)
        if self.sliding:
            seen = seen & (positions.view(batch, count, block, 1) - place < c.sliding_window)
            own_seen = own_seen.tril(0 if c.causal else c.sliding_window - 1).triu(1 - c.sliding_window)
        scores = torch.cat(
            (
                (q.flatten(2, 4) @ k.transpose(-1, -2))
                .view(*q.shape[:-1], length)
                .masked_fill(~seen[:, None, None], -math.inf),
                (q @ own_k.transpose(-1, -2)).masked_fill(~own_seen, -math.inf),
            ),
            -1,
        )
        p = torch.softmax(scores.float() * c.head_dim**-0.5, -1).to(v.dtype)
        out = (p[..., :length].flatten(2, 4) @ v).view(q.shape) + p[..., length:] @ own_v
        merged = out.flatten(1, 2).permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)  # [B, A * block, Hq * D]
        result: torch.Tensor = self.o_proj(merged)
        return result


class DrafterLayer(nn.Module):
    """Block attention and MLP on a residual stream, each perhaps between two convolutions over the block."""

    def __init__(self, c: DrafterConfig, *, sliding: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps, plus_one=False)
        self.self_attn = BlockAttention(c, sliding=sliding)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps, plus_one=False)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)
        self.attention_conv = GroupedConv(c.hidden_size, c.conv.taps, c.conv.group_size) if c.conv else None
        self.mlp_conv = GroupedConv(c.hidden_size, c.conv.taps, c.conv.group_size) if c.conv else None

    def forward(self, x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """x [B, A * block, H]."""
        blocks = anchors.shape[1]
        h = self.input_layernorm(x)
        x = x + _between(self.attention_conv, h, blocks, lambda u: self.self_attn(u, context, anchors))
        return x + _between(self.mlp_conv, self.post_attention_layernorm(x), blocks, self.mlp)


def _between(
    conv: GroupedConv | None, h: torch.Tensor, blocks: int, sublayer: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The sublayer of normed rows h; with a convolution before and after it, whose kernels come from h."""
    if conv is None:
        return sublayer(h)
    dynamic = conv.dynamic(h)
    before: torch.Tensor = conv(h, dynamic, 0, blocks)
    after: torch.Tensor = conv(sublayer(before), dynamic, 1, blocks)
    return after


class Drafter(nn.Module):
    """A drafter; ``state_dict`` has the tensor names of its checkpoint."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        self.fc = Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps, plus_one=False)
        self.layers = nn.ModuleList(DrafterLayer(c, sliding=sliding) for sliding in c.sliding)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps, plus_one=False)
        initialise(self, len(c.sliding))
        self.candidate_selector: Selector | None = None
        self.markov_head: MarkovHead | None = None
        self.confidence_head: Confidence | None = None
        if isinstance(c.head, SelectorConfig):
            self.candidate_selector = Selector(c.vocab_size, c.hidden_size, c.head)
        elif c.head is not None:
            self.markov_head = MarkovHead(c.vocab_size, c.hidden_size, c.head)
            if c.head.confidence is not None:
                self.confidence_head = Confidence(c.hidden_size, c.head)

    def set_fp8(self, on: bool) -> None:
        """Round keys and values as an FP8 cache does."""
        for layer in self.layers:
            if isinstance(layer, DrafterLayer):
                layer.self_attn.fp8 = on

    def forward(
        self, taps: torch.Tensor, anchors: torch.Tensor, first: torch.Tensor, embedding: torch.Tensor
    ) -> torch.Tensor:
        """Normed hidden rows [B, A, block, H]; the last K of a block propose.

        taps [B, T, n * H] of the whole sequences; anchors [B, A] positions; first [B, A] the tokens there; embedding
        [V, H] of the target.
        """
        c = self.c
        context = self.hidden_norm(self.fc(taps))
        ids = first.new_full((*first.shape, c.block_size), c.mask_token_id)
        ids[..., 0] = first
        x = nn.functional.embedding(ids.flatten(1), embedding)
        for layer in self.layers:
            x = layer(x, context, anchors)
        out: torch.Tensor = self.norm(x).unflatten(1, (anchors.shape[1], c.block_size))
        return out

    def proposals(self, hidden: torch.Tensor, logits: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Greedy drafts [B, A, K] of the proposing rows: hidden [B, A, K, H], the head's logits [B, A, K, V]."""
        head = self.candidate_selector or self.markov_head
        return logits.argmax(-1) if head is None else head.walk(hidden, logits, first)
