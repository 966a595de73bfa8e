"""The native vision tower whole, on a CPU: its steps, places and launches, with emulated kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from golden_pairs import golden, pair, programs, store
from native_support import SIGHTED, FakeGpu, formats_of, same, write_native_bundle
from pictures_support import noise, picture
from tower_on_cpu import COMPILER, HostGpu, HostWeights, tower_library

from edge_dflash.backends.cuda.kernels.tower import check_tower
from edge_dflash.backends.cuda.memory import Allocator
from edge_dflash.backends.cuda.support import check_native
from edge_dflash.backends.cuda.tower import Eyes, HostRows, Tower, TowerLayout, tower_schedule
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.tower import TorchTower
from edge_dflash.bundle.reader import Bundle
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.pictures.pictured import SeenRows, Sight
from edge_dflash.weights.layout import unpack
from edge_dflash.weights.stacks import program_stacks

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ to emulate kernels")
SPEC = pair("vision").target.vision


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return tower_library(tmp_path_factory.mktemp("kernels"))


def tower(library, tokens=40):
    program = programs("vision").see
    gpu, layout = HostGpu(library), TowerLayout.of(SPEC, program, tokens)
    counted = Allocator(None)
    layout.count(counted, HostWeights(store("vision"), program).formats)
    memory = Allocator(gpu)
    made = Tower(gpu, layout, HostWeights(store("vision"), program), lambda unit: b"", memory)
    assert memory.bytes == counted.bytes  # what is counted before is what is taken
    return made


@pytest.fixture(scope="module")
def reference():
    return TorchTower(SPEC, programs("vision").see, TorchWeights(store("vision")), Precision("bfloat16", "fp8"))


@emulated
@pytest.mark.parametrize("number", range(3))
def test_rows_are_those_of_the_golden_run_within_bf16(library, reference, number):
    one = picture(number)
    found, wanted = tower(library).see(one).host(), golden("vision")[f"img{number}.tower_rows"]
    rounded = reference.run(one.values(), one.grid)["rows"].numpy()
    spread = wanted.std()
    assert found.shape == wanted.shape
    assert np.abs(found - rounded).max() < 0.05 * spread
    assert np.abs(found - wanted).max() < 2 * np.abs(rounded - wanted).max() + 0.02 * spread


@emulated
def test_pictures_one_behind_the_other_leave_nothing_behind(library):
    made = tower(library)
    first = made.see(noise(1, (4, 6))).bits
    for grid in ((2, 2), (8, 10), (6, 4), (10, 8), (4, 6)):
        made.see(noise(2, grid))
    assert np.array_equal(made.see(noise(1, (4, 6))).bits, first)
    assert np.array_equal(tower(library).see(noise(1, (4, 6))).bits, first)


@emulated
def test_a_picture_with_more_patches_than_there_is_memory_for_is_refused(library):
    with pytest.raises(BackendError, match="takes 160 at most"):
        tower(library).see(noise(0, (14, 12)))


def test_a_linear_takes_what_follows_it_along():
    steps = tower_schedule(programs("vision").see).steps
    names = [type(step).__name__ for step in steps]
    block = ["LayerNormed", "Product", "Looked", "Product", "LayerNormed", "Product", "Product"]
    assert names == ["Product", "Places", *block, *block, "LayerNormed", "Product", "Product"]
    assert [step.activation.name for step in steps if type(step).__name__ == "Product"] == [
        *("NONE", "NONE", "NONE", "GELU_TANH", "NONE", "NONE", "NONE", "GELU_TANH", "NONE"),
        *("GELU_ERF", "NONE"),
    ]
    assert [len(step.reads) for step in steps if type(step).__name__ == "Product"] == [1, 1, 2, 1, 2, 1, 2, 1, 2, 1, 1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"heads": 2, "hidden_size": 272}, "136 dims"),
        ({"heads": 16}, "4 dims"),
        ({"hidden_size": 72, "heads": 9}, "72"),
    ],
)
def test_towers_that_the_kernels_do_not_take_are_refused(changes, why):
    with pytest.raises(BackendError, match=why):
        check_tower(replace(SPEC, **changes))


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_a_native_bundle_holds_the_stacks_of_its_tower(tmp_path, form):
    see = pair_programs(SIGHTED).see
    formats = formats_of("bf16", SIGHTED) | {name: form for name, spec in see.weights.items() if spec.kind == "linear"}
    check_native(SIGHTED, formats, arch="sm110")
    weights = write_native_bundle(tmp_path, formats, SIGHTED)
    bundle = Bundle.open(tmp_path)
    stacks = program_stacks(see, formats)
    assert len(stacks) == 4 * SPEC.depth + 3
    for stack in stacks:
        packed = bundle.repacked(stack)
        (unpacked,) = unpack(packed)
        same(unpacked, weights[stack.names[0]])


def test_native_kernels_refuse_a_tower_by_name():
    wide = replace(SIGHTED, target=replace(SIGHTED.target, vision=replace(SIGHTED.target.vision, heads=16)))
    with pytest.raises(BackendError, match=r"4 dims.*--text-only"):
        check_native(wide, formats_of("bf16", wide))


def test_rows_of_a_picture_lie_where_their_chunk_has_them():
    gpu = FakeGpu()
    images = gpu.allocate(2 * 8 * 64)
    eyes = Eyes(gpu, object(), [], images, 300)
    bits = np.arange(10 * 8, dtype=np.uint16).reshape(10, 8)
    sight = Sight(
        np.zeros((3, 20), np.int32), -4, (SeenRows(3, HostRows(bits), 2, 6), SeenRows(12, HostRows(bits), 0, 8))
    )
    for first, count in ((0, 20), (0, 5), (5, 5), (10, 10)):
        gpu.bytes_of(images)[:] = 0xCC
        ids = np.full(count, 7, np.int32)
        eyes.fill(ids, first, sight)
        rows = gpu.bytes_of(images).view(np.uint16).reshape(64, 8)
        for row in range(count):
            at = first + row
            seen = bits[at - 3 + 2] if 3 <= at < 9 else bits[at - 12] if at >= 12 else None
            assert ids[row] == (7 if seen is None else 300 + row)
            if seen is not None:
                assert np.array_equal(rows[row], seen)
