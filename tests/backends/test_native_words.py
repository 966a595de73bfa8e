"""NVFP4 words with a pair in each byte (SM100 and later): order, and decoding on a model of the instruction."""

import re
import shutil
import subprocess

import numpy as np
import pytest
from cubin_support import cubin
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import FakeGpu, same
from ptx_support import kernels_ptx

from edge_dflash.backends.cuda.compile import KERNELS, compiler_version
from edge_dflash.backends.cuda.linear import LinearWeights
from edge_dflash.board.archs import ARCHS
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, bf16_to_f32
from edge_dflash.weights.layout import SCALE_CODE, WORD_BITS, repack, words_of
from edge_dflash.weights.packing import data_for, unpack

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
    byte, scales = np.arange(256), SCALE_CODE[:0x7F]  # zero and every E4M3 scale; blocks of scale zero have codes zero
    for pair in range(4):
        word = WORD_BITS[pair][byte]
        masked = {
            0: word & 0x81C081C0,
            1: word << np.uint32(6) & 0x81C081C0,
            2: (word >> np.uint32(4) | word << np.uint32(28)) & 0x81C081C0,
            3: (word << np.uint32(2) & 0x80C080C0) | (word >> np.uint32(6) & 0x01000100),
        }[pair]
        halves = bf16_to_f32(np.stack((masked & 0xFFFF, masked >> 16), -1).astype(np.uint16))
        today = halves[:, None] * scale_values(scales, 0x70007000)[:, None]
        direct = converted(byte)[:, None] * scale_values(scales, BIAS_BF16)[:, None]
        shrunk = converted(byte).astype(np.float16) * np.uint16(SHRINK & 0xFFFF).view(np.float16)
        through_f16 = bf16_to_f32(shrunk.view(np.uint16))[:, None] * scale_values(scales, BIAS_F16)[:, None]
        assert not (today.view(np.uint32) & 0xFFFF).any()  # exact in BF16
        assert np.array_equal(today.view(np.uint32), direct.view(np.uint32))
        assert np.array_equal(today.view(np.uint32), through_f16.view(np.uint32))
        assert np.isfinite(today).all()


def random_weight(n, k, seed):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return Nvfp4Weight(packed, rng.integers(0, 0x7F, (n, k // 16), dtype=np.uint8), 0.017)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=3), st.integers(1, 12), st.booleans())
def test_both_orders_hold_the_same_weights(columns, blocks, gated):
    columns = columns[:1] * 2 if gated else columns
    stack = [random_weight(n, 16 * blocks, n + i) for i, n in enumerate(columns)]
    halves, pairs = (repack(stack, swiglu=gated, words=words) for words in ("halves", "bytes"))
    for a, b in zip(unpack(halves), unpack(pairs), strict=True):
        same(a, b)
    words, bytes_ = (r.data.reshape(-1, 1152)[:, :1024].view(np.uint32) for r in (halves, pairs))
    table = sum(WORD_BITS[i][bytes_ >> np.uint32(8 * i) & 0xFF] for i in range(4))
    assert np.array_equal(words, table)  # byte i holds pair i
    assert np.array_equal(halves.data.reshape(-1, 1152)[:, 1024:], pairs.data.reshape(-1, 1152)[:, 1024:])
    assert np.array_equal(halves.scale, pairs.scale)
    assert np.array_equal(data_for(halves, 110), pairs.data)
    assert np.array_equal(data_for(pairs, 87), halves.data)
    assert data_for(pairs, 110) is pairs.data


def test_a_device_gets_the_words_that_its_kernels_read():
    packed = repack(random_weight(40, 80, 0))
    for arch in ARCHS:
        gpu = FakeGpu()
        gpu.sm = arch.sm
        found = gpu.bytes_of(LinearWeights.of(gpu, packed).data)
        assert np.array_equal(found, repack(unpack(packed), words=words_of(arch.sm)).data)
        assert np.array_equal(found, packed.data) == ("e2m1" not in arch.features)


def test_other_formats_have_no_words():
    packed = repack(Fp8Weight(np.zeros((8, 64), np.uint8), np.ones(8, np.float32)))
    assert data_for(packed, 110) is packed.data


@pytest.mark.parametrize("arch", CONVERTING, ids=lambda arch: arch.name)
def test_kernels_convert_where_the_compiler_can(arch):
    kernels = kernels_ptx("linear_tiles", arch.kernels.removeprefix("sm"))
    to = "bf16x2" if tuple(map(int, compiler_version().split("."))) >= (13, 2) else "f16x2"
    streaming = [text for name, text in kernels.items() if "nvfp4" in name]
    assert streaming
    for text in streaming:
        assert f"cvt.rn.{to}.e2m1x2" in text


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch.kernels], ids=lambda arch: arch.name)
def test_cubins_convert_where_the_architecture_can(arch, tmp_path):
    if shutil.which("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed")
    path = tmp_path / "tiles.cubin"
    path.write_bytes(cubin("linear_tiles", arch.kernels))
    code = subprocess.run(["nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
    assert ("E2M1.UNPACK_B" in code) == (arch in CONVERTING)
