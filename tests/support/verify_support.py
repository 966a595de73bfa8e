"""Short golden files and NVFP4 versions of the golden pairs, for the tests of verification."""

from functools import cache

from golden_pairs import ENGINE, FLOAT32, golden, pair, programs, store

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.weights.quantize import quantize_nvfp4, wide_tensor

GENERATED = ("greedy_tokens", "dflash_tokens", "greedy_top2_margin")


def short_golden(name, prompt, tokens):
    """One prompt of a golden file as if only ``tokens`` tokens had been generated."""
    keys = {key: array for key, array in golden(name).items() if key.startswith(f"{prompt}.")}
    for key in GENERATED:
        keys[f"{prompt}.{key}"] = keys[f"{prompt}.{key}"][:tokens]
    rows = len(keys[f"{prompt}.prompt"]) + tokens
    keys[f"{prompt}.teacher_forced_logits"] = keys[f"{prompt}.teacher_forced_logits"][:rows]
    return keys


class Nvfp4Store:
    """A golden pair with every linear but the gates in NVFP4."""

    def __init__(self, name):
        self._store, self._weights = store(name), programs(name).weights
        self._quantized = {}

    def get(self, name):
        spec = self._weights[name]
        if spec.kind != "linear" or spec.module in ("gates", "router", "conv"):
            return self._store.get(name)
        if name not in self._quantized:
            self._quantized[name] = quantize_nvfp4(wide_tensor(self._store.get(name)))
        return self._quantized[name]

    def kv_scale(self, state):
        return (0.02, 0.05)


@cache
def nvfp4_store(name):
    return Nvfp4Store(name)


def engine(name, max_context=160, **options):
    """The pair as a bundle runs it: NVFP4 weights, FP8 KV, BF16 activations."""
    return ReferenceBackend(pair(name), nvfp4_store(name), ENGINE, max_context=max_context, **options)


def exact(name, max_context=160, **options):
    """The pair unquantized, in float32."""
    return ReferenceBackend(pair(name), store(name), FLOAT32, max_context=max_context, **options)


BACKENDS = {"engine": engine, "float32": exact}
