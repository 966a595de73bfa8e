"""NVFP4 words: order, decoding by masks and shifts, and (SM100 and later) on a model of the instruction."""

import re

import numpy as np
import pytest
from native_support import FakeGpu
from ptx_support import kernels_ptx

from edge_dflash.backends.cuda.compile import KERNELS, compiler_version
from edge_dflash.backends.cuda.kernels.linear import LinearWeights
from edge_dflash.board.archs import ARCHS
from edge_dflash.bundle.parts import DATA, repacked_of
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, bf16_to_f32
from edge_dflash.weights.layout import SCALE_CODE, bf16_pairs, data_for, repack, to_packed, to_words, unpack, words_of
from edge_dflash.weights.stacks import Stack

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SOURCE = (KERNELS / "e2m1.cuh").read_text()
CONVERTING = [arch for arch in ARCHS if "e2m1" in arch.features]


def constant(text):
    """A number that the kernels' source gives by ``text`` and an expression of hexadecimal digits."""
    return int(re.search(text, SOURCE)[1], 16)


BIAS_BF16, BIAS_F16 = (int(word, 16) for word in re.findall(r"SCALE_BIAS = (0x\w+)u", SOURCE))
SHRINK = constant(r'"r"\((0x\w+)u\)')


def converted(byte):
    """cvt.rn.*.e2m1x2 as PTX describes it: bits 0..3 become the low element, bits 4..7 the high one. Exact in F16."""
    return E2M1[np.stack((byte & 15, byte >> 4), -1)]


def scale_values(codes, bias):
    """Both halves of scale_pair, as BF16 values."""
    pair = codes.astype(np.uint32) * np.uint32(0x10001) * 16 + np.uint32(bias)
    assert np.array_equal(pair & 0xFFFF, pair >> 16)
    return bf16_to_f32((pair & 0xFFFF).astype(np.uint16))


def test_all_codes_and_scales_give_the_bits_of_masks_and_shifts():
    byte, scales = np.arange(256, dtype=np.uint32), SCALE_CODE[:0x7F]  # blocks of scale zero have codes zero
    for pair in range(4):
        masked = bf16_pairs(to_words(byte << 8 * pair, "shared"))
        assert not any(other.any() for i, other in enumerate(masked) if i != pair)
        halves = bf16_to_f32(np.stack((masked[pair] & 0xFFFF, masked[pair] >> 16), -1).astype(np.uint16))
        today = halves[:, None] * scale_values(scales, 0x70007000)[:, None]
        direct = converted(byte)[:, None] * scale_values(scales, BIAS_BF16)[:, None]
        shrunk = converted(byte).astype(np.float16) * np.uint16(SHRINK & 0xFFFF).view(np.float16)
        through_f16 = bf16_to_f32(shrunk.view(np.uint16))[:, None] * scale_values(scales, BIAS_F16)[:, None]
        assert not (today.view(np.uint32) & 0xFFFF).any()  # exact in BF16
        assert np.array_equal(today.view(np.uint32), direct.view(np.uint32))
        assert np.array_equal(today.view(np.uint32), through_f16.view(np.uint32))
        assert np.isfinite(today).all()


@pytest.mark.parametrize("order", ["shared", "bytes"])
def test_every_word_is_that_of_its_codes(order):
    # Words and codes are sums of what each of their bits stands for: so 32 bits and many sums stand for all.
    bits, rng = np.uint32(1) << np.arange(32, dtype=np.uint32), np.random.default_rng(0)
    for values in (bits, rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)):
        assert np.array_equal(to_packed(to_words(values, order), order), values)
        assert np.array_equal(to_words(to_packed(values, order), order), values)
        assert np.array_equal(
            to_words(values ^ values[::-1], order), to_words(values, order) ^ to_words(values, order)[::-1]
        )


def expression(text):
    """What the kernels' source gives to ``text``, as Python."""
    found = re.search(re.escape(text) + r" = (.*);", (KERNELS / "decode.cuh").read_text())[1]
    return re.sub(r"(0x[0-9A-F]+)u", r"np.uint32(\1)", found).replace("__funnelshift_r", "funnel")


def test_kernels_decode_as_the_host():
    w = np.random.default_rng(1).integers(0, 1 << 32, 1 << 12, dtype=np.uint32)
    names = {"w": w, "np": np, "funnel": lambda low, high, n: low >> n | high << (32 - n)}
    names["rotated"] = eval(expression("const u32 rotated"), names)
    for i, pair in enumerate(bf16_pairs(w)):
        assert np.array_equal(eval(expression(f"pair[{i}]"), names), pair)


def random_weight(n, k, seed):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return Nvfp4Weight(packed, rng.integers(0, 0x7F, (n, k // 16), dtype=np.uint8), 0.017)


def test_a_device_gets_the_words_that_its_kernels_read():
    packed = repack(random_weight(40, 80, 0))
    for arch in ARCHS:
        gpu = FakeGpu()
        gpu.sm = arch.sm
        found = gpu.bytes_of(LinearWeights.of(gpu, packed).data)
        assert np.array_equal(found, repack(unpack(packed), words=words_of(arch.sm)).data)
        assert np.array_equal(found, packed.data) == ("e2m1" not in arch.features)


@pytest.mark.parametrize("words", sorted(DATA))
def test_a_bundle_names_its_words_and_an_older_one_is_turned(words):
    packed = repack(random_weight(40, 80, 0), words=words)
    stack = Stack(("target.w",), packed.layout)
    found = repacked_of(
        stack, {f"target.w+0.{DATA[words]}": ("U8", packed.data), "target.w+0.scale": ("F32", packed.scale)}
    )
    assert found.words == words
    gpu = FakeGpu()
    gpu.sm = 87
    assert np.array_equal(gpu.bytes_of(LinearWeights.of(gpu, found).data), repack(random_weight(40, 80, 0)).data)


def test_other_formats_have_no_words():
    packed = repack(Fp8Weight(np.zeros((8, 64), np.uint8), np.ones(8, np.float32)))
    assert data_for(packed, 110) is packed.data


@pytest.mark.parametrize("arch", [arch for arch in CONVERTING if arch.name != "sm120"], ids=lambda arch: arch.name)
def test_kernels_convert_where_the_compiler_can(arch):
    kernels = kernels_ptx("linear_tiles", arch.kernels)
    to = "bf16x2" if tuple(map(int, compiler_version().split("."))) >= (13, 2) else "f16x2"
    streaming = [text for name, text in kernels.items() if "nvfp4" in name]
    assert streaming
    for text in streaming:
        assert f"cvt.rn.{to}.e2m1x2" in text
