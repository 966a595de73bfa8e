"""A drafter in training: the Programs of its pair, run over every block of several sequences at once, with gradients.

The ops are those of :mod:`edge_dflash.backends.reference`; here a tensor is [sequences, blocks, rows, columns], context
and blocks lie side by side in one attention, and nothing is stored between passes. Embedding and head are the target's
and stay as they are.

Weights and keys are rounded as a bundle holds them on the way forward, and gradients pass through: equal to the
functions of :mod:`edge_dflash.weights.quantize` followed by dequantization, on any device. NVFP4 block scales are those
of max / 6; a bundle whose scales were searched holds values that are nearer to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from edge_dflash.backends.reference.attention import Table, rope_table, turned, visible
from edge_dflash.backends.reference.dense import dense
from edge_dflash.errors import BuildError, RequestError
from edge_dflash.model import dflash, pair_programs
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.ops import Attend, KvAppend, Linear, Op, Remap, SelectRows, StateOp, Walk
from edge_dflash.model.program import Program, WeightSpec
from edge_dflash.model.specs import DrafterSpec, PairSpec, RopeSpec
from edge_dflash.weights.e4m3 import E4M3_MAX, E4M3_TINY, from_e4m3, to_e4m3
from edge_dflash.weights.formats import BLOCK, WeightFormat, read_as
from edge_dflash.weights.quantize import E2M1_MAX, GLOBAL_DIVISOR, fused_group, nearest_e2m1

KV_MARGIN = 1.25  # the largest key or value is this far below the largest FP8 code


def fake_weight(weight: torch.Tensor, form: WeightFormat, largest: torch.Tensor) -> torch.Tensor:
    """A matrix [N, K] (float32) as a checkpoint in BF16 and a bundle in ``form`` keep it, with the matrix's gradient.

    ``largest``: max|W|, of a fused group for NVFP4. Formats that are wide stay as they are. Raises BuildError for a
    format whose rounding is not known here.
    """
    if not read_as(form).quantized:
        return weight
    if form not in ("nvfp4", "fp8"):
        raise BuildError(f"a drafter is not trained in {form}: build the bundle with a drafter in nvfp4, fp8 or bf16")
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
    global_scale = global_scale.clamp_min(1e-30)
    wanted = blocks.abs().amax(-1) / (E2M1_MAX * global_scale)
    wanted = torch.where(wanted == 0, 1.0, wanted).clamp(E4M3_TINY, E4M3_MAX)
    scale = wanted.to(torch.float8_e4m3fn).float()
    return nearest_e2m1(blocks / (scale * global_scale)[:, None]) * scale[:, None] * global_scale[:, None]


def _fp8_values(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale = scale.clamp_min(1e-12)
    return from_e4m3(to_e4m3(x, scale), scale)


HEAD = "target.lm_head"
TARGET = frozenset((HEAD, "target.embed_tokens"))  # weights of the target that its drafter has
_HEAD = ".lm_head"  # the target's, or of a drafter that has its own
KeysValues = tuple[torch.Tensor, torch.Tensor]  # [sequences, Hkv, T, D] each
BlockContext = Mapping[str, KeysValues]  # of whole sequences, by state


class BlockDrafter(nn.Module):
    """The trained weights of a pair's drafter, float32, what it has of its target, and the passes over them.

    ``weights``: the drafter's, and the target's embedding and head as they are multiplied with. ``formats``: of its
    weights in a bundle; linears are rounded to them, and with ``fp8_kv`` keys and values to FP8, while ``quantized`` is
    set.
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
        self.pair, self.spec = pair, drafter_spec(pair)
        self.propose, self._context = pair_programs(pair).propose, _context_program(pair, self.spec)
        ops = [op for op in self.propose.ops if not isinstance(op, Walk)]
        head = next(i for i, op in enumerate(ops) if isinstance(op, Linear) and op.weight.endswith(_HEAD))
        self._block, self._head = ops[:head], ops[head:]
        self.specs = drafter_weights(pair)
        self.quantized = False
        self._formats = {name: form for name, form in (formats or {}).items() if name in self.specs}
        self._fp8_kv = fp8_kv
        self._ropes: dict[RopeSpec, Table] = {}
        self._length = 1  # positions
        self._held: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}  # rounded matrices, while nothing is learnt
        frozen = {op.weight for op in self.propose.ops if isinstance(op, Remap)}  # ids are no numbers to learn
        for name in self.specs:
            values = nn.Parameter(weights[name].detach().float().clone(), requires_grad=name not in frozen)
            self.register_parameter(_key(name), values)
        for name in TARGET.intersection(weights):
            self.register_buffer(_key(name), weights[name], persistent=False)

    def tensor(self, name: str) -> torch.Tensor:
        """A weight by its canonical name."""
        found: torch.Tensor = getattr(self, _key(name))
        return found

    def forget_rounded(self) -> None:
        """Free the rounded matrices that passes without gradients keep."""
        self._held.clear()

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights by canonical name."""
        return {name: self.tensor(name).detach() for name in self.specs}

    def context(self, taps: torch.Tensor) -> BlockContext:
        """Keys and values of sequences whose taps are [B, T, n * H]."""
        self._length = taps.shape[1] + self.spec.block_size
        at, kv = torch.arange(taps.shape[1], device=taps.device), dict[str, KeysValues]()

        def keep(op: KvAppend, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv[op.state] = self._keys_values(op, k, v, at)
            return at

        self._run(self._context.ops, {"taps": taps}, keep)
        return kv

    def block(self, context: BlockContext, anchors: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Hidden rows [B, A, K, H] that draft, of blocks whose anchors, tokens ``first`` [B, A], stand at ``anchors``.

        A block sees the context before its anchor.
        """
        ids = first.new_full((*first.shape, self.spec.block_size), self.spec.mask_token_id)
        ids[..., 0] = first
        at = anchors[..., None] + torch.arange(self.spec.block_size, device=ids.device)
        masks: dict[tuple[bool, int | None], torch.Tensor] = {}

        def attend(op: Attend, *qkv: torch.Tensor) -> torch.Tensor:
            rule = op.bidirectional, op.window
            if rule not in masks:
                masks[rule] = _mask(rule, at, context[op.state][0].shape[2])
            return self._attend(op, qkv, context[op.state], at, masks[rule])

        return self._run(self._block, {"ids": ids}, attend)[self._head[0].inputs[0]]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] float32 of rows [..., H] that draft."""
        for op in self._head:
            rows = dense(op, (rows,), self)
        return rows.float()

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """See :class:`~edge_dflash.backends.reference.dense.Arithmetic`."""
        return F.linear(x, self._matrix(name))

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`~edge_dflash.backends.reference.dense.Arithmetic`."""
        return F.silu(x)

    def _run(
        self, ops: Sequence[Op], tensors: dict[str, torch.Tensor], state: Callable[..., torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """``tensors`` with those that ops make; ``state`` is what state ops do, given the op and its inputs."""
        for op in ops:
            inputs = tuple(tensors[name] for name in op.inputs)
            if isinstance(op, StateOp):
                tensors[op.output] = state(op, *inputs)
            elif isinstance(op, SelectRows):  # those that draft
                tensors[op.output] = inputs[0][..., 1:, :]
            else:
                tensors[op.output] = dense(op, inputs, self)
        return tensors

    def _matrix(self, name: str) -> torch.Tensor:
        """A matrix, as the bundle will hold it where that is wanted."""
        weight, form = self.tensor(name), self._formats.get(name, "bf16")
        if not self.quantized or not read_as(form).quantized:
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
        """Keys and values as stored, [B, Hkv, rows, D], of k and v [B, .., rows, Hkv * D] at positions [.., rows]."""
        k = _heads(turned(op, k, self.tensor(op.k_norm), self._rope(op.rope, at)))
        v = _heads(torch.unflatten(v, -1, (-1, op.head_dim)))
        return (fake_fp8(k), fake_fp8(v)) if self.quantized and self._fp8_kv else (k, v)

    def _rope(self, spec: RopeSpec, at: torch.Tensor) -> Table:
        """Cosines and sines of some positions; the tables hold all that the last context and its blocks have."""
        known = self._ropes.get(spec)
        if known is None or len(known[0]) < self._length:
            cos, sin = rope_table(spec, max(512, 1 << (self._length - 1).bit_length()))
            known = self._ropes[spec] = cos.to(at.device), sin.to(at.device)
        return known[0][at], known[1][at]

    def _attend(
        self, op: Attend, qkv: Sequence[torch.Tensor], known: KeysValues, at: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention of block rows over context and own block; ``mask`` [B, 1, A * R, T + A * R]."""
        q, k, v = qkv
        query = _heads(turned(op, q, self.tensor(op.q_norm), self._rope(op.rope, at)))
        own = self._keys_values(op, k, v, at)
        width = v.dtype  # of products: BF16 in mixed precision
        keys, values = (torch.cat((old.to(width), new.to(width)), 2) for old, new in zip(known, own, strict=True))
        out = F.scaled_dot_product_attention(query.to(width), keys, values, attn_mask=mask, enable_gqa=True)
        return torch.unflatten(out.transpose(1, 2).flatten(2), 1, at.shape[1:])


def drafter_spec(pair: PairSpec) -> DrafterSpec:
    """The drafter of a pair. Raises RequestError without one."""
    if pair.drafter is None:
        raise RequestError("the pair has no drafter to train; give --drafter, or a geometry to begin from")
    return pair.drafter


def drafter_weights(pair: PairSpec) -> dict[str, WeightSpec]:
    """Weights of a pair's drafter, in the order of their use. Raises RequestError without one."""
    drafter_spec(pair)
    return {name: spec for name, spec in pair_programs(pair).weights.items() if name.startswith("drafter.")}


def _context_program(pair: PairSpec, drafter: DrafterSpec) -> Program:
    """taps -> the drafter's keys and values, as every pass of the target appends them."""
    taps = len(drafter.target_layer_ids) * pair.target.hidden_size
    g = GraphBuilder("context", commits=True, inputs={"taps": taps})
    dflash.append_context(g, "taps", drafter)
    return g.program()


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[B, heads, rows, D] of x [B, .., rows, heads, D]."""
    return x.flatten(1, -3).transpose(1, 2)


def _mask(rule: tuple[bool, int | None], at: torch.Tensor, tokens: int) -> torch.Tensor:
    """What rows at positions ``at`` [B, A, R] see: context before their anchor, then their block's rows.

    [B, 1, A * R, T + A * R].
    """
    place = torch.arange(tokens, device=at.device)
    context = (place < at[:, :, :1, None]).expand(*at.shape, -1).flatten(1, 2)
    block = torch.arange(at.shape[1], device=at.device).repeat_interleave(at.shape[2])
    own = (block[:, None] == block).expand(len(at), -1, -1)
    keys = torch.cat((place.expand(len(at), -1), at.flatten(1)), -1)
    return visible(rule, at.flatten(1), keys, torch.cat((context, own), -1))[:, None]


def _key(name: str) -> str:
    return name.replace(".", "/")
