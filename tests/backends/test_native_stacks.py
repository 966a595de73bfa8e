"""Which linears lie together, and in which file of a bundle."""

from dataclasses import replace

import pytest
from native_support import NATIVE_PAIR, formats_of, programs

from edge_dflash.bundle.parts import bundle_parts, native_stacks, stack_bytes, stack_part
from edge_dflash.errors import BackendError
from edge_dflash.model.specs import DrafterLayerMask
from edge_dflash.weights.stacks import PARTS, pair_stacks, program_stacks

D0, T0, T1 = "drafter.layers.0", "target.layers.0", "target.layers.1"


def names(stacks, prefix):
    return [tuple(name.removeprefix(prefix + ".") for name in s.names) for s in stacks if s.names[0].startswith(prefix)]


def test_matrices_of_one_input_and_format_lie_together():
    stacks = program_stacks(programs().verify, formats_of("nvfp4"))
    assert names(stacks, T0) == [
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        ("linear_attn.in_proj_a", "linear_attn.in_proj_b"),
        ("linear_attn.out_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ]
    assert names(stacks, T1)[0] == tuple(f"self_attn.{part}_proj" for part in "qkv")
    layouts = {stack.key: stack.layout for stack in stacks}
    gated = layouts[f"{T0}.mlp.gate_proj+1"]
    assert (gated.swiglu, gated.columns, gated.k, gated.format) == (True, (48, 48), 32, "nvfp4")
    assert not layouts["drafter.layers.0.self_attn.k_proj+3"].swiglu


def test_keys_and_values_of_a_drafter_are_in_two_stacks():
    stacks = pair_stacks(programs(), formats_of("nvfp4"))
    context = stacks[f"{D0}.self_attn.k_proj+3"]
    assert context.names == tuple(f"drafter.layers.{i}.self_attn.{kv}_proj" for i in (0, 1) for kv in "kv")
    assert context.joined
    block = stacks[f"{D0}.self_attn.q_proj+2"]
    assert set(context.names) & set(block.names) == {f"{D0}.self_attn.k_proj", f"{D0}.self_attn.v_proj"}


def test_passes_share_equal_stacks_and_names_occur_in_all():
    formats = formats_of("fp8")
    stacks = pair_stacks(programs(), formats)
    linears = {name for name, spec in programs().weights.items() if spec.kind == "linear"}
    assert {name for stack in stacks.values() for name in stack.names} == linears
    assert all(
        stack == stacks[stack.key]
        for p in (programs().prefill, programs().verify)
        for stack in program_stacks(p, formats)
    )


def test_another_format_makes_another_stack():
    stacks = program_stacks(programs().verify, formats_of("nvfp4", k_proj="fp8", up_proj="bf16"))
    assert names(stacks, T1)[:2] == [("self_attn.q_proj", "self_attn.v_proj"), ("self_attn.k_proj",)]
    assert ("mlp.gate_proj",) in names(stacks, T1)
    assert ("mlp.up_proj",) in names(stacks, T1)
    assert not any(stack.layout.swiglu for stack in stacks)


def test_outputs_that_cannot_lie_side_by_side_are_at_most_so_many():
    attention = replace(
        NATIVE_PAIR.drafter.attention, head_dim=72, kv_heads=1, heads=1
    )  # 72 columns: no multiple of 32
    drafter = replace(NATIVE_PAIR.drafter, attention=attention, layers=(DrafterLayerMask(False, None),) * 3)
    pair = replace(NATIVE_PAIR, drafter=drafter)
    stacks = program_stacks(programs(pair).verify, formats_of("nvfp4", pair))
    context = [stack for stack in stacks if stack.names[0].startswith("drafter.layers")]
    assert [len(stack.names) for stack in context] == [PARTS, 2]
    assert not context[0].joined


def test_a_format_without_kernels_is_named():
    with pytest.raises(
        BackendError,
        match=r"down_proj is stored as 'int4', the native kernels take nvfp4, fp8, bf16, f32, tied: choose one",
    ):
        program_stacks(programs().verify, formats_of("nvfp4", down_proj="int4"))


def test_files_of_a_native_bundle_hold_every_weight_and_every_stack_once():
    formats = formats_of("nvfp4", target__lm_head="tied")
    parts = bundle_parts(programs(), formats, stacked=True)
    stacks = [stack for part in parts.values() for stack in part.stacks]
    assert sorted(s.key for s in stacks) == sorted(native_stacks(programs(), formats))
    assert "target.lm_head" not in {name for stack in stacks for name in stack.names}
    single = [name for part in parts.values() for name in part.names]
    assert sorted(single) == sorted(n for n, spec in programs().weights.items() if spec.kind != "linear")
    for path, part in parts.items():
        assert all(stack_part(stack) == path for stack in part.stacks)
    context = parts["weights/drafter-context.safetensors"].stacks
    assert {stack.key for stack in context} == {"drafter.fc+0", f"{D0}.self_attn.k_proj+3"}
    assert stack_bytes(context[0]) == context[0].layout.nbytes + 128 * context[0].layout.units


def test_files_of_a_reference_bundle_hold_no_stacks():
    parts = bundle_parts(programs(), formats_of("nvfp4"), stacked=False)
    assert not any(part.stacks for part in parts.values())
    assert sorted(name for part in parts.values() for name in part.names) == sorted(programs().weights)
