"""Stores to measure: the demo target's source and its bundle, and stores that change weights on the way."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from edge_dflash.demo.tasks import HELDOUT, TARGET
from edge_dflash.model import pair_programs
from edge_dflash.quality.compare import figures
from edge_dflash.quality.measure import Run
from edge_dflash.quality.stream import Passes, Variant
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.checkpoint import PairCheckpoint, checkpoint_pair
from edge_dflash.weights.formats import Nvfp4Weight
from edge_dflash.weights.quantize import ENCODERS, wide_tensor

SEQUENCES = [list(range(40, 75)), [9, 8, 700, 6, 5, 4, 900, 800, 31, 32, 33, 34], [77] * 17]


@cache
def source():
    """The demo target's checkpoint and its pair."""
    pair = checkpoint_pair(Path(TARGET), None)
    return PairCheckpoint.open(Path(TARGET), None, pair_programs(pair).weights), pair


@cache
def task_texts():
    """Ids of two short held-out tasks with their answers."""
    tokenizer = Tokenizer.open(Path(TARGET))
    tasks = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    found = [(*tokenizer.encode_chat(one["messages"]), *tokenizer.encode_text(one["answer"])) for one in tasks]
    return [ids for ids in found if len(ids) < 260][:2]


def sensitivities(stores, pair, sequences, units=None, *, device="cpu"):
    """Figures of each unit of the other store that costs anything, alone, over all sequences."""
    passes, rows = Passes.of(pair), sum(map(len, sequences))
    variants = {name: Variant(frozenset(taken), rows) for name, taken in (units or passes.units).items()}
    run = Run(passes, stores, sequences, variants, device=device)
    return {name: figures(found) for name, found in run.compared().items()}


class Changed:
    """A store some of whose weights and scales are changed on the way."""

    def __init__(self, store, weight=lambda name, weight: weight, scale=lambda state, scales: scales):
        self._store, self._weight, self._scale = store, weight, scale

    def get(self, name):
        with torch.device("cpu"):  # whatever the device of the stream that asks
            return self._weight(name, self._store.get(name))

    def kv_scale(self, state):
        return self._scale(state, self._store.kv_scale(state))


def rounded(pair, form="nvfp4"):
    """A change that stores linears in a format."""
    specs = pair_programs(pair).weights

    def change(name, weight):
        wanted = specs[name].kind == "linear" and not name.endswith(("in_proj_a", "in_proj_b"))
        return ENCODERS[form](wide_tensor(weight).float()) if wanted else weight

    return change


def stretched(layer, factor):
    """A change of the global scale of a layer's linears."""

    def change(name, weight):
        if f".layers.{layer}." in name and isinstance(weight, Nvfp4Weight):
            return replace(weight, global_scale=weight.global_scale * factor)
        return weight

    return change


def kld(p, q):
    """KL(p || q) of rows of logits, by its definition in float64."""
    p, q = (torch.log_softmax(z.double(), -1) for z in (p, q))
    return (p.exp() * (p - q)).sum(-1)
