"""A random pair of Qwen3 sizes in Hugging Face transformers, and a DFlash loop around it on plain torch."""

import math
import time
from statistics import median

import torch
import torch.nn.functional as F

from edge_dflash.model import pair_programs

BRANCHES = ("o_proj", "down_proj")


def rms(name, shape):
    """As bench/random_pair.py: a linear keeps its input's RMS, a residual branch a quarter; norms are neutral."""
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


def crop(cache, length):
    """Forget what lies behind ``length`` tokens."""
    if (excess := cache.get_seq_length() - length) > 0:
        cache.crop(-excess)


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

    def plain(self, prompt, tokens, **more):
        """(seconds a token after the first, ids) of generate()."""
        ids = torch.tensor([prompt], device="cuda")
        options = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0, **more}
        mask = torch.ones_like(ids)
        times = {}
        for count in (1, tokens):
            torch.cuda.synchronize()
            began = time.perf_counter()
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=count, **options)
            torch.cuda.synchronize()
            times[count] = time.perf_counter() - began
        return (times[tokens] - times[1]) / (tokens - 1), out[0, len(prompt) :].tolist()

    def greedy(self, prompt, tokens):
        """Seconds a token after the first of a bare loop around the model, without what generate() adds."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        token = self.forward(torch.tensor(prompt, device="cuda"), cache)[0][-1:]
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(tokens):
            token = self.model(input_ids=token[None], past_key_values=cache, use_cache=True).logits[0].argmax(-1)
            token.item()  # a loop has to look for the stop token
        return (time.perf_counter() - began) / tokens

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
            crop(cache, length)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / cycles, committed / cycles

    def parts(self, prompt, cycles=8):
        """Milliseconds of each part of the DFlash loop, waited for one by one."""
        from transformers import DynamicCache

        cache, ids = DynamicCache(config=self.model.config), torch.tensor(prompt, device="cuda")
        length, block = len(prompt), ids[: self.pair.drafter.block_size]
        *_, taps = self.forward(ids, cache)
        self.drafter.append(taps, 0)
        found = {}
        for index in range(2 + cycles):
            for name, work in (
                ("draft", lambda: self.drafter.drafts(block[:1], length)),
                ("forward_1_row", lambda: self.model(input_ids=block[None, :1], past_key_values=cache)),
                ("crop", lambda: crop(cache, length)),
                ("forward", lambda: self.model(input_ids=block[None], past_key_values=cache)),
                ("crop", lambda: crop(cache, length)),
                ("forward_with_hidden_states", lambda: self.forward(block, cache)),
                ("crop", lambda: crop(cache, length)),
                ("append", lambda: self.drafter.append(taps[:5], length)),
            ):
                torch.cuda.synchronize()
                began = time.perf_counter()
                work()
                torch.cuda.synchronize()
                if index >= 2:
                    found.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
        return {name: median(values) for name, values in found.items()}
