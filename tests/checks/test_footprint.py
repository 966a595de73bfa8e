"""Bytes of weights, states and passes and operations of a prompt, by hand and from the published dimensions."""

from math import prod

import pytest

from edge_dflash.bench.random_pair import kind_recipe, synthetic_pair
from edge_dflash.checks import footprint
from edge_dflash.checks.footprint import Costs
from edge_dflash.model import pair_programs
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.program import DeltaState, KvState
from edge_dflash.model.specs import AttentionSpec, LayerSpec, RopeSpec
from edge_dflash.weights.formats import read_as


@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("bf16", 2 * 2048),
        ("tied", 2 * 2048),
        ("f32", 4 * 2048),
        ("fp8", 2048 + 4 * 32),
        ("nvfp4", 1024 + 128 + 4),
    ],
)
def test_weight_bytes_of_each_format(form, size):
    assert read_as(form).nbytes((32, 64)) == size


def test_state_bytes_by_hand():
    states = [KvState(2, 32), DeltaState(2, 6, 32, 32, 4), KvState(4, 16)]
    assert footprint.kv_bytes_per_token(states, "fp8") == 2 * 2 * 32 + 2 * 4 * 16
    assert footprint.kv_bytes_per_token(states, "bfloat16") == 2 * 256
    assert footprint.kv_bytes_per_token(states, "float32") == 4 * 256
    assert footprint.delta_bytes(states) == 4 * 6 * 32 * 32 + 2 * 320 * 3
    assert footprint.tape_bytes_per_row(states) == 2 * 320 + 8 * 6


def attention_program(window):
    spec = AttentionSpec(4, 2, 8, RopeSpec(1e4, 8), gated=False)
    g = GraphBuilder("verify", commits=False)
    x = g.embed("ids", "target.embed_tokens", 100, 32, "embedding")
    q = g.linear(x, "q", 32, "attention", "q")
    k = g.linear(x, "k", 16, "attention", "k")
    v = g.linear(x, "v", 16, "attention", "v")
    o = g.attend(q, k, v, "target.layers.0", spec, LayerSpec(spec, 8, 1e-6, window=window))
    return g.program(logits=g.linear(o, "head", 100, "lm_head", "logits"))


@pytest.mark.parametrize(("window", "rows"), [(None, 1000), (64, 63), (5000, 1000)])
def test_a_window_limits_the_rows_that_are_read(window, rows):
    assert footprint.kv_read_bytes(attention_program(window), 1000, "fp8") == rows * 2 * 2 * 8


def test_scratch_is_the_peak_of_tensors_alive_at_once():
    # q, k and v are alive beside their input: 32 + 32 + 16 + 16 columns of BF16; then o, then 100 FP32 logits beside o
    assert footprint.scratch_bytes(attention_program(None), 10) == max(
        10 * 2 * (32 + 32 + 16 + 16), 10 * (2 * 32 + 400)
    )
    # one row of logits is FP32 even where the rest is small
    assert footprint.scratch_bytes(attention_program(None), 1) == 464


BYTES = {"nvfp4": 0.5625, "fp8": 1, "bf16": 2}


def costs(name, kind, kv="fp8"):
    pair = synthetic_pair(name)
    programs = pair_programs(pair)
    return Costs(programs, kind_recipe(kind).formats(programs.weights), kv, pair)


@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3-8b"])
def test_weights_are_those_of_the_formats_and_a_scale_a_row(name, kind):
    found = costs(name, kind)
    for program, traffic in (
        (found.programs.verify, found.verify(512, 5)),
        (found.programs.propose, found.propose(512)),
    ):
        want = 0
        for weight, spec in program.weights.items():
            if spec.kind == "linear":
                rows = -(-spec.shape[0] // 32) * 32
                want += rows * spec.shape[1] * BYTES[found.formats[weight]] + 4 * rows
        assert sum(traffic.weights.values()) == want
        assert traffic.total > want


def test_state_of_gated_delta_layers_is_written_only_behind_a_commit():
    found = costs("qwen3.6-27b", "nvfp4")
    state = 48 * 4 * 48 * 128 * 128  # layers, FP32, heads, key and value dims
    history = 48 * 2 * 10240 * 3
    assert found.verify(512, 5).state == 2 * state + 2 * history
    assert found.verify(512, 0).state == state + 2 * history
    tape_row = 48 * (2 * 10240 + 8 * 48)
    assert found.verify(512, 5).tape == 21 * tape_row
    assert found.verify(512, 1, 1).tape == 2 * tape_row
    assert found.propose(512).state == found.propose(512).tape == 0


def test_keys_and_values_grow_with_the_context_up_to_the_window():
    found = costs("qwen3.6-27b", "nvfp4")
    verify = [found.verify(n, 5).kv for n in (512, 513, 32768)]
    assert verify[1] - verify[0] == 16 * 2 * 4 * 256  # layers, K and V, heads, dims
    assert verify[2] - verify[0] == (32768 - 512) * 16 * 2 * 4 * 256
    draft = [found.propose(n).kv for n in (2047, 2048, 32768)]
    assert draft[1] - draft[0] == 2 * 8 * 128  # one full layer; four slide over 2,048
    assert draft[2] - draft[1] == (32768 - 2048) * 2 * 8 * 128
    assert costs("qwen3.6-27b", "nvfp4", "bfloat16").verify(512, 5).kv == 2 * verify[0]


def test_a_prompt_costs_two_operations_a_weight_and_token_and_its_attention():
    found = costs("qwen3-8b", "bf16")
    program = found.programs.prefill
    body = sum(prod(s.shape) for n, s in program.weights.items() if s.kind == "linear" and n != "target.lm_head")
    attention = 36 * 4 * 32 * 128 * (1000 * 1001 // 2)
    assert found.prefill_operations(1000) == 2 * 1000 * body + 2 * 151936 * 4096 + attention
