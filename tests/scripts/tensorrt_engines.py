"""Builds every TensorRT engine of a published pair from random packed weights: seconds, bytes and memory. Needs no GPU.

    python -m tests.scripts.tensorrt_engines --synthetic qwen3.6-27b --arch sm121

Weights are made when an engine asks for them and engines are dropped, so no disk is read or written.
The last line is one JSON object. Seconds follow what else the machine does; CPU seconds do so less.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from edge_dflash.backends.cuda.tensorrt.compile import Compiler
from edge_dflash.backends.cuda.tensorrt.flavours import flavour_of, load, version
from edge_dflash.backends.cuda.tensorrt.units import Unit, bundle_units, engine_units
from edge_dflash.bench.random_pair import pair_names, synthetic_pair
from edge_dflash.errors import EdgeDflashError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import Array, Fp8Weight, Nvfp4Weight, Weight, WideWeight
from edge_dflash.weights.quantize import fused_group
from edge_dflash.weights.recipe import Recipe, default_recipe

SCALE = 1e-3  # of weights and of NVFP4 activations: up to twice that


class PackedStore:
    """Random weights of a pair in the formats of a recipe, the same every time; each is made when it is asked for."""

    def __init__(self, pair: PairSpec, recipe: Recipe) -> None:
        self._specs, self._recipe = pair_programs(pair).weights, recipe
        self._formats = recipe.formats(self._specs)
        self.seconds: defaultdict[int, float] = defaultdict(float)  # spent here, by thread

    def get(self, name: str) -> Weight:
        """Random codes; block scales are below 2, others one for all linears of a fused group."""
        began = time.perf_counter()
        weight = self._random(name)
        self.seconds[threading.get_ident()] += time.perf_counter() - began
        return weight

    def _random(self, name: str) -> Weight:
        spec, form = self._specs[name], self._formats[name]
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if form == "nvfp4":
            n, k = spec.shape
            packed, block_scale = _codes(rng, (n, k // 2)), _codes(rng, (n, k // 16), 0x3F)
            group = np.random.default_rng(zlib.crc32(fused_group(name)[0].encode()))
            scale, input_scale = (float(SCALE * (1 + group.random(dtype=np.float32))) for _ in range(2))
            return Nvfp4Weight(
                packed, block_scale, scale, input_scale if self._recipe.nvfp4_activations(spec, form) else None
            )
        if form == "fp8":
            return Fp8Weight(_codes(rng, spec.shape, 0x6F), np.array([0.01], np.float32))
        return WideWeight(rng.integers(0x3C00, 0x3F80, spec.shape, np.uint16))

    def kv_scale(self, state: str) -> tuple[float, float]:
        """No engine reads it."""
        return 1.0, 1.0


def _codes(rng: np.random.Generator, shape: tuple[int, ...], mask: int = 0xFF) -> Array:
    """Random bytes with the bits of ``mask``. As whole words: in bytes NumPy takes three times as long."""
    count = math.prod(shape)
    codes = rng.integers(0, 1 << 64, -(-count // 8), np.uint64).view(np.uint8)[:count].reshape(shape)
    codes &= np.uint8(mask)
    return codes


def kind_of(unit: Unit, pair: PairSpec) -> str:
    """Model and modules of a unit's linears, in order; units of a kind have equal shapes."""
    specs = pair_programs(pair).weights
    linears = [specs[name] for name in unit.weights if specs[name].kind == "linear"]
    modules = list(dict.fromkeys(spec.module for spec in linears))
    size = sum(spec.shape[0] * spec.shape[1] for spec in linears)
    return f"{unit.key.partition('-')[0]}: {' '.join(modules)} ({size / 1e6:.0f} M)"


def build_all(pair: PairSpec, recipe: Recipe, arch: str, workers: int, chunk: int) -> list[dict[str, Any]]:
    """Build every engine once, ``workers`` at a time. Raises BackendError and BuildError."""
    store, local = PackedStore(pair, recipe), threading.local()
    units = engine_units(bundle_units(pair, recipe.formats(pair_programs(pair).weights), chunk).units)

    def build(unit: Unit) -> dict[str, Any]:
        compiler = local.__dict__.setdefault("compiler", None) or Compiler(arch)
        local.compiler = compiler
        made, began = store.seconds[threading.get_ident()], time.perf_counter()
        lowered = compiler.lower(unit, store)
        made = store.seconds[threading.get_ident()] - made
        plan = compiler.build(lowered)
        seconds = time.perf_counter() - began - made
        print(f"{unit.key}: {seconds:.1f} s, {len(plan) / 1e6:,.1f} MB", file=sys.stderr, flush=True)
        sizes = {"weight_bytes": sum(array.nbytes for array in lowered.net.held), "plan_bytes": len(plan)}
        return {"key": unit.key, "kind": kind_of(unit, pair), "seconds": seconds, "weight_seconds": made, **sizes}

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(build, units.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Build and print one JSON line; return 0, or an error's exit code after one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.tensorrt_engines", description=__doc__)
    parser.add_argument("--synthetic", default="qwen3.6-27b", choices=pair_names())
    parser.add_argument("--arch", default="sm121", help="sm120 or sm121")
    parser.add_argument("--activations", default="nvfp4", choices=("nvfp4", "bf16"))
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2, help="engines in work at a time")
    chosen = parser.parse_args(argv)
    default = default_recipe()
    recipe = Recipe("plans", target=default.target, drafter=default.drafter, activations=chosen.activations)
    began, cpu = time.perf_counter(), time.process_time()
    try:
        plans = build_all(synthetic_pair(chosen.synthetic), recipe, chosen.arch, chosen.workers, chosen.prefill_chunk)
    except EdgeDflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    sums = {name: sum(plan[name] for plan in plans) for name in ("weight_bytes", "plan_bytes", "weight_seconds")}
    took = {"seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    found = {**vars(chosen), "plans": len(plans), **took, **sums, "ratio": sums["plan_bytes"] / sums["weight_bytes"]}
    found |= {"tensorrt": version(load(flavour_of(chosen.arch))), "cores": os.cpu_count()}
    found |= {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "built": plans}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
