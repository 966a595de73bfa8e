"""Several lanes on the native backend, on a device that keeps only its control blocks: rows add up in every lane."""

from dataclasses import replace

import numpy as np
import pytest
from control_gpu import ControlGpu
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from native_support import NATIVE_PAIR, formats_of, random_store
from store_weights import StoreWeights

from edge_dflash.backends.cuda import backend as native_backend
from edge_dflash.backends.cuda import loading
from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.backends.cuda.graphs import joint_steps
from edge_dflash.backends.cuda.kernels.small import SlotWords
from edge_dflash.backends.cuda.measured import force
from edge_dflash.backends.cuda.memory import ControlBlock, DevicePointer
from edge_dflash.backends.cuda.slots import Slots
from edge_dflash.decode.backend import Asked, Cycle, Precision, lane_steps
from edge_dflash.decode.sampling import Sampling
from edge_dflash.errors import BackendError, RequestError

CONTEXT, CHUNK, LANES = 128, 16, 4
VOCABULARY, BLOCK = NATIVE_PAIR.target.vocab_size, NATIVE_PAIR.drafter.block_size


def load(monkeypatch, gpu, lanes=LANES, pair=NATIVE_PAIR, **options):
    monkeypatch.setattr(native_backend, "Gpu", lambda: gpu)
    weights = StoreWeights(random_store(formats_of()), formats_of())
    sizes = {"max_context": CONTEXT, "prefill_chunk": CHUNK} | options
    return NativeBackend(pair, weights, Precision("bfloat16", "fp8"), cubin=lambda unit: b"", lanes=lanes, **sizes)


