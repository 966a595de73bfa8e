"""The choice kernels without a GPU: they compile for every arch, and both sides have the same sizes."""

from types import SimpleNamespace

import numpy as np
import pytest

from edge_dflash.backends.cuda.kernels import sample
from edge_dflash.backends.cuda.kernels.sample import Chooser
from edge_dflash.backends.cuda.memory import Allocator, DevicePointer, Matrix, aligned
from edge_dflash.backends.cuda.rows import NativeRows
from edge_dflash.decode.sampling import Sampling
from edge_dflash.errors import BackendError


def test_the_device_holds_what_a_vocabulary_needs():
    memory = Allocator(None)
    buffers = sample.SamplingBuffers.take(memory, 16, 248_320)
    assert (buffers.masks.nbytes, buffers.bins.nbytes) == (16 * 7760 * 4, 16 * 65536 * 4)
    assert (buffers.ties.nbytes, buffers.bests.nbytes) == (16 * 31 * 4, 16 * 31 * 16)
    assert aligned(memory.total) < 5 << 20


def test_settings_of_a_request_are_written_as_they_are():
    settings = np.zeros(1, sample.SETTINGS)
    sample.write_sampling(settings, Sampling(0.7, 10**12, 0.9, 2**64 - 1))
    assert settings.itemsize == 48
    assert settings[0].tolist() == (0.7, 0.9, 2**64 - 1, 2**31 - 1, 0, 0, 0, 0, 0)


class Recorder:
    """A Gpu that keeps what is enqueued."""

    def __init__(self):
        self.log = []

    def pinned(self, shape, dtype):
        return np.zeros(shape, dtype)

    def capture(self, enqueue):
        self.log.append("capture")
        return self

    def upload(self):
        pass

    def write_from(self, pointer, array):
        self.log.append((pointer, array.copy()))

    def launch(self):
        self.log.append("launch")

    def synchronize(self):
        self.log.append("wait")


class Owner:
    def __init__(self, columns):
        self.gpu, self.passes = Recorder(), 5
        self.buffers = sample.SamplingBuffers.take(Allocator(None), 16, columns)
        self.chooser = Chooser(self.gpu, None, self.buffers, None)
        self.chooser._chosen[:] = np.arange(100, 116)

    def enter(self, number):
        if number != self.passes:
            raise BackendError("replaced")


def test_rows_ask_for_their_own_part_of_the_buffer():
    owner, masks = Owner(70), [None, np.array([1, 2, 3], np.uint32), None, np.array([7, 8, 9], np.uint32), None]
    rows = NativeRows(owner, 15, 1, np.zeros(16, np.int32))
    assert rows.choose(Sampling(0.5, 3, 0.9, 2**63), 40, masks, first=2) == [103, 104, 105, 106, 107]
    capture, (pointer, sent), launch, wait = owner.gpu.log
    assert (capture, launch, wait) == ("capture", "launch", "wait")
    assert (pointer.address, pointer.nbytes) == (4 * 12, 3 * 12)  # rows 4 to 6 of the masks
    assert sent[[0, 2]].tolist() == [[1, 2, 3], [7, 8, 9]]
    assert owner.chooser._settings[0].tolist() == (0.5, 0.9, 2**63, 3, 40, 3, 8, 1 << 4 | 1 << 6, 0)
    with pytest.raises(ValueError, match="5 choices from row 11"):
        rows.choose(Sampling(), 0, [None] * 5, first=11)
    owner.passes += 1
    with pytest.raises(BackendError, match="replaced"):
        rows.choose(Sampling(), 0, [None])


def test_settings_that_no_launch_took_up_are_written_again():
    owner, greedy = Owner(70), Sampling()
    owner.chooser.prepare(Sampling(0.5))
    owner.chooser.write(greedy, 0, [])  # of a cycle whose masks then fail
    owner.gpu.log.clear()
    owner.chooser.prepare(greedy)
    ((_, sent),) = owner.gpu.log
    assert sent["temperature"].tolist() == [0.0]
    owner.chooser.prepare(greedy)
    assert len(owner.gpu.log) == 1


def test_no_launch_covers_rows_that_the_logits_lack():
    """A block reads its row's logits before it knows whether the settings want them."""
    memory, grids = Allocator(None), []
    gpu = SimpleNamespace(launch=lambda kernel, grid, *_, **__: grids.append(grid))
    buffers = sample.SamplingBuffers.take(memory, 16, 100)
    sampler = sample.Sampler(gpu, SimpleNamespace(kernel=lambda name: name))
    logits = Matrix(DevicePointer(1 << 20, 2 * 16 * 112), 112)
    for skipped in (0, 1, 9):  # a walk's rows begin behind the anchor's
        grids.clear()
        sampler.choose(buffers, logits.behind(skipped), DevicePointer(2 << 20, 64))
        assert [grid[:2] for grid in grids] == [(1, 16 - skipped), (16 - skipped, 1), *[(1, 16 - skipped)] * 2]


def test_settings_go_to_the_device_only_when_they_change():
    owner = Owner(70)
    for sampling in (Sampling(1.0), Sampling(1.0), Sampling(1.0, seed=3), Sampling(1.0, seed=3)):
        owner.chooser.prepare(sampling)
    assert len(owner.gpu.log) == 1 + 2
    owner.chooser.choose(Sampling(0.7), 0, [None], 0)
    before = len(owner.gpu.log)
    owner.chooser.prepare(Sampling(0.7))  # the choice has brought them
    assert len(owner.gpu.log) == before
