"""The mixtures of experts of a pair whose other dense ops are engines: our kernels over the stacks of its bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.kernels.experts import ExpertKernels
from edge_dflash.backends.cuda.memory import Allocator
from edge_dflash.backends.cuda.mixtures import Mixtures, count_mixtures, shape_of
from edge_dflash.backends.cuda.states import Sizes
from edge_dflash.backends.cuda.steps import Mix
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.model.ops import Experts
from edge_dflash.model.program import PairPrograms
from edge_dflash.weights.stacks import expert_stacks


class EngineMixtures:
    """Of no layer in a pair without experts."""

    def __init__(self, weights: NativeWeights, cubin: Callable[[str], bytes]) -> None:
        self._weights, self._cubin = weights, cubin
        self.steps: Mapping[str, Mix] = {}  # by the output of the op
        self._rows = 0

    def lay_out(self, programs: PairPrograms, sizes: Sizes) -> None:
        """Find the stacks of all layers. Raises BackendError for what the kernels do not take."""
        stacks = expert_stacks(programs.verify, self._weights.formats)
        self._rows = max(sizes.prefill_rows, sizes.rows)
        ops = {op.output: op for op in programs.verify.ops if isinstance(op, Experts)}
        self.steps = {
            name: Mix(op.inputs, (name,), op=op, up=stacks[name][0], down=stacks[name][1]) for name, op in ops.items()
        }
        for step in self.steps.values():
            shape_of(step)

    def count(self, memory: Allocator) -> None:
        """Count weights and memory, before anything is loaded."""
        if self.steps:
            count_mixtures(memory, self.steps, self._rows)

    def load(self, gpu: Gpu, memory: Allocator) -> Mixtures | None:
        """Bring the weights to the device."""
        if not self.steps:
            return None
        return Mixtures(gpu, ExpertKernels(gpu, self._cubin), self._weights, memory, self.steps, self._rows)
