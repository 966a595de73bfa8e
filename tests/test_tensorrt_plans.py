"""Real plans from the real compiler, on a machine without a GPU: the demo pair for SM121, and what it refuses."""

from dataclasses import replace

import pytest
from tensorrt_support import reference, units

from edge_dflash.backends.tensorrt.compile import Compiler
from edge_dflash.backends.tensorrt.net import Net
from edge_dflash.backends.tensorrt.units import RowRange
from edge_dflash.errors import BackendError, BuildError

pytestmark = pytest.mark.tensorrt

TWICE = ("w4a16", "w4a16", "w4a4")
PLAN_OVERHEAD = 1 << 20  # bytes of kernels that a layer brings; weights come on top once


@pytest.mark.parametrize("kind", ["w4a16", "w4a4"])
def test_the_demo_pair_builds_for_sm121(kind):
    compiler = Compiler("sm121")
    for unit in units("demo").units.values():
        lowered = compiler.lower(unit, reference("demo", kind).store)
        plan = compiler.plan(lowered)
        assert lowered.weight_bytes < len(plan) < lowered.weight_bytes + PLAN_OVERHEAD * (1 + len(unit.ops)), unit.key


@pytest.mark.parametrize(("kind", "arch"), [("fp8", "sm120"), ("fp8-channel", "sm121a"), ("bf16", "sm120a")])
def test_other_formats_and_architectures_build(kind, arch):
    compiler = Compiler(arch)
    for key in ("target-007", "head"):  # the context's fc among them
        lowered = compiler.lower(units("demo").units[key], reference("demo", kind).store)
        assert len(compiler.plan(lowered)) > lowered.weight_bytes


def test_the_compilers_words_and_the_plan_are_in_the_error(monkeypatch):
    """An FP32 scale with a BF16 result is what TensorRT cannot type."""
    original = Net.dequantize
    monkeypatch.setattr(
        Net, "dequantize", lambda net, x, s, axis=None: original(net, x, net.cast(s, "FLOAT") if axis else s, axis)
    )
    compiler = Compiler("sm121")
    lowered = compiler.lower(units("demo").units["head"], reference("demo", "w4a16").store)
    with pytest.raises(BuildError, match=r"plan head for sm121: TensorRT 1\.\d.* says .*logits#"):
        compiler.plan(lowered)


def test_the_compilers_words_are_in_the_refusal_of_a_layer(monkeypatch):
    monkeypatch.setattr(Net, "times_transposed", lambda net, x, w: net.concat([]))
    with pytest.raises(
        BackendError, match=r"logits: TensorRT 1\.\d.* refuses the concat; TensorRT says .*addConcatenation"
    ):
        Compiler("sm121").lower(units("demo").units["head"], reference("demo", "bf16").store)


def test_a_profile_that_makes_no_sense_is_the_builders_error():
    compiler = Compiler("sm121")
    unit = replace(units("demo").units["head"], profiles=(RowRange(16, 8, 4),))
    with pytest.raises(BuildError, match="plan head for sm121"):
        compiler.plan(compiler.lower(unit, reference("demo", "bf16").store))


def test_plans_differ_by_weights_and_are_the_same_twice():
    compiler, unit = Compiler("sm121"), units("demo").units["drafter-001"]
    one, same, other = (bytes(compiler.plan(compiler.lower(unit, reference("demo", k).store))) for k in TWICE)
    assert len(one) == len(same)
    assert one != other
