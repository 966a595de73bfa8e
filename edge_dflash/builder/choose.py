"""Which backends a bundle is built for: what was asked for, or what suits the arch; which formats our kernels take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_dflash.backends.cuda.compile import compiler_version
from edge_dflash.backends.tensorrt.flavours import TENSORRT_RTX
from edge_dflash.board.archs import ARCHS_OF, BACKENDS, Arch, ordered
from edge_dflash.board.profiles import named_arch
from edge_dflash.decode.backend import MOST_LANES
from edge_dflash.errors import BackendError, BuildError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import Nvfp4Weight, WeightFormat, WeightStore, read_as
from edge_dflash.weights.recipe import Recipe

BOTH = ("native", "tensorrt")


@dataclass(frozen=True)
class Choice:
    """The backends of a build."""

    arch: Arch
    backends: tuple[str, ...]  # in the order of BACKENDS
    why: str
    given: bool  # asked for by name: what stands in the way of one is an error

    @property
    def active(self) -> str:
        """The backend that runs the bundle until two were timed: native kernels run at once."""
        return self.backends[0]

    @property
    def line(self) -> str:
        """For people: what was chosen and why."""
        return f"building for {self.arch.name}, backend {','.join(self.backends)}: {self.why}"


def choose(arch: str, backend: str | None, recipe: Recipe) -> Choice:
    """Decide by ``backend`` ("native", "native,tensorrt"), or by the arch when it is None.

    Raises BackendError for unknown names and for pairs that are not built together.
    """
    found = named_arch(arch)
    if backend is not None:
        return Choice(found, _named(arch, found, backend), "as asked for", given=True)
    if not found.sm:
        return Choice(found, ("reference",), "a CPU runs the reference backend alone", given=False)
    if found.sm < read_as("nvfp4").tensorrt:
        return Choice(found, ("native",), "our kernels read every format there", given=False)
    if recipe.activations == "nvfp4":
        why = f"recipe {recipe.name} has NVFP4 activations, which only TensorRT computes"
        return Choice(found, ("tensorrt",), why, given=False)
    if found.tensorrt == TENSORRT_RTX.module:
        why = "kernels that run at once, and plans, as TensorRT for RTX is installed here"
    else:
        why = "kernels that run at once, and the networks of plans, which only the board can compile"
    return Choice(found, BOTH, f"{why}; build --finish on the board keeps the faster", given=False)


def _named(arch: str, found: Arch, backend: str) -> tuple[str, ...]:
    """The backends of ``--backend``. Raises BackendError."""
    names = [name.strip() for name in backend.split(",")]
    if any(name not in BACKENDS for name in names):
        raise BackendError(f"--backend is {backend!r}, accepted are {', '.join(BACKENDS)} and {','.join(BOTH)}")
    if len(set(names)) > 1 and ordered(names) != BOTH:
        raise BackendError(f"--backend is {backend!r}; only native and tensorrt share a bundle: build the other apart")
    for name in names:
        if name not in found.backends:
            raise BackendError(
                f"--arch is {arch!r}, --backend {name} is built for {', '.join(ARCHS_OF[name])}; "
                "leave --backend out for what suits the arch"
            )
    return ordered(names)


def decide_lanes(asked: int | None, recipe: Recipe) -> int:
    """Sequences at once that a bundle opens with: as asked, else the recipe's. Raises BuildError."""
    lanes = recipe.context.lanes if asked is None else asked
    if not 1 <= lanes <= MOST_LANES:
        raise BuildError(f"lanes is {lanes}, accepted are 1 to {MOST_LANES}")
    return lanes


def decide_native(
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
    linears = [store.get(name) for name, spec in programs.weights.items() if spec.kind == "linear"]
    count = sum(isinstance(weight, Nvfp4Weight) and weight.input_scale is not None for weight in linears)
    dropped = (
        f"{count} linears of the checkpoint carry scales of NVFP4 activations, which are left out: "
        "the native backend computes with bf16 activations"
    )
    return narrowed(formats, programs, store), (dropped,) if count else ()
