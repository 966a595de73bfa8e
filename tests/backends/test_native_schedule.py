"""The schedule of native passes, the placement of their tensors, rotary tables, and what a cycle reads back."""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from edge_dflash.backends.cuda.compile import KERNELS
from edge_dflash.backends.cuda.kernels.cycle import RESULT_WORDS, Result
from edge_dflash.backends.cuda.rotary import rope_table
from edge_dflash.backends.cuda.schedule import place, schedule, strides_of_blocks
from edge_dflash.backends.cuda.steps import Columns, Copy, Gather, Head, Mix, Multiply, Normalise, Project, State
from edge_dflash.backends.reference.attention import rope_table as torch_rope_table
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Concat, StateOp, SwiGlu
from edge_dflash.model.registry import read_pair
from edge_dflash.model.specs import RopeSpec, YarnScaling

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = ("qwen3.6-27b", "qwen3.5-4b", "qwen3-8b", "qwen3.6-35b-a3b", "qwen3-coder-30b-a3b")
PASSES = [(m, p) for m in MODELS for p in ("prefill", "verify", "propose")]


@cache
def programs(model):
    folder = CONFIGS / model
    return pair_programs(read_pair(folder / "target", folder / "drafter"))


def formats(model, linear="nvfp4", **changes):
    found = {
        n: linear if s.kind == "linear" and s.module not in ("gates", "router") else "bf16"
        for n, s in programs(model).weights.items()
    }
    return found | changes


def lowered(model, name, form=None):
    return schedule(getattr(programs(model), name), form or formats(model), wide=name == "prefill")


@pytest.mark.parametrize(("model", "name"), PASSES)
def test_a_pass_begins_with_a_kernel_that_waits_before_it_lets_others_start(model, name):
    # Attention reads the length, and keys of earlier passes, before it waits for the linears ahead of it.
    assert isinstance(lowered(model, name).steps[0], Gather)
    bodies = (KERNELS / "small.cu").read_text().split('extern "C" __global__')[1:]
    gathers = [body for body in bodies if re.search(r"\bgather_\w+\(", body)]
    assert gathers
    for body in gathers:
        first = re.search(r"{\s*(\w+)\(\);\s*(\w+)\(\);", body)
        assert first is not None
        assert first.groups() == ("pdl_wait", "pdl_trigger")


@pytest.mark.parametrize(("model", "name"), PASSES)
def test_every_weight_of_a_pass_is_read_once_and_every_state_op_runs_once(model, name):
    schedule, program = lowered(model, name), getattr(programs(model), name)
    read = []
    for step in schedule.steps:
        match step:
            case Multiply():
                read += [*step.stack.names, *(step.side.names if step.side else ())]
            case Project() | Head():
                read += step.stack.names
            case Mix():
                shared = step.op.shared
                read += [*step.up.names, *step.down.names, step.op.router, *([shared.judge] if shared else [])]
    linear = [weight for weight, spec in program.weights.items() if spec.kind == "linear"]
    assert sorted(read) == sorted(linear)
    found, wanted = (
        (s.op for s in schedule.steps if isinstance(s, State)),
        (o for o in program.ops if isinstance(o, StateOp)),
    )
    assert sorted(found, key=lambda op: op.output) == sorted(wanted, key=lambda op: op.output)


@pytest.mark.parametrize(("model", "name"), PASSES)
def test_every_tensor_is_written_before_it_is_read(model, name):
    schedule = lowered(model, name)
    there = set()
    for step in schedule.steps:
        for tensor in step.reads:
            root = schedule.place(tensor)[0]
            assert tensor in there or root in there or root == "taps", f"{tensor} is read before it is written"
        there |= {*step.writes, *(schedule.place(tensor)[0] for tensor in step.writes)}


@pytest.mark.parametrize(("model", "name"), PASSES)
def test_tensors_that_live_together_do_not_share_memory(model, name):
    schedule = lowered(model, name)
    places, size = place(schedule, 16)
    lives = {}
    for index, step in enumerate(schedule.steps):
        for tensor in (*step.reads, *step.writes):
            root = schedule.place(tensor)[0]
            lives[root] = (lives.get(root, (index,))[0], index)
    lives.pop("logits")
    assert places.keys() == lives.keys()
    for a in places:
        assert places[a].offset % 256 == 0
        assert places[a].offset + places[a].nbytes <= size
        assert places[a].stride >= schedule.columns[a]
        for b in places:
            together = lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]
            apart = (
                places[a].offset + places[a].nbytes <= places[b].offset
                or places[b].offset + places[b].nbytes <= places[a].offset
            )
            assert a == b or apart or not together
    assert size < 0.2 * sum(p.nbytes for p in places.values())  # memory is used again


@pytest.mark.parametrize("model", MODELS)
def test_narrow_passes_fuse_residuals_and_norms(model):
    schedule = lowered(model, "verify")
    assert not [s for s in schedule.steps if isinstance(s, Columns)]
    assert not [s for s in schedule.steps if isinstance(s, Normalise)]
    assert schedule.steps[0].norm is not None  # the first layer's goes with the embedding
    (copy,) = [s for s in schedule.steps if isinstance(s, Copy)]
    taps = [schedule.slices[name] for name in copy.writes]
    hidden = schedule.widths["embedding"]
    assert taps == [("taps", i * hidden) for i in range(len(taps))]
    assert copy.reads == next(op for op in programs(model).verify.ops if isinstance(op, Concat)).inputs


