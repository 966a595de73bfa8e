"""Pairs in every weight format, what the reference makes of their passes, and plans judged by it tensor by tensor."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from golden_pairs import ENGINE, EXPERTS, NAMES, WALKS
from golden_pairs import pair as golden_pair
from golden_pairs import store as golden_store
from trt_interpreter import run

from edge_dflash.backends.cuda.states import Sizes
from edge_dflash.backends.cuda.tensorrt.dense import layout_of
from edge_dflash.backends.cuda.tensorrt.flavours import TENSORRT_RTX, load
from edge_dflash.backends.cuda.tensorrt.lower import lower
from edge_dflash.backends.cuda.tensorrt.units import CHOICES, RunEngine, pair_units
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.decode.backend import Precision
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Linear
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.formats import Nvfp4Weight, WideWeight
from edge_dflash.weights.quantize import quantize_fp8, quantize_nvfp4, wide_tensor

DEMO = Path(__file__).resolve().parents[2] / "edge_dflash" / "demo" / "models"
PAIRS = ("demo", *NAMES, *WALKS, EXPERTS)
KINDS = ("w4a16", "w4a4", "fp8", "fp8-channel", "bf16")
PAIRS_AND_KINDS = [
    pytest.param(name, kind, marks=pytest.mark.xdist_group(f"{name} {kind}")) for name in PAIRS for kind in KINDS
]
"""What is cached below by both is made once where tests of a group run in one process."""
PASSES = ("prefill", "verify", "propose")
PROMPT, CHUNK = 21, 64  # tokens of the prefill, most rows of a prefill pass


@cache
def spec(name):
    if name == "demo":
        return read_pair(DEMO / "target", DEMO / "drafter")
    return golden_pair(name)


@cache
def checkpoint(name):
    if name == "demo":
        return PairCheckpoint.open(DEMO / "target", DEMO / "drafter", pair_programs(spec(name)).weights)
    return golden_store(name)


def cut(pair, chunk=CHUNK):
    """Engines and steps of a pair, and its layout; the experts' stacks are BF16."""
    programs = pair_programs(pair)
    found = pair_units(programs, dict.fromkeys(programs.weights, "bf16"), pair.verify_rows, chunk, pair.block_size)
    return found, layout_of(programs, Precision(), Sizes(pair.verify_rows, chunk, 256, block=pair.block_size), found)


@cache
def units(name):
    return cut(spec(name))[0]


def programs_of(name):
    """The programs of the passes, as run."""
    return {which: each.program for which, each in units(name).schedules.items()}


def runs(found, which):
    """The engines that a pass runs."""
    return [step for step in found.schedules[which].steps if isinstance(step, RunEngine)]


class Formatted:
    """A pair's weights with all linears but gates in one format; activation scales are put in by :func:`tensors`."""

    def __init__(self, name, kind):
        self.source, self.kind = checkpoint(name), kind
        self.specs = pair_programs(spec(name)).weights
        self.input_scales = {}
        self._made = {}

    def get(self, name):
        if name not in self._made:
            self._made[name] = self._convert(name)
        weight = self._made[name]
        scale = self.input_scales.get(name)
        return replace(weight, input_scale=scale) if scale and isinstance(weight, Nvfp4Weight) else weight

    def kv_scale(self, state):
        return self.source.kv_scale(state)

    def _convert(self, name):
        weight, spec = self.source.get(name), self.specs[name]
        if (
            spec.kind != "linear"
            or spec.module in ("gates", "router")
            or self.kind == "bf16"
            or not isinstance(weight, WideWeight)
        ):
            return weight
        if self.kind.startswith("fp8"):
            return quantize_fp8(wide_tensor(weight), per_channel=self.kind == "fp8-channel")
        return quantize_nvfp4(wide_tensor(weight))


@dataclass(frozen=True)
class Reference:
    """A pair in one format, and all tensors of its three passes as the reference backend makes them."""

    store: Formatted
    passes: dict[str, dict[str, np.ndarray]]


@cache
def reference(name, kind):
    """Prefill of PROMPT tokens, verify of a block and propose behind it, float32 arrays by tensor."""
    store = Formatted(name, kind)
    if kind == "w4a4":
        store.input_scales = _input_scales(name)
    return Reference(store, _passes(name, store))


