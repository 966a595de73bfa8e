"""What kernels/tower.cu computes, on a CPU: each thread a fiber, warps by emulation (support/kernels_on_cpu)."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from tower_on_cpu import COMPILER, bits, tower_library, wide

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to emulate kernels")


class Channels(ctypes.Structure):
    _fields_ = (("mean", ctypes.c_float * 4), ("spread", ctypes.c_float * 4))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return tower_library(tmp_path_factory.mktemp("kernels"))


def near(x):
    return wide(bits(x))


def at(array):
    return ctypes.c_void_p(array.ctypes.data)


def rng(seed=0):
    return np.random.default_rng(seed)


def test_levels_become_patches_of_every_time_slot(kernels):
    levels = rng().integers(0, 256, (5, 3 * 16), np.uint8)
    out = np.zeros((5, 112), np.uint16)
    by = Channels((10.0, 127.5, 200.0, 0.0), (50.0, 127.5, 255.0, 1.0))
    kernels.patches(at(levels), at(out), 5, 3, 16, 2, 112, by)
    mean, spread = (np.array(part[:3], np.float32)[:, None] for part in (by.mean, by.spread))
    wanted = near((levels.reshape(5, 3, 16).astype(np.float32) - mean) / spread)
    assert np.array_equal(wide(out[:, :96]), np.repeat(wanted[:, :, None], 2, 2).reshape(5, 96))
    assert not out[:, 96:].any()


def test_positions_are_interpolated_and_added(kernels):
    x, table = bits(rng(1).normal(size=(6, 48))), bits(rng(2).normal(size=(9, 40)))
    corners = rng(3).integers(0, 9, (6, 4), np.int32)
    shares = rng(4).random((6, 4), np.float32)
    sums = np.zeros((6, 40), np.float32)
    for n in range(4):
        sums += wide(table)[corners[:, n]] * shares[:, n : n + 1]
    wanted = near(wide(x[:, :40]) + near(sums))
    kept = x[:, 40:].copy()
    kernels.positions(at(x), at(table), at(corners), at(shares), 6, 40, 48)
    assert np.array_equal(wide(x[:, :40]), wanted)
    assert np.array_equal(x[:, 40:], kept)


@pytest.mark.parametrize("columns", [8, 72, 300, 1152])
def test_layer_norm(kernels, columns):
    stride = -(-columns // 16) * 16
    x, out = bits(rng(5).normal(3.0, 2.0, (4, stride))), np.zeros((4, stride), np.uint16)
    weight, bias = (rng(seed).normal(size=columns).astype(np.float32) for seed in (6, 7))
    kernels.norm(at(x), at(weight), at(bias), at(out), 4, columns, stride, stride, ctypes.c_float(1e-6))
    rows = wide(x)[:, :columns].astype(np.float64)
    away = rows - rows.mean(1, keepdims=True)
    wanted = away / np.sqrt((away**2).mean(1, keepdims=True) + 1e-6) * weight + bias
    assert np.allclose(wide(out)[:, :columns], wanted, rtol=2**-8, atol=1e-5)


def gelu(x, kind):
    x = x.astype(np.float64)
    if kind == 1:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) if kind == 2 else x


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("residual", [False, True])
def test_bias_activation_and_residual(kernels, kind, residual):
    x, extra, out = (
        bits(rng(8).normal(size=(3, 304)) * 3),
        bits(rng(9).normal(size=(3, 304))),
        np.zeros((3, 304), np.uint16),
    )
    bias = rng(10).normal(size=300).astype(np.float32)
    kernels.finish(at(x), at(bias), at(extra) if residual else None, at(out), 3, 300, 304, kind)
    y = near(gelu(near(wide(x)[:, :300] + bias), kind))
    wanted = near(y + wide(extra)[:, :300]) if residual else y
    assert np.allclose(wide(out)[:, :300], wanted, rtol=2**-7, atol=1e-6)
    assert kind or np.array_equal(wide(out)[:, :300], wanted)


def test_queries_and_keys_turn_and_values_do_not(kernels):
    heads, dim, rows = 3, 24, 5
    qkv = bits(rng(11).normal(size=(rows, 3 * heads * dim)))
    before, angles = wide(qkv), rng(12).normal(size=(rows, dim // 2)) * 9
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    kernels.turn(at(qkv), at(cosine), at(sine), rows, heads, dim, 3 * heads * dim)
    x = before.reshape(rows, 3, heads, 2, dim // 2)
    low, high, c, s = x[:, :2, :, 0], x[:, :2, :, 1], cosine[:, None, None], sine[:, None, None]
    wanted = x.copy()
    wanted[:, :2, :, 0], wanted[:, :2, :, 1] = near(low * c - high * s), near(high * c + low * s)
    assert np.array_equal(wide(qkv), wanted.reshape(before.shape))


@pytest.mark.parametrize(
    ("rows", "heads", "dim"),
    [
        (4, 4, 16),
        (63, 2, 72),
        (64, 1, 64),
        (65, 2, 72),
        (200, 1, 80),
        (130, 1, 128),
        (70, 1, 104),
        (24, 2, 8),
        (9, 1, 40),
    ],
)
def test_every_patch_sees_all_patches(kernels, rows, heads, dim):
    qkv = bits(rng(13).normal(size=(rows, 3 * heads * dim)) * 2)
    out = np.zeros((rows, heads * dim + 16), np.uint16)
    scale = dim**-0.5
    kernels.attend(
        *(at(qkv), at(out), rows, heads, dim, 3 * heads * dim, heads * dim + 16),
        ctypes.c_float(scale * math.log2(math.e)),
    )
    q, k, v = wide(qkv).astype(np.float64).reshape(rows, 3, heads, dim).transpose(1, 2, 0, 3)
    scores = q @ k.transpose(0, 2, 1) * scale
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = (shares / shares.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(rows, heads * dim)
    found = wide(out)[:, : heads * dim]
    assert np.abs(found - wanted).max() < 0.03
    assert not out[:, heads * dim :].any()
