"""Accept lengths of the tiny pairs and of the demo pair under every reading of a drafter's masks.

    python tests/scripts/drafter_masks.py [--golden DIR] [--pairs qwen3,qwen3_5,demo] [--tasks 3]

Reference backend, greedy; float32 weights and activations for the tiny pairs, BF16 ones for the demo pair's held-out
tasks. ``drafts`` is the share of draft tokens of the golden file's first blocks that come out the same. The output
tokens must not depend on the masks. The last line is one JSON object.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from paths import GOLDEN

from calib.demo.evaluate import heldout_tasks
from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.demo.tasks import MODELS
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.recipe import MaskOverride, Recipe


def readings(pair):
    """Masks by name: what the config says, and what it would mean elsewhere."""
    layers = pair.drafter.layers
    window = next((mask.window for mask in layers if mask.window), 24)
    slides = [f"drafter.layers.{index}" for index, mask in enumerate(layers) if mask.window]
    full = [f"drafter.layers.{index}" for index, mask in enumerate(layers) if not mask.window]
    return {
        "config": (),
        "is_causal true": (MaskOverride("*", "causal"),),
        "is_causal false": (MaskOverride("*", "bidirectional"),),
        "sliding layers see all": tuple(MaskOverride(name, "bidirectional", "none") for name in slides),
        "no window": (MaskOverride("*", window="none"),),
        "use_swa": tuple(MaskOverride(name, window=window) for name in full),
        "use_swa, is_causal true": (MaskOverride("*", "causal", window),),
    }


def accept_length(pair, store, precision, prompts, new_tokens, context):
    """Mean accept length, and the tokens."""
    backend = ReferenceBackend(pair, store, precision, max_context=context)
    made, cycles, tokens, options = 0, 0, [], Options(max_new_tokens=new_tokens)
    for prompt in prompts:
        backend.reset()
        done = generate(backend, prompt, options, stop_token_ids=pair.target.eos_token_ids)
        made, cycles = made + sum(done.accept_lengths), cycles + len(done.accept_lengths)
        tokens.append(done.tokens)
    return made / cycles, tokens


def same_drafts(pair, store, golden):
    """Share of the first block's drafts that are the golden's."""
    same = []
    for name in ("p0", "p1", "p2"):
        backend = ReferenceBackend(pair, store, Precision("float32", "float32"), max_context=160)
        backend.prefill(golden[f"{name}.prompt"].tolist())
        drafts = backend.propose(int(golden[f"{name}.greedy_tokens"][0])).argmax()
        same.append(np.asarray(drafts) == golden[f"{name}.cycle_draft_tokens"][0])
    return float(np.mean(same))


def tiny(folder, name):
    target, drafter = folder / f"{name}-tiny", folder / f"{name}-tiny-dflash"
    pair, golden = (
        read_pair(target, drafter),
        load_file(folder / f"golden_{name}.safetensors"),
    )
    prompts = [golden[f"p{n}.prompt"].tolist() for n in range(3)]
    return pair, PairCheckpoint.open(target, drafter, pair_programs(pair).weights), prompts, golden


def demo(tasks):
    pair = read_pair(MODELS / "target", MODELS / "drafter")
    tokenizer = Tokenizer.open(MODELS / "target")
    prompts = [list(tokenizer.encode_chat(task.messages)) for task in heldout_tasks()[:tasks]]
    store = PairCheckpoint.open(MODELS / "target", MODELS / "drafter", pair_programs(pair).weights)
    return pair, store, prompts, None


def measure(pair, store, prompts, golden):
    precision, new_tokens, context = (
        (Precision("float32", "float32"), 64, 160) if golden else (Precision("bfloat16", "fp8"), 160, 1024)
    )
    found, plain = {}, None
    for name, masks in readings(pair).items():
        changed = Recipe("reading", masks=masks).masked(pair)
        length, tokens = accept_length(changed, store, precision, prompts, new_tokens, context)
        assert plain in (None, tokens), f"{name} changed the output"
        plain = tokens
        found[name] = {"accept_length": round(length, 3)}
        if golden:
            found[name]["drafts"] = round(same_drafts(changed, store, golden), 3)
        print(f"{name:26} {found[name]}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", type=Path, default=GOLDEN)
    parser.add_argument("--pairs", default="qwen3,qwen3_5,demo")
    parser.add_argument("--tasks", type=int, default=3)
    given = parser.parse_args()
    result = {}
    for name in given.pairs.split(","):
        print(name)
        result[name] = measure(*(demo(given.tasks) if name == "demo" else tiny(given.golden, name)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