def _passes(name, store, observer=None):
    programs, shape = programs_of(name), spec(name)
    interpreter = Interpreter(TorchWeights(store), ENGINE)
    memory = Memory.allocate(pair_programs(shape).states, 128, ENGINE, store.kv_scale)
    rng = np.random.default_rng(7)
    block = shape.drafter.block_size
    vocabulary = shape.target.vocab_size
    found = {}
    for which, rows in (("prefill", PROMPT), ("verify", shape.verify_rows), ("propose", block)):
        ids = [int(i) for i in rng.integers(0, vocabulary, rows)]
        if which == "propose":
            ids[1:] = [shape.drafter.mask_token_id] * (block - 1)
        program = programs[which]
        names = [op.output for op in program.ops]
        outputs = interpreter.run(program, ids, memory, want=names, observer=observer)
        found[which] = {n: outputs[n].numpy() for n in names} | {"ids": np.array(ids)}
        if which == "prefill":
            memory.length += rows
    return found


@cache
def _input_scales(name):
    """max|input| / 2688 of every linear of the pair with NVFP4 weights, but of the head and fc."""
    largest = {}

    def observe(op, role, values):
        if isinstance(op, Linear) and role == "x":
            largest[op.weight] = max(largest.get(op.weight, 0.0), float(values.abs().max()))

    _passes(name, Formatted(name, "w4a16"), observe)
    wide = ("lm_head", "fc")
    return {n: float(np.float32(v / 2688)) for n, v in largest.items() if not n.endswith(wide)}


@cache
def tensorrt():
    """TensorRT, a builder that needs no GPU, and the logger that must outlive it."""
    trt = load(TENSORRT_RTX)
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    return trt, trt.Builder(logger), logger


def lowered(unit, store):
    trt, builder, _ = tensorrt()
    return lower(unit, store, trt, builder)


@cache
def unit_network(name, kind, key):
    return lowered(units(name).units[key], reference(name, kind).store)


@cache
def constants(name, kind, key):
    """Decoded constants of :func:`unit_network`, put in by its first run."""
    return {}


def runs_of(name, passes=PASSES):
    """(pass, plan) of every run of a plan of a pair."""
    return [(which, step.key) for which in passes for step in runs(units(name), which)]


def step_of(name, which, key):
    return next(step for step in runs(units(name), which) if step.key == key)


def plan_tensors(name, kind, which, key):
    """The reference's tensors of a pass by the names that a plan gives them: its inputs and its ops' results."""
    step, tensors = step_of(name, which, key), reference(name, kind).passes[which]
    names = {op.output: op.output for op in units(name).units[key].ops} | dict((*step.inputs, *step.outputs))
    return {own: tensors[tensor] for own, tensor in names.items() if own != CHOICES}


def evaluate(network, name, kind, which, key, *, forced):
    """What a network makes of the reference's inputs; ``forced`` gives each op the reference's tensors."""
    known = constants(name, kind, key) if network is unit_network(name, kind, key).network else None
    tensors = plan_tensors(name, kind, which, key)
    inputs = {own: tensors[own] for own, _ in step_of(name, which, key).inputs}
    return run(tensorrt()[0], network, inputs, tensors if forced else (), known)


@dataclass(frozen=True)
class Finding:
    """How far one op's result is from the reference's, given the same inputs."""

    which: str
    key: str
    op: str
    tensor: str
    steps: float  # largest distance in BF16 steps: 2^-7 of the larger value
    differing: int  # values that differ at all
    allowed: int

    @property
    def wrong(self):
        return self.steps > 1 or self.differing > self.allowed


def judge(network, name, kind, which, key):
    """A finding for each op of a plan.

    An op has one BF16 rounding, as in the reference, behind float32 sums in another order: at most one step, and
    seldom that: one value of 200, or one of a smaller tensor, whose sum may lie on a midpoint of two BF16 values. A
    quantized linear has a second one, in front of its scale: still at most one step, but often. Sums in another order
    show where their terms cancel: 2^-14 of the tensor's root mean square is allowed for that.
    """
    found = evaluate(network, name, kind, which, key, forced=True)
    tensors, store = plan_tensors(name, kind, which, key), reference(name, kind).store
    for op in units(name).units[key].ops:
        scaled = isinstance(op, Linear) and not isinstance(store.get(op.weight), WideWeight)
        where = (which, key, type(op).__name__, op.output)
        a, b = found[op.output], tensors[op.output]
        if a.shape != b.shape:
            yield Finding(*where, np.inf, 1, 0)
            continue
        over = np.maximum(np.abs(a - b) - 2.0**-14 * np.sqrt(np.square(b).mean()), 0)
        steps = over / (2.0**-7 * np.maximum(np.maximum(np.abs(a), np.abs(b)), 2.0**-126))
        largest = float(np.where(np.isnan(a), np.inf, steps).max())
        allowed = max(1, int((0.45 if scaled else 0.005) * over.size))
        yield Finding(*where, largest, int((over > 0).sum()), allowed)
