"""Times propose passes with and without their walk, at published sizes with random weights; prints one JSON line last.

Run on a GPU: python tests/gpu/bench_native_drafters.py
"""

import json
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

from native_backend_support import ENGINE, device_cubin  # noqa: E402

from edge_dflash.backends.cuda.backend import NativeBackend  # noqa: E402
from edge_dflash.backends.cuda.measured import force, profile  # noqa: E402
from edge_dflash.backends.cuda.steps import Convolve, Draft  # noqa: E402
from edge_dflash.bench.random_pair import RandomWeights, synthetic_pair  # noqa: E402
from edge_dflash.decode.backend import Asked  # noqa: E402
from edge_dflash.decode.sampling import GREEDY, Sampling  # noqa: E402

PAIRS = ("qwen3.8-27b-dflash2", "qwen3.8-27b-dspark", "qwen3-8b-dspark")
SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(0.7, 20, 0.95, 1)}
CYCLES = 40


def times(backend, sampling):
    """Median seconds of propose and verify, on the device's clock."""
    backend.reset()
    backend.prefill(list(range(1, 500)))
    found, anchor = [], 7
    for _ in range(CYCLES):
        cycle = backend.cycle(Asked(anchor, sampling))
        backend.commit(1)
        anchor = cycle.tokens[0]
        found.append((cycle.propose_seconds, cycle.verify_seconds))
    return [median(part) for part in zip(*found, strict=True)]


def measure(name):
    pair = synthetic_pair(name)
    weights = RandomWeights(pair, "nvfp4", device_cubin)
    backend = NativeBackend(pair, weights, ENGINE, cubin=device_cubin, max_context=1024, prefill_chunk=512)
    shape, row = backend.loaded.common.layout.walk, {"pair": name}
    row["codebook_bytes"] = shape.rows * 2 * shape.rank * (1 + shape.top)  # a step reads its predecessor and candidates
    steps = profile(backend)
    row["conv_us"] = sum(s.seconds for s in steps if s.name == Convolve.__name__) * 1e6
    for mode, sampling in SAMPLINGS.items():
        row[mode], row[f"{mode}_verify"] = (one * 1e6 for one in times(backend, sampling))
    planned = backend.loaded.passes["propose"].schedule.steps
    planned[:] = [step for step in planned if not isinstance(step, Draft)]
    force(backend, None)  # captures them again
    row["without"] = times(backend, GREEDY)[0] * 1e6
    backend.close()
    return row


def main():
    """All pairs."""
    found = []
    for name in PAIRS:
        found.append(measure(name))
        print("  ".join(f"{k} {v:,.0f}" if k != "pair" else v for k, v in found[-1].items()), flush=True)
    print(json.dumps({"us": found}))


if __name__ == "__main__":
    main()
