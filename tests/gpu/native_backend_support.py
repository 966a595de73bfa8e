"""Pairs on the native backend for GPU tests: the demo pair and small random ones, in every weight format."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from mixture_pairs import PAIRS as MIXTURES
from mixture_pairs import kind_key, made
from native_linear_support import cubin
from native_state_support import threads
from store_weights import StoreWeights
from synthetic import drafter_config, qwen3_5_config, qwen3_config, write_drafter, write_target

from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.decode.backend import Precision
from edge_dflash.demo.tasks import assemble
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.model.specs import DrafterLayerMask
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.formats import WideWeight
from edge_dflash.weights.quantize import quantize_fp8, quantize_nvfp4, wide_tensor

DEMO = Path(__file__).parents[2] / "edge_dflash" / "demo" / "models"
ENGINE = Precision("bfloat16", "fp8")
WIDE_KV = Precision("bfloat16", "bfloat16")


class Quantized:
    """A store whose linears are quantized on the way: ``kind`` is bf16, fp8, nvfp4, or mixed (by turns)."""

    def __init__(self, store, weights, kind):
        self._store, self._weights, self._kind = store, weights, kind
        self._kept = {}

    def get(self, name):
        if name not in self._kept:
            self._kept[name] = self._quantized(name)
        return self._kept[name]

    def _quantized(self, name):
        weight, spec = self._store.get(name), self._weights[name]
        kinds = ("bf16", "fp8", "nvfp4")
        kind = kinds[sum(kind_key(name).encode()) % 3] if self._kind == "mixed" else self._kind
        kind = "fp8" if spec.module == "vision" and kind == "nvfp4" else kind
        if (
            not isinstance(weight, WideWeight)
            or spec.kind != "linear"
            or spec.module in ("gates", "router")
            or kind == "bf16"
        ):
            return weight
        tensor = wide_tensor(weight)
        return quantize_fp8(tensor) if kind == "fp8" else quantize_nvfp4(tensor)

    def kv_scale(self, state):
        return (0.05, 0.04) if state.startswith("target") else (0.03, 0.06)


def small(name):
    """Configs of a small random pair: (target, drafter)."""
    if name == "dense":  # head_dim 128, sliding and causal drafter layers, a block of 10
        target = qwen3_config(
            hidden_size=256, intermediate_size=352, head_dim=128, num_attention_heads=4, vocab_size=1000
        )
        drafter = drafter_config(
            target, hidden_size=256, head_dim=128, block_size=10, layer_types=["full_attention", "sliding_attention"],
            use_sliding_window=True, sliding_window=24, num_attention_heads=8,
        )  # fmt: skip
    else:  # head_dim 256, gate, partial rotation; gated delta of 128; a block of 16
        target = qwen3_5_config(
            hidden_size=256, intermediate_size=512, head_dim=256, num_attention_heads=6, num_key_value_heads=1,
            linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=128, linear_value_head_dim=128,
            vocab_size=2048, num_hidden_layers=8,
        )  # fmt: skip
        drafter = drafter_config(target, hidden_size=256, head_dim=64, block_size=16)
    return target, drafter


@cache
def checkpoint(name):
    """(pair, programs, store) by name: demo, eyes, dense, hybrid, experts, few; "dense causal 24" masks all layers."""
    if " " in name:
        base, block, window = name.split()
        pair, _, held = checkpoint(base)
        mask = DrafterLayerMask(block == "bidirectional", None if window == "None" else int(window))
        pair = replace(pair, drafter=replace(pair.drafter, layers=(mask,) * pair.drafter.num_layers))
        return pair, pair_programs(pair), held
    if name in MIXTURES:
        return made(name, checkpoint(MIXTURES[name][0]))
    if name == "demo":
        target, drafter = DEMO / "target", DEMO / "drafter"
    elif name == "eyes":  # the demo that sees
        target, drafter = Path(tempfile.mkdtemp()) / "target", DEMO / "drafter"
        assemble(target)
    else:
        root = Path(tempfile.mkdtemp())
        configs = small(name)
        target, drafter = root / "target", root / "drafter"
        write_target(target, configs[0], seed=3)
        write_drafter(drafter, configs[1], seed=4)
    pair = read_pair(target, drafter)
    programs = pair_programs(pair)
    return pair, programs, PairCheckpoint.open(target, drafter, programs.weights)


@cache
def store(name, kind):
    _, programs, wide = checkpoint(name)
    return Quantized(wide, programs.weights, kind)


@cache
def native(name, kind="nvfp4", precision=ENGINE, max_context=256, prefill_chunk=64, lanes=1):
    """The pair on the GPU, loaded once for all tests."""
    pair, programs, _ = checkpoint(name)
    weights = StoreWeights(store(name, kind), {n: store(name, kind).get(n).format for n in programs.weights})
    sizes = {"max_context": max_context, "prefill_chunk": prefill_chunk, "lanes": lanes}
    return NativeBackend(pair, weights, precision, cubin=device_cubin, **sizes)


def reference(name, kind="nvfp4", precision=ENGINE, max_context=256):
    """The same pair in torch on the CPU."""
    torch.set_num_threads(threads(4))
    return ReferenceBackend(checkpoint(name)[0], store(name, kind), precision, max_context=max_context)


def device_cubin(unit):
    return cubin(unit, "sm90a" if torch.cuda.get_device_capability() == (9, 0) else f"sm{_sm()}a")


def _sm():
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def prompt(name, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vocabulary = checkpoint(name)[0].target.vocab_size
    return torch.randint(1, vocabulary - 2, (count,), generator=generator).tolist()


class Nearness:
    """Whether logits differ from the reference's by no more than its own rounding to bfloat16 moves them.

    Both arithmetics round in the same places, but the kernels also round queries and probabilities to 16 bits. On a
    pair of few and confident logits one rounding that tips over moves a whole row: on single rows the reference with
    those two roundings added is 0.2 to 2.7 times its own rounding away from itself. Squares are therefore summed over
    all prompts, which brings that to 0.4 to 1.1 for blocks and to 0.5 to 1.8 for the single rows of prefill.
    """

    def __init__(self, name, kind, precision, ours=None):
        self.ours = ours or native(name, kind, precision)
        self.theirs = reference(name, kind, precision)
        self.exact = reference(name, kind, Precision("float32", precision.kv))
        self.squares = {}

    def reset(self, lane=0):
        for backend in (self.ours, self.theirs, self.exact):
            backend.reset()

    def __call__(self, method, ids):
        found, rounded, exact = (getattr(b, method)(ids).logits() for b in (self.ours, self.theirs, self.exact))
        kept = self.squares.setdefault(method, [])
        kept.append([rms(a - b) ** 2 for a, b in ((found, rounded), (found, exact), (rounded, exact))])

    def commit(self, rows, lane=0, path=None):
        for backend in (self.ours, self.theirs, self.exact):
            backend.commit(rows)

    def judge(self):
        for method, kept in self.squares.items():
            to_rounded, to_exact, allowed = np.sqrt(np.sum(kept, axis=0))
            assert allowed > 0  # or the comparison says nothing
            assert to_rounded <= 1.6 * allowed, f"{method}: {to_rounded / allowed} of the reference's rounding"
            most = 2.2 if method == "prefill" else 1.5
            assert to_exact <= most * allowed, f"{method}: {to_exact / allowed} of the reference's rounding"


def rms(x):
    return float(np.sqrt(np.square(x.astype(np.float64)).mean()))
