"""The golden pairs as backends, for tests."""

from functools import cache

from paths import GOLDEN
from safetensors.numpy import load_file

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.decode.backend import Precision
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.checkpoint import PairCheckpoint

NAMES = ("qwen3", "qwen3_5")
WALKS = ("qwen3-dspark-vanilla", "qwen3-dspark-gated", "qwen3-dspark-rnn", "qwen3_5-dflash2")
"""Pairs whose drafts are chosen by a walk."""
EXPERTS = "qwen3_5_moe"
"""A pair whose target is a mixture of experts."""
FLOAT32 = Precision("float32", "float32")
ENGINE = Precision("bfloat16", "fp8")


def directories(name):
    """Checkpoints of target and drafter."""
    target, _, drafter = name.partition("-")
    return GOLDEN / f"{target}-tiny", GOLDEN / f"{target}-tiny-{drafter or 'dflash'}"


@cache
def pair(name):
    return read_pair(*directories(name))


@cache
def programs(name):
    return pair_programs(pair(name))


@cache
def store(name):
    return PairCheckpoint.open(*directories(name), programs(name).weights)


@cache
def golden(name):
    return load_file(GOLDEN / f"golden_{name}.safetensors")


CPU_BACKENDS = {"reference": ReferenceBackend}
"""Backends that run on any machine, each held to what all promise by tests/backends/test_cpu_backends.py."""


def backend(name, precision=FLOAT32, max_context=160, kind="reference", **options):
    return CPU_BACKENDS[kind](pair(name), store(name), precision, max_context=max_context, **options)


def same_bits(a, b):
    """Whether two snapshots are equal, bit for bit."""
    return (
        (a.length, a.delta) == (b.length, b.delta)
        and a.arrays.keys() == b.arrays.keys()
        and all(a.arrays[n].tobytes() == b.arrays[n].tobytes() for n in a.arrays)
    )
