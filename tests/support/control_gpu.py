"""A device that keeps only its control blocks and remembers what was enqueued."""

from collections import defaultdict

import numpy as np
from native_support import NATIVE_PAIR, FakeGpu

from edge_dflash.backends.cuda.driver import Kernel
from edge_dflash.backends.cuda.kernels.cycle import COUNTED_WORDS, RESULT_WORDS

BLOCK = NATIVE_PAIR.drafter.block_size
WORDS = ("length", "pending", "rows", "anchor", "lane")


class Call(tuple):
    """Name and arguments of a launch."""

    grid = (1, 1, 1)


class ControlGpu(FakeGpu):
    """Runs the kernels that move control blocks; ``states`` counts the rows that are in each lane's recurrent states.

    ``accept``: how many drafts stand, of each lane or (an int) of all.
    """

    sm, sm_count, name = 87, 16, "a device without kernels"

    def __init__(self):
        super().__init__()
        self.blocks = [dict.fromkeys(WORDS, -1) for _ in range(8)]
        self.states = defaultdict(int)
        self.accept, self.enqueued, self.allocations = 0, None, 0
        self.free, self.launches, self.closed = 1 << 40, [], 0
        self.sizes = []  # bytes of every allocation
        self.counted = self.counts_at = None  # rows of a whole cycle that count, and where the device has them
        self.copies = []  # from, to, rows, pitch, bytes

    @property
    def words(self):
        return self.blocks[0]

    @property
    def rows(self):
        return self.states[0]

    @rows.setter
    def rows(self, rows):
        self.states[0] = rows

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
        if shape[1:] == (RESULT_WORDS,):
            self.result = made
        if shape[1:] == (COUNTED_WORDS,) and self.counted is None:
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
            self.enqueued.append(Call((kernel.name, arguments)))
            self.enqueued[-1].grid = grid
        else:
            self.run(kernel.name, arguments, grid)

    def run(self, name, arguments, grid):
        self.launches.append(name)
        if name == "cycle_set":
            given = np.array(arguments[1].words).reshape(8, -1)
            for slot in (slot for slot in range(8) if arguments[2] >> slot & 1):
                self.blocks[slot].update(zip(WORDS, given[slot].tolist(), strict=False))
        elif name == "commit_rows":
            assert arguments[1] == -1
            for words in self.blocks[: arguments[2]]:
                self.replay(words)
        elif name == "commit_prefill":
            words = self.blocks[0]
            self.replay(words)
            self.states[words["lane"]] += words["rows"]
            words["length"] += words["rows"]
        elif name == "cycle_accept":
            for slot, words in enumerate(self.blocks[: grid[0]]):
                self.end(slot, words, arguments[8], arguments[2])

    def replay(self, words):
        """The pending rows go into the states of the slot's lane; an idle slot has none."""
        assert words["lane"] >= 0 or words["pending"] == 0
        self.states[words["lane"]] += words["pending"]
        words["pending"] = 0

    def end(self, slot, words, valid, rows):
        """Accept and commit; ``valid``: where it says how many of ``rows`` count, of a whole cycle or of a verify."""
        if words["lane"] < 0:
            return
        self.replay(words)
        whole = self.counts_at is not None and valid.address - self.counts_at in (0, 8)  # asked for, or sure
        stop = int(self.counted[slot, 0] if whole else self.settings["stop"][slot])
        assert 1 <= stop <= rows  # rows beyond it were never computed
        accept = min(self.accept if isinstance(self.accept, int) else self.accept[words["lane"]], stop - 1)
        words["length"], words["pending"] = words["length"] + accept + 1, accept + 1
        words["anchor"] = accept  # choice i of the fake is i
        self.result[slot, :2], self.result[slot, 4 : 4 + BLOCK] = (accept, stop - 1), range(BLOCK)

    def free_bytes(self):
        return self.free, 1 << 40

    def close(self):
        self.closed += 1

    def enter(self, *args):
        pass

    fill = read_into = synchronize = enter

    def copy(self, *asked):
        self.copies.append(asked)

    def write_from(self, pointer, array):
        if self.counted is not None and np.shares_memory(array, self.counted):
            self.counts_at = pointer.address

    def read(self, pointer, shape, dtype):
        return np.zeros(shape, dtype)


class ReplayedGraph:
    def __init__(self, gpu, calls):
        self.gpu, self.calls = gpu, calls

    def launch(self):
        for call in self.calls:
            self.gpu.run(*call, getattr(call, "grid", (1, 1, 1)))

    def upload(self):
        pass
