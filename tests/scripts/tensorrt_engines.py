"""Builds every TensorRT engine of a published pair from random packed weights: seconds, bytes and memory. Needs no GPU.

    python -m tests.scripts.tensorrt_engines --synthetic qwen3.6-27b --arch sm121

Weights are made when an engine asks for them and engines are hashed and dropped, so no disk is read or written.
The last line is one JSON object. Seconds follow what else the machine does; CPU seconds do so less.
"""

from __future__ import annotations

import argparse
import hashlib
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
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Built:
    """One engine."""

    key: str
    kind: str  # its linears, by module
    seconds: float  # of lowering and building, without making weights
    weight_seconds: float  # of making weights
    hash_seconds: float
    weight_bytes: int
    plan_bytes: int


def kind_of(unit: Unit, pair: PairSpec) -> str:
    """Model and modules of a unit's linears, in order; units of a kind have equal shapes."""
    specs = pair_programs(pair).weights
    linears = [specs[name] for name in unit.weights if specs[name].kind == "linear"]
    modules = list(dict.fromkeys(spec.module for spec in linears))
    size = sum(spec.shape[0] * spec.shape[1] for spec in linears)
    return f"{unit.key.partition('-')[0]}: {' '.join(modules)} ({size / 1e6:.0f} M)"


def build_all(pair: PairSpec, recipe: Recipe, arch: str, workers: int, chunk: int) -> list[Built]:
    """Build every engine once, ``workers`` at a time. Raises BackendError and BuildError."""
    store, local = PackedStore(pair, recipe), threading.local()
    units = engine_units(bundle_units(pair, recipe.formats(pair_programs(pair).weights), chunk).units)

    def build(unit: Unit) -> Built:
        compiler = local.__dict__.setdefault("compiler", None) or Compiler(arch)
        local.compiler = compiler
        made, began = store.seconds[threading.get_ident()], time.perf_counter()
        lowered = compiler.lower(unit, store)
        made = store.seconds[threading.get_ident()] - made
        plan = compiler.build(lowered)
        seconds, began = time.perf_counter() - began - made, time.perf_counter()
        hashlib.sha256(plan)
        hashed = time.perf_counter() - began
        built = Built(unit.key, kind_of(unit, pair), seconds, made, hashed, lowered.weight_bytes, len(plan))
        print(f"{unit.key}: {seconds:.1f} s, {len(plan) / 1e6:,.1f} MB", file=sys.stderr, flush=True)
        return built

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(build, units.values()))


def summary(plans: Sequence[Built]) -> list[dict[str, Any]]:
    """A row for each kind: plans, median seconds, bytes."""
    rows = []
    for kind in dict.fromkeys(plan.kind for plan in plans):
        members = [plan for plan in plans if plan.kind == kind]
        weights, size = sum(p.weight_bytes for p in members), sum(p.plan_bytes for p in members)
        seconds = float(np.median([p.seconds for p in members]))
        rows.append({"kind": kind, "plans": len(members), "seconds": round(seconds, 2), "weight_bytes": weights})
        rows[-1] |= {"plan_bytes": size, "ratio": round(size / weights, 4)}
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Build, print a table and one JSON line; return 0, or an error's exit code after one line on stderr."""
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
        pair = synthetic_pair(chosen.synthetic)
        plans = build_all(pair, recipe, chosen.arch, chosen.workers, chosen.prefill_chunk)
    except EdgeDflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    rows = summary(plans)
    print(f"{'plans':>5} {'s each':>7} {'weights MB':>11} {'plans MB':>9} {'ratio':>7}  kind")
    for row in rows:
        sizes = f"{row['weight_bytes'] / 1e6:11,.1f} {row['plan_bytes'] / 1e6:9,.1f} {row['ratio']:7.4f}"
        print(f"{row['plans']:5} {row['seconds']:7.2f} {sizes}  {row['kind']}")
    weights, size = sum(p.weight_bytes for p in plans), sum(p.plan_bytes for p in plans)
    total = {"pair": chosen.synthetic, "arch": chosen.arch, "activations": chosen.activations, "plans": len(plans)}
    total |= {"workers": chosen.workers, "seconds": round(seconds, 1), "weight_bytes": weights, "plan_bytes": size}
    parts = {name: round(sum(getattr(p, name) for p in plans), 1) for name in ("weight_seconds", "hash_seconds")}
    total |= {"cpu_seconds": round(cpu, 1), **parts}
    total |= {"tensorrt": version(load(flavour_of(chosen.arch))), "cores": os.cpu_count()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    total |= {"ratio": round(size / weights, 4), "largest_ratio": max(r["ratio"] for r in rows)}
    total |= {"peak_rss_bytes": peak, "kinds": rows, "built": [asdict(plan) for plan in plans]}
    print(json.dumps(total))
    return 0


if __name__ == "__main__":
    sys.exit(main())
