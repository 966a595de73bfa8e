"""Real plans from the real compiler, on a machine without a GPU: the demo pair for SM121, and what it refuses."""

import re
from dataclasses import replace

import pytest
from tensorrt_support import reference, units

from edge_dflash.backends.cuda.tensorrt import lower as lowering
from edge_dflash.backends.cuda.tensorrt.compile import Compiler
from edge_dflash.backends.cuda.tensorrt.lower import linear
from edge_dflash.backends.cuda.tensorrt.net import Net
from edge_dflash.backends.cuda.tensorrt.units import RowRange
from edge_dflash.errors import BackendError, BuildError

pytestmark = pytest.mark.tensorrt

TWICE = ("w4a16", "w4a16", "w4a4")
PLAN_OVERHEAD = 1 << 20  # bytes of kernels that a layer brings; weights come on top once


@pytest.mark.parametrize("kind", ["w4a16", "w4a4"])
def test_the_demo_pair_builds_for_sm121(kind):
    compiler = Compiler("sm121")
    for unit in units("demo").units.values():
        lowered = compiler.lower(unit, reference("demo", kind).store)
        plan = compiler.build(lowered)
        held = sum(array.nbytes for array in lowered.net.held)
        assert held < len(plan) < held + PLAN_OVERHEAD * (1 + len(unit.ops)), unit.key


def products(plan):
    """The op names of each product in a plan, for each profile and kernel."""
    names = re.findall(rb'fully_connected=\{ name="([^"]*)"', plan)
    return sorted(sorted(set(re.split(rb"\+|#\d+ matmul(?: \[profile \d\])?", name)) - {b""}) for name in names)


def kernels(plan):
    """Kernels of a plan but products: what they fuse, and for those that read no slice also which they are."""
    found = re.findall(rb"fqn=__myl_([A-Za-z]+)(\w+)", plan)
    found = [(fused.replace(b"Slic", b""), which) for fused, which in found]
    return sorted((fused, b"" if b"CastMulCast" in fused else which) for fused, which in found)


@pytest.mark.parametrize("key", ["target-001", "target-007", "drafter-001"])
def test_stacks_are_those_that_tensorrt_makes_by_itself(key, monkeypatch):
    """With the same kernels; each elementwise kernel behind a stack reads its slice, and was handed a part before."""
    compiler, unit, store = Compiler("sm121"), units("demo").units[key], reference("demo", "w4a4").store
    ours = bytes(compiler.build(compiler.lower(unit, store)))
    assert not re.search(rb'fully_connected=\{ name="[^"]*matmul[^"]*\+', ours)  # none left to stack
    monkeypatch.setattr(
        lowering, "_linears", lambda net, op, unit, x, store: {op.output: linear(net, x, store.get(op.weight))}
    )
    theirs = bytes(compiler.build(compiler.lower(unit, store)))
    assert products(ours) == products(theirs)
    assert kernels(ours) == kernels(theirs)
    scratch = rb"region = \{ name=devmem\w* size=(\d+)"
    assert re.findall(scratch, ours) == re.findall(scratch, theirs) != []


@pytest.mark.parametrize(("kind", "arch"), [("fp8", "sm120"), ("fp8-channel", "sm121a"), ("bf16", "sm120a")])
def test_other_formats_and_architectures_build(kind, arch):
    compiler = Compiler(arch)
    for key in ("target-007", "head"):  # the context's fc among them
        lowered = compiler.lower(units("demo").units[key], reference("demo", kind).store)
        assert len(compiler.build(lowered)) > sum(array.nbytes for array in lowered.net.held)


def test_the_compilers_words_and_the_plan_are_in_the_error(monkeypatch):
    """An FP32 scale with a BF16 result is what TensorRT cannot type."""
    original = Net.dequantize
    monkeypatch.setattr(
        Net, "dequantize", lambda net, x, s, axis=None: original(net, x, net.cast(s, "FLOAT") if axis else s, axis)
    )
    compiler = Compiler("sm121")
    lowered = compiler.lower(units("demo").units["head"], reference("demo", "w4a16").store)
    with pytest.raises(BuildError, match=r"plan head for sm121: TensorRT 1\.\d.* says .*logits#"):
        compiler.build(lowered)


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
        compiler.build(compiler.lower(unit, reference("demo", "bf16").store))


def test_plans_differ_by_weights_and_are_the_same_twice():
    compiler, unit = Compiler("sm121"), units("demo").units["drafter-001"]
    one, same, other = (bytes(compiler.build(compiler.lower(unit, reference("demo", k).store))) for k in TWICE)
    assert len(one) == len(same)
    assert one != other
