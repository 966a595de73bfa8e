"""Engines of a pair and the schedule that runs them, without TensorRT: cuts, shared engines, bindings, memory."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from golden_pairs import ENGINE, EXPERTS, WALKS
from tensorrt_support import CHUNK, PAIRS, PASSES, checkpoint, runs, spec
from tensorrt_support import cut as cut_pair
from tensorrt_walk import dry_run

from edge_dflash.backends.cuda.steps import Convolve, Draft, Last, Mix, State
from edge_dflash.backends.cuda.tensorrt.units import HEAD, RowRange, RunEngine, norms_before_rows, pair_units
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Add, Experts, GroupedConv, SelectRows
from edge_dflash.model.registry import read_pair

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = ("qwen3.6-27b", "qwen3.5-4b", "qwen3-8b", "qwen3.8-27b-dflash2", "qwen3.8-27b-dspark")


@cache
def pair_of(name):
    return spec(name) if name in PAIRS else read_pair(CONFIGS / name / "target", CONFIGS / name / "drafter")


@cache
def laid_out(name):
    return cut_pair(pair_of(name))


def cut(name):
    return laid_out(name)[0]


@pytest.mark.parametrize("name", [*PAIRS, *MODELS])
def test_engines_are_cut_and_scheduled(name):
    """A walk finds every tensor; no weight is in two engines but the drafter's k and v; prefill and verify share."""
    found, layout = laid_out(name)
    for which in PASSES:
        dry_run(found.units, layout, which)
    read = [weight for unit in found.units.values() for weight in unit.weights]
    twice = {weight for weight in read if read.count(weight) > 1}
    assert all(w.startswith("drafter.") and w.endswith(("k_proj", "v_proj")) for w in twice)
    programs = {which: each.program for which, each in found.schedules.items()}
    linear = {name for program in programs.values() for name, s in program.weights.items() if s.kind == "linear"}
    ours = {w for step in found.schedules["verify"].steps if isinstance(step, Mix) for w in step.op.weights}
    assert linear - ours == linear & set(read)
    assert bool(ours) == (pair_of(name).target.experts is not None)
    keys = {which: [step.key for step in runs(found, which)] for which in PASSES}
    assert keys["prefill"] == keys["verify"]
    assert set(keys["verify"]) & set(keys["propose"]) == {HEAD}
    assert len(found.units) == len(set(keys["verify"]) | set(keys["propose"]))


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
    found, rows = cut(name), pair_of(name).block_size
    steps, program = found.schedules["propose"].steps, found.schedules["propose"].program
    convolved = [s for s in steps if isinstance(s, Convolve)]
    assert [s.op for s in convolved] == [op for op in program.ops if isinstance(op, GroupedConv)]
    assert bool(convolved) == (pair_of(name).drafter.kind == "dflash2")
    assert steps[-1] == Draft((program.walk.inputs[0],), (), program.walk, int(not pair_of(name).drafter.anchor_drafts))
    assert found.units[HEAD].profiles == (RowRange(*[pair_of(name).verify_rows] * 3),)
    drafter = [unit for key, unit in found.units.items() if key.startswith("drafter-")]
    assert drafter
    assert all(unit.profiles == (RowRange(rows, rows, rows),) for unit in drafter)


@pytest.mark.parametrize("which", ["prefill", "verify"])
def test_our_kernels_mix_between_plans(which):
    steps, program = cut(EXPERTS).schedules[which].steps, cut(EXPERTS).schedules[which].program
    mixed = [step for step in steps if isinstance(step, Mix)]
    assert [step.op for step in mixed] == [op for op in program.ops if isinstance(op, Experts)]
    for step in mixed:
        before, after = (steps[steps.index(step) + i] for i in (-1, 1))
        assert step.op.inputs[0] in before.writes
        assert step.op.output in after.reads


