import pytest
from golden_pairs import GOLDEN, NAMES, pair, programs

from edge_dflash.model.ops import Attend, Concat, GatedDelta, KvAppend, SelectRows
from edge_dflash.model.program import DeltaState, KvState
from edge_dflash.weights.safetensors import TensorFiles


@pytest.mark.parametrize("name", NAMES)
def test_programs_use_every_tensor_of_the_checkpoints_and_no_other(name):
    stored = set()
    for part, directory in (("target", f"{name}-tiny"), ("drafter", f"{name}-tiny-dflash")):
        for tensor in TensorFiles.open(GOLDEN / directory).names():
            stored.add(f"{part}." + tensor.removeprefix("model.").removesuffix(".weight"))
    if pair(name).target.tied:
        stored.add("target.lm_head")
    assert set(programs(name).weights) == stored


@pytest.mark.parametrize("name", NAMES)
def test_taps_are_layer_outputs_in_the_listed_order(name):
    concat = next(op for op in programs(name).verify.ops if isinstance(op, Concat))
    taps = pair(name).drafter.target_layer_ids
    assert concat.inputs == tuple(f"target.layers.{i}.out" for i in taps)


@pytest.mark.parametrize("name", NAMES)
def test_only_prefill_commits_and_selects_the_last_row(name):
    p = programs(name)
    assert (p.prefill.commits, p.verify.commits, p.propose.commits) == (True, False, False)
    selections = [[op.which for op in q.ops if isinstance(op, SelectRows)] for q in (p.prefill, p.verify, p.propose)]
    assert selections == [["last"], [], ["drafts"]]


@pytest.mark.parametrize("name", NAMES)
def test_the_drafter_block_and_its_context_share_one_cache(name):
    p = programs(name)
    block = [op for op in p.propose.ops if isinstance(op, Attend)]
    context = [op for op in p.verify.ops if isinstance(op, KvAppend)]
    assert [op.state for op in block] == [op.state for op in context]
    assert [(op.rope, op.k_norm) for op in block] == [(op.rope, op.k_norm) for op in context]
    assert [(op.bidirectional, op.window) for op in block] == [
        (layer.bidirectional, layer.window) for layer in pair(name).drafter.layers
    ]


def test_states_of_a_hybrid_target():
    states = programs("qwen3_5").states
    kinds = {f"target.layers.{i}": KvState if i % 4 == 3 else DeltaState for i in range(8)}
    for name, state in states.items():
        expected = kinds.get(name.rsplit(".", 1)[0], KvState)
        assert type(state) is expected
    ops = [op for op in programs("qwen3_5").verify.ops if isinstance(op, GatedDelta | Attend)]
    assert [type(op) for op in ops] == [Attend if i % 4 == 3 else GatedDelta for i in range(8)]
