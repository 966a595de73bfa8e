"""Builds of mixtures of experts: every expert in its place in native bundles, one after the other through memory."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from builder_support import BF16, GOLDEN, KEEP, recipe
from bundle_support import random_weight
from native_support import fake_cubin, same

from edge_dflash.backends.cuda import support
from edge_dflash.builder import decide
from edge_dflash.builder import write as builder
from edge_dflash.builder.convert import weight_tensors
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.parts import Part, tensor_file, write_file
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import BackendError, RecipeError
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.formats import Fp8Weight, WideWeight
from edge_dflash.weights.layout import Layout, data_for, member, repack, shared_part, words_of
from edge_dflash.weights.quantize import dequantize, quantize_nvfp4
from edge_dflash.weights.rounding import Search
from edge_dflash.weights.stacks import ExpertStack, pair_experts, unpack_weight

WIDE, SINGLE, MODELOPT, CT = (f"qwen3_5_moe-tiny{end}" for end in ("", "-perexpert", "-nvfp4-modelopt", "-nvfp4-ct"))
EXPERTS, PARTS = 8, 3  # of the goldens: the shared expert is three times as wide
AGAIN = "schema: 1\nname: again\nrequantize: fp8\ntarget: {experts: keep, lm_head: keep}\n"


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Kernels compile in no time, and heads of gated delta layers may be smaller than they take: nothing runs them."""
    digest = decide.kernels_digest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "check_native", lambda *args, **kwargs: None)
        patch.setattr(builder, "compile_cubin", fake_cubin)
        patch.setattr(decide, "kernels_digest", lambda: digest)
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory, quick):
    """The native bundle of a golden mixture, built once."""
    root = tmp_path_factory.mktemp("built")
    return cache(lambda name: Bundle.open(build(config_of(name, root / name)).bundle))


def config_of(name, output, **changes):
    native = {"arch": "sm110", "backend": "native", "max_context": 128}
    return BuildConfig(**{"target": GOLDEN / name, "drafter": None, "output": output, **native, **changes})


def stacks_of(bundle):
    """Expert stacks of a bundle, by key."""
    return pair_experts(pair_programs(bundle.pair), bundle.manifest.weights)


@pytest.mark.parametrize(
    ("name", "text"),
    [(WIDE, None), (WIDE, BF16.replace("mlp: bf16,", "mlp: bf16, experts: bf16,", 1)), (MODELOPT, None), (CT, KEEP)],
)
def test_a_native_bundle_holds_every_expert_of_a_reference_bundle(tmp_path, name, text):
    path = recipe(tmp_path, text) if text else None
    native = Bundle.open(build(config_of(name, tmp_path / "native", recipe=path)).bundle)
    plain = config_of(name, tmp_path / "plain", recipe=path, arch="cpu", backend=None)
    reference = Bundle.open(build(plain).bundle)
    assert native.manifest.weights == reference.manifest.weights
    assert len(stacks_of(native)) == 8
    for weight in native.manifest.weights:
        same(reference.get(weight), native.get(weight))
    tests = [(bundle.path / "selftest.json").read_bytes() for bundle in (native, reference)]
    assert tests[0] == tests[1]  # the reference computes the same with the experts of either


def test_spellings_build_the_same_bundle(built):
    one, other = (built(name).manifest for name in (WIDE, SINGLE))
    assert {name for name in one.files if one.files[name] != other.files[name]} == set()


def test_a_native_bundle_of_a_pair_is_complete(tmp_path):
    keep = KEEP.replace("mlp: keep,", "mlp: keep, experts: keep,", 1)
    pair = {"drafter": GOLDEN / "qwen3_5_moe-tiny-dflash", "recipe": recipe(tmp_path, keep)}
    bundle = Bundle.open(build(config_of(WIDE, tmp_path / "out", **pair)).bundle)
    weights = pair_programs(bundle.pair).weights
    store = PairCheckpoint.open(GOLDEN / WIDE, pair["drafter"], weights)
    for name in weights:
        same(store.get(name), bundle.get(name))


