"""Engines of a pair and the schedule that runs them, without TensorRT: cuts, shared engines, bindings, memory."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from golden_pairs import ENGINE, EXPERTS, WALKS
from tensorrt_support import CHUNK, PAIRS, PASSES, checkpoint, rows_of, spec, units
from tensorrt_walk import dry_run

from edge_dflash.backends.cuda.steps import Convolve, Draft, Last, State
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.backends.tensorrt.runs import RunEngine, RunExperts, engine_pass
from edge_dflash.backends.tensorrt.units import (
    CHOICES,
    EMBEDDING,
    HEAD,
    LOGITS,
    RowRange,
    Run,
    norms_before_rows,
    pair_units,
)
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Add, Experts, GroupedConv, SelectRows, StateOp
from edge_dflash.model.registry import read_pair

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = ("qwen3.6-27b", "qwen3.5-4b", "qwen3-8b", "qwen3.8-27b-dflash2", "qwen3.8-27b-dspark")
ALL = [(name, which) for name in (*PAIRS, *MODELS) for which in PASSES]


@cache
def cut(name):
    if name in PAIRS:
        return units(name)
    return pair_units(pair_programs(pair_of(name)), pair_of(name).verify_rows, CHUNK, pair_of(name).block_size)


@cache
def pair_of(name):
    return spec(name) if name in PAIRS else read_pair(CONFIGS / name / "target", CONFIGS / name / "drafter")


def placed(name, which):
    return engine_pass(cut(name), which, rows_of(pair_of(name))[which])


@pytest.mark.parametrize(("name", "which"), ALL)
def test_a_walk_binds_every_tensor_to_a_live_address(name, which):
    plan = placed(name, which)
    report = dry_run(cut(name).units, plan)
    runs = [s for s in cut(name).passes[which] if isinstance(s, Run)]
    assert report.engines == len(runs)
    assert report.bindings == sum(len(run.reads) + len(run.writes) for run in runs)
    assert report.states == len([op for op in cut(name).programs[which].ops if isinstance(op, StateOp)])
    assert set(plan.places) < report.tensors


@pytest.mark.parametrize("name", [*PAIRS, *MODELS])
def test_no_weight_is_in_two_plans_but_the_drafters_k_and_v(name):
    read = [weight for unit in cut(name).units.values() for weight in unit.weights]
    twice = {weight for weight in read if read.count(weight) > 1}
    assert all(w.startswith("drafter.") and w.endswith(("k_proj", "v_proj")) for w in twice)
    linear = {n for p in cut(name).programs.values() for n, s in p.weights.items() if s.kind in ("linear", "embedding")}
    ours = {weight for step in cut(name).passes["verify"] if isinstance(step, Experts) for weight in step.weights}
    assert linear - ours == linear & set(read)
    assert bool(ours) == (pair_of(name).target.experts is not None)


@pytest.mark.parametrize("name", [*PAIRS, *MODELS])
def test_prefill_and_verify_run_the_same_plans(name):
    keys = {which: [s.key for s in cut(name).passes[which] if isinstance(s, Run)] for which in PASSES}
    assert keys["prefill"] == keys["verify"]
    assert set(keys["verify"]) & set(keys["propose"]) == {EMBEDDING, HEAD}
    assert len(cut(name).units) == len(set(keys["verify"]) | set(keys["propose"]))


def test_profiles_are_those_of_a_block_and_of_a_prefill_chunk():
    block, chunk = RowRange(16, 16, 16), RowRange(1, CHUNK, CHUNK)
    for key, unit in cut("demo").units.items():
        assert unit.profiles == ((block,) if key == HEAD or key.startswith("drafter") else (block, chunk))


@pytest.mark.parametrize("name", PAIRS)
def test_a_norm_before_the_selection_of_rows_gives_the_same_bits(name):
    program = pair_programs(spec(name)).prefill
    moved = norms_before_rows(program)
    assert isinstance(moved.ops[-2], SelectRows)
    results = []
    for each in (program, moved):
        memory = Memory.allocate(program.states, 64, ENGINE, checkpoint(name).kv_scale)
        interpreter = Interpreter(TorchWeights(checkpoint(name)), ENGINE)
        results.append(interpreter.run(each, list(range(1, 20)), memory))
    for role in ("logits", "hidden"):
        assert results[0][role].equal(results[1][role])


@pytest.mark.parametrize("name", WALKS)
def test_our_kernels_convolve_between_plans_and_walk_behind_the_head(name):
    found, steps = cut(name), placed(name, "propose").schedule.steps
    program, rows = found.programs["propose"], pair_of(name).block_size
    convolved = [s for s in steps if isinstance(s, Convolve)]
    assert [s.op for s in convolved] == [op for op in program.ops if isinstance(op, GroupedConv)]
    assert bool(convolved) == (pair_of(name).drafter.kind == "dflash2")
    assert steps[-1] == Draft((program.walk.inputs[0],), (), program.walk, int(not pair_of(name).drafter.anchor_drafts))
    assert found.units[HEAD].profiles == (RowRange(*[pair_of(name).verify_rows] * 3),)
    drafter = [unit for key, unit in found.units.items() if key.startswith("drafter-")]
    assert drafter
    assert all(unit.profiles == (RowRange(rows, rows, rows),) for unit in drafter)
    assert not any(isinstance(op, GroupedConv) for unit in found.units.values() for op in unit.ops)


@pytest.mark.parametrize("which", ["prefill", "verify"])
def test_our_kernels_mix_between_plans(which):
    plan, found = placed(EXPERTS, which), cut(EXPERTS)
    mixed = [step for step in plan.schedule.steps if isinstance(step, RunExperts)]
    assert [step.op for step in mixed] == [op for op in found.programs[which].ops if isinstance(op, Experts)]
    assert len(mixed) == 4
    for step in mixed:
        before, after = (plan.schedule.steps[plan.schedule.steps.index(step) + i] for i in (-1, 1))
        assert step.op.inputs[0] in before.writes
        assert step.op.output in after.reads
    assert not any(isinstance(op, Experts) for unit in found.units.values() for op in unit.ops)


@pytest.mark.parametrize("which", ["prefill", "verify"])
def test_a_mixture_that_is_missing_or_early_is_found(which):
    plan = placed(EXPERTS, which)
    index = first(plan, RunExperts)
    early = with_steps(plan, lambda steps: exchange(steps, index - 1, index))
    for wrong in (with_steps(plan, lambda steps: without(steps, index)), early):
        with pytest.raises(BackendError, match="the schedule is wrong"):
            dry_run(cut(EXPERTS).units, wrong)


@pytest.mark.parametrize("step", [Convolve, Draft])
def test_a_convolution_or_walk_that_is_missing_or_early_is_found(step):
    plan = placed("qwen3_5-dflash2", "propose")
    index = first(plan, step, -1)
    early = with_steps(plan, lambda steps: exchange(steps, index - 1, index))
    for wrong in (with_steps(plan, lambda steps: without(steps, index)), early):
        with pytest.raises(BackendError, match="the schedule is wrong"):
            dry_run(cut("qwen3_5-dflash2").units, wrong)


def without(steps, index):
    return [*steps[:index], *steps[index + 1 :]]


def first(plan, kind, skip=0):
    return [i for i, step in enumerate(plan.schedule.steps) if isinstance(step, kind)][skip]


def nth_run(plan, number):
    return first(plan, RunEngine, number)


def with_steps(plan, change):
    return replace(plan, schedule=replace(plan.schedule, steps=change(list(plan.schedule.steps))))


def exchange(steps, a, b):
    steps[a], steps[b] = steps[b], steps[a]
    return steps


def rebound(plan, **changes):
    """The second plan's bindings changed: ``reads`` or ``writes`` as a function of the pairs."""
    index = nth_run(plan, 2)
    step = plan.schedule.steps[index]
    run = replace(step.run, **{side: change(getattr(step.run, side)) for side, change in changes.items()})
    step = RunEngine(tuple(t for _, t in run.reads), tuple(t for _, t in run.writes), run)
    return with_steps(plan, lambda steps: [*steps[:index], step, *steps[index + 1 :]])