@pytest.mark.parametrize("name", ["prefill", "verify"])
def test_a_mixture_is_one_step_with_its_residual_and_the_next_norm(name):
    schedule = lowered("qwen3.6-35b-a3b", name)
    steps = [s for s in schedule.steps if isinstance(s, Mix)]
    assert len(steps) == 40
    assert all(len(step.reads) == 2 for step in steps)
    assert [len(step.writes) for step in steps] == [1 if name == "prefill" else 2] * 40
    assert {(step.up.layout.k, step.down.layout.k, step.up.members, step.up.parts) for step in steps} == {
        (2048, 512, 257, 1)
    }


@pytest.mark.parametrize(("model", "name"), PASSES)
def test_a_residual_and_what_it_is_added_to_lie_in_rows_of_one_stride(model, name):
    schedule = lowered(model, name)
    places, _ = place(schedule, 16)
    for step in schedule.steps:
        if isinstance(step, Project | Mix) and len(step.reads) > 1:
            residual, out = schedule.place(step.reads[1]), schedule.place(step.writes[0])
            assert places[residual[0]].stride == places[out[0]].stride
            assert residual[1] == out[1] == 0


def test_gates_of_a_gated_delta_layer_go_along_with_its_large_stack():
    steps = [s for s in lowered("qwen3.6-27b", "verify").steps if isinstance(s, Multiply) and s.side]
    assert len(steps) == 48
    assert all(s.side.names[0].endswith("in_proj_a") and s.stack.names[0].endswith("in_proj_qkv") for s in steps)


def test_gate_and_up_of_two_formats_are_gated_apart():
    form = formats("qwen3-8b", **{"target.layers.0.mlp.up_proj": "bf16"})
    schedule = lowered("qwen3-8b", "verify", form)
    assert [s.writes for s in schedule.steps if isinstance(s, Columns) and s.op is SwiGlu] == [
        ("target.layers.0.swiglu",)
    ]


WINDOWS = {"nvfp4": 64, "fp8": 64, "bf16": 32}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("linear", WINDOWS)
def test_what_only_linears_of_one_window_read_lies_in_blocks(model, linear):
    schedule = lowered(model, "verify", formats(model, linear))
    found = strides_of_blocks(schedule, lambda stack: WINDOWS[stack.layout.format])
    assert set(found.values()) == {-WINDOWS[linear]}
    inner = {step.reads[0] for step in schedule.steps if isinstance(step, Multiply | Project | Head)}
    by_attention = {s.writes[0] for s in schedule.steps if isinstance(s, State) and type(s.op).__name__ == "Attend"}
    results = set(schedule.program.outputs.values())
    assert {name for name in inner if schedule.place(name)[0] not in found} == by_attention | inner & results
    for step in schedule.steps:
        for name in step.reads:
            if schedule.place(name)[0] in found:
                assert isinstance(step, Multiply | Project | Head)
                assert name == step.reads[0]
    assert not {schedule.place(name)[0] for name in results} & set(found)


def test_rows_of_readers_of_other_kernels_stay_rows():
    schedule = lowered("qwen3.6-27b", "verify")
    assert not strides_of_blocks(schedule, lambda stack: 0)
    large = {stack.key for step in schedule.steps if isinstance(step, Multiply) for stack in [step.stack]}
    found = strides_of_blocks(schedule, lambda stack: 0 if stack.key in large else 64)
    for step in schedule.steps:
        if isinstance(step, Multiply):  # neither what it reads nor, of a gated pair, what it writes
            assert not {schedule.place(n)[0] for n in (*step.reads, *step.writes)} & set(found)


def test_prefill_runs_its_head_on_one_row():
    schedule = lowered("qwen3.6-27b", "prefill")
    assert schedule.single == {"last_row", "hidden"}
    assert isinstance(schedule.steps[-1], Head)


YARN = YarnScaling(4.0, 4096)


@pytest.mark.parametrize("rope", [RopeSpec(1e6, 128), RopeSpec(1e7, 64), RopeSpec(1e6, 64, YARN)])
def test_rotary_tables_are_those_of_the_reference(rope):
    for found, wanted in zip(rope_table(rope, 5000), torch_rope_table(rope, 5000), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted.numpy(), atol=5e-4)  # angles of 5,000 rad have 3e-4 between floats
        np.testing.assert_allclose(found[:100], wanted[:100].numpy(), atol=1e-5)


def test_a_cycle_is_read_from_its_words():
    words = np.zeros(RESULT_WORDS, np.int32)
    words[0], words[4:20] = 3, np.arange(100, 116)
    words[36:] = np.array([5_000, 12_000, 40_000], np.uint64).view(np.int32)
    result = Result.of(words, 16)
    assert (result.accepted, result.choices) == (3, tuple(range(100, 116)))
    assert (result.propose_seconds, result.verify_seconds) == (pytest.approx(7e-6), pytest.approx(28e-6))


@dataclass(frozen=True, kw_only=True)
class Scan(StateOp):
    """A state op that has no kernel."""


def test_a_state_op_without_a_kernel_is_refused_before_anything_is_loaded():
    program = programs("qwen3-8b").verify
    last = max(index for index, op in enumerate(program.ops) if isinstance(op, StateOp))
    op = program.ops[last]
    other = Scan(inputs=op.inputs, output=op.output, state=op.state)
    changed = replace(program, ops=(*program.ops[:last], other, *program.ops[last + 1 :]))
    with pytest.raises(BackendError, match="the native backend has no kernel for op Scan"):
        schedule(changed, formats("qwen3-8b"), wide=False)