class Steered:
    """Drafts so many tokens, masks each row or none, and may give up before or behind the verify."""

    tolerant = False

    def __init__(self, drafts, masked=False, fails=None):
        self.count, self.fails = drafts, fails
        self.mask = np.full((VOCABULARY + 31) // 32, 3, np.uint32) if masked else None

    def drafts(self, rows, position):
        self.give_up("drafts")
        return rows.argmax()[: self.count]

    def masks(self, drafts):
        self.give_up("masks")
        return [self.mask] * (len(drafts) + 1)

    def give_up(self, where):
        if self.fails == where:
            raise RequestError(where)


STEERING = st.none() | st.builds(
    Steered, st.integers(0, BLOCK - 1), st.booleans(), st.sampled_from([None, None, None, "drafts", "masks"])
)
TURN = st.fixed_dictionaries({
    "drafts": st.none() | st.integers(0, BLOCK),
    "temperature": st.sampled_from([0.0, 0.7]),
    "steering": STEERING,
    "accept": st.integers(0, BLOCK - 1),
    "keep": st.none() | st.integers(0, BLOCK),
})  # fmt: skip


class Bookkeeping(RuleBasedStateMachine):
    """Calls in any order on lanes in any mix, against the number of rows that each sequence must have."""

    @initialize(lanes=st.integers(2, 5))
    def start(self, lanes):
        self.gpu, self.lanes = ControlGpu(), lanes
        with pytest.MonkeyPatch.context() as patch:
            self.backend = load(patch, self.gpu, lanes)
        self.gpu.states.clear()
        self.length = [0] * lanes

    @rule(lane=st.integers(0, 4), count=st.integers(1, 40))
    def prefill(self, lane, count):
        lane %= self.lanes
        if self.length[lane] + count <= CONTEXT:
            self.backend.prefill([1] * count, lane)
            self.length[lane] += count

    @rule(turns=st.dictionaries(st.integers(0, 4), TURN, min_size=1))
    def cycles(self, turns):
        turns = {lane: turn for lane, turn in turns.items() if lane < self.lanes and self.room(lane)}
        self.gpu.accept = {lane: turn["accept"] for lane, turn in turns.items()}
        found = self.backend.cycles([
            Asked(3, Sampling(turn["temperature"]), turn["steering"], turn["drafts"], lane=lane)
            for lane, turn in turns.items()
        ])  # fmt: skip
        assert len(found) == len(turns)
        for (lane, turn), outcome in zip(turns.items(), found, strict=True):
            self.check(lane, turn, outcome)

    def check(self, lane, turn, outcome):
        steering, most = turn["steering"], BLOCK - 1 if turn["drafts"] is None else min(turn["drafts"], BLOCK - 1)
        if steering and (steering.fails == "masks" or (steering.fails == "drafts" and most)):
            assert isinstance(outcome, RequestError)
            with pytest.raises(BackendError, match="no verify is open"):
                self.backend.commit(0, lane)
            return
        drafts = min(most, steering.count) if steering else most
        assert isinstance(outcome, Cycle)
        assert (outcome.drafts, outcome.accepted) == (drafts, min(turn["accept"], drafts))
        assert outcome.tokens == tuple(range(outcome.accepted + 1))
        if turn["keep"] is not None:
            kept = min(turn["keep"], len(outcome.tokens))
            self.backend.commit(kept, lane)
            self.length[lane] += kept

    @rule(lane=st.integers(0, 4), accept=st.integers(0, BLOCK - 1))
    def cycle(self, lane, accept):
        lane %= self.lanes
        if self.room(lane):
            self.gpu.accept = accept
            self.backend.cycle(Asked(5, lane=lane))
            self.backend.commit(accept + 1, lane)
            self.length[lane] += accept + 1

    @rule(lane=st.integers(0, 4))
    def flush(self, lane):
        lane %= self.lanes
        self.backend.flush(lane)
        assert self.gpu.states[lane] == self.length[lane]

    @rule(lane=st.integers(0, 4))
    def reset(self, lane):
        lane %= self.lanes
        self.backend.reset(lane)
        self.gpu.states[lane] = self.length[lane] = 0

    @rule(source=st.integers(0, 4), to=st.integers(0, 4))
    def copy(self, source, to):
        source, target = source % self.lanes, to % self.lanes
        self.backend.copy(source, target)
        assert self.gpu.states[source] == self.length[source]  # what is copied
        self.gpu.states[target] = self.length[target] = self.length[source]

    @rule(source=st.integers(0, 4), to=st.integers(0, 4))
    def move(self, source, to):
        source, target = source % self.lanes, to % self.lanes
        self.backend.restore(self.backend.snapshot(source), target)
        self.gpu.states[target] = self.length[target] = self.length[source]

    def room(self, lane):
        return self.length[lane] + BLOCK <= CONTEXT

    @invariant()
    def rows_add_up(self):
        for lane in range(self.lanes):
            assert self.backend.length(lane) == self.length[lane]
            self.backend._put(lane)
            words = self.gpu.words
            assert (words["lane"], words["length"]) == (lane, self.length[lane])
            assert self.gpu.states[lane] + words["pending"] == self.length[lane]


Bookkeeping.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestBookkeeping = Bookkeeping.TestCase


def together(backend, gpu, count, **given):
    at = len(gpu.launches)
    found = backend.cycles([Asked(5, lane=lane, **given) for lane in range(count)])
    return found, gpu.launches[at:]


@pytest.mark.parametrize(("lanes", "slots"), [(2, 2), (3, 4), (4, 4), (1, 1)])
def test_lanes_run_the_graph_of_the_fewest_slots_that_hold_them(monkeypatch, lanes, slots):
    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu
    gpu.accept = BLOCK
    for sampling in (Sampling(), Sampling(0.7)):
        for drafts in range(1, BLOCK):
            _, launched = together(backend, gpu, lanes, sampling=sampling, drafts=drafts)
            cycles = backend.graphs[slots].cycles
            graph = (cycles.sampled if sampling.temperature else cycles.greedy).of(drafts + 1)
            assert launched[-len(graph.calls) :] == [name for name, _ in graph.calls]
            (accept,) = [call for call in graph.calls if call[0] == "cycle_accept"]
            rows = next(step for step in (joint_steps(BLOCK) if slots > 1 else range(BLOCK + 1)) if step > drafts)
            assert (accept.grid[0], accept[1][2]) == (slots, rows)


def test_lanes_that_are_committed_whole_need_nothing_from_the_host(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu
    gpu.accept = 2
    anchors = [5] * 3
    for turn in range(5):
        at = len(gpu.launches)
        found = backend.cycles([Asked(anchor, lane=lane) for lane, anchor in enumerate(anchors)])
        assert gpu.launches[at:].count("cycle_set") == (turn == 0)  # three lanes and an idle slot: one launch
        for lane, cycle in enumerate(found):
            backend.commit(3, lane)
            anchors[lane] = cycle.tokens[-1]
    _, launched = together(backend, gpu, 2)  # of fewer lanes
    assert launched.count("cycle_set") == 1


def test_a_lane_stays_in_its_slot():
    told = []
    kernels = type("Kernels", (), {"set": lambda self, control, slots: told.append(dict(slots))})()
    slots = Slots(kernels, DevicePointer(1 << 20, 256), 4)
    assert slots.arrange([2, 0, 3], 4) == [2, 0, 3, -1]
    words = [SlotWords(lane, ControlBlock(10 * lane)) for lane in (2, 0, 3)]
    slots.put(words)
    assert slots.arrange([3, 1, 2], 4) == [2, 1, 3, -1]
    assert slots.arrange([3, 1], 2) == [3, 1]
    slots.put(words)
    slots.put([words[0], words[1]._replace(lane=1), words[2]])
    assert [sorted(changed) for changed in told] == [[0, 1, 2], [1]]


def test_a_mix_of_greedy_and_sampled_lanes_is_sampled_by_each_ones_settings(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu
    gpu.accept = 1
    samplings = [Sampling(), Sampling(0.7, 5, 0.9, 3), Sampling(1.5, seed=9)]
    backend.cycles([Asked(5, sampling, lane=lane) for lane, sampling in enumerate(samplings)])
    names = ("temperature", "top_k", "top_p", "seed")
    found = [tuple(gpu.settings[name][slot].item() for name in names) for slot in range(4)]
    assert found == [(0, 0, 1, 0), (0.7, 5, 0.9, 3), (1.5, 0, 1, 9), (0, 0, 1, 0)]


def test_plain_lanes_stand_beside_drafting_ones(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu
    gpu.accept = BLOCK
    plain, drafted = backend.cycles([Asked(5, drafts=0), Asked(5, drafts=2, lane=1)])
    assert (plain.tokens, plain.drafts, plain.propose_seconds) == ((0,), 0, 0.0)
    assert (drafted.tokens, drafted.drafts) == ((0, 1, 2), 2)
    assert gpu.launches.count("cycle_accept") > 0
    found, launched = together(backend, gpu, 3, drafts=0)
    assert [cycle.tokens for cycle in found] == [(0,)] * 3
    assert "cycle_ids" not in launched  # nobody proposes
    for lane in range(3):
        backend.commit(1, lane)
    at = len(gpu.launches)
    backend.cycles([Asked(0, drafts=0, lane=lane) for lane in range(3)])
    assert "cycle_set" not in gpu.launches[at:]  # the device has the anchors


def test_steered_lanes_compute_their_masks_while_the_verify_runs(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu
    gpu.accept, seen = BLOCK, []
    steerings = [Steered(2, masked=True) for _ in range(2)]
    for steering in steerings:
        own = steering.masks
        steering.masks = lambda drafts, own=own: seen.append(len(gpu.launches)) or own(drafts)
    waited = []
    monkeypatch.setattr(gpu, "synchronize", lambda *asked: waited.append(len(gpu.launches)))
    asked = [Asked(9, Sampling(0.7), steering, lane=lane) for lane, steering in enumerate(steerings)]
    found = backend.cycles([*asked, Asked(9, lane=2), Asked(9, drafts=0, lane=3)])
    assert [cycle.drafts for cycle in found] == [2, 2, BLOCK - 1, 0]
    assert seen[0] == seen[1]
    assert not [at for at in waited if at == seen[0]]  # the verify is under way
    names = gpu.launches[seen[0] :]
    assert (names[0], names[-1], names.count("cycle_accept")) == ("sample_count", "cycle_accept", 1)


def test_logits_of_each_lane_are_those_of_its_rows(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu
    gpu.accept, read = 1, []
    monkeypatch.setattr(gpu, "read", lambda pointer, shape, dtype: read.append(pointer) or np.zeros(shape, dtype))
    found, _ = together(backend, gpu, 3, logits=True)
    logits = backend.loaded.common.buffers.logits
    for slot, cycle in enumerate(found):
        assert cycle.logits().shape == (2, VOCABULARY)
        assert read[slot].address - logits.pointer.address == 2 * logits.stride * slot * BLOCK
    backend.reset(3)
    backend.prefill([1], 3)
    with pytest.raises(BackendError, match="replaced by a later pass"):
        found[0].logits()


def test_logits_stay_where_lanes_need_several_passes(monkeypatch):
    class Tolerant(Steered):
        tolerant = True

        def tolerated(self, rows, drafts, choices):
            return []

    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu
    gpu.accept = 1
    asked = [Asked(5, logits=True), Asked(5, steering=Tolerant(1), lane=1), Asked(5, logits=True, lane=2)]
    found = backend.cycles(asked)
    assert [cycle.logits().shape[1] for cycle in (found[0], found[2])] == [VOCABULARY] * 2
    for lane, cycle in enumerate(found):
        backend.commit(len(cycle.tokens), lane)


def test_a_lane_is_asked_once_and_checked_before_anything_runs(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu
    before = len(gpu.launches)
    for asked, words in (
        ([Asked(1), Asked(2)], r"lanes \[0, 0\] are asked for together"),
        ([Asked(1), Asked(VOCABULARY, lane=1)], "outside the vocabulary"),
        ([Asked(1), Asked(1, lane=LANES)], "lane 4 is outside the 4"),
    ):
        with pytest.raises(BackendError, match=words):
            backend.cycles(asked)
    assert len(gpu.launches) == before
    assert backend.cycles([]) == []


def test_a_copy_takes_the_committed_rows_alone(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu
    backend.prefill([1] * 9, 1)
    backend.copy(1, 3)
    assert backend.length(3) == 9
    states = backend.loaded.common.states
    kv, copies = iter(gpu.copies), len(gpu.copies)
    for name, memory in states.kv.items():
        shape = states.shapes[name]
        row = shape.head_dim * (1 if shape.kv == "fp8" else 2)
        for array in (memory.k, memory.v):
            source, target, rows, pitch, nbytes = next(kv)
            offsets = [pointer.address - array.address for pointer in (source, target)]
            assert offsets == [shape.kv_bytes, 3 * shape.kv_bytes]
            assert (rows, pitch, nbytes) == (shape.kv_heads, shape.kv_rows * row, 9 * row)
    assert copies == 2 * len(states.kv) + 2 * len(states.delta)
    backend.copy(1, 1)
    assert len(gpu.copies) == copies


def test_forced_patterns_are_those_of_joint_cycles_too(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu
    force(backend, [2])
    for forced in (True, False):
        for slots in (1, 4):
            calls = backend.graphs[slots].cycles.greedy.of(BLOCK).calls
            (accept,) = [call for call in calls if call[0] == "cycle_accept"]
            assert accept[1][7] == forced
        force(backend, None)


def test_nothing_is_allocated_or_captured_after_load(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu()), gpu

    def never(*arguments, **options):
        raise AssertionError("after load")

    for name in ("allocate", "pinned", "load", "kernel", "capture"):
        monkeypatch.setattr(gpu, name, never)
    for count in range(1, LANES + 1):
        for given in ({}, {"sampling": Sampling(0.7)}, {"drafts": 0}, {"steering": Steered(2, masked=True)}):
            together(backend, gpu, count, **given)
    backend.copy(0, 1)


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 8])
def test_the_budget_counts_every_lane(monkeypatch, lanes):
    def load_in(free):
        gpu = ControlGpu()
        gpu.free = free
        return load(monkeypatch, gpu, lanes), gpu

    backend, gpu = load_in(1 << 40)
    total = sum(backend.budget.values())
    assert sum(gpu.sizes) == total
    assert sorted(backend.graphs) == list(lane_steps(lanes))
    load_in(total + loading._SLACK)
    with pytest.raises(BackendError, match="the pair needs" if lanes == 1 else f"fewer than {lanes} lanes"):
        load_in(total + loading._SLACK - 1)


def test_one_lane_has_the_graphs_of_before(monkeypatch):
    backend = load(monkeypatch, ControlGpu(), 1)
    assert (list(backend.graphs), backend.loaded.common.layout.sizes.slots) == ([1], 1)


def test_more_rows_than_a_pass_takes_go_through_several(monkeypatch):
    gpu = ControlGpu()
    monkeypatch.setattr(loading, "MOST_ROWS", 2 * BLOCK)
    backend = load(monkeypatch, gpu, 8)
    assert sorted(backend.graphs) == [1, 2]
    gpu.accept = dict(enumerate([0, 1, 2, 3, 0, 1, 2, 3]))
    found, launched = together(backend, gpu, 7)
    assert [cycle.accepted for cycle in found] == [0, 1, 2, 3, 0, 1, 2]
    assert launched.count("cycle_accept") == 4


@pytest.mark.parametrize("sm", [87, 89, 90, 110, 121])
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_every_launch_of_joint_passes_is_accepted_on_every_kind_of_device(monkeypatch, sm, rows):
    monkeypatch.setattr("edge_dflash.backends.cuda.kernels.linear.bf16_map", lambda *asked: None)  # asks a driver
    gpu = ControlGpu()
    gpu.sm = sm
    pair = replace(NATIVE_PAIR, drafter=replace(NATIVE_PAIR.drafter, block_size=rows))
    backend = load(monkeypatch, gpu, 8, pair)
    assert sorted(backend.graphs) == [count for count in (1, 2, 4, 8) if count * rows <= loading.MOST_ROWS]
    for count, graphs in list(backend.graphs.items())[1:]:
        assert list(graphs.verify.graphs) == list(joint_steps(rows))
        for most, graph in graphs.cycles.greedy.graphs.items():
            (accept,) = [call for call in graph.calls if call[0] == "cycle_accept"]
            assert (accept.grid[0], accept[1][2]) == (count, most)


def test_a_target_alone_runs_its_lanes_together(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu(), pair=replace(NATIVE_PAIR, drafter=None)), gpu
    found, launched = together(backend, gpu, 3)
    assert [cycle.tokens for cycle in found] == [(0,)] * 3
    assert launched.count("cycle_accept") == 1
