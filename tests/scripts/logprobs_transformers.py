"""Log-probabilities against those of transformers, in float32: the golden pairs and the demo pair.

``python tests/scripts/logprobs_transformers.py`` in an environment with transformers. Last line: one JSON object.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from golden_pairs import FLOAT32, GOLDEN  # noqa: E402

from edge_dflash.backends.reference.backend import ReferenceBackend  # noqa: E402  # found by the path above
from edge_dflash.decode.loop import stream  # noqa: E402
from edge_dflash.decode.options import Options  # noqa: E402
from edge_dflash.model import pair_programs  # noqa: E402
from edge_dflash.model.registry import read_pair  # noqa: E402
from edge_dflash.weights.checkpoint import PairCheckpoint  # noqa: E402

DEMO = ROOT / "edge_dflash" / "demo" / "models"
PAIRS = {name: (GOLDEN / f"{name}-tiny", GOLDEN / f"{name}-tiny-dflash") for name in ("qwen3", "qwen3_5")}
PAIRS["demo"] = (DEMO / "target", DEMO / "drafter")
GREEDY = Options(max_new_tokens=64, logprobs=20)
MODES = {"greedy": GREEDY, "sampled": replace(GREEDY, temperature=1.5, top_k=50, top_p=0.95, seed=3)}


def compare(name: str, mode: str) -> dict[str, float]:
    """Largest differences: of the tokens' own, of the alternatives', and how many alternatives have another rank."""
    target, drafter = PAIRS[name]
    pair = read_pair(target, drafter)
    store = PairCheckpoint.open(target, drafter, pair_programs(pair).weights)
    backend = ReferenceBackend(pair, store, FLOAT32, max_context=256)
    prompt = np.random.default_rng(5).integers(pair.target.vocab_size, size=24).tolist()
    made = [one for step in stream(backend, prompt, MODES[mode]) for one in step.logprobs]
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *(one.token for one in made)]])).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits.double(), -1)
    own = max(abs(one.logprob - float(row[one.token])) for one, row in zip(made, rows, strict=True))
    best = rows.topk(20).indices.tolist()
    pairs = [(other, row, right) for one, row, ids in zip(made, rows, best, strict=True)
             for other, right in zip(one.top, ids, strict=True)]  # fmt: skip
    return {
        "tokens": len(made),
        "own": own,
        "alternatives": max(abs(other.logprob - float(row[other.token])) for other, row, _ in pairs),
        "other_rank": sum(other.token != right for other, _, right in pairs),
    }


def main() -> None:
    found = {f"{name} {mode}": compare(name, mode) for name in PAIRS for mode in MODES}
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__, **found}))


if __name__ == "__main__":
    main()
