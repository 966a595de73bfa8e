"""Which plans a bundle holds, under which names, and whether a pair can be run that way. Knows no TensorRT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from edge_dflash.backends.cuda.support import check_native
from edge_dflash.backends.tensorrt.units import EMBEDDING, HEAD, PairUnits, Unit, pair_units
from edge_dflash.board.archs import find_arch
from edge_dflash.bundle.manifest import PLANS
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import WeightFormat, read_as

STATE_UNITS = ("attend", "cycle", "delta", "sample", "small")  # compilation units of kernels that run between plans
WORD = 16  # rows of logits lie behind each other without gaps, and start on so many


def plan_name(key: str) -> str:
    """Path of a plan in a bundle."""
    return f"{PLANS}{key}.plan"


def bundle_units(pair: PairSpec, prefill_chunk: int) -> PairUnits:
    """Dense ops of a pair as units. Raises BackendError."""
    return pair_units(pair_programs(pair), pair.drafter.block_size, prefill_chunk)


def planned(units: Mapping[str, Unit]) -> dict[str, Unit]:
    """Units that become plans, by path: all but the embedding, whose rows a kernel gathers.

    The head is first: its plan takes longest to build, and nothing should wait for it in the end.
    """
    found = {plan_name(key): unit for key, unit in units.items() if key != EMBEDDING}
    return dict(sorted(found.items(), key=lambda item: item[1].key != HEAD))


def check_plans(
    pair: PairSpec, formats: Mapping[str, WeightFormat], arch: str, kv: Literal["fp8", "bfloat16"] = "fp8"
) -> None:
    """Raise BackendError, naming weight or op, unless plans and state kernels for ``arch`` run the pair."""
    check_native(pair, formats, kv=kv)
    sm = find_arch(arch, "tensorrt").sm
    for name, word in formats.items():
        if sm < (first := read_as(word).tensorrt):
            raise BackendError(
                f"{name} is {word}, which TensorRT runs on SM {first} and later, not on {arch}; "
                "build it with --backend native, or choose fp8 in the recipe"
            )
    if pair.target.vocab_size % WORD:
        raise BackendError(
            f"the vocabulary has {pair.target.vocab_size} tokens, plans need a multiple of {WORD}; "
            "build it with --backend native"
        )
