"""What a build for the native backend decides and checks before it writes a byte."""

from __future__ import annotations

from collections.abc import Mapping

from edge_dflash.backends.cuda.compile import compiler_version
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.program import PairPrograms
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import Nvfp4Weight, WeightFormat, WeightStore
from edge_dflash.weights.recipe import Recipe


def plan_native(
    arch: str, recipe: Recipe, pair: PairSpec, store: WeightStore, formats: Mapping[str, WeightFormat]
) -> tuple[dict[str, WeightFormat], tuple[str, ...]]:
    """Formats of a native bundle and warnings.

    Raises BuildError without a compiler and BackendError for what the kernels do not take.
    """
    compiler_version()
    from edge_dflash.backends.cuda.support import check_native, narrowed  # the bindings of CUDA, only here

    if recipe.activations == "nvfp4":
        raise BackendError(
            f"recipe {recipe.name} asks for activations in nvfp4, the native backend computes with bf16; "
            "set activations: bf16, the weights may stay nvfp4"
        )
    programs = pair_programs(pair)
    check_native(pair, formats, arch=arch, kv="fp8" if recipe.kv == "fp8" else "bfloat16")
    return narrowed(formats, programs, store), _dropped_scales(programs, store)


def _dropped_scales(programs: PairPrograms, store: WeightStore) -> tuple[str, ...]:
    linears = [store.get(name) for name, spec in programs.weights.items() if spec.kind == "linear"]
    count = sum(isinstance(weight, Nvfp4Weight) and weight.input_scale is not None for weight in linears)
    if not count:
        return ()
    return (
        f"{count} linears of the checkpoint carry scales of NVFP4 activations, which are left out: "
        "the native backend computes with bf16 activations",
    )
