"""What a build for the TensorRT backend decides and checks before it writes a byte."""

from __future__ import annotations

from collections.abc import Mapping

from edge_dflash.backends.cuda.compile import compiler_version
from edge_dflash.backends.cuda.support import device_sm
from edge_dflash.backends.tensorrt.api import TENSORRT_RTX, Flavour, flavour_of, load, version
from edge_dflash.board.archs import find_arch
from edge_dflash.builder.choice import Choice
from edge_dflash.bundle.manifest import Plans
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import WeightFormat, WeightStore
from edge_dflash.weights.recipe import Recipe


def plan_tensorrt(
    choice: Choice, recipe: Recipe, pair: PairSpec, store: WeightStore, formats: Mapping[str, WeightFormat], chunk: int
) -> tuple[dict[str, WeightFormat], Plans, tuple[str, ...]]:
    """Formats of a TensorRT bundle; its plans, to be built here or deferred to the device; warnings.

    Raises BuildError without a kernel compiler, BackendError without TensorRT for RTX where that is what builds, and
    for what plans or state kernels do not take.
    """
    compiler_version()
    from edge_dflash.backends.cuda.support import narrowed  # the bindings of CUDA, only here
    from edge_dflash.backends.tensorrt.backend import check_engines
    from edge_dflash.backends.tensorrt.units import bundle_units, engine_units

    arch = choice.arch.name
    flavour = flavour_of(arch)
    check_engines(pair, formats, arch, "fp8" if recipe.kv == "fp8" else "bfloat16")
    names = tuple(sorted(engine_units(bundle_units(pair, chunk).units)))
    found = builder_version(arch, flavour)
    plans = Plans(
        "tensorrt_rtx" if flavour is TENSORRT_RTX else "tensorrt", found, names, () if found is not None else names
    )
    warnings = () if "native" in choice.backends else _expanded(recipe, pair, formats)  # else the faster is kept
    return narrowed(formats, pair_programs(pair), store), plans, warnings


def _expanded(recipe: Recipe, pair: PairSpec, formats: Mapping[str, WeightFormat]) -> tuple[str, ...]:
    """A warning about what is right and slow."""
    specs = pair_programs(pair).weights
    names = [n for n, spec in specs.items() if formats[n] == "nvfp4" and not recipe.nvfp4_activations(spec, "nvfp4")]
    if not names:
        return ()
    return (
        f"{len(names)} NVFP4 linears ({names[0]} ...) read BF16 activations: TensorRT for RTX 1.7 expands such "
        "weights to BF16 on every run, several times the bytes; set activations: nvfp4 in the recipe, and fp8 for "
        "lm_head and fc",
    )


def builder_version(arch: str, flavour: Flavour) -> str | None:
    """Version of the TensorRT that builds for ``arch`` on this machine; None: that is left to the device."""
    if flavour is TENSORRT_RTX:
        return checked_version(flavour)
    try:
        return checked_version(flavour) if device_sm() == find_arch(arch).sm else None
    except BackendError:
        return None


def checked_version(flavour: Flavour) -> str:
    """Version of an installed flavour. Raises BackendError when it is missing or too old for our layers."""
    found = version(load(flavour))
    if _numbers(found)[:2] < _numbers(flavour.first):
        raise BackendError(f"{flavour.product} is {found}, plans need {flavour.first} or later; {flavour.install}")
    return found


def check_device(arch: str, where: str, what: str) -> None:
    """Raise BackendError unless this machine's GPU is the one for ``what``, such as "its plans are built"."""
    wanted = find_arch(arch).sm
    try:
        sm = device_sm()
    except BackendError as error:
        raise BackendError(
            f"{where}: {what} on a device of SM {wanted}, and here is none ({error}); "
            f"copy the bundle to the board and run there: edge-dflash build --finish {where}"
        ) from None
    if sm != wanted:
        raise BackendError(
            f"{where}: {what} on a device of SM {wanted}, this one is SM {sm}; "
            f"copy the bundle to the board and run there: edge-dflash build --finish {where}"
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
