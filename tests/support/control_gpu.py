"""A device that keeps only its control block and remembers what was enqueued."""

import numpy as np
from native_support import NATIVE_PAIR, FakeGpu

from edge_dflash.backends.cuda.driver import Kernel
from edge_dflash.backends.cuda.small import RESULT_WORDS

BLOCK = NATIVE_PAIR.drafter.block_size


class ControlGpu(FakeGpu):
    """Runs the kernels that move the control block; ``rows`` counts those that are in the recurrent states."""

    sm, sm_count, name = 87, 16, "a device without kernels"

    def __init__(self):
        super().__init__()
        self.words = dict.fromkeys(("length", "pending", "rows", "anchor"), -1)
        self.rows, self.accept, self.enqueued, self.allocations = 0, 0, None, 0
        self.free, self.launches, self.closed = 1 << 40, [], 0
        self.sizes = []  # bytes of every allocation
        self.counted = self.counts_at = None  # rows of a whole cycle that count, and where the device has them

    def allocate(self, nbytes):
        self.allocations += 1
        self.sizes.append(nbytes)
        return super().allocate(min(nbytes, 1 << 16)).__class__((self.allocated << 40), nbytes)

    def write(self, pointer, array):
        pass

    def pinned(self, shape, dtype):
        made = np.zeros(shape, dtype)
        if made.dtype.names:  # the chooser's settings
            self.settings = made
        if shape == (RESULT_WORDS,):
            self.result = made
        if shape == (2,):
            self.counted = made
        return made

    def load(self, cubin):
        return self

    def kernel(self, name, *, shared_bytes=0):
        return Kernel(None, name)

    def most_clusters(self, kernel, *block):
        return 8

    def prefer_shared(self, kernel):
        pass

    def capture(self, enqueue):
        self.enqueued = []
        enqueue()
        graph, self.enqueued = ReplayedGraph(self, self.enqueued), None
        return graph

    def launch(self, kernel, grid, block, arguments, **options):
        if self.enqueued is not None:
            self.enqueued.append((kernel.name, arguments))
        else:
            self.run(kernel.name, arguments)

    def run(self, name, arguments):
        words = self.words
        self.launches.append(name)
        if name == "cycle_set":
            words.update(zip(("length", "pending", "rows", "anchor"), arguments[1:], strict=True))
        elif name == "commit_rows":
            assert arguments[1] == -1
            self.rows, words["pending"] = self.rows + words["pending"], 0
        elif name == "commit_prefill":
            self.rows += words["pending"] + words["rows"]
            words["length"], words["pending"] = words["length"] + words["rows"], 0
        elif name == "cycle_accept":
            self.rows += words["pending"]
            valid = arguments[-1]  # how many rows count: of a whole cycle, else of a verify
            whole = self.counts_at is not None and valid.address - self.counts_at in (0, 8)  # asked for, or sure
            stop = self.counted if whole else self.settings["stop"]
            accept = min(self.accept, int(stop[0]) - 1)
            words["length"], words["pending"] = words["length"] + accept + 1, accept + 1
            words["anchor"] = accept  # choice i of the fake is i
            self.result[:2], self.result[4 : 4 + BLOCK] = (accept, int(stop[0]) - 1), range(BLOCK)

    def free_bytes(self):
        return self.free, 1 << 40

    def close(self):
        self.closed += 1

    def enter(self, *args):
        pass

    fill = read_into = copy = synchronize = enter

    def write_from(self, pointer, array):
        if array is self.counted:
            self.counts_at = pointer.address

    def read(self, pointer, shape, dtype):
        return np.zeros(shape, dtype)


class ReplayedGraph:
    def __init__(self, gpu, calls):
        self.gpu, self.calls = gpu, calls

    def launch(self):
        for name, arguments in self.calls:
            self.gpu.run(name, arguments)

    def upload(self):
        pass
