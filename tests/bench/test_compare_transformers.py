"""The parts of the side-by-side comparison that need no GPU: its drafter and its repacking are right."""

from __future__ import annotations

import compare_transformers
import numpy as np
import torch
import transformers_pair
from golden_pairs import GOLDEN

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.decode.backend import Precision
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.quantize import wide_tensor


def test_its_repacking_is_that_of_a_build():
    compare_transformers.check_packing()


def test_its_drafter_gives_the_reference_drafts():
    target, drafter = GOLDEN / "qwen3-tiny", GOLDEN / "qwen3-tiny-dflash"
    pair = read_pair(target, drafter)
    specs = pair_programs(pair).weights
    store = PairCheckpoint.open(target, drafter, specs)
    weights = {name: wide_tensor(store.get(name)).float() for name in specs}
    reference = ReferenceBackend(pair, store, Precision("float32", "float32"), max_context=128)
    inner = {name.removeprefix("drafter."): w for name, w in weights.items() if name.startswith("drafter.")}
    theirs = transformers_pair.Drafter(
        pair.drafter, inner, weights["target.embed_tokens"], weights["target.lm_head"], 128
    )
    prompt = list(range(5, 45))
    reference.prefill(prompt)
    arrays = reference.snapshot().arrays
    for index in range(pair.drafter.num_layers):
        for which, part in enumerate("kv"):
            rows = torch.from_numpy(np.array(arrays[f"drafter.layers.{index}.kv.{part}"]).view(np.float32))
            theirs.memory[index, which, :, : len(prompt)] = rows.view(
                len(prompt), -1, pair.drafter.attention.head_dim
            ).transpose(0, 1)
    found = theirs.drafts(torch.tensor([77]), len(prompt)).numpy()
    want = reference.propose(77).logits()
    assert np.abs(found - want).max() < 1e-3 * np.abs(want).max()
