"""The same pair of random BF16 weights in Hugging Face transformers and in edge-dflash, timed in one run.

    python tests/gpu/compare_transformers.py [--accept-length 5] [--context 512] [--cubins DIR]

Sizes of Qwen3-8B and its published drafter. transformers decodes greedily with generate() and its own cache, and runs a
DFlash loop written here on plain torch: the target's forward over a block with its hidden states, a drafter with
preallocated keys and values, a forced accept pattern. edge-dflash takes the same tensors, with BF16 keys and values,
and is timed through its own loop. Both compute in BF16; sums are ordered differently, so tokens are compared position
by position on one given text, with the logits' distance. Prints one JSON line last.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from edge_dflash.backends.base import Precision
from edge_dflash.backends.native.driver import DevicePointer
from edge_dflash.backends.native.linear import LinearWeights
from edge_dflash.backends.native.weight_layout import UNIT_ROWS, WINDOW, repack
from edge_dflash.benchmark.machine import describe
from edge_dflash.benchmark.measure import Meter, accept_pattern
from edge_dflash.benchmark.pairs import synthetic_pair
from edge_dflash.benchmark.subjects import CUBINS
from edge_dflash.benchmark.weights import RandomWeights
from edge_dflash.checkpoint.weights import WideWeight
from edge_dflash.models import pair_programs

BRANCHES = ("o_proj", "down_proj")


def rms(name, shape):
    """As benchmark/weights.py: a linear keeps its input's RMS, a residual branch a quarter; norms are neutral."""
    if len(shape) == 1:
        return None
    if "embed_tokens" in name:
        return 1.0
    return (0.25 if name.endswith(BRANCHES) else 1.0) / math.sqrt(shape[-1])


def random_drafter(pair, device, dtype=torch.bfloat16):
    """The drafter's weights by canonical name without ``drafter.``."""
    weights = {}
    for name, spec in pair_programs(pair).weights.items():
        if name.startswith("drafter."):
            tensor = torch.ones(spec.shape, device=device, dtype=dtype)
            if (size := rms(name, spec.shape)) is not None:
                tensor.normal_(0, size)
            weights[name.removeprefix("drafter.")] = tensor
    return weights


class Drafter:
    """The DFlash block pass on torch; keys and values of the context lie in buffers made once."""

    def __init__(self, spec, weights, embedding, head, most):
        self.spec, self.w, self.embedding, self.head = spec, weights, embedding, head
        a, device, dtype = spec.attention, embedding.device, embedding.dtype
        shape = (spec.num_layers, 2, a.kv_heads, most, a.head_dim)
        self.memory = torch.zeros(shape, device=device, dtype=dtype)
        frequency = a.rope.theta ** (-torch.arange(0, a.head_dim, 2, device=device, dtype=torch.float64) / a.head_dim)
        angle = torch.outer(torch.arange(most, device=device, dtype=torch.float64), frequency).float().repeat(1, 2)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        assert all(mask.bidirectional and mask.window is None for mask in spec.layers)

    def rotate(self, x, at):
        rows, half = x.shape[1], x.shape[2] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * self.cos[at : at + rows] + turned * self.sin[at : at + rows]

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.w[name], self.spec.rms_norm_eps)

    def heads(self, x, name, count):
        return F.linear(x, self.w[name]).view(x.shape[0], count, -1).transpose(0, 1)

    def keep(self, index, x, at):
        """Keys and values of rows at positions ``at``, ..."""
        name, a, rows = f"layers.{index}.self_attn", self.spec.attention, x.shape[0]
        key = self.norm(self.heads(x, f"{name}.k_proj", a.kv_heads), f"{name}.k_norm")
        self.memory[index, 0, :, at : at + rows] = self.rotate(key, at)
        self.memory[index, 1, :, at : at + rows] = self.heads(x, f"{name}.v_proj", a.kv_heads)

    def append(self, taps, at):
        feature = self.norm(F.linear(taps, self.w["fc"]), "hidden_norm")
        for index in range(self.spec.num_layers):
            self.keep(index, feature, at)

    def drafts(self, anchor, at):
        """Logits of the drafts behind ``anchor`` [1], which is at position ``at``: [B - 1, V]."""
        spec, a = self.spec, self.spec.attention
        masks = anchor.new_full((spec.block_size - 1,), spec.mask_token_id)
        x = F.embedding(torch.cat((anchor, masks)), self.embedding)
        for index in range(spec.num_layers):
            name = f"layers.{index}"
            h = self.norm(x, f"{name}.input_layernorm")
            query = self.norm(self.heads(h, f"{name}.self_attn.q_proj", a.heads), f"{name}.self_attn.q_norm")
            self.keep(index, h, at)
            key, value = self.memory[index, :, :, : at + spec.block_size]
            out = F.scaled_dot_product_attention(self.rotate(query, at)[None], key[None], value[None], enable_gqa=True)
            x = x + F.linear(out[0].transpose(0, 1).flatten(1), self.w[f"{name}.self_attn.o_proj"])
            m = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = (F.linear(m, self.w[f"{name}.mlp.{part}_proj"]) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self.w[f"{name}.mlp.down_proj"])
        return F.linear(self.norm(x, "norm")[1:], self.head)


