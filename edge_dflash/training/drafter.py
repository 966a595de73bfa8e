"""A drafter in training: the Programs of its pair, run over every block of several sequences at once, with gradients.

The ops are those that backends run; here a tensor is [sequences, blocks, rows, columns], context and blocks lie side by
side in one attention, and nothing is stored between passes. Embedding and head are the target's and stay as they are.

Weights and keys are rounded as a bundle holds them on the way forward, and gradients pass through: equal to the
functions of :mod:`edge_dflash.weights.quantize` followed by dequantization, on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from edge_dflash.backends.reference.attention import rope_table
from edge_dflash.errors import RequestError
from edge_dflash.model import dflash, pair_programs
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.ops import (
    UNDRAFTED,
    Add,
    Attend,
    Embed,
    GroupedConv,
    KvAppend,
    Linear,
    Op,
    Remap,
    RmsNorm,
    SelectRows,
    SwiGlu,
)
from edge_dflash.model.program import Program, WeightSpec
from edge_dflash.model.specs import PairSpec, RopeSpec
from edge_dflash.weights.formats import BLOCK, WeightFormat
from edge_dflash.weights.quantize import E2M1, E2M1_MAX, E4M3_MAX, E4M3_TINY, GLOBAL_DIVISOR, fused_group

_DECISIONS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the magnitudes of E2M1
KV_MARGIN = 1.25  # the largest key or value is this far below the largest FP8 code


def fake_weight(weight: torch.Tensor, form: WeightFormat, largest: torch.Tensor) -> torch.Tensor:
    """A matrix [N, K] (float32) as a checkpoint in BF16 and a bundle in ``form`` keep it, with the matrix's gradient.

    ``largest``: max|W|, of a fused group for NVFP4. Formats that are wide stay as they are.
    """
    if form not in ("nvfp4", "fp8"):
        return weight
    with torch.no_grad():
        kept = weight.bfloat16().float()  # what a checkpoint will hold
        if form == "nvfp4":
            scales = (largest / GLOBAL_DIVISOR).expand(kept.numel() // BLOCK)
            held = nvfp4_values(kept.reshape(-1, BLOCK), scales).view_as(kept)
        else:
            held = _fp8_values(kept, largest / E4M3_MAX)
    return weight + (held - weight).detach()


def fake_fp8(x: torch.Tensor) -> torch.Tensor:
    """x as stored in an FP8 E4M3 cache with one scale for the tensor; float32; the gradient passes through."""
    with torch.no_grad():
        wide = x.float()
        stored = _fp8_values(wide, wide.abs().amax() * (KV_MARGIN / E4M3_MAX))
    return x + (stored - x).detach()


def nvfp4_values(blocks: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Dequantized NVFP4 of blocks [n, 16] (float32) with a positive global scale for each [n]."""
    decisions, magnitudes = _tables(blocks.device)
    global_scale = global_scale.clamp_min(1e-30)
    wanted = blocks.abs().amax(-1) / (E2M1_MAX * global_scale)
    wanted = torch.where(wanted == 0, 1.0, wanted).clamp(E4M3_TINY, E4M3_MAX)
    scale = wanted.to(torch.float8_e4m3fn).float()
    size = (blocks / (scale * global_scale).unsqueeze(-1)).abs()
    code = torch.bucketize(size, decisions)  # a tie goes down ...
    tie_up = (size == 0.75) | (size == 1.75) | (size == 3.5)  # ... but to the even code
    magnitude = magnitudes[code + tie_up]
    return torch.copysign(magnitude, blocks) * scale.unsqueeze(-1) * global_scale.unsqueeze(-1)


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(_DECISIONS, device=device), torch.tensor(E2M1, device=device)


