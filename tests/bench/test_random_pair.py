"""Random weights: legal in every format, of the right size, the same every time."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from grammar_support import compile_schema
from random_words import random_words
from synthetic import CONFIGS

from edge_dflash.backends.cuda.memory import DevicePointer
from edge_dflash.bench.random_pair import (
    KV_SCALE,
    LEAST,
    Making,
    RandomWeights,
    kind_recipe,
    pair_names,
    stack_rms,
    synthetic_pair,
    synthetic_tokenizer,
)
from edge_dflash.bench.subjects import SCENE_STEPS, STEPS, WORDS
from edge_dflash.decode.sampling import unpack as unpack_mask
from edge_dflash.errors import RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WideWeight, bf16_to_f32
from edge_dflash.weights.layout import UNIT_ROWS, Layout, Repacked, unpack
from edge_dflash.weights.stacks import Stack, pair_stacks

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
KINDS = ("nvfp4", "fp8", "bf16")


def e4m3(codes):
    """E4M3 by its definition; NaN for 0x7F and 0xFF."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    return np.where(codes & 127 == 127, np.nan, np.where(codes & 128, -size, size))


def values(weight):
    match weight:
        case Nvfp4Weight():
            codes = np.stack((weight.packed & 15, weight.packed >> 4), -1).reshape(weight.shape)
            return E2M1[codes] * np.repeat(e4m3(weight.block_scale), 16, 1) * weight.global_scale
        case Fp8Weight():
            return e4m3(weight.data) * weight.scale.reshape(-1, 1)
        case WideWeight():
            return bf16_to_f32(weight.data).astype(np.float64)


