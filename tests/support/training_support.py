"""A small pair with taps of random answers, and the golden pairs' drafters, for tests of the training."""

from pathlib import Path

import numpy as np
from golden_pairs import backend, pair, store

from edge_dflash.bundle.reader import Bundle
from edge_dflash.model import pair_programs
from edge_dflash.training.drafter import TARGET, BlockDrafter, drafter_weights
from edge_dflash.training.settings import TrainingRun
from edge_dflash.training.taps import Sample, Shards, write_taps
from edge_dflash.weights.quantize import dequantize

SCHEMA = {
    "type": "object",
    "properties": {"do": {"enum": ["a", "b"]}},
    "required": ["do"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}


def answers(bundle, count=12):
    """Prompts of random tokens and answers that repeat a few patterns: something to learn."""
    rng, size = np.random.default_rng(0), bundle.pair.target.vocab_size
    patterns = rng.integers(0, size, (2, 30))
    return [
        Sample((*rng.integers(0, size, 6).tolist(), *patterns[i % 2].tolist()), 6, heldout=i >= count - 4)
        for i in range(count)
    ]


def prepared(path, folder):
    """The bundle, and shards of its taps in a folder, made where they are not there."""
    bundle = Bundle.open(path)
    return bundle, Shards(write_taps(bundle, answers(bundle), folder))


def drafter_of(bundle, weights=None):
    """The drafter of a bundle, perhaps with other weights of its own."""
    held = {name: dequantize(bundle.get(name)) for name in (*drafter_weights(bundle.pair), *TARGET)}
    return BlockDrafter(bundle.pair, held | (weights or {}), bundle.manifest.weights)


def weights_of(name):
    """What the drafter of a golden pair has, its target's embedding and head among it."""
    return {one: dequantize(store(name).get(one)) for one in (*drafter_weights(pair(name)), *TARGET)}


def module(name):
    """The drafter of a golden pair."""
    return BlockDrafter(pair(name), weights_of(name))


def taps_of(name, ids):
    """Taps of a prompt by the reference's own pass."""
    one = backend(name)
    outputs = one._interpreter.run(pair_programs(pair(name)).prefill, ids, one._lanes[0].memory)
    return outputs["taps"]


def plan(**changes):
    """A run of which the steps alone matter."""
    return TrainingRun(Path(), (), Path(), **{"sequences": 4, "anchors": 4, "rate": 3e-3, "checks": 4, **changes})
