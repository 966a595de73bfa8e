"""Speculative against plain decoding, bit for bit: logits of every committed row, KV bytes, recurrent state, tokens.

    python tests/gpu/equality.py            # all pairs; prints one JSON line last

Plain decoding verifies one row at a time. Speculation is forced through every accept length: ``right`` true drafts,
then wrong ones. Differences are counted, not tolerated.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

from native_backend_support import ENGINE, device_cubin, native, prompt  # noqa: E402

from edge_dflash.backends.cuda.backend import NativeBackend  # noqa: E402
from edge_dflash.bench.random_pair import RandomWeights, synthetic_pair  # noqa: E402

NEW = 33  # tokens of a run


@dataclass
class Tally:
    """What was compared, and what differed."""

    pair: str
    prompts: int = 0
    accept_lengths: int = 0
    cycles: int = 0
    rows: int = 0
    state_bytes: int = 0
    differences: int = 0


def full_size(name, layers, taps, lanes=1):
    """The first layers of a published pair at full width, with random weights; a small vocabulary."""
    pair = synthetic_pair(name)
    target = replace(pair.target, layer_types=pair.target.layer_types[:layers], vocab_size=8192)
    drafter = replace(
        pair.drafter, num_target_layers=layers, target_layer_ids=taps, vocab_size=8192, mask_token_id=8191
    )
    pair = replace(pair, target=target, drafter=drafter)
    weights = RandomWeights(pair, "nvfp4", device_cubin)
    sizes = {"max_context": 512, "prefill_chunk": 128, "lanes": lanes}
    return NativeBackend(pair, weights, ENGINE, cubin=device_cubin, **sizes)


BACKENDS = {
    "demo nvfp4": partial(native, "demo", "nvfp4"),
    "demo bf16": partial(native, "demo", "bf16"),
    "dense mixed": partial(native, "dense", "mixed"),
    "hybrid nvfp4": partial(native, "hybrid", "nvfp4"),
    "8 layers of qwen3.6-27b": partial(full_size, "qwen3.6-27b", 8, (0, 2, 4, 5, 6)),
    "10 layers of qwen3.6-35b-a3b": partial(full_size, "qwen3.6-35b-a3b", 10, (0, 1, 2, 3, 4, 5, 6, 7)),
    "6 layers of qwen3-8b": partial(full_size, "qwen3-8b", 6, (0, 1, 2, 3, 4)),
}


def plain(backend, ids):
    """Tokens, the bytes of the logits behind each, and the state, one verified row at a time."""
    backend.reset()
    rows = backend.prefill(ids)
    tokens, logits = rows.argmax(), [rows.logits()[0].tobytes()]
    while len(tokens) < NEW:
        rows = backend.verify(tokens[-1:])
        tokens += rows.argmax()
        logits.append(rows.logits()[0].tobytes())
        backend.commit(1)
        backend.flush()
    return tokens, logits, backend.snapshot()


def forced(backend, ids, right, wanted, tally):
    """One run with ``right`` true drafts a cycle; counts what differs from plain decoding."""
    tokens, logits, state = wanted
    size, vocabulary = backend.shape.block_size, backend.shape.vocab_size
    backend.reset()
    backend.prefill(ids)
    done = 1  # tokens known; the last one is the anchor
    while done < NEW:
        true = tokens[done : done + right]
        wrong = [(t + 1) % vocabulary for t in (tokens[done + right :] + [0] * size)[: size - 1 - right]]
        block = ([tokens[done - 1], *true, *wrong])[:size]
        found = backend.verify(block)
        rows, choices = found.logits(), found.argmax()
        count = min(len(true) + 1, NEW - done)
        for i in range(count):
            tally.rows += 1
            tally.differences += rows[i].tobytes() != logits[done + i]
            tally.differences += choices[i] != tokens[done + i]
        backend.commit(count)
        done += count
        tally.cycles += 1
    ended = backend.snapshot()
    tally.differences += ended.length != state.length
    for name, array in state.arrays.items():
        tally.state_bytes += array.nbytes
        tally.differences += ended.arrays[name].tobytes() != array.tobytes()


def check(name, backend, prompts):
    """Every accept length on every prompt."""
    tally = Tally(name)
    for ids in prompts:
        wanted = plain(backend, ids)
        for right in range(backend.shape.block_size):
            forced(backend, ids, right, wanted, tally)
        tally.prompts += 1
    tally.accept_lengths = backend.shape.block_size
    return tally


def prompts_for(name, backend):
    """Three prompts of different lengths."""
    pair = name.split()[0] if name.split()[0] in ("demo", "dense", "hybrid") else "hybrid"
    return [[t % backend.shape.vocab_size for t in prompt(pair, count, seed=count)] for count in (5, 40, 91)]


def main():
    """Check all pairs."""
    found = []
    for name, make in BACKENDS.items():
        backend = make()
        tally = check(name, backend, prompts_for(name, backend))
        found.append(asdict(tally))
        print(tally, flush=True)
    print(json.dumps({"bit_equality": found, "differences": sum(t["differences"] for t in found)}))


if __name__ == "__main__":
    main()
