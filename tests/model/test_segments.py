"""Segments: every op once, in an order that may run, cut at the state ops."""

import pytest
from golden_pairs import NAMES, pair, programs

from edge_dflash.model.ops import Add, Attend, GatedDelta, KvAppend, Op, StateOp
from edge_dflash.model.program import Program, outputs, segments

PASSES = ("prefill", "verify", "propose")


def passes(name):
    return [getattr(programs(name), which) for which in PASSES]


@pytest.mark.parametrize("name", NAMES)
def test_every_op_is_in_one_segment_and_runs_after_what_it_reads(name):
    for program in passes(name):
        ops = [op for segment in segments(program) for op in segment.ops]
        assert len(ops) == len(program.ops)
        assert set(map(id, ops)) == set(map(id, program.ops))
        made = {"ids"}
        for op in ops:
            assert set(op.inputs) <= made, op
            made.add(op.output)
        assert set(program.outputs.values()) <= made


@pytest.mark.parametrize("name", NAMES)
def test_dense_ops_wait_for_earlier_segments_only(name):
    for program in passes(name):
        before = {"ids"}
        for segment in segments(program):
            assert set(segment.inputs) <= before
            assert not {op.output for op in segment.state} & set(segment.inputs)
            before |= {op.output for op in segment.ops}


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_has_a_segment_for_each_layer_with_state_and_one_behind(name):
    for program in passes(name):
        sequential = [op for op in program.ops if isinstance(op, Attend | GatedDelta)]
        parts = segments(program)
        assert len(parts) == len(sequential) + 1
        for segment, op in zip(parts, sequential, strict=False):
            assert op in segment.state


@pytest.mark.parametrize("name", NAMES)
def test_the_drafters_context_is_appended_as_soon_as_the_last_tap_is_there(name):
    appends = [op for op in programs(name).verify.ops if isinstance(op, KvAppend)]
    behind = max(pair(name).drafter.target_layer_ids) + 1  # a layer has one state op
    state = segments(programs(name).verify)[behind].state
    assert appends
    assert [op for op in state if isinstance(op, KvAppend)] == appends


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_what_somebody_else_reads(name):
    for program in passes(name):
        parts, wanted = segments(program), outputs(program)
        read = {name for segment in parts for name in segment.inputs}
        read |= {name for op in program.ops if isinstance(op, StateOp) for name in op.inputs}
        read |= set(program.outputs.values())
        dense = {op.output for segment in parts for op in segment.dense}
        assert {name for names in wanted for name in names} == read & dense
        for segment, names in zip(parts, wanted, strict=True):
            assert set(names) <= {op.output for op in segment.dense}


def test_levels_count_the_state_ops_of_the_longest_path():
    append = {"k_norm": "w", "eps": 1e-6, "plus_one": False, "rope": None, "kv_heads": 1, "head_dim": 64}
    a = Add(inputs=("ids", "ids"), output="a")
    s = KvAppend(inputs=("a", "a"), output="s", state="x", **append)
    late = Add(inputs=("s", "ids"), output="late")
    early = Add(inputs=("a", "ids"), output="early")  # listed behind the state op, does not wait for it
    program = Program("p", (a, s, late, early), {}, {}, {}, {"logits": "late"}, commits=False)
    first, second = segments(program)
    assert (first.dense, first.state) == ((a, early), (s,))
    assert (second.dense, second.state, second.inputs) == ((late,), (), ("s", "ids"))
    assert outputs(program) == (("a",), ("late",))


def test_an_op_of_neither_kind_is_refused():
    program = Program("p", (Op(inputs=("ids",), output="a"),), {}, {}, {}, {}, commits=False)
    with pytest.raises(TypeError, match="p: Op is neither a dense nor a state op"):
        segments(program)
