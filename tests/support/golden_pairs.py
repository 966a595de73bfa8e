"""The golden pairs as backends, for tests."""

from functools import cache
from pathlib import Path

from safetensors.numpy import load_file

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.decode.backend import Precision
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.checkpoint import PairCheckpoint

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("qwen3", "qwen3_5")
FLOAT32 = Precision("float32", "float32")
ENGINE = Precision("bfloat16", "fp8")


@cache
def pair(name):
    return read_pair(GOLDEN / f"{name}-tiny", GOLDEN / f"{name}-tiny-dflash")


@cache
def programs(name):
    return pair_programs(pair(name))


@cache
def store(name):
    return PairCheckpoint.open(GOLDEN / f"{name}-tiny", GOLDEN / f"{name}-tiny-dflash", programs(name).weights)


@cache
def golden(name):
    return load_file(GOLDEN / f"golden_{name}.safetensors")


def backend(name, precision=FLOAT32, max_context=160, **options):
    return ReferenceBackend(pair(name), store(name), precision, max_context=max_context, **options)


def same_bits(a, b):
    """Whether two snapshots are equal, bit for bit."""
    return (
        a.length == b.length
        and a.arrays.keys() == b.arrays.keys()
        and all(a.arrays[n].tobytes() == b.arrays[n].tobytes() for n in a.arrays)
    )
