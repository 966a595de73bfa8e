"""Bytes of the passes and operations of a prompt, against arithmetic from the published dimensions."""

from __future__ import annotations

from math import prod

import pytest

from edge_dflash.checks.footprint import Costs
from edge_dflash.checks.random_pair import kind_recipe, synthetic_pair
from edge_dflash.model import pair_programs

BYTES = {"nvfp4": 0.5625, "fp8": 1, "bf16": 2}


def costs(name, kind, kv="fp8"):
    pair = synthetic_pair(name)
    programs = pair_programs(pair)
    return Costs(programs, kind_recipe(kind).formats(programs.weights), kv, pair.drafter.block_size)


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
