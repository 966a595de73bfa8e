"""Mixtures of experts without a device: kernels and their arguments, launches, what is refused."""

import pytest
from native_support import Recorder

from edge_dflash.backends.cuda.kernels.experts import (
    TILES,
    ExpertKernels,
    ExpertsBuffers,
    ExpertsShape,
    ExpertWeights,
    block_bytes,
)
from edge_dflash.backends.cuda.kernels.splits import block_shared
from edge_dflash.backends.cuda.memory import NULL, Allocator, DevicePointer, Matrix
from edge_dflash.board.archs import KERNEL_ARCHS, find_arch
from edge_dflash.errors import BackendError

SHAPE = ExpertsShape(2048, 256, 8, 512, 1, True, "nvfp4", "nvfp4")
FORMATS = ("nvfp4", "fp8", "bf16")


class Gpu(Recorder):
    """Every launch may begin under the one before, with no more shared memory than its kernel was loaded with."""

    def __init__(self, sm=90, sm_count=132):
        super().__init__(sm)
        self.sm_count, self.most = sm_count, {}

    def load(self, cubin):
        return self

    def kernel(self, name, *, shared_bytes=0):
        self.most[name] = shared_bytes or 48 << 10
        return super().kernel(name)

    def prefer_shared(self, kernel):
        pass

    def launch(self, kernel, grid, block, arguments, *, shared_bytes=0, overlap=False):
        assert overlap
        assert shared_bytes <= self.most[kernel.name]
        super().launch(kernel, grid, block, arguments, shared_bytes=shared_bytes)


def run(gpu, rows, shape=SHAPE, **options):
    buffers, pointer = ExpertsBuffers.take(Allocator(None), shape, rows), DevicePointer(1 << 20, 1 << 30)
    weights = ExpertWeights(pointer, pointer if shape.shared else NULL, *[pointer] * 4)
    x = Matrix(pointer, shape.hidden)
    ExpertKernels(gpu, lambda unit: b"").run(shape, weights, buffers, x, x, rows, **options)
    return gpu.launches


@pytest.mark.parametrize("arch", KERNEL_ARCHS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 64, 512])
def test_blocks_fit_every_architecture(arch, form, rows):
    sm = find_arch(arch, "native").sm
    shape = ExpertsShape(2048, 256, 8, 512, 1, True, form, form)
    products = [one for one in run(Gpu(sm, 48), rows, shape) if "_up_" in one[0] or "_down_" in one[0]]
    tile = 16 if rows > 256 and block_shared(sm) > 200 << 10 else 8
    assert [one[0] for one in products] == [f"experts_{w}_{form}_{tile}" for w in ("up", "down")]
    for _, grid, threads, _, shared in products:
        assert (threads, grid[0] % 48) == (256, 0)
        assert grid[0] // 48 * (shared + 1024) <= block_shared(sm) + 1024


def test_a_pass_has_few_launches():
    short = ["route", "choose", "up_nvfp4_8", "down_nvfp4_8", "sum"]
    long = ["route", "choose_group", "list", "place", "up_nvfp4_16", "down_nvfp4_16", "sum"]
    for rows, names in ((1, short), (16, short), (512, long)):
        assert [one[0] for one in run(Gpu(), rows)] == [f"experts_{name}" for name in names]
    assert [one[0] for one in run(Gpu(), 17)][:4] == [f"experts_{name}" for name in long[:4]]


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 33, 512])
@pytest.mark.parametrize("tile", TILES)
def test_entries_are_enough(rows, tile):
    most_entries = SHAPE.entries(rows, tile)
    for most in range(1, rows + 1):  # experts that have ``most`` rows each, as many as there are
        full = min(rows * 8 // most, 256)
        assert full * -(-most // tile) + -(-rows // tile) <= most_entries
    buffers = ExpertsBuffers.take(Allocator(None), SHAPE, 512)
    assert buffers.gated.nbytes >= most_entries * tile * 512 * 2
    assert buffers.list.nbytes >= 4 * (4 + most_entries * (4 + tile))


def test_larger_tiles_where_shared_memory_holds_them():
    wide = ExpertsShape(3072, 256, 8, 1024, 1, True, "nvfp4", "nvfp4")
    assert [SHAPE.tile(rows, 90) for rows in (1, 256, 257, 1024, 1025, 2048)] == [8, 8, 16, 16, 32, 32]
    assert [wide.tile(rows, sm) for rows, sm in ((64, 90), (512, 90), (2048, 110), (2048, 121))] == [8, 16, 16, 8]


def test_a_block_holds_its_stages():
    down = ExpertsShape(2048, 8, 2, 512, 0, True, "bf16", "bf16").down
    assert block_bytes("down", SHAPE.down, 8, 90) == 8 * 5 * (1152 + 8 * 64 * 2)
    assert block_bytes("up", SHAPE.up, 8, 121) == 8 * 2 * (1152 + 8 * 64 * 2) + 8 * 1024
    assert block_bytes("down", down, 32, 90) == 8 * 3 * 2048 + 512 * 32 * 2
    assert block_bytes("up", SHAPE.up, 32, 90) == 8 * 6 * 1152 + 2048 * 32 * 2 + 4 * 8 * 1024


def test_passes_that_are_refused():
    one = DevicePointer(1 << 20, 1 << 30)
    buffers, weights = ExpertsBuffers.take(Allocator(None), SHAPE, 16), ExpertWeights(*[one] * 6)
    kernels = ExpertKernels(Gpu(), lambda unit: b"")
    with pytest.raises(ValueError, match="in rows of a multiple of 8"):
        kernels.run(SHAPE, weights, buffers, Matrix(one, -64), Matrix(one, 2048), 16)
    with pytest.raises(BackendError, match="use shorter passes"):
        run(Gpu(121, 1), 4096)
