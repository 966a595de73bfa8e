"""The choice kernels without a GPU: they compile for every arch, and both sides have the same sizes."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from cubin_support import cubin, kernel_use

from edge_dflash.backends.cuda.compile import KERNELS
from edge_dflash.backends.cuda.graphs import Graphs
from edge_dflash.backends.cuda.kernels import sample
from edge_dflash.backends.cuda.kernels.sample import Chooser
from edge_dflash.backends.cuda.memory import Allocator, Control, DevicePointer, Matrix, aligned
from edge_dflash.backends.cuda.rows import NativeRows
from edge_dflash.backends.cuda.states import Sizes
from edge_dflash.decode.sampling import Sampling
from edge_dflash.errors import BackendError

SOURCE = (KERNELS / "sample.cu").read_text()
CHOICE = (KERNELS / "choice.cuh").read_text()


@pytest.mark.parametrize("arch", ["sm87", "sm90a", "sm110a", "sm121a"])
def test_the_unit_compiles_with_few_spills(arch):
    kernels = kernel_use(cubin(sample.UNIT, arch))
    print(arch, {name: (use.registers, use.stack_bytes) for name, use in kernels.items()})
    assert kernels.keys() == set(sample._KERNELS)
    assert all(0 < use.registers <= 128 and use.stack_bytes <= 32 for use in kernels.values())
    assert all(use.shared_bytes <= 48 << 10 for use in kernels.values())


def test_sizes_are_those_of_the_kernel():
    found = dict(re.findall(r"(\w+) = (\d+)[,;]", SOURCE))
    ours = {"BINS": sample._BINS, "SLICE": sample._SLICE, "THREADS": sample._THREADS}
    assert {name: int(found[name]) for name in ours} == ours
    assert int(found["COUNT_THREADS"]) == sample._COUNT_THREADS
    assert sample._BINS // int(found["CHUNK"]) == sample._CHUNKS
    assert "CUT_THREADS = CHUNKS" in SOURCE


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


class Calls:
    """Notes the name and the arguments of every method that is called."""

    def __init__(self, log, name):
        self._log, self._name = log, name

    def __getattr__(self, method):
        return lambda *arguments, **named: self._log.append((f"{self._name}.{method}", arguments, named))


def test_a_sampled_cycle_chooses_for_the_positions_of_its_rows():
    log, memory = [], Allocator(None)

    def narrowed(rows, slots):
        return SimpleNamespace(rows=slots * rows, enqueue=Calls(log, f"verify{rows}").enqueue)

    at = [DevicePointer(address, 1024) for address in (1 << 20, 2 << 20, 3 << 20, 4 << 20, 5 << 20)]
    control, ids, drafts, choices, other = at
    buffers = SimpleNamespace(
        control=control, ids=ids, drafts=drafts, choices=choices, clock=other, counted=other,
        logits="logits", sampling=sample.SamplingBuffers.take(memory, 16, 100),
    )  # fmt: skip
    kernels = SimpleNamespace(cycle=Calls(log, "frame"), sampler=Calls(log, "sampler"), walker=None)
    layout = SimpleNamespace(sizes=Sizes(10, 64, 128), first_draft=1)
    loaded = SimpleNamespace(
        common=SimpleNamespace(buffers=buffers, kernels=kernels, layout=layout),
        passes={"propose": Calls(log, "propose"), "verify": SimpleNamespace(narrow=narrowed)},
    )  # fmt: skip
    graphs = Graphs(Calls(log, "gpu"), loaded, SimpleNamespace(found="host words"), None, mask=63)
    for sampled, rows in ((False, 10), (True, 10), (False, 6), (True, 6)):
        log.clear()
        graphs.enqueue_cycle(rows, sampled=sampled)
        names = [name for name, _, _ in log]
        own = ["sampler.choose"] * sampled
        passes = ["frame.ids", "propose.enqueue", *own, "frame.ids", f"verify{rows}.enqueue", *own]
        assert names == [*passes, "frame.accept"]
        assert "host words" in log[-1][1]  # the device writes what a cycle found where the host reads it
        assert [named["logits"] for name, _, named in log if name.endswith("enqueue")] == [sampled] * 2
        assert [arguments[2] for name, arguments, _ in log if name in ("frame.ids", "frame.accept")] == [10, rows, rows]
        length = DevicePointer(control.address + 4 * Control.LENGTH, 4)
        found = [arguments for name, arguments, _ in log if name == "sampler.choose"]
        wanted = [
            # of drafts row 0 is the anchor's: no draft
            (buffers.sampling, "logits", drafts, sample.Block(length, 0, 1, 10), sample.Span(10)),
            (buffers.sampling, "logits", choices, sample.Block(length, 1, 0, rows), sample.Span(rows)),
        ]
        assert found == wanted[: 2 * sampled]
