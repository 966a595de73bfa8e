"""What the native kernels do not take is refused by name before anything is built."""

from dataclasses import replace

import numpy as np
import pytest
from bundle_support import PAIR
from native_support import MIXED, NATIVE_PAIR, formats_of, programs, random_store

from edge_dflash.backends.cuda.compile import ARCHS
from edge_dflash.backends.cuda.support import check_native, narrowed
from edge_dflash.errors import BackendError
from edge_dflash.weights.formats import WideWeight


def drafter(**changes):
    return replace(NATIVE_PAIR, drafter=replace(NATIVE_PAIR.drafter, **changes))


def target(**changes):
    return replace(NATIVE_PAIR, target=replace(NATIVE_PAIR.target, **changes))


def delta(**changes):
    return target(gated_delta=replace(NATIVE_PAIR.target.gated_delta, **changes))


def experts(**changes):
    return replace(MIXED, target=replace(MIXED.target, experts=replace(MIXED.target.experts, **changes)))


@pytest.mark.parametrize("arch", [None, *ARCHS])
@pytest.mark.parametrize("form", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize(
    "pair", [NATIVE_PAIR, MIXED, experts(shared_intermediate=None)], ids=["mlp", "shared", "mixed"]
)
def test_a_pair_that_fits(pair, form, arch):
    check_native(pair, formats_of(form, pair), arch=arch)
    check_native(pair, formats_of(form, pair), arch=arch, kv="bfloat16")


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (PAIR, "target.layers.0.delta: key_dim is 16; the gated delta kernels take 32, 64 or 128"),
        (delta(value_dim=48), "value_dim is 48"),
        (delta(conv_kernel=5), "conv_kernel is 5"),
        (delta(key_heads=2, value_heads=3), "value heads 3"),
        (
            drafter(attention=replace(NATIVE_PAIR.drafter.attention, head_dim=96)),
            "drafter.layers.0.ctx: head_dim is 96; the attention kernels take 64, 128 or 256",
        ),
        (target(attention=replace(NATIVE_PAIR.target.attention, kv_heads=3)), "2 heads over 3 KV heads"),
        (drafter(block_size=33), "a block has 33 rows; the attention kernels take 1 to 32"),
        (target(intermediate_size=40), "target.layers.0.down: a linear has 40 inputs; the native kernels take mult"),
    ],
)
def test_pairs_that_do_not_fit_are_refused_with_a_way_out(pair, words):
    with pytest.raises(BackendError) as error:
        check_native(pair, formats_of("bf16", pair))
    assert words in str(error.value)
    assert "build it with --backend reference --arch cpu" in str(error.value)


@pytest.mark.parametrize("word", ["fp8", "int4"])
def test_a_quantized_embedding_is_refused(word):
    with pytest.raises(BackendError, match=f"embedding: the embedding is {word}; the native kernels gather BF16 rows"):
        check_native(NATIVE_PAIR, formats_of("nvfp4", embed_tokens=word))


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (
            experts(shared_intermediate=48),
            "target.layers.0.experts: the shared expert has 48 rows; .* a multiple of 32",
        ),
        (
            experts(intermediate=24, shared_intermediate=24),
            "experts have 24 columns over .*; the native kernels take multiples of 16",
        ),
        (experts(count=32, chosen=17), "a row chooses 17 of 32 experts; the native kernels take at most 16"),
        (experts(count=8, chosen=9), "a row chooses 9 of 8 experts; the native kernels take at most 8 of at most 512"),
        (experts(chosen=8, shared_intermediate=32 * 32), "a row has 32 shared members beside 8 experts"),
    ],
)
def test_mixtures_that_do_not_fit_are_refused_with_a_way_out(pair, words):
    with pytest.raises(BackendError, match=f"{words}.*; build it with --backend reference --arch cpu"):
        check_native(pair, formats_of("bf16", pair))


@pytest.mark.parametrize("name", ["mlp__gate", "shared_expert_gate"])
def test_a_quantized_router_is_refused(name):
    with pytest.raises(
        BackendError, match=f"{name.replace('__', '.')} is nvfp4; the native kernels read routers in BF16"
    ):
        check_native(MIXED, formats_of("nvfp4", MIXED, **{name: "nvfp4"}))


def test_shared_memory_of_an_arch_is_a_limit():
    large = drafter(block_size=32)
    check_native(large, formats_of("fp8", large), arch="sm87")
    with pytest.raises(BackendError, match=r"fp8 linears with blocks of 32 rows need \d+ bytes .* sm121a has 101376"):
        check_native(large, formats_of("fp8", large), arch="sm121a")
    check_native(large, formats_of("nvfp4", large), arch="sm121a")


def test_float32_that_bf16_holds_becomes_bf16_and_other_is_refused():
    name, formats = "target.layers.0.linear_attn.in_proj_a", formats_of("nvfp4", in_proj_a="f32", A_log="f32")
    store = random_store(formats)
    with pytest.raises(BackendError, match=f"{name} holds float32 values that BF16 cannot hold"):
        narrowed(formats, programs(), store)
    store[name] = WideWeight((store[name].data.view(np.uint32) & 0xFFFF0000).view(np.float32))
    found = narrowed(formats, programs(), store)
    assert found[name] == "bf16"
    assert found["target.layers.0.linear_attn.A_log"] == "f32"
    assert {**found, name: "f32"} == formats