class TorchWeights(RandomWeights):
    """edge-dflash's weights from torch tensors on the device, repacked there (weight_layout.py, BF16)."""

    def __init__(self, pair, tensors):
        super().__init__(pair, "bf16", None)
        self.tensors = tensors

    def stack(self, gpu, stack):
        packed = packed_bf16([self.tensors[name] for name in stack.names], stack.layout)
        data = self.place(gpu, packed)
        return LinearWeights(stack.layout, data, gpu.upload(np.ones(stack.layout.units * UNIT_ROWS, np.float32)))

    def embedding(self, gpu, name):
        return self.place(gpu, self.tensors[name])

    def vector(self, name):
        return self.tensors[name].float().cpu().numpy()

    def place(self, gpu, tensor):
        tensor = tensor.contiguous()
        torch.cuda.synchronize()
        memory = gpu.allocate(tensor.nbytes)
        gpu.copy(memory, DevicePointer(tensor.data_ptr(), tensor.nbytes), tensor.nbytes)
        gpu.synchronize()
        return memory


def packed_bf16(parts, layout):
    """Streaming form of full BF16 matrices [N, K]."""
    if layout.swiglu:
        n, k = parts[0].shape
        parts = [torch.stack([part.view(n // 8, 8, k) for part in parts], 1).view(2 * n, k)]
    lanes = torch.cat(list(parts)).view(layout.units, 2, 2, 8, layout.windows, 4, WINDOW["bf16"] // 4)
    return lanes.permute(0, 4, 1, 2, 3, 5, 6).contiguous()


def check_packing():
    for columns, swiglu in (((64, 32), False), ((48, 48), True)):
        parts = [torch.randn(n, 128).bfloat16() for n in columns]
        want = repack([WideWeight(part.view(torch.int16).numpy().view(np.uint16)) for part in parts], swiglu=swiglu)
        found = packed_bf16(parts, want.layout).view(torch.int16).numpy().view(np.uint8).reshape(-1)
        assert (found == want.data).all()


class Transformers:
    """The target in transformers, and a DFlash loop around it."""

    def __init__(self, pair, most):
        from transformers import AutoModelForCausalLM, Qwen3Config

        t = pair.target
        config = Qwen3Config(
            vocab_size=t.vocab_size,
            hidden_size=t.hidden_size,
            intermediate_size=t.intermediate_size,
            num_hidden_layers=t.num_layers,
            num_attention_heads=t.attention.heads,
            num_key_value_heads=t.attention.kv_heads,
            head_dim=t.attention.head_dim,
            rms_norm_eps=t.rms_norm_eps,
            max_position_embeddings=t.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": t.attention.rope.theta},
            tie_word_embeddings=False,
        )
        with torch.device("cuda"):
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        for name, parameter in self.model.named_parameters():
            if (size := rms(name.removesuffix(".weight"), parameter.shape)) is None:
                parameter.data.fill_(1)
            else:
                parameter.data.normal_(0, size)
        self.pair, head = pair, self.model.lm_head.weight.data
        weights = random_drafter(pair, "cuda")
        self.drafter = Drafter(pair.drafter, weights, self.model.model.embed_tokens.weight.data, head, most)
        self.tensors = {
            "target." + name.removeprefix("model.").removesuffix(".weight"): parameter.data
            for name, parameter in self.model.named_parameters()
        } | {f"drafter.{name}": tensor for name, tensor in weights.items()}

    def plain(self, prompt, tokens):
        """(seconds a token after the first, ids) of generate()."""
        ids = torch.tensor([prompt], device="cuda")
        options = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        times = {}
        for count in (1, tokens):
            torch.cuda.synchronize()
            began = time.perf_counter()
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=count, **options)
            torch.cuda.synchronize()
            times[count] = time.perf_counter() - began
        return (times[tokens] - times[1]) / (tokens - 1), out[0, len(prompt) :].tolist()

    def forward(self, ids, cache):
        """(choices [rows], logits [rows, V], taps [rows, n H]) of a target pass over ``ids`` behind the cache."""
        out = self.model(input_ids=ids[None], past_key_values=cache, use_cache=True, output_hidden_states=True)
        taps = torch.cat([out.hidden_states[i + 1][0] for i in self.pair.drafter.target_layer_ids], -1)
        return out.logits[0].argmax(-1), out.logits[0], taps

    def dflash(self, prompt, pattern, cycles, warm=3):
        """Seconds a cycle of the DFlash loop with a forced accept pattern; committed tokens a cycle."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        choices, _, taps = self.forward(torch.tensor(prompt, device="cuda"), cache)
        anchor, length, committed, began = choices[-1:], len(prompt), 0, 0.0
        self.drafter.append(taps, 0)
        for index in range(warm + cycles):
            if index == warm:
                torch.cuda.synchronize()
                began, committed = time.perf_counter(), 0
            drafts = self.drafter.drafts(anchor, length).argmax(-1)
            choices, _, taps = self.forward(torch.cat((anchor, drafts)), cache)
            agree = (choices[:-1] == drafts).int().cumprod(0).sum().item()  # the host has to know it
            accepted = pattern[index % len(pattern)] if pattern else agree
            anchor = choices[accepted : accepted + 1]
            self.drafter.append(taps[: accepted + 1], length)
            length, committed = length + accepted + 1, committed + accepted + 1
            cache.crop(length)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / cycles, committed / cycles


def agreement(hf, backend, prompt, text):
    """Position by position on one text: equal choices of target and drafter, and how far logits are apart."""
    from transformers import DynamicCache

    block, cache = backend.shape.block_size, DynamicCache(config=hf.model.config)
    _, _, taps = hf.forward(torch.tensor(prompt, device="cuda"), cache)
    hf.drafter.append(taps, 0)
    backend.reset()
    backend.prefill(prompt).argmax()
    found = {
        "positions": 0,
        "equal": 0,
        "drafts": 0,
        "equal_drafts": 0,
        "distance": 0.0,
        "rms_distance": 0.0,
        "rms": 0.0,
    }
    for first in range(0, len(text) - block + 1, block):
        part = text[first : first + block]
        theirs = hf.drafter.drafts(torch.tensor(part[:1], device="cuda"), len(prompt) + first).float().cpu().numpy()
        ours = backend.propose(part[0]).logits()
        found["drafts"] += len(ours)
        found["equal_drafts"] += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        _, logits, taps = hf.forward(torch.tensor(part, device="cuda"), cache)
        hf.drafter.append(taps, len(prompt) + first)
        theirs, rows = logits.float().cpu().numpy(), backend.verify(part)
        ours = rows.logits()
        backend.commit(block)
        found["positions"] += block
        found["equal"] += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        found["distance"] = max(found["distance"], float(np.abs(ours - theirs).max()))
        found["rms_distance"] = float(np.sqrt(((ours - theirs) ** 2).mean()))
        found["rms"] = float(np.sqrt((theirs**2).mean()))
    return found


def ours(hf, pair, prompt, pattern, tokens, most, cubins):
    """edge-dflash with the tensors of ``hf``: (plain, speculative) Decode, and the agreement."""
    from edge_dflash.backends.native.arch import device_sm
    from edge_dflash.backends.native.backend import NativeBackend
    from edge_dflash.benchmark.cubins import Cubins, device_arch

    cubin = Cubins(cubins, device_arch(device_sm()))
    weights = TorchWeights(pair, hf.tensors)
    backend = NativeBackend(pair, weights, Precision(kv="bfloat16"), cubin=cubin, max_context=most)
    try:
        same = agreement(hf, backend, prompt, hf.text)
        meter = Meter(backend, None, None)
        meter.steps(prompt, 32, speculative=True)
        plain, steps = meter.decode([prompt], tokens, speculative=False)
        same["equal_plain_prefix"] = prefix([t for step in steps for t in step.tokens], hf.text[1:])
        backend.force(pattern)
        speculative, _ = meter.decode(
            [prompt], 1 + tokens * (sum(pattern) + len(pattern)) // len(pattern), speculative=True
        )
        cycle = meter.device_cycle(backend, prompt)
        return plain, speculative, cycle, same
    finally:
        backend.close()


def prefix(a, b):
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accept-length", type=float, default=5.0)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of plain decoding, and cycles")
    parser.add_argument("--cubins", type=Path, default=CUBINS)
    options = parser.parse_args()
    import transformers

    check_packing()
    torch.manual_seed(0)
    pair = synthetic_pair("qwen3-8b")
    most = options.context + 24 * (options.tokens + 8)
    prompt = np.random.default_rng(0).integers(0, pair.target.vocab_size, options.context).tolist()
    pattern = accept_pattern(options.accept_length, pair.drafter.block_size)
    with torch.inference_mode():
        hf = Transformers(pair, most)
        hf.plain(prompt, 8)
        token_seconds, hf.text = hf.plain(prompt, options.tokens)
        cycle_seconds, length = hf.dflash(prompt, pattern, options.tokens)
        print(f"transformers: {token_seconds * 1e3:.2f} ms a token, {cycle_seconds * 1e3:.2f} ms a cycle", flush=True)
        plain, speculative, cycle, same = ours(hf, pair, prompt, pattern, options.tokens, most, options.cubins)
    theirs = {
        "plain_ms": token_seconds * 1e3,
        "plain_tokens_per_second": 1 / token_seconds,
        "cycle_ms": cycle_seconds * 1e3,
        "accept_length": length,
        "tokens_per_second": length / cycle_seconds,
    }
    mine = {
        "plain_ms": plain.ms,
        "plain_tokens_per_second": plain.tokens_per_second,
        "cycle_ms": speculative.ms,
        "accept_length": speculative.accept_length,
        "tokens_per_second": speculative.tokens_per_second,
        "propose_ms": cycle.propose.ms,
        "verify_ms": cycle.verify.ms,
    }
    result = {
        "pair": "qwen3-8b, random BF16 weights, BF16 keys and values",
        "context": options.context,
        "machine": describe() | {"device": torch.cuda.get_device_name()},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "theirs": theirs,
        "ours": mine,
        "ratio_plain": mine["plain_tokens_per_second"] / theirs["plain_tokens_per_second"],
        "ratio_dflash": mine["tokens_per_second"] / theirs["tokens_per_second"],
        "ratio_dflash_over_their_plain": mine["tokens_per_second"] / theirs["plain_tokens_per_second"],
        "agreement": same,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