def _fp8_values(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale = scale.clamp_min(1e-12)
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


HEAD, EMBEDDING = "target.lm_head", "target.embed_tokens"
KeysValues = tuple[torch.Tensor, torch.Tensor]  # [sequences, Hkv, T, D] each


@dataclass(frozen=True)
class BlockContext:
    """Keys and values of whole sequences, by state."""

    kv: Mapping[str, KeysValues]
    tokens: int  # T


class BlockDrafter(nn.Module):
    """The trained weights of a pair's drafter, float32, and the passes over them.

    ``formats``: of its weights in a bundle; linears are rounded to them, and with ``fp8_kv`` keys and values to FP8,
    while ``quantized`` is set.
    """

    def __init__(
        self,
        pair: PairSpec,
        weights: Mapping[str, torch.Tensor],
        formats: Mapping[str, WeightFormat] | None = None,
        *,
        fp8_kv: bool = True,
    ) -> None:
        """Raise RequestError for a pair without a drafter."""
        super().__init__()
        if pair.drafter is None:
            raise RequestError("the pair has no drafter to train")
        self.pair, self.spec = pair, pair.drafter
        self.propose, self.context_program = pair_programs(pair).propose, context_program(pair)
        self.specs = drafter_weights(pair)
        self.quantized = False
        self._formats, self._fp8_kv = formats or {}, fp8_kv
        self._ropes: dict[RopeSpec, KeysValues] = {}
        self._length = 1  # positions
        self._held: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}  # rounded matrices, while nothing is learnt
        frozen = {op.weight for op in self.propose.ops if isinstance(op, Remap)}  # ids are no numbers to learn
        for name in self.specs:
            values = nn.Parameter(weights[name].detach().float().clone(), requires_grad=name not in frozen)
            self.register_parameter(_key(name), values)

    def tensor(self, name: str) -> torch.Tensor:
        """A weight by its canonical name."""
        return self.get_parameter(_key(name))

    def forget_rounded(self) -> None:
        """Free the rounded matrices that passes without gradients keep."""
        self._held.clear()

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights by canonical name."""
        return {name: self.tensor(name).detach() for name in self.specs}

    def context(self, taps: torch.Tensor) -> BlockContext:
        """Keys and values of sequences whose taps are [B, T, n * H]."""
        tensors, kv = {"taps": taps[:, None]}, {}
        self._length = taps.shape[1] + self.spec.block_size
        for op in self.context_program.ops:
            if isinstance(op, KvAppend):
                k, v = (tensors[name] for name in op.inputs)
                kv[op.state] = self._keys_values(op, k, v, torch.arange(taps.shape[1], device=taps.device)[None, None])
            else:
                tensors[op.output] = self._execute(op, tensors)
        return BlockContext(kv, taps.shape[1])

    def block(
        self, context: BlockContext, anchors: torch.Tensor, first: torch.Tensor, embedding: torch.Tensor
    ) -> torch.Tensor:
        """Hidden rows [B, A, K, H] that draft, of blocks whose anchors, tokens ``first`` [B, A], stand at ``anchors``.

        ``embedding`` [V, H], float32 or BF16. A block sees the context before its anchor.
        """
        ids = first.new_full((*first.shape, self.spec.block_size), self.spec.mask_token_id)
        ids[..., 0] = first
        rows = torch.arange(self.spec.block_size, device=ids.device)
        masks: dict[tuple[bool, int | None], torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {"ids": ids}
        drafting = self._drafting()
        for op in self.propose.ops:
            if isinstance(op, Embed):
                tensors[op.output] = F.embedding(ids, embedding).float()  # the residual stream is not rounded
            elif isinstance(op, Attend):
                kind = op.bidirectional, op.window
                if kind not in masks:
                    masks[kind] = _visible(op, anchors, rows, context.tokens)
                q, k, v = (tensors[name] for name in op.inputs)
                tensors[op.output] = self._attend(op, (q, k, v), context.kv[op.state], anchors, masks[kind])
            else:
                tensors[op.output] = self._execute(op, tensors)
            if op.output == drafting:
                return tensors[drafting]
        raise ValueError(f"the propose pass makes no {drafting}")

    def logits(self, rows: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] float32 of rows [..., H] that draft; ``head`` [V, H] is the target's."""
        tensors = {self._drafting(): rows}
        for op in self.propose.ops:
            if isinstance(op, Linear) and op.weight == HEAD:
                return F.linear(rows, head).float()
            if op.inputs[0] in tensors and isinstance(op, Linear | Remap):
                tensors[op.output] = self._execute(op, tensors)
                if isinstance(op, Remap):
                    return tensors[op.output].float()
        raise ValueError("the propose pass has no head")

    def _drafting(self) -> str:
        """The tensor of the rows that draft."""
        return self.propose.outputs.get("draft_hidden") or next(
            op.inputs[0]
            for op in self.propose.ops
            if isinstance(op, Linear) and (op.weight == HEAD or op.weight == "drafter.lm_head")
        )

    def _execute(self, op: Op, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x, *others = (tensors[name] for name in op.inputs)
        match op:
            case Linear():
                return F.linear(x, self._linear(op.weight))
            case RmsNorm():
                return F.rms_norm(x.float(), x.shape[-1:], self.tensor(op.weight), op.eps)
            case Add():
                return x + others[0]
            case SwiGlu():
                return F.silu(x) * others[0]
            case SelectRows():
                return x[..., 1:, :]
            case GroupedConv():
                return grouped_conv(op, x, others[0], self.tensor(op.base))
            case Remap():
                wide = x.new_full((*x.shape[:-1], op.vocab), UNDRAFTED)
                return wide.index_copy(-1, self.tensor(op.weight).long(), x)
            case _:
                raise TypeError(f"a drafter in training has no function for op {type(op).__name__}")

    def _linear(self, name: str) -> torch.Tensor:
        """A matrix, as the bundle will hold it where that is wanted."""
        weight, form = self.tensor(name), self._formats.get(name, "bf16")
        if not self.quantized or form not in ("nvfp4", "fp8"):
            return weight
        group = fused_group(name) if form == "nvfp4" else (name,)
        members = [self.tensor(one) for one in group if one in self.specs]
        versions = tuple(one._version for one in members)
        if not torch.is_grad_enabled() and name in self._held and self._held[name][0] == versions:
            return self._held[name][1]
        largest = torch.stack([one.detach().bfloat16().abs().amax() for one in members]).amax().float()
        held = fake_weight(weight, form, largest)
        if not torch.is_grad_enabled():
            self._held[name] = versions, held
        return held

    def _keys_values(self, op: KvAppend | Attend, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> KeysValues:
        """Normed, turned, as stored: k, v [B, A, R, Hkv * D] at positions [.., A, R] to [B, Hkv, A * R, D]."""
        k = self._turned(op, k, op.k_norm, op.kv_heads, at)
        v = torch.unflatten(v, -1, (op.kv_heads, op.head_dim)).flatten(1, 2).transpose(1, 2)
        return (fake_fp8(k), fake_fp8(v)) if self.quantized and self._fp8_kv else (k, v)

    def _turned(self, op: KvAppend | Attend, x: torch.Tensor, norm: str, heads: int, at: torch.Tensor) -> torch.Tensor:
        """[B, heads, A * R, D] of x [B, A, R, heads * D]."""
        x = torch.unflatten(x, -1, (heads, op.head_dim))
        x = F.rms_norm(x.float(), x.shape[-1:], self.tensor(norm), op.eps)
        cos, sin = (table[at][..., None, :] for table in self._rope(op.rope, x.device))
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).flatten(1, 2).transpose(1, 2)

    def _rope(self, spec: RopeSpec, device: torch.device) -> KeysValues:
        """Cosines and sines of all positions that the last context and its blocks have."""
        known, length = self._ropes.get(spec), self._length
        if known is None or len(known[0]) < length:
            cos, sin = rope_table(spec, max(512, 1 << (length - 1).bit_length()))
            known = self._ropes[spec] = cos.to(device), sin.to(device)
        return known

    def _attend(
        self,
        op: Attend,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        known: KeysValues,
        anchors: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of block rows over context and own block; ``visible`` [B, 1, A * R, T + A * R]."""
        q, k, v = qkv
        at = anchors[..., None] + torch.arange(q.shape[2], device=q.device)
        query = self._turned(op, q, op.q_norm, op.heads, at)
        own = self._keys_values(op, k, v, at)
        width = v.dtype  # of products: BF16 in mixed precision
        keys, values = (torch.cat((old.to(width), new.to(width)), 2) for old, new in zip(known, own, strict=True))
        out = F.scaled_dot_product_attention(query.to(width), keys, values, attn_mask=visible, enable_gqa=True)
        return torch.unflatten(out.transpose(1, 2).flatten(2), 1, q.shape[1:3])


def context_program(pair: PairSpec) -> Program:
    """taps -> the drafter's keys and values, as every pass of the target appends them."""
    if pair.drafter is None:
        raise RequestError("the pair has no drafter to train")
    taps = len(pair.drafter.target_layer_ids) * pair.target.hidden_size
    g = GraphBuilder("context", commits=True, inputs={"taps": taps})
    dflash.append_context(g, "taps", pair.drafter)
    return g.program()


def drafter_weights(pair: PairSpec) -> dict[str, WeightSpec]:
    """Weights of a pair's drafter, in the order of their use."""
    return {name: spec for name, spec in pair_programs(pair).weights.items() if name.startswith("drafter.")}


def grouped_conv(op: GroupedConv, u: torch.Tensor, c: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Convolution over the rows of blocks: u [..., R, H], coefficients c [..., R, 2 * taps * groups]; float32."""
    dynamic = torch.unflatten(c.float(), -1, (2, op.taps, -1))[..., op.side, :, :]
    dynamic = dynamic.repeat_interleave(op.group_size, -1)
    rows = u.float()
    total: torch.Tensor = (base[op.side, 0] + dynamic[..., 0, :]) * rows
    for tap in range(1, op.taps):
        before = F.pad(rows, (0, 0, tap, 0))[..., : rows.shape[-2], :]
        total = total + (base[op.side, tap] + dynamic[..., tap, :]) * before
    return total


def _visible(op: Attend, anchors: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """What each row sees: the context before its anchor, then rows of that block. [B, 1, A * R, T + A * R]."""
    position = anchors[..., None] + rows  # [B, A, R]
    place = torch.arange(tokens, device=rows.device)
    context = (place < anchors[..., None, None]).expand(*position.shape, tokens)
    inside = torch.ones(len(rows), len(rows), dtype=torch.bool, device=rows.device)
    if not op.bidirectional:
        inside = inside.tril()
    if op.window is not None:
        context = context & (position[..., None] - place < op.window)
        inside = inside.triu(1 - op.window).tril(op.window - 1)
    same = torch.eye(anchors.shape[1], dtype=torch.bool, device=rows.device)  # blocks
    own = (same[:, None, :, None] & inside[None, :, None, :]).flatten(2).flatten(0, 1)
    return torch.cat((context.flatten(1, 2), own.expand(len(anchors), -1, -1)), -1)[:, None]


def _key(name: str) -> str:
    return name.replace(".", "/")
