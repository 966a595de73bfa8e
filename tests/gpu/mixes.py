"""Random mixes of lanes at the sizes of published pairs: each request has the bits that it has alone.

    python tests/gpu/mixes.py [--mixes N] [--output FILE]

As test_native_lanes.py, whose mixes these are, on random weights at full width. The first difference ends it.
"""

import argparse
import json
import sys
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

from equality import full_size  # noqa: E402
from native_backend_support import ENGINE, device_cubin  # noqa: E402
from test_native_lanes import PAIRS, Mix  # noqa: E402

from edge_dflash.backends.cuda.backend import NativeBackend  # noqa: E402
from edge_dflash.bench.random_pair import RandomWeights, synthetic_pair  # noqa: E402


@cache
def whole(name, lanes=1):
    """A published pair as it is."""
    pair = synthetic_pair(name)
    weights = RandomWeights(pair, "nvfp4", device_cubin)
    return NativeBackend(pair, weights, ENGINE, cubin=device_cubin, max_context=512, prefill_chunk=128, lanes=lanes)


BACKENDS = {
    "8 layers of qwen3.6-27b": partial(cache(full_size), "qwen3.6-27b", 8, (0, 2, 4, 5, 6)),
    "qwen3.5-4b": partial(whole, "qwen3.5-4b"),
    "10 layers of qwen3.6-35b-a3b": partial(cache(full_size), "qwen3.6-35b-a3b", 10, (0, 1, 2, 3, 4, 5, 6, 7)),
}


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--mixes", type=int, default=40, help="of each pair")
    options.add_argument("--output", type=Path)
    asked, done = options.parse_args(), {}
    for name, load in BACKENDS.items():
        PAIRS[name] = (load,)
        cycles = 0
        for seed in range(asked.mixes):
            mix = Mix(name, seed)
            mix.run()
            cycles += mix.joint_cycles
        done[name] = {"mixes": asked.mixes, "joint cycles": cycles, "differences": 0}
        print(name, done[name], flush=True)
        if asked.output:
            asked.output.write_text(json.dumps(done))


if __name__ == "__main__":
    main()