class FakeGpu:
    """Host memory behind made-up addresses; runs bench_weights by its mirror."""

    sm_count = 4

    def __init__(self):
        self.memory, self.next = {}, 256

    def allocate(self, nbytes):
        pointer = DevicePointer(self.next, nbytes)
        self.memory[pointer.address] = np.full(nbytes, 0xFF, np.uint8)
        self.next += -(-nbytes // 256) * 256
        return pointer

    def upload(self, array):
        pointer = self.allocate(array.nbytes)
        self.memory[pointer.address][:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return pointer

    def load(self, cubin):
        assert cubin == b"bench"
        return self

    def kernel(self, name):
        return name

    def launch(self, kernel, grid, block, arguments):
        assert kernel == "bench_weights"
        pointer, words, seed, bits, exponent = arguments
        assert words.value * 4 == pointer.nbytes
        form = {4: "nvfp4", 8: "fp8", 16: "bf16"}[bits]
        self.memory[pointer.address][:] = random_words(0, words.value, seed.value, form, exponent).view(np.uint8)

    def fetch(self, pointer, dtype):
        return self.memory[pointer.address].view(dtype)


def unpacked(gpu, made):
    data, scale = gpu.fetch(made.data, np.uint8), gpu.fetch(made.scale, np.float32)
    assert len(scale) == made.layout.units * UNIT_ROWS
    assert len(data) == made.layout.nbytes
    return unpack(Repacked(made.layout, data, scale))


@pytest.fixture(scope="module")
def small():
    return synthetic_pair("qwen3.5-4b")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("columns", "k", "swiglu"), [((64, 32), 256, False), ((48, 48), 128, True), ((96,), 512, False)]
)
def test_stacks_are_legal_and_keep_the_scale_of_their_input(small, kind, columns, k, swiglu):
    gpu, weights = FakeGpu(), RandomWeights(small, kind, str.encode)
    stack = Stack(tuple(f"target.layers.0.mlp.{i}" for i in range(len(columns))), Layout(kind, columns, k, swiglu))
    for weight, n in zip(unpacked(gpu, weights.stack(gpu, stack)), columns, strict=True):
        found = values(weight)
        assert found.shape == (n, k)
        assert np.isfinite(found).all()
        assert abs(np.log2(np.sqrt((found**2).mean()) * math.sqrt(k))) < (0.6 if kind == "bf16" else 0.1)
        assert len(np.unique(found)) > 8


def test_a_stack_with_padding_is_made_on_the_host_and_padded_with_zeros(small):
    gpu, weights = FakeGpu(), RandomWeights(small, "nvfp4", str.encode)
    stack = Stack(("target.a", "target.b"), Layout("bf16", (48, 48), 64))
    made = weights.stack(gpu, stack)
    for weight in unpacked(gpu, made):
        assert weight.shape == (48, 64)
        assert np.isfinite(values(weight)).all()
    assert (gpu.fetch(made.data, np.uint16) == 0).sum() >= 2 * 16 * 64


def test_branches_are_quiet_and_the_bytes_are_the_same_every_time(small):
    wide = Stack(("target.layers.0.mlp.gate_proj",), Layout("fp8", (32,), 64))
    branch = Stack(("target.layers.0.mlp.down_proj",), Layout("fp8", (32,), 64))
    assert stack_rms(branch) == stack_rms(wide) / 4
    gpu = FakeGpu()
    first, again, other = (
        gpu.fetch(RandomWeights(small, "fp8", str.encode).stack(gpu, stack).data, np.uint8)
        for stack in (wide, wide, branch)
    )
    assert (first == again).all()
    assert (first != other).mean() > 0.9


def test_bf16_values_are_finite_at_the_sizes_that_are_asked():
    for rms in (1.0, 1 / math.sqrt(25600), 0.25 / math.sqrt(17408)):
        exponent = Making.of("bf16", rms).exponent
        found = bf16_to_f32(random_words(0, 4096, 3, "bf16", exponent).view(np.uint16))
        assert np.isfinite(found).all()
        assert 0.66 < np.sqrt((found.astype(np.float64) ** 2).mean()) / rms < 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_formats_follow_the_default_recipe(small, kind):
    weights = RandomWeights(small, kind, str.encode)
    formats, programs = weights.formats, pair_programs(small)
    assert formats.keys() == programs.weights.keys()
    assert formats["drafter.fc"] == ("fp8" if kind == "nvfp4" else kind)
    assert formats["target.layers.0.linear_attn.in_proj_a"] == "bf16"
    assert formats["target.embed_tokens"] == "bf16"
    for name in ("target.lm_head", "target.layers.3.self_attn.q_proj", "drafter.layers.0.mlp.up_proj"):
        assert formats[name] == kind
    assert pair_stacks(programs, formats)
    assert kind_recipe(kind).kv == "fp8"


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3-8b"])
def test_vectors_are_neutral_and_plausible(name):
    pair = synthetic_pair(name)
    weights, specs = RandomWeights(pair, "nvfp4", str.encode), pair_programs(pair).weights
    for weight, spec in specs.items():
        if spec.kind in ("vector", "conv"):
            vector = weights.vector(weight)
            assert (vector.shape, vector.dtype) == (spec.shape, np.float32)
            assert np.isfinite(vector).all()
    assert (weights.vector("target.norm") == (0 if name == "qwen3.5-4b" else 1)).all()
    assert (weights.vector("drafter.norm") == 1).all()
    assert (weights.vector("drafter.layers.0.self_attn.k_norm") == 1).all()
    if name == "qwen3.5-4b":
        assert (weights.vector("target.layers.0.linear_attn.norm") == 1).all()
        assert (weights.vector("target.layers.3.self_attn.q_norm") == 0).all()
        decay = np.exp(-np.exp(weights.vector("target.layers.0.linear_attn.A_log")) * np.log1p(np.exp(-4)))
        assert (decay > 0.7).all()
    assert weights.kv_scale("target.layers.3.kv") == (KV_SCALE, KV_SCALE)


@pytest.mark.parametrize("name", pair_names())
def test_synthetic_pairs_are_those_of_the_published_configs(name):
    folder = CONFIGS / name
    published = read_pair(folder / "target", folder / "drafter")
    assert synthetic_pair(name) == published


def test_unknown_pairs_are_refused_with_the_names():
    with pytest.raises(RequestError, match=r"'qwen3-27b'; there are qwen3.6-27b, qwen3.5-9b, qwen3.5-4b, qwen3-8b"):
        synthetic_pair("qwen3-27b")


SIZE = 20_000


@pytest.fixture(scope="module")
def tokenizer():
    return synthetic_tokenizer(SIZE, WORDS)


def test_it_has_exactly_as_many_ids_as_the_model(tokenizer):
    assert tokenizer.size == SIZE
    assert tokenizer.eos_token_id == SIZE - 1
    assert len({tokenizer.token(index) for index in range(SIZE)}) == SIZE
    assert synthetic_tokenizer(SIZE, WORDS).to_json() == tokenizer.to_json()


def test_its_words_are_as_long_as_those_of_real_vocabularies(tokenizer):
    lengths = [len(tokenizer.token(index)) for index in range(1000, SIZE - 1)]
    assert 6 < np.mean(lengths) < 8
    assert max(lengths) <= 14


def test_a_plan_is_a_few_tokens_a_step_and_any_text_comes_back(tokenizer):
    step = '{"action":"navigate","target":"red_toolbox"},'
    assert len(tokenizer.encode(step)) <= 12
    assert tokenizer.decode(tokenizer.encode(step)) == step
    for text in ("kitchen table 42", "Größe: 5 µm\n\t☃"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_one_that_holds_no_words_is_refused():
    with pytest.raises(RequestError, match=f"of 300 ids is too small; give at least {LEAST}"):
        synthetic_tokenizer(300)


def test_random_choices_make_steps_without_end(tokenizer):
    grammar = compile_schema(SCENE_STEPS.schema, tokenizer, SIZE, [SIZE - 1]).constraint()
    rng, tokens = np.random.default_rng(0), []
    for _ in range(500):
        allowed = np.flatnonzero(unpack_mask(grammar.masks(())[0], SIZE))
        assert SIZE - 1 not in allowed
        tokens.append(int(rng.choice(allowed)))
        grammar.advance(tokens[-1:])
    text = tokenizer.decode(tokens)
    steps = json.loads(text[: text.rindex("},") + 1] + "]}")["steps"]
    assert len(steps) > 30
    assert {tuple(step) for step in steps} == {("action", "target")}


def test_the_schema_of_bundles_takes_a_plan_and_ends(tokenizer):
    grammar = compile_schema(STEPS.schema, tokenizer, SIZE, [SIZE - 1]).constraint()
    grammar.advance(tokenizer.encode('{"steps":[{"action":"open","target":"the fridge"}]}'))
    grammar.advance([SIZE - 1])
    assert list(np.flatnonzero(unpack_mask(grammar.masks(())[0], SIZE))) == [SIZE - 1]