def test_members_lie_behind_each_other(built):
    bundle = built(WIDE)
    words = words_of(110)
    for stack in stacks_of(bundle).values():
        packed = bundle.repacked(stack)
        assert packed.words == words
        assert not packed.data.flags.owndata
        assert (stack.experts, stack.parts, stack.members) == (EXPERTS, PARTS, EXPERTS + PARTS)
        swiglu = stack.layout.swiglu
        scales = [[bundle.get(name).global_scale for name in stack.expert(index)] for index in range(EXPERTS + 1)]
        assert all(len(set(each)) == 1 for each in scales)  # gate and up share theirs, experts do not
        assert len({each[0] for each in scales}) > EXPERTS // 2
        for expert in range(EXPERTS):
            wanted = repack([bundle.get(name) for name in stack.expert(expert)], swiglu=swiglu, words=words)
            found = member(packed, expert)
            assert found.layout == wanted.layout
            assert np.array_equal(found.data, wanted.data)
            assert np.array_equal(found.scale, wanted.scale)


def test_a_shared_expert_is_the_sum_of_its_parts(built):
    """Rows of gate and up, columns of down: products of the parts add up to the whole's."""
    bundle = built(WIDE)
    rng = np.random.default_rng(0)
    first, second = (stack for stack in stacks_of(bundle).values() if ".layers.2." in stack.key)
    x = rng.standard_normal((5, first.layout.k)).astype(np.float32)
    gate, up, down = (
        dequantize(bundle.get(f"target.layers.2.mlp.shared_expert.{part}_proj")).numpy()
        for part in ("gate", "up", "down")
    )
    total = np.zeros((5, second.layout.columns[0]), np.float32)
    for part in range(PARTS):
        (g, u), (d,) = (
            [dequantize(unpack_weight(_alone(stack), member(bundle.repacked(stack), EXPERTS + part), i)).numpy()
             for i in range(len(stack.layout.columns))]
            for stack in (first, second)
        )  # fmt: skip
        total += ((x @ g.T) * (x @ u.T)) @ d.T
    assert np.allclose(total, ((x @ gate.T) * (x @ up.T)) @ down.T, atol=1e-5)


def _alone(stack):
    """The stack of one member, as an expert stack without a shared expert."""
    return replace(stack, names=stack.expert(0), experts=1, parts=0)