def steps_changed(layout, which, change):
    """The layout with the steps that ``change`` makes of a pass's."""
    schedule = layout.schedules[which]
    changed = replace(schedule, steps=change(list(schedule.steps)))
    return replace(layout, schedules={**layout.schedules, which: changed})


def places_changed(layout, **changes):
    """The output of the first layer in another place."""
    name, places = "target.layers.0.out", layout.places["prefill"]
    moved = {**places, name: replace(places[name], **changes)}
    return replace(layout, places={**layout.places, "prefill": moved})


def first(steps, kind, skip=0):
    return [i for i, step in enumerate(steps) if isinstance(step, kind)][skip]


def without(kind, skip=0):
    def change(steps):
        del steps[first(steps, kind, skip)]
        return steps

    return change


def earlier(kind, skip=0):
    """The step and the one before it exchanged."""

    def change(steps):
        at = first(steps, kind, skip)
        steps[at - 1 : at + 1] = [steps[at], steps[at - 1]]
        return steps

    return change


WALKING = "qwen3_5-dflash2"
WRONG = [
    *(("demo", "prefill", without(kind, skip)) for kind, skip in ((RunEngine, 3), (State, 1), (State, -1), (Last, 0))),
    *(("demo", "prefill", earlier(kind, skip)) for kind, skip in ((RunEngine, 2), (State, 0))),
    *((EXPERTS, which, wrong(Mix)) for which in ("prefill", "verify") for wrong in (without, earlier)),
    *((WALKING, "propose", wrong(kind, -1)) for kind in (Convolve, Draft) for wrong in (without, earlier)),
    ("demo", "prefill", lambda steps: [*steps, steps[first(steps, RunEngine, 3)]]),
]


@pytest.mark.parametrize(("name", "which", "change"), WRONG)
def test_a_walk_finds_a_step_that_is_missing_early_or_run_twice(name, which, change):
    found, layout = laid_out(name)
    with pytest.raises(AssertionError):
        dry_run(found.units, steps_changed(layout, which, change), which)


def test_a_walk_finds_a_tensor_in_a_wrong_place():
    found, layout = laid_out("demo")
    at, other = (layout.places["prefill"][f"target.layers.{i}.out"].offset for i in (0, 1))
    for wrong in (
        {"offset": other},
        {"offset": layout.arena_bytes},
        {"nbytes": 64},
        {"offset": at + 32},
        {"stride": 272},
    ):
        with pytest.raises(AssertionError):
            dry_run(found.units, places_changed(layout, **wrong), "prefill")


def test_a_walk_finds_an_engine_of_another_program():
    found, layout = laid_out("demo")
    unit = found.units["target-002"]
    for wrong in (
        replace(unit, inputs=(replace(unit.inputs[0], columns=512), *unit.inputs[1:])),
        replace(unit, profiles=unit.profiles[:1]),
        replace(unit, ops=unit.ops[1:]),
        replace(unit, outputs=unit.outputs[1:]),
    ):
        with pytest.raises((AssertionError, IndexError)):
            dry_run({**found.units, unit.key: wrong}, layout, "prefill")


@pytest.mark.parametrize("chunk", [8, 64])
def test_the_head_runs_on_a_block_in_every_pass(chunk):
    found, layout = cut_pair(spec("demo"), chunk)
    for which in PASSES:
        dry_run(found.units, layout, which)
        head = runs(found, which)[-1]
        assert (head.key, head.profile, head.rows) == (HEAD, 0, 16)
        read = layout.places[which][layout.schedules[which].place(head.reads[0])[0]]
        assert read.nbytes >= 2 * 16 * 256


def test_an_op_behind_selected_rows_is_refused():
    programs = pair_programs(spec("demo"))
    late = Add(inputs=("draft_rows", "draft_rows"), output="late")
    program = replace(programs.propose, ops=(*programs.propose.ops, late))
    with pytest.raises(BackendError, match="only the head may follow selected rows"):
        pair_units(replace(programs, propose=program), {}, 16, CHUNK)
