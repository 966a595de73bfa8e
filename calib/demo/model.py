"""The Qwen3.5 text architecture for training: batched, with autograd, module names those of Hugging Face checkpoints.

Layers are gated delta layers and, every fourth, full attention with an output gate. Sums that matter (norms, the delta
rule, the softmax of logits) are float32; linears run in the dtype of an enclosing autocast. Knows nothing of data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from calib.demo.delta import chunked_delta, sequential_delta
from calib.demo.fakequant import Linear
from calib.demo.modules import Mlp, Norm, initialise, rope
from edge_dflash.training.drafter import fake_fp8

_L2_EPS = 1e-6


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of the target; the defaults are those of the shipped demo target."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 6
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rotary_dims: int = 16
    rope_theta: float = 1e7
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    @property
    def full_layers(self) -> tuple[bool, ...]:
        """Which layers are full attention."""
        return tuple(i % 4 == 3 for i in range(self.num_hidden_layers))


@dataclass
class AttentionCache:
    """Keys and values [B, Hkv, capacity, D] of each sequence's positions."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass
class DeltaCache:
    """State [B, Hv, Dk, Dv] float32 and the last K - 1 convolution inputs [B, K-1, C]."""

    state: torch.Tensor
    history: torch.Tensor


class Attention(nn.Module):
    """Full attention with an output gate and partial RoPE."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.fp8 = False  # keys and values as an FP8 cache gives them back
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim * 2)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps, plus_one=True)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps, plus_one=True)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v [B, heads, T, D] with norm, RoPE and cache rounding done, and the gate [B, T, Hq * D]."""
        c = self.c
        q, gate = self.q_proj(x).unflatten(-1, (c.num_attention_heads, 2, c.head_dim)).unbind(-2)
        k = self.k_proj(x).unflatten(-1, (-1, c.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        q = rope(self.q_norm(q).transpose(1, 2), positions, c.rotary_dims, c.rope_theta)
        k = rope(self.k_norm(k).transpose(1, 2), positions, c.rotary_dims, c.rope_theta)
        if self.fp8:
            k, v = fake_fp8(k), fake_fp8(v)
        return q.to(v.dtype), k.to(v.dtype), v, gate.flatten(-2)

    def forward(
        self, x: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, AttentionCache | None]:
        """Whole sequences x [B, T, H]; with ``lengths`` also the cache (rows beyond a length are garbage)."""
        q, k, v, gate = self.project(x, torch.arange(x.shape[1], device=x.device))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = self.o_proj(o.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))
        return out, None if lengths is None else AttentionCache(k, v)

    def step(self, x: torch.Tensor, cache: AttentionCache, position: torch.Tensor) -> torch.Tensor:
        """One token per sequence: x [B, 1, H] at positions [B]; its K/V are written into the cache."""
        q, k, v, gate = self.project(x, position[:, None])
        index = position[:, None, None, None].expand(-1, k.shape[1], 1, k.shape[3])
        cache.k.scatter_(2, index, k)
        cache.v.scatter_(2, index, v)
        visible = torch.arange(cache.k.shape[2], device=x.device)[None, :] <= position[:, None]
        o = F.scaled_dot_product_attention(q, cache.k, cache.v, attn_mask=visible[:, None, None, :], enable_gqa=True)
        out: torch.Tensor = self.o_proj(o.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))
        return out