@pytest.mark.parametrize("form", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("channels", [False, True])
def test_shared_experts_of_every_format_come_back(form, channels):
    rng = np.random.default_rng(1)
    shapes = {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    weights = {name: random_weight(rng, shape, form, None) for name, shape in shapes.items()}
    if form == "fp8":
        for name, weight in weights.items():
            scale = rng.uniform(0.5, 1, weight.shape[0] if channels else 1).astype(np.float32)
            weights[name] = Fp8Weight(weight.data, scale)
    for names, layout in (
        (("gate", "up"), Layout(form, (32, 32), 64, swiglu=True)),
        (("down",), Layout(form, (64,), 32)),
    ):
        shared = tuple(weights[name] for name in names)
        parts = [repack(shared_part(shared, layout, part), swiglu=layout.swiglu) for part in range(3)]
        stack = ExpertStack(names, layout, experts=0, parts=3)
        packed = replace(
            parts[0],
            data=np.concatenate([part.data for part in parts]),
            scale=np.concatenate([part.scale for part in parts]),
        )
        assert packed.data.size == stack.nbytes
        assert packed.scale.size == stack.rows
        for index, name in enumerate(names):
            same(weights[name], unpack_weight(stack, packed, index))


def test_words_of_every_member_are_those_of_the_device():
    rng = np.random.default_rng(2)
    experts = [random_weight(rng, (32, 64), "nvfp4", None) for _ in range(3)]
    packs = {words: [repack(expert, words=words) for expert in experts] for words in ("bytes", "shared")}
    joined = {words: np.concatenate([one.data for one in parts]) for words, parts in packs.items()}
    scale = np.concatenate([one.scale for one in packs["bytes"]])
    packed = replace(packs["bytes"][0], data=joined["bytes"], scale=scale)
    assert data_for(packed, 110) is packed.data
    assert np.array_equal(data_for(packed, 90), joined["shared"])


def programs_of(name):
    return pair_programs(read_pair(GOLDEN / name, None))


def formats_of(name, **others):
    found = {n: "nvfp4" if spec.kind == "linear" else "bf16" for n, spec in programs_of(name).weights.items()}
    return found | {n: form for n in found for end, form in others.items() if n.endswith(f"{end}_proj")}


def test_formats_of_a_layer_do_not_mix():
    programs = programs_of(WIDE)
    formats = formats_of(WIDE) | {"target.layers.2.mlp.experts.5.up_proj": "fp8"}
    with pytest.raises(
        BackendError, match=r"2\.mlp\.experts\.5\.up_proj is fp8, target\.layers\.2\.mlp\.experts\.0\.gate"
    ):
        pair_experts(programs, formats)
    formats = formats_of(WIDE) | {"target.layers.1.mlp.shared_expert.down_proj": "bf16"}
    with pytest.raises(BackendError, match=r"shared_expert\.down_proj is bf16, .*experts\.0\.down_proj is nvfp4"):
        pair_experts(programs, formats)
    forms = [stack.layout.format for stack in pair_experts(programs, formats_of(WIDE, down="fp8")).values()]
    assert forms == ["nvfp4", "fp8"] * 4  # gate and up, and down, are stacks of their own


def test_a_shared_expert_that_is_no_multiple_is_refused():
    pair = read_pair(GOLDEN / WIDE, None)
    experts = replace(pair.target.experts, shared_intermediate=40)
    programs = pair_programs(replace(pair, target=replace(pair.target, experts=experts)))
    with pytest.raises(
        BackendError, match=r"experts\.0\.gate_proj has 16 rows, the shared expert 40; the native kernels"
    ):
        pair_experts(programs, formats_of(WIDE))


def test_experts_pass_through_memory_one_by_one(tmp_path):
    """A fraction of the stack's bytes, measured by what NumPy allocates."""
    rng = np.random.default_rng(0)
    count, shape = 48, (256, 1024)
    source = WideWeight((rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16))
    names = tuple(f"target.layers.0.mlp.experts.{e}.{kind}_proj" for e in range(count) for kind in ("gate", "up"))

    class Store(dict):
        def get(self, name):
            return source

        def kv_scale(self, state):
            return (1.0, 1.0)

    stack = ExpertStack(names, Layout("nvfp4", (256, 256), 1024, swiglu=True), count, 0)
    with ThreadPoolExecutor(2) as pool:
        part = Part((), (stack,))
        tensors = weight_tensors(part, Store(), dict.fromkeys(names, "nvfp4"), {}, pool, "bytes")
        tracemalloc.start()
        write_file(tmp_path / "part", tensor_file(tensors))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (tmp_path / "part").stat().st_size > stack.nbytes > 12 << 20
    assert most < stack.nbytes / 2


def test_fp8_is_rounded_again_only_where_the_recipe_says_so(tmp_path):
    path = recipe(tmp_path, AGAIN.replace("requantize: fp8\n", ""))
    with pytest.raises(RecipeError, match=r"asks for nvfp4 of .* stores as fp8; .* or requantize: fp8"):
        build(config_of(MODELOPT, tmp_path / "out", recipe=path))
    bundle = Bundle.open(build(config_of(MODELOPT, tmp_path / "out", recipe=recipe(tmp_path, AGAIN))).bundle)
    formats = bundle.manifest.weights
    assert "fp8" not in formats.values()
    store = PairCheckpoint.open(GOLDEN / MODELOPT, None, programs_of(MODELOPT).weights)
    parts = [f"target.layers.0.linear_attn.in_proj_{part}" for part in ("qkv", "z")]
    wide = [dequantize(store.get(name)) for name in parts]
    amax = max(float(values.abs().max()) for values in wide)
    for name, values in zip(parts, wide, strict=True):
        same(quantize_nvfp4(values, amax, Search()), bundle.get(name))
    expert = "target.layers.0.mlp.experts.3.up_proj"
    same(replace(store.get(expert), input_scale=None), bundle.get(expert))
