"""The same pair of random BF16 weights in Hugging Face transformers and in edge-dflash, timed in one run.

    python tests/gpu/compare_transformers.py [--accept-length 5] [--context 512] [--static] [--cubins DIR]

Sizes of Qwen3-8B and its published drafter. transformers decodes greedily with generate() and its own cache, and runs a
DFlash loop written here on plain torch: the target's forward over a block with its hidden states, a drafter with
preallocated keys and values, a forced accept pattern. edge-dflash takes the same tensors, with BF16 keys and values,
and is timed through Planner.plan. Both compute in BF16; sums are ordered differently, so tokens are compared position
by position on one given text, with the logits' distance. Prints one JSON line last.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from cuda.bindings import driver
from transformers_pair import Transformers

from edge_dflash.backends.cuda.kernels.linear import LinearWeights
from edge_dflash.bench.device import CUBINS, force
from edge_dflash.bench.measure import Meter
from edge_dflash.bench.provenance import describe
from edge_dflash.bench.random_pair import RandomWeights, synthetic_pair
from edge_dflash.bench.workload import accept_pattern
from edge_dflash.decode.backend import Precision
from edge_dflash.planner import Planner
from edge_dflash.weights.formats import WideWeight
from edge_dflash.weights.layout import UNIT_ROWS, WINDOW, repack


class TorchWeights(RandomWeights):
    """edge-dflash's weights from torch tensors on the device, repacked there (weights/layout.py, BF16)."""

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
        driver.cuMemcpyDtoDAsync(memory.address, tensor.data_ptr(), tensor.nbytes, gpu.stream)
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


def ours(hf, pair, prompt, pattern, tokens, most, folder):
    """edge-dflash with the tensors of ``hf``: (plain, speculative) Decode, and the agreement."""
    from edge_dflash.backends.cuda.backend import NativeBackend
    from edge_dflash.backends.cuda.support import device_sm
    from edge_dflash.bench.device import cubins

    cubin = cubins(folder, device_sm())
    weights = TorchWeights(pair, hf.tensors)
    backend = NativeBackend(pair, weights, Precision(kv="bfloat16"), cubin=cubin, max_context=most)
    with Planner(backend, None, fallback=False) as planner:
        same = agreement(hf, planner.backend, prompt, hf.text)
        meter = Meter(planner, None, None)
        meter.decode([prompt], 32)
        plain, plans = meter.decode([prompt], tokens, speculative=False)
        same["equal_plain_prefix"] = prefix(plans[0].tokens, hf.text)
        force(backend, pattern)
        speculative, _ = meter.decode([prompt], 1 + tokens * (sum(pattern) + len(pattern)) // len(pattern))
        cycle = meter.device_cycle(prompt)
        return plain, speculative, cycle, same


def prefix(a, b):
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accept-length", type=float, default=5.0)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of plain decoding, and cycles")
    parser.add_argument("--static", action="store_true", help="also generate() with a static cache, which compiles")
    parser.add_argument("--commit", help="what to record where git does not know it")
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
        generate_seconds, hf.text = hf.plain(prompt, options.tokens)
        hf.greedy(prompt, 4)
        token_seconds = min(generate_seconds, hf.greedy(prompt, options.tokens))
        cycle_seconds, length = hf.dflash(prompt, pattern, options.tokens)
        parts = hf.parts(prompt)
        static = None
        if options.static:
            hf.plain(prompt, 8, cache_implementation="static")
            static = hf.plain(prompt, options.tokens, cache_implementation="static")[0] * 1e3
        print(f"transformers: {token_seconds * 1e3:.2f} ms a token, {cycle_seconds * 1e3:.2f} ms a cycle", flush=True)
        plain, speculative, cycle, same = ours(hf, pair, prompt, pattern, options.tokens, most, options.cubins)
    theirs = {
        "generate_ms": generate_seconds * 1e3,
        "plain_ms": token_seconds * 1e3,  # of the faster of generate() and a bare loop
        "plain_tokens_per_second": 1 / token_seconds,
        "cycle_ms": cycle_seconds * 1e3,
        "accept_length": length,
        "tokens_per_second": length / cycle_seconds,
        "parts_ms": parts,
        "plain_static_cache_ms": static,
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
        "machine": describe()
        | {"device": torch.cuda.get_device_name()}
        | ({"commit": options.commit} if options.commit else {}),
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
