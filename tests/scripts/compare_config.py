"""Every one-key mutation of a target's configuration, read here and by transformers: do the logits agree?

    python -m tests.scripts.compare_config docs/results/config-keys.json

Needs transformers beside torch. The weights are those of the golden checkpoints, in float32 on the CPU; one prompt of
40 tokens. Where both run the model, the largest difference of a logit must stay below 1e-3. What we refuse is
counted by what transformers does with it: refuses it too, gives the same logits as without the mutation, or others.
Mutations of drafters and of quantization are judged by the parser alone: transformers has no such keys.
"""

import datetime
import json
import logging
import resource
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import transformers
from config_mutations import CONFIG, OUTCOMES, Base, bases, load, verdicts
from golden_pairs import GOLDEN
from safetensors.torch import load_file, save_file

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.checks.observe import FLOAT32
from edge_dflash.errors import CheckpointError
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.checkpoint import PairCheckpoint

PROMPT = [(37 * i + 11) % 192 for i in range(40)]
TOLERANCE = 1e-3
ASKED = {"refused": 2, "without effect": 1}  # values of a key that transformers is asked about; else all
MEMORY = 6 << 30  # bytes: transformers allocates whatever a number says
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}


def targets():
    """Bases that transformers can load, each with the golden checkpoint whose weights it has."""
    by_name = {base.name: base for base in bases()}
    nested = []
    for name in ("qwen3_5 nested, compressed-tensors", "qwen3_5 nested, ModelOpt, no layer_types"):
        config = {k: v for k, v in by_name[name].files[CONFIG].items() if k != "quantization_config"}
        nested.append(Base(name.replace("compressed-tensors", "wide").replace("ModelOpt", "wide"), {CONFIG: config}))
    for base in nested:
        base.files[CONFIG]["vision_config"] = {**VISION, "model_type": "qwen3_5_vision"}
    experts = by_name["qwen3_5_moe nested"]
    vision = {**VISION, "out_hidden_size": 64, "model_type": "qwen3_5_moe_vision"}
    experts.files[CONFIG] |= {"vision_config": vision}
    untied = Base("qwen3 untied", {CONFIG: load("qwen3-tiny") | {"tie_word_embeddings": False}})
    return [
        (by_name["qwen3"], "qwen3"),
        (by_name["qwen3 with flat rotary keys"], "qwen3"),
        (untied, "qwen3"),
        (by_name["qwen3_5"], "qwen3_5"),
        *((base, "qwen3_5") for base in nested),
        (by_name["qwen3_moe"], "qwen3"),
        (by_name["qwen3_5_moe"], "qwen3_5_moe"),
        (experts, "qwen3_5_moe"),
    ]


def write_weights(directory, family, base):
    """The golden weights under the names of this base; an untied Qwen3 gets a head of its own."""
    tensors = load_file(GOLDEN / f"{family}-tiny" / "model.safetensors")
    if "text_config" in base.files[CONFIG]:
        tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    if base.name == "qwen3 untied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    if base.name == "qwen3_moe":
        tensors = _mixtures(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _mixtures(tensors):
    """Qwen3's weights with the rows of each MLP dealt out to 8 experts of 16, first rows of gates as routers."""
    found = {name: value for name, value in tensors.items() if ".mlp." not in name}
    for name, gate in tensors.items():
        if name.endswith(".mlp.gate_proj.weight"):
            layer = name.removesuffix("gate_proj.weight")
            up, down = (tensors[f"{layer}{part}_proj.weight"] for part in ("up", "down"))
            halves = [part[: 8 * 16].reshape(8, 16, -1) for part in (gate, up)]
            found[f"{layer}experts.gate_up_proj"] = torch.cat(halves, 1).contiguous()
            found[f"{layer}experts.down_proj"] = down[:, : 8 * 16].reshape(-1, 8, 16).transpose(0, 1).contiguous()
            found[f"{layer}gate.weight"] = gate[:8].contiguous()
    return found


def ours(directory, family):
    """Logits [tokens, vocabulary] of the reference. Raises CheckpointError."""
    drafter = GOLDEN / f"{family}-tiny-dflash"
    pair = read_pair(directory, drafter)
    store = PairCheckpoint.open(directory, drafter, pair_programs(pair).weights)
    backend = ReferenceBackend(pair, store, FLOAT32, max_context=64)
    rows = []
    for first in range(0, len(PROMPT), pair.drafter.block_size):
        block = PROMPT[first : first + pair.drafter.block_size]
        rows.append(backend.verify(block).logits())
        backend.commit(len(block))
    return np.concatenate(rows)


def theirs(directory):
    """Logits [tokens, vocabulary] of transformers, or the name of what it raises."""
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        kind = getattr(transformers, config.architectures[0])
        weights = load_file(directory / "model.safetensors")
        model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        found = model.load_state_dict(weights, strict=False)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        if {name for name in found.missing_keys if "visual" not in name} - tied or found.unexpected_keys:
            return "other tensors"  # from_pretrained draws the missing ones at random and warns
        with torch.no_grad():
            return model(torch.tensor([PROMPT]), use_cache=False).logits[0].float().numpy()
    except Exception as error:
        return type(error).__name__


def compare(base, family, directory):
    """Every mutation of a base: (mutation, our outcome, what transformers makes of it, largest difference)."""
    write_weights(directory, family, base)
    for name, content in base.files.items():
        (directory / name).write_text(json.dumps(content))
    start, before = ours(directory, family), theirs(directory)
    assert np.abs(start - before).max() < TOLERANCE, base.name
    with tempfile.TemporaryDirectory() as scratch:
        judged = list(verdicts(base, Path(scratch)))
    seen = Counter()
    for mutation, outcome in judged:
        seen[mutation.path, outcome] += 1
        if seen[mutation.path, outcome] > ASKED.get(outcome, 100):
            continue
        for name, content in mutation.files().items():
            (directory / name).write_text(json.dumps(content))
        there = theirs(directory)
        here = start
        try:
            here = start if outcome in ("refused", "without effect") else ours(directory, family)
        except CheckpointError:
            outcome = "refused by the tensors"
        same = "raises" if isinstance(there, str) else bool(np.abs(here - there).max() < TOLERANCE)
        yield mutation, outcome, same, there if isinstance(there, str) else float(np.abs(here - there).max())


def main():
    """Compare every base, and write the counts and what differs."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    counts, notes, most = Counter(), {}, 0.0
    for base, family in targets():
        with tempfile.TemporaryDirectory() as directory:
            for mutation, outcome, same, found in compare(base, family, Path(directory)):
                there = {True: "the same logits", False: "other logits", "raises": "raises"}[same]
                counts[f"{outcome} here; {there} there"] += 1
                if not outcome.startswith("refused"):
                    most = max(most, 0.0 if same == "raises" else found)
                    if same is not True:
                        notes[mutation.label] = f"{outcome} here; {there} there ({found})"
        print(base.name, dict(counts), file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        parsed = Counter(outcome for base in bases() for _, outcome in verdicts(base, Path(scratch)))
    result = {
        "what": "One-key mutations of configurations, by tests/scripts/compare_config.py.",
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "commit": commit,
        "transformers": transformers.__version__,
        "parsed": {"mutations": parsed.total(), **{outcome: parsed[outcome] for outcome in OUTCOMES}},
        "compared": counts.total(),
        "compared_by_outcome": dict(sorted(counts.items())),
        "largest_difference_where_both_run": most,
        "differ": notes,
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
