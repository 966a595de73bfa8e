"""The vision tower as one plan: its network interpreted, and compiled."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from golden_pairs import golden
from golden_pairs import pair as golden_pair
from pictures_support import picture
from tensorrt_support import Formatted, lowered, tensorrt
from trt_interpreter import outputs, run

from edge_dflash.backends.cuda.tensorrt.compile import Compiler
from edge_dflash.backends.cuda.tensorrt.net import Net
from edge_dflash.backends.cuda.tensorrt.units import TOWER, bundle_units
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.tower import TorchTower
from edge_dflash.decode.backend import Precision
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import FrameAttend, Linear
from edge_dflash.model.vision import patch_tables

pytestmark = pytest.mark.tensorrt

PAIR = golden_pair("vision")
SPEC = PAIR.target.vision
UNIT = bundle_units(PAIR, {}, 64).units[TOWER]
FREE = {"bf16": 1, "fp8": 1.5, "fp8-channel": 1.5}
"""Relative L2 distance of a plan's rows from the reference's, in 2^-8; a scale is a second rounding."""


@cache
def network(kind):
    return lowered(UNIT, Formatted("vision", kind))


@cache
def reference(kind, *, every=False):
    """The reference's tower; its outputs are rows, or every tensor."""
    program = pair_programs(PAIR).see
    if every:
        program = replace(program, outputs={op.output: op.output for op in program.ops})
    return TorchTower(SPEC, program, TorchWeights(Formatted("vision", kind)), Precision("bfloat16", "fp8"))


def given(one):
    return {"patches": one.values(), **vars(patch_tables(SPEC, one.grid))}


@pytest.mark.parametrize("kind", FREE)
@pytest.mark.parametrize("number", range(3))
def test_rows_are_the_references_within_bf16(kind, number):
    one = picture(number)
    found = run(tensorrt()[0], network(kind).network, given(one))["rows"]
    wanted = reference(kind).run(one.values(), one.grid)["rows"].numpy()
    assert found.shape == wanted.shape
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) * 256 <= FREE[kind]
    if kind == "bf16":  # no further from transformers' rows than the reference
        exact = golden("vision")[f"img{number}.tower_rows"]
        assert np.abs(found - exact).max() <= 1.2 * np.abs(wanted - exact).max()


def wrong_ops(network, kind):
    """Ops, given the reference's tensors, that are further from its results than other plans' ops may be.

    Attention also rounds scores and their shares; of it a distance is asked.
    """
    one = picture(2)
    tensors = {n: t.numpy() for n, t in reference(kind, every=True).run(one.values(), one.grid).items()}
    found = run(tensorrt()[0], network, given(one), tensors)
    for op in UNIT.ops:
        a, b = found[op.output], tensors[op.output]
        if a.shape != b.shape:
            yield op.output
        elif isinstance(op, FrameAttend):
            if np.linalg.norm(a - b) > 2**-7 * np.linalg.norm(b):
                yield op.output
        else:
            over = np.maximum(np.abs(a - b) - 2.0**-14 * np.sqrt(np.square(b).mean()), 0)
            steps = over / (2.0**-7 * np.maximum(np.maximum(np.abs(a), np.abs(b)), 2.0**-126))
            allowed = 0.45 if kind.startswith("fp8") and isinstance(op, Linear) else 0.005
            if steps.max() > 1 or (over > 0).mean() > allowed:
                yield op.output


@pytest.mark.parametrize("kind", FREE)
def test_each_op_is_the_references_within_one_bf16_step(kind):
    assert not list(wrong_ops(network(kind).network, kind))


def test_the_network_has_the_inputs_and_the_output_of_its_unit():
    made = network("bf16").network
    shapes = {t.name: (t.dtype.name, tuple(t.shape)) for t in map(made.get_input, range(made.num_inputs))}
    half = SPEC.head_dim // 2
    assert shapes == {
        "patches": ("BF16", (-1, SPEC.patches.columns)),
        "corners": ("INT32", (-1, 4)),
        "shares": ("FLOAT", (-1, 4)),
        "cos": ("FLOAT", (-1, half)),
        "sin": ("FLOAT", (-1, half)),
    }
    assert outputs(made) == {"rows": ("BF16", (-1, SPEC.out))}


FAULTS = {
    "times_transposed": lambda right: lambda net, x, w: right(net, x, net.elementwise(w, w, "SUM")),
    "softmax": lambda right: lambda net, x: x,
    "activation": lambda right: lambda net, x, form: right(net, x, "GELU_ERF" if form == "GELU_TANH" else "GELU_TANH"),
    "concat": lambda right: lambda net, tensors, axis=1: right(net, tensors[:1] * len(tensors), axis),
    "reduce": lambda right: lambda net, x, kind, keep: right(net, x, "MAX", keep=keep),
    "turned": lambda right: lambda net, x, order, shape: net.shaped(x, shape),
}
WHERE = {"times_transposed": "product", "activation": "gelu", "reduce": "norm1"} | dict.fromkeys(
    ("softmax", "concat", "turned"), "attended"
)


@pytest.mark.parametrize(("method", "op"), WHERE.items())
def test_a_tower_that_is_lowered_wrongly_is_found(monkeypatch, method, op):
    monkeypatch.setattr(Net, method, FAULTS[method](getattr(Net, method)))
    made = lowered(UNIT, Formatted("vision", "bf16"))  # owns the memory of the network's constants
    assert any(op in name for name in wrong_ops(made.network, "bf16"))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_the_plan_is_built(kind):
    compiler, store = Compiler("sm121"), Formatted("vision", kind)
    engine = compiler.build(compiler.lower(UNIT, store))
    weights = sum(store.get(name).nbytes for name in UNIT.weights)
    assert weights < engine.nbytes < weights + len(UNIT.ops) * (1 << 20)