class Conv(nn.Module):
    """Causal depthwise convolution over time, then SiLU."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.rand(channels, 1, kernel) * 2 - 1) * kernel**-0.5)

    def forward(self, line: torch.Tensor) -> torch.Tensor:
        """line [B, K-1+T, C], oldest first -> [B, T, C]."""
        kernel = self.weight.shape[2]
        length = line.shape[1] - kernel + 1
        weight = self.weight[:, 0].to(line.dtype)
        total = line[:, :length] * weight[:, 0]
        for n in range(1, kernel):
            total = total + line[:, n : n + length] * weight[:, n]
        return F.silu(total)


class GatedDelta(nn.Module):
    """Gated DeltaNet layer."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        heads = c.linear_num_value_heads
        key, value = c.linear_num_key_heads * c.linear_key_head_dim, heads * c.linear_value_head_dim
        self.key_width = key
        self.in_proj_qkv = Linear(c.hidden_size, 2 * key + value)
        self.in_proj_z = Linear(c.hidden_size, value)
        self.in_proj_a = Linear(c.hidden_size, heads, wide=True)
        self.in_proj_b = Linear(c.hidden_size, heads, wide=True)
        self.conv1d = Conv(2 * key + value, c.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        step = torch.empty(heads).uniform_(-6.9, -2.3).exp()  # decay step of 0.001 .. 0.1
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = Norm(c.linear_value_head_dim, c.rms_norm_eps, plus_one=False)
        self.out_proj = Linear(value, c.hidden_size)

    def _inputs(self, line: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v, g, beta of the delta rule, float32, from conv inputs ``line`` and layer inputs x."""
        c = self.c
        mixed = self.conv1d(line).float()
        q, k, v = mixed.split((self.key_width, self.key_width, mixed.shape[-1] - 2 * self.key_width), -1)
        q, k = (_normalise(y.unflatten(-1, (c.linear_num_key_heads, -1))) for y in (q, k))
        v = v.unflatten(-1, (c.linear_num_value_heads, -1))
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return q * c.linear_key_head_dim**-0.5, k, v, g, torch.sigmoid(self.in_proj_b(x).float())

    def _output(self, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        z = self.in_proj_z(x)
        out: torch.Tensor = self.out_proj(self.norm(o).flatten(-2).to(z.dtype) * F.silu(z))
        return out

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> tuple[torch.Tensor, DeltaCache | None]:
        """Whole sequences x [B, T, H]; with ``lengths`` [B] also the cache after that many tokens of each."""
        u = self.in_proj_qkv(x)
        line = F.pad(u, (0, 0, self.c.linear_conv_kernel_dim - 1, 0))
        q, k, v, g, beta = self._inputs(line, x)
        if lengths is not None:  # rows after a length leave the state alone
            inside = (torch.arange(x.shape[1], device=x.device)[None, :] < lengths[:, None])[..., None]
            g, beta = g * inside, beta * inside
        with torch.autocast(x.device.type, enabled=False):
            o, state = chunked_delta(q, k, v, g, beta)
        cache = None
        if lengths is not None:
            rows = lengths[:, None] + torch.arange(self.c.linear_conv_kernel_dim - 1, device=x.device)
            cache = DeltaCache(state, line.gather(1, rows[..., None].expand(-1, -1, line.shape[2])))
        return self._output(o, x), cache

    def step(self, x: torch.Tensor, cache: DeltaCache, position: torch.Tensor) -> torch.Tensor:
        """One token per sequence, x [B, 1, H]; the cache moves on."""
        line = torch.cat((cache.history, self.in_proj_qkv(x)), 1)
        q, k, v, g, beta = self._inputs(line, x)
        with torch.autocast(x.device.type, enabled=False):
            o, state = sequential_delta(q, k, v, g, beta, cache.state)
        cache.state.copy_(state)
        cache.history.copy_(line[:, 1:])
        return self._output(o, x)


def _normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


class Layer(nn.Module):
    """Mixer and MLP on a residual stream."""

    def __init__(self, c: TargetConfig, *, full: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps, plus_one=True)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps, plus_one=True)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)
        self.self_attn = Attention(c) if full else None
        self.linear_attn = None if full else GatedDelta(c)

    @property
    def mixer(self) -> Any:
        """The layer's attention or gated delta module."""
        return self.linear_attn if self.self_attn is None else self.self_attn

    def finish(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The rest of the layer after the mixer's output."""
        x = x + mixed
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and final norm: what Hugging Face keeps under ``model.``."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, full=full) for full in c.full_layers)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps, plus_one=True)

    @property
    def blocks(self) -> list[Layer]:
        """The layers in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


class Target(nn.Module):
    """The whole language model; ``state_dict`` has the tensor names of a text-only checkpoint."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.model = Decoder(c)
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        initialise(self, c.num_hidden_layers)

    def set_fp8(self, on: bool) -> None:
        """Round keys and values as an FP8 cache does."""
        for layer in self.model.blocks:
            if layer.self_attn is not None:
                layer.self_attn.fp8 = on

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B, T] -> logits [B, T, V]."""
        x = self.model.embed_tokens(ids)
        for layer in self.model.blocks:
            x = layer.finish(x, layer.mixer(layer.input_layernorm(x))[0])
        logits: torch.Tensor = self.lm_head(self.model.norm(x))
        return logits
