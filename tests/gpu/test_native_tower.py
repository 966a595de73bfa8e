"""The vision tower on a GPU: golden rows, wide heads, FP8, and pictures one behind the other."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_pairs import golden, pair, programs, store
from native_linear_support import cubin
from pictures_support import noise, picture
from store_weights import StoreWeights

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.memory import Allocator
from edge_dflash.backends.cuda.tower import Tower, TowerLayout
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.tower import TorchTower
from edge_dflash.decode.backend import Precision
from edge_dflash.model.vision import vision_program
from edge_dflash.weights.formats import WideWeight
from edge_dflash.weights.quantize import quantize_fp8

pytestmark = pytest.mark.gpu
GOLDEN = pair("vision").target.vision
WIDE = replace(
    GOLDEN,
    depth=2,
    hidden_size=1152,
    heads=16,
    intermediate_size=4304,
    positions=48,
    out=512,
    patches=replace(GOLDEN.patches, max_pixels=1 << 24),
)


@pytest.fixture(scope="module")
def gpu():
    found = Gpu()
    yield found
    found.close()


class Random:
    """Weights of a tower; linears in one format."""

    def __init__(self, program, form):
        self._weights, rng = {}, np.random.default_rng(0)
        for name, spec in program.weights.items():
            values = rng.standard_normal(spec.shape, np.float32) * np.float32(spec.shape[-1] ** -0.5)
            wide = WideWeight((values.view(np.uint32) >> 16).astype(np.uint16))
            self._weights[name] = (
                quantize_fp8(torch.from_numpy(values)) if (spec.kind, form) == ("linear", "fp8") else wide
            )
        self.formats = {n: form if s.kind == "linear" else "bf16" for n, s in program.weights.items()}

    def get(self, name):
        return self._weights[name]


def towers(gpu, spec, program, weights, formats, tokens=600):
    def load(unit):
        return cubin(unit, f"sm{gpu.sm}" + ("a" if gpu.sm >= 90 else ""))

    layout = TowerLayout.of(spec, program, tokens)
    ours = Tower(gpu, layout, StoreWeights(weights, formats), load, Allocator(gpu))
    return ours, TorchTower(spec, program, TorchWeights(weights), Precision("bfloat16", "fp8"))


def distance(ours, theirs, one):
    found, wanted = ours.see(one).host(), theirs.run(one.values(), one.grid)["rows"].numpy()
    assert found.shape == wanted.shape
    return np.abs(found - wanted).max() / wanted.std()


def test_rows_are_those_of_the_golden_run_within_bf16(gpu):
    program = programs("vision").see
    ours, theirs = towers(gpu, GOLDEN, program, store("vision"), dict.fromkeys(program.weights, "bf16"), 40)
    for number in range(3):
        assert distance(ours, theirs, picture(number)) < 0.05
        wanted = golden("vision")[f"img{number}.tower_rows"]
        assert np.abs(ours.see(picture(number)).host() - wanted).max() < 0.1 * wanted.std()


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_a_tower_of_the_published_width_is_close_to_the_reference(gpu, form):
    program = vision_program(WIDE)
    weights = Random(program, form)
    ours, theirs = towers(gpu, WIDE, program, weights, weights.formats)
    for grid in ((2, 2), (16, 30), (2, 128), (38, 50)):
        assert distance(ours, theirs, noise(1, grid)) < 0.1


def test_the_same_picture_gives_the_same_bits_whatever_came_before(gpu):
    program = vision_program(WIDE)
    weights = Random(program, "bf16")
    ours, _ = towers(gpu, WIDE, program, weights, weights.formats)
    first, before = ours.see(noise(1, (38, 50))).bits, gpu.allocations
    for seed, grid in enumerate(((2, 2), (48, 48), (38, 50), (4, 100))):
        ours.see(noise(seed + 2, grid))
    assert np.array_equal(ours.see(noise(1, (38, 50))).bits, first)
    assert gpu.allocations == before