def swapped(pairs):
    (a, x), (b, y), *rest = pairs
    return ((a, y), (b, x), *rest)


def moved(plan, **changes):
    """The first layer's output changed in its place."""
    name = "target.layers.0.out"
    return replace(plan, places={**plan.places, name: replace(plan.places[name], **changes)})


def over(plan):
    """A tensor that is needed late lies where an early one is written."""
    early = plan.places["target.layers.1.out"]
    return moved(plan, offset=early.offset)


WRONG = {
    "a plan missing": lambda p: with_steps(p, lambda s: without(s, nth_run(p, 3))),
    "a plan run twice": lambda p: with_steps(p, lambda s: [*s, s[nth_run(p, 3)]]),
    "a state op missing": lambda p: with_steps(p, lambda s: without(s, first(p, State, 1))),
    "the last context append missing": lambda p: with_steps(p, lambda s: without(s, first(p, State, -1))),
    "the last row missing": lambda p: with_steps(p, lambda s: without(s, first(p, Last))),
    "two plans exchanged": lambda p: with_steps(p, lambda s: exchange(s, nth_run(p, 2), nth_run(p, 3))),
    "a state op before its plan": lambda p: with_steps(p, lambda s: exchange(s, first(p, State), nth_run(p, 1))),
    "inputs exchanged": lambda p: rebound(p, reads=swapped),
    "outputs exchanged": lambda p: rebound(p, writes=swapped),
    "an input not bound": lambda p: rebound(p, reads=lambda pairs: pairs[1:]),
    "an output not bound": lambda p: rebound(p, writes=lambda pairs: pairs[1:]),
    "an input bound twice": lambda p: rebound(p, reads=lambda pairs: (*pairs, pairs[0])),
    "an output bound to an input": lambda p: rebound(p, writes=lambda w: ((w[0][0], "target.layers.0.qkv"), *w[1:])),
    "a place over another": over,
    "a place past the arena": lambda p: moved(p, offset=p.arena),
    "a place that is too small": lambda p: moved(p, nbytes=64),
    "a place at an odd address": lambda p: moved(p, offset=p.places["target.layers.0.out"].offset + 32),
    "rows with gaps": lambda p: moved(p, stride=272),
    "more rows than the profile": lambda p: replace(p, rows=CHUNK + 1),
    "no such profile": lambda p: replace(p, profile=2),
    "the profile of a block": lambda p: replace(p, profile=0),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schedule_is_found(name):
    plan = placed("demo", "prefill")
    with pytest.raises(BackendError, match="the schedule is wrong"):
        dry_run(cut("demo").units, WRONG[name](plan))


def changed_binding(unit, **changes):
    return replace(unit, inputs=(replace(unit.inputs[0], **changes), *unit.inputs[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda u: changed_binding(u, columns=512),
        lambda u: changed_binding(u, columns=None),
        lambda u: changed_binding(u, dtype="int32"),
        lambda u: changed_binding(u, name="other"),
        lambda u: replace(u, profiles=u.profiles[:1]),
        lambda u: replace(u, ops=u.ops[1:]),
        lambda u: replace(u, outputs=u.outputs[1:]),
    ],
)
def test_a_plan_of_another_program_is_found(change):
    found = {**cut("demo").units, "target-002": change(cut("demo").units["target-002"])}
    with pytest.raises(BackendError, match="the schedule is wrong"):
        dry_run(found, placed("demo", "prefill"))


def test_a_missing_plan_is_found():
    found = {key: unit for key, unit in cut("demo").units.items() if key != HEAD}
    with pytest.raises(BackendError, match="there is no plan head"):
        dry_run(found, placed("demo", "verify"))


@pytest.mark.parametrize("chunk", [8, 64])
def test_the_head_runs_on_a_block_in_every_pass(chunk):
    pair = pair_units(pair_programs(spec("demo")), 16, chunk)
    for which, rows in (("prefill", chunk), ("verify", 16), ("propose", 16)):
        plan = engine_pass(pair, which, rows)
        dry_run(pair.units, plan)
        bound = plan.bound(plan.schedule.steps[-1])
        assert (bound.key, bound.profile, bound.rows) == (HEAD, 0, 16)
        addresses = dict(bound.addresses)
        assert (addresses[LOGITS].buffer, addresses[CHOICES].buffer) == ("logits", "choices")
        read = plan.places[plan.schedule.place(plan.schedule.steps[-1].reads[0])[0]]
        assert read.nbytes >= 2 * 16 * 256
    assert plan.address("draft_rows") == plan.address("drafter.hidden")


def test_an_op_behind_selected_rows_is_refused():
    programs = pair_programs(spec("demo"))
    late = Add(inputs=("draft_rows", "draft_rows"), output="late")
    program = replace(programs.propose, ops=(*programs.propose.ops, late))
    with pytest.raises(BackendError, match="only the head may follow selected rows"):
        pair_units(replace(programs, propose=program), 16, CHUNK)
