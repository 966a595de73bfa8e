"""The native backend's bookkeeping on a device that keeps only its control blocks: whatever is called on one lane or on
several, rows add up in each."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from control_gpu import ControlGpu
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from native_support import NATIVE_PAIR, formats_of, random_store
from store_weights import StoreWeights

from edge_dflash.backends.cuda import backend as native_backend
from edge_dflash.backends.cuda import loading
from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.backends.cuda.graphs import joint_steps
from edge_dflash.backends.cuda.kernels.cycle import SlotWords
from edge_dflash.backends.cuda.memory import DevicePointer
from edge_dflash.backends.cuda.slots import Slots
from edge_dflash.bench.device import REPEATS, force, profile
from edge_dflash.decode.backend import Asked, Backend, Cycle, Precision
from edge_dflash.decode.sampling import Sampling
from edge_dflash.decode.shape import lane_steps, row_steps
from edge_dflash.errors import BackendError, RequestError

CONTEXT, CHUNK, LANES = 128, 16, 4
VOCABULARY, BLOCK = NATIVE_PAIR.target.vocab_size, NATIVE_PAIR.drafter.block_size
STATE = Precision("bfloat16", "fp8")


def load(monkeypatch, gpu, lanes=1, pair=NATIVE_PAIR, **options):
    monkeypatch.setattr(native_backend, "Gpu", lambda: gpu)
    weights = StoreWeights(random_store(formats_of()), formats_of())
    sizes = {"max_context": CONTEXT, "prefill_chunk": CHUNK, "lanes": lanes} | options
    return NativeBackend(pair, weights, STATE, cubin=lambda unit: b"", **sizes)


class Steered:
    """Drafts so many tokens, masks each row or none, may end the path, or give up before or after the verify."""

    tolerant = False

    def __init__(self, drafts, masked=False, fails=None, ends=BLOCK):
        self.count, self.fails, self.ends = drafts, fails, ends  # ends: rows behind which the path ends
        self.mask = np.full((VOCABULARY + 31) // 32, 3, np.uint32) if masked else None

    def drafts(self, rows, position):
        self.give_up("drafts")
        return rows.argmax()[: self.count]

    def masks(self, drafts):
        self.give_up("masks")
        return [self.mask] * min(len(drafts) + 1, self.ends)

    def give_up(self, where):
        if self.fails == where:
            raise RequestError(where)


STEERING = st.none() | st.builds(
    Steered,
    st.integers(0, BLOCK - 1),
    st.booleans(),
    st.sampled_from([None, None, None, "drafts", "masks"]),
    st.integers(1, BLOCK),
)
LANE = st.integers(0, 4)
KEEP = st.none() | st.integers(0, BLOCK)
TURN = st.fixed_dictionaries({
    "drafts": st.none() | st.integers(0, BLOCK),
    "temperature": st.sampled_from([0.0, 0.7]),
    "steering": STEERING,
    "logits": st.booleans(),
    "accept": st.integers(0, BLOCK - 1),
    "keep": KEEP,
})  # fmt: skip


class Bookkeeping(RuleBasedStateMachine):
    """Calls in any order on lanes in any mix, against the number of rows that each sequence must have."""

    @initialize(lanes=st.integers(1, 5))
    def start(self, lanes):
        self.gpu, self.lanes, self.saved = ControlGpu(), lanes, None
        with pytest.MonkeyPatch.context() as patch:
            self.backend = load(patch, self.gpu, lanes)
        self.gpu.states.clear()
        self.length, self.open = [0] * lanes, [None] * lanes  # rows; rows of an open verify

    def room(self, lane, rows=BLOCK):
        return self.length[lane] + rows <= CONTEXT

    @rule(lane=LANE, count=st.integers(1, 40))
    def prefill(self, lane, count):
        lane %= self.lanes
        if not self.room(lane, count):
            with pytest.raises(BackendError, match="the context holds 128"):
                self.backend.prefill([1] * count, lane)
            return
        self.backend.prefill([1] * count, lane)
        self.length[lane], self.open[lane] = self.length[lane] + count, None

    @rule(lane=LANE, anchor=st.integers(0, VOCABULARY - 1))
    def propose(self, lane, anchor):
        lane %= self.lanes
        if self.room(lane):
            assert len(self.backend.propose(anchor, lane)) == BLOCK - 1
            assert self.gpu.words["anchor"] == anchor
            self.open[lane] = None

    @rule(lane=LANE, count=st.integers(1, BLOCK), keep=KEEP)
    def verify(self, lane, count, keep):
        lane %= self.lanes
        if self.room(lane, count):
            assert len(self.backend.verify([2] * count, lane)) == count
            self.leave_open(lane, count, keep)

    @rule(turns=st.dictionaries(LANE, TURN, min_size=1))
    def cycles(self, turns):
        turns = {lane: turn for lane, turn in turns.items() if lane < self.lanes and self.room(lane)}
        self.gpu.accept = {lane: turn["accept"] for lane, turn in turns.items()}
        found = self.backend.cycles([
            Asked(3, Sampling(turn["temperature"]), turn["steering"], turn["drafts"], lane=lane, logits=turn["logits"])
            for lane, turn in turns.items()
        ])  # fmt: skip
        assert len(found) == len(turns)
        for turn, outcome in zip(turns.values(), found, strict=True):
            if turn["logits"] and isinstance(outcome, Cycle):
                assert outcome.logits().shape == (len(outcome.tokens), VOCABULARY)
        for (lane, turn), outcome in zip(turns.items(), found, strict=True):
            self.check(lane, turn, outcome)

    def check(self, lane, turn, outcome):
        steering, most = turn["steering"], BLOCK - 1 if turn["drafts"] is None else min(turn["drafts"], BLOCK - 1)
        self.open[lane] = None
        if steering and (steering.fails == "masks" or (steering.fails == "drafts" and most)):
            assert isinstance(outcome, RequestError)
            with pytest.raises(BackendError, match="no verify is open"):
                self.backend.commit(0, lane)
            return
        drafts = min(most, steering.count) if steering else most
        assert isinstance(outcome, Cycle)
        accepted = min(turn["accept"], drafts, steering.ends - 1 if steering else drafts)
        assert (outcome.drafts, outcome.accepted) == (drafts, accepted)
        assert outcome.tokens == tuple(range(accepted + 1))
        assert turn["drafts"] != 0 or outcome.propose_seconds == 0.0
        self.leave_open(lane, len(outcome.tokens), turn["keep"])

    @rule(lane=LANE, accept=st.integers(0, BLOCK - 1))
    def cycle(self, lane, accept):
        lane %= self.lanes
        if self.room(lane):
            self.gpu.accept = accept
            self.backend.cycle(Asked(5, lane=lane))
            self.leave_open(lane, accept + 1, accept + 1)

    def leave_open(self, lane, rows, keep):
        """So many rows may be committed; commit ``keep`` of them at once, unless it is None."""
        self.open[lane] = rows
        if keep is not None:
            self.commit(lane, min(rows, keep))

    @rule(lane=LANE, rows=st.integers(0, BLOCK))
    def commit(self, lane, rows):
        lane %= self.lanes
        if self.open[lane] is None or rows > self.open[lane]:
            with pytest.raises(BackendError, match="cannot commit"):
                self.backend.commit(rows, lane)
            return
        self.backend.commit(rows, lane)
        self.length[lane], self.open[lane] = self.length[lane] + rows, None

    @rule(lane=LANE)
    def flush(self, lane):
        lane %= self.lanes
        self.backend.flush(lane)
        self.open[lane] = None
        assert self.gpu.states[lane] == self.length[lane]

    @rule(lane=LANE, profiled=st.booleans())
    def reset(self, lane, profiled):
        lane %= self.lanes
        if profiled and lane == 0 and self.room(0, REPEATS * BLOCK):
            self.gpu.accept = 0
            profile(self.backend, 1)
        else:
            self.backend.reset(lane)
        self.become(lane, 0)

    def become(self, lane, rows):
        self.gpu.states[lane], self.length[lane], self.open[lane] = rows, rows, None

    @rule(source=LANE, to=LANE)
    def copy(self, source, to):
        source, target = source % self.lanes, to % self.lanes
        self.backend.copy(source, target)
        assert self.gpu.states[source] == self.length[source]  # what is copied
        self.open[source] = None
        self.become(target, self.length[source])

    @rule(lane=LANE)
    def snapshot(self, lane):
        lane %= self.lanes
        self.saved, self.open[lane] = self.backend.snapshot(lane), None
        assert self.saved.length == self.gpu.states[lane] == self.length[lane]

    @precondition(lambda self: self.saved is not None)
    @rule(lane=LANE)
    def restore(self, lane):
        self.backend.restore(self.saved, lane % self.lanes)
        self.become(lane % self.lanes, self.saved.length)

    @invariant()
    def rows_add_up(self):
        """What is in the states and what is pending make the committed rows, once the next pass has been told."""
        for lane in range(self.lanes):
            assert self.backend.length(lane) == self.length[lane]
            before = len(self.gpu.launches)
            self.backend.slots.put([self.backend.lane(lane).words])
            assert len(self.gpu.launches) - before <= 1
            words = self.gpu.words
            assert (words["lane"], words["length"]) == (lane, self.length[lane])
            assert self.gpu.states[lane] + words["pending"] == self.length[lane]


Bookkeeping.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestBookkeeping = Bookkeeping.TestCase


def together(backend, gpu, count, **given):
    at = len(gpu.launches)
    found = backend.cycles([Asked(5, lane=lane, **given) for lane in range(count)])
    return found, gpu.launches[at:]


@pytest.fixture
def alone(monkeypatch):
    """A backend of one lane, and its device."""
    gpu = ControlGpu()
    backend = load(monkeypatch, gpu)
    backend.prefill([1] * 8)
    return backend, gpu


@pytest.fixture
def joint(monkeypatch):
    """A backend of several lanes, and its device."""
    gpu = ControlGpu()
    return load(monkeypatch, gpu, LANES), gpu


@pytest.mark.parametrize(
    ("sm", "rows", "linears"),
    [
        *((sm, rows, {f"linear_nvfp4_{rows}"}) for sm in (87, 89, 120, 121) for rows in (16, 32)),
        *((110, rows, {f"linear_cluster_nvfp4_{rows}"}) for rows in (16, 32)),
        (90, 16, {"linear_hopper_nvfp4"}),
        (90, 32, {"linear_cluster_nvfp4_32"}),  # of all passes: rows of fewer have the same bits
    ],
)
def test_every_launch_of_every_pass_is_accepted_on_every_kind_of_device(monkeypatch, sm, rows, linears):
    monkeypatch.setattr("edge_dflash.backends.cuda.kernels.linear.bf16_map", lambda *asked: None)  # asks a driver
    gpu = ControlGpu()
    gpu.sm = sm
    pair = replace(NATIVE_PAIR, drafter=replace(NATIVE_PAIR.drafter, block_size=rows))
    backend = load(monkeypatch, gpu, pair=pair)
    launched = {name for name, _ in backend.graphs[1].verify.of(rows).calls}
    found = {re.sub(r"_\d(_\d)?$", "", name) for name in launched if "_nvfp4_" in name}  # less splits and teams
    assert found == linears
    assert any(name.startswith("attend") for name in launched)
    assert any(name.startswith("delta") for name in launched)


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
        for most, graph in graphs.greedy.graphs.items():
            (accept,) = [call for call in graph.calls if call[0] == "cycle_accept"]
            assert (accept.grid[0], accept[1][2]) == (count, most)


@pytest.mark.parametrize(("lanes", "slots"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_lanes_run_the_graph_of_the_fewest_slots_and_rows_that_hold_them(joint, lanes, slots):
    backend, gpu = joint
    gpu.accept, steps = BLOCK, (row_steps if slots == 1 else joint_steps)(BLOCK)
    for sampling in (Sampling(), Sampling(0.7)):
        for drafts in range(1, BLOCK):
            found, launched = together(backend, gpu, lanes, sampling=sampling, drafts=drafts)
            assert [(cycle.drafts, cycle.accepted) for cycle in found] == [(drafts, drafts)] * lanes
            each = backend.graphs[slots]
            graphs = each.sampled if sampling.temperature else each.greedy
            rows = next(step for step in steps if step > drafts)
            calls = graphs.of(drafts + 1).calls
            assert calls is graphs.graphs[rows].calls
            assert launched[-len(calls) :] == [name for name, _ in calls]
            (accept,) = [call for call in calls if call[0] == "cycle_accept"]
            assert (accept.grid[0], accept[1][2]) == (slots, rows)


@pytest.mark.parametrize("slots", [1, 4])
def test_sampled_rows_choose_for_their_positions(joint, slots):
    for rows, graph in joint[0].graphs[slots].sampled.graphs.items():
        jobs = [one for name, given in graph.calls if name == "sample_count" for one in given if hasattr(one, "offset")]
        found = [(job.offset, job.first, job.stop, job.block) for job in jobs]
        assert found == [(0, 1, BLOCK, BLOCK), (1, 0, rows, rows)]  # of drafts row 0 is the anchor's: no draft


@pytest.mark.parametrize("lanes", [1, 3])
def test_lanes_that_are_committed_whole_need_nothing_from_the_host(joint, lanes):
    backend, gpu = joint
    gpu.accept, anchors = 2, [5] * lanes
    for keep, told in ((3, 1), (3, 0), (3, 0), (2, 0), (3, 1)):  # fewer rows than the device had committed
        at = len(gpu.launches)
        found = backend.cycles([Asked(anchor, lane=lane) for lane, anchor in enumerate(anchors)])
        assert gpu.launches[at:].count("cycle_set") == told  # all lanes and idle slots: one launch
        for lane, cycle in enumerate(found):
            backend.commit(keep, lane)
            anchors[lane] = cycle.tokens[-1]
    if lanes > 1:  # then fewer lanes
        _, launched = together(backend, gpu, 2)
        assert launched.count("cycle_set") == 1


def test_after_a_cycle_that_failed_the_device_is_told_everything_again(monkeypatch, joint):
    backend, gpu = joint
    gpu.accept = 1
    together(backend, gpu, 2)
    with monkeypatch.context() as patch:
        patch.setattr(backend.host, "read", lambda *asked: (_ for _ in ()).throw(BackendError("the device is gone")))
        with pytest.raises(BackendError, match="the device is gone"):
            together(backend, gpu, 2)
    _, launched = together(backend, gpu, 2)  # nobody has said whether the one before was committed
    assert launched.count("cycle_set") == 1


def test_a_lane_stays_in_its_slot():
    told = []
    kernels = type("Kernels", (), {"set": lambda self, control, slots: told.append(dict(slots))})()
    slots = Slots(kernels, DevicePointer(1 << 20, 256), 4)
    assert slots.arrange([2, 0, 3], 4) == [2, 0, 3, -1]
    words = [SlotWords(lane, 10 * lane) for lane in (2, 0, 3)]
    slots.put(words)
    assert slots.arrange([3, 1, 2], 4) == [2, 1, 3, -1]
    assert slots.arrange([3, 1], 2) == [3, 1]
    slots.put(words)
    slots.put([words[0], words[1]._replace(lane=1), words[2]])
    assert [sorted(changed) for changed in told] == [[0, 1, 2], [1]]


def test_a_mix_of_greedy_and_sampled_lanes_is_sampled_by_each_ones_settings(joint):
    backend, gpu = joint
    gpu.accept = 1
    samplings = [Sampling(), Sampling(0.7, 5, 0.9, 3), Sampling(1.5, seed=9)]
    backend.cycles([Asked(5, sampling, lane=lane) for lane, sampling in enumerate(samplings)])
    names = ("temperature", "top_k", "top_p", "seed")
    found = [tuple(gpu.settings[name][slot].item() for name in names) for slot in range(4)]
    assert found == [(0, 0, 1, 0), (0.7, 5, 0.9, 3), (1.5, 0, 1, 9), (0, 0, 1, 0)]


def test_plain_cycles_need_nothing_from_the_host_but_their_token(alone):
    backend, gpu = alone
    loaded, gpu.accept, anchor = len(gpu.launches), 0, 5
    for _ in range(5):
        anchor = backend.cycle(Asked(anchor, drafts=0)).tokens[-1]
        backend.commit(1)
    assert anchor == 0
    assert gpu.launches[loaded:].count("cycle_set") == 1  # for the first anchor
    assert "sample_choose" not in gpu.launches[loaded:]


def test_plain_lanes_stand_beside_drafting_ones(joint):
    backend, gpu = joint
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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_of_a_cycle_are_left_by_one_graph_and_read_on_demand(monkeypatch, alone, temperature):
    backend, gpu = alone
    gpu.accept, read = 2, []
    monkeypatch.setattr(gpu, "read", lambda pointer, shape, dtype: read.append(shape) or np.zeros(shape, dtype))
    loaded = len(gpu.launches)
    cycle = backend.cycle(Asked(5, Sampling(temperature), logits=True))
    names = gpu.launches[loaded:]
    assert (names.count("cycle_accept"), names.count("sample_choose")) == (1, 2)  # the greedy graph keeps no logits
    assert read == []
    backend.commit(3)
    assert cycle.logits().shape == (3, VOCABULARY)
    assert [rows for rows, _ in read] == [3]  # of those that were chosen, no more
    assert backend.cycle(Asked(5, Sampling(temperature))).logits is None
    with pytest.raises(BackendError, match="replaced by a later pass"):
        cycle.logits()


def test_logits_of_each_lane_are_those_of_its_rows(monkeypatch, joint):
    backend, gpu = joint
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


def test_logits_stay_where_lanes_need_several_passes(joint):
    class Tolerant(Steered):
        tolerant = True

        def tolerated(self, rows, drafts, choices):
            return []

    backend, gpu = joint
    gpu.accept = 1
    asked = [Asked(5, logits=True), Asked(5, steering=Tolerant(1), lane=1), Asked(5, logits=True, lane=2)]
    found = backend.cycles(asked)
    assert [cycle.logits().shape[1] for cycle in (found[0], found[2])] == [VOCABULARY] * 2
    for lane, cycle in enumerate(found):
        backend.commit(len(cycle.tokens), lane)


def test_steered_lanes_compute_their_masks_while_the_verify_runs(monkeypatch, joint):
    backend, gpu = joint
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


def test_a_lane_is_asked_once_and_checked_before_anything_runs(joint):
    backend, gpu = joint
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


def test_a_copy_takes_the_committed_rows_alone(joint):
    backend, gpu = joint
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


def test_forced_patterns_are_those_of_joint_cycles_too(joint):
    backend, _ = joint
    force(backend, [2])
    for forced in (True, False):
        for slots in (1, 4):
            calls = backend.graphs[slots].greedy.of(BLOCK).calls
            (accept,) = [call for call in calls if call[0] == "cycle_accept"]
            assert accept[1][7] == forced
        force(backend, None)


def test_nothing_is_allocated_loaded_or_captured_after_load(monkeypatch, joint):
    backend, gpu = joint

    def never(*arguments, **options):
        raise AssertionError("after load")

    for name in ("allocate", "pinned", "load", "kernel", "capture"):
        monkeypatch.setattr(gpu, name, never)
    backend.prefill([1] * 2 * CHUNK).argmax()
    backend.propose(1).logits()
    mask = np.full((VOCABULARY + 31) // 32, 3, np.uint32)
    backend.verify([1, 2]).choose(Sampling(0.7, 5, 0.9), backend.length() + 1, [mask, None])
    backend.commit(1)
    for count in range(1, LANES + 1):
        for sampling in (Sampling(), Sampling(0.7)):
            for drafts in (None, *range(BLOCK)):
                together(backend, gpu, count, sampling=sampling, drafts=drafts)
            for masked in (False, True):
                together(backend, gpu, count, sampling=sampling, steering=Steered(3, masked))
    backend.copy(0, 1)
    saved = backend.snapshot()
    backend.reset()
    backend.restore(saved)
    backend.flush()
    with pytest.raises(AssertionError, match="after load"):
        force(backend, [1])


def test_it_is_a_backend(alone):
    backend: Backend = alone[0]
    assert backend.shape.usable_context == CONTEXT - BLOCK


def test_what_does_not_fit_into_memory_is_said_before_anything_is_loaded(monkeypatch):
    gpu = ControlGpu()
    gpu.free = 1 << 28
    with pytest.raises(BackendError, match=r"the pair needs .* GB \(.*\), a device without kernels has 0.27 GB free"):
        load(monkeypatch, gpu)
    assert gpu.allocations == 0
    assert gpu.closed == 1


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


def test_more_rows_than_a_pass_takes_go_through_several(monkeypatch):
    gpu = ControlGpu()
    monkeypatch.setattr(loading.Launches, "most_rows", 2 * BLOCK)
    backend = load(monkeypatch, gpu, 8)
    assert sorted(backend.graphs) == [1, 2]
    gpu.accept = dict(enumerate([0, 1, 2, 3, 0, 1, 2, 3]))
    found, launched = together(backend, gpu, 7)
    assert [cycle.accepted for cycle in found] == [0, 1, 2, 3, 0, 1, 2]
    assert launched.count("cycle_accept") == 4


def test_a_profile_starts_at_its_anchor_and_leaves_an_empty_sequence(monkeypatch):
    gpu = ControlGpu()
    backend = load(monkeypatch, gpu)
    backend.prefill([1] * 8)
    seen = []
    capture = gpu.capture
    monkeypatch.setattr(gpu, "capture", lambda enqueue: (seen.append(dict(gpu.words)), capture(enqueue))[1])
    profile(backend, 7)
    assert (seen[0]["anchor"], seen[0]["length"], backend.length()) == (7, 8, 0)
    backend.prefill([1] * (CONTEXT - BLOCK))
    with pytest.raises(BackendError, match="do not fit the context"):
        profile(backend)


def test_ids_and_lanes_that_are_not_there_never_reach_the_device(alone):
    backend, gpu = alone
    saved, before = backend.snapshot(), len(gpu.launches)
    of_ids = (
        backend.propose,
        lambda token: backend.cycle(Asked(token)),
        lambda token: backend.verify([token]),
        lambda token: backend.prefill([token]),
    )
    of_lanes = (
        *(backend.length, backend.reset, backend.flush, backend.snapshot),
        lambda lane: backend.prefill([1], lane),
        lambda lane: backend.propose(1, lane),
        lambda lane: backend.verify([1], lane),
        lambda lane: backend.commit(0, lane),
        lambda lane: backend.restore(saved, lane),
        lambda lane: backend.cycle(Asked(1, lane=lane)),
        lambda lane: backend.cycle(Asked(1, drafts=0, lane=lane)),
    )
    for calls, first, what in (
        (of_ids, VOCABULARY, "token id {} is outside the vocabulary"),
        (of_lanes, 1, "lane {} is outside the 1 of this backend"),
    ):
        for call, value in product(calls, (-1, first)):
            with pytest.raises(BackendError, match=what.format(value)):
                call(value)
    assert len(gpu.launches) == before


def test_other_arithmetic_is_refused(monkeypatch):
    weights = StoreWeights(random_store(formats_of()), formats_of())
    monkeypatch.setattr(native_backend, "Gpu", ControlGpu)
    for precision, words in (
        (Precision("float32", "fp8"), "activations are 'float32'"),
        (Precision(kv="float32"), "kv"),
    ):
        with pytest.raises(BackendError, match=words):
            NativeBackend(NATIVE_PAIR, weights, precision, cubin=lambda unit: b"", max_context=CONTEXT)


def test_a_target_alone_runs_its_own_passes(monkeypatch):
    backend = load(monkeypatch, ControlGpu(), pair=replace(NATIVE_PAIR, drafter=None))
    assert backend.loaded.common.layout.sizes.rows == 1
    assert not any("drafter" in name for name in backend.loaded.common.states.kv)
    with pytest.raises(BackendError, match="no drafter"):
        backend.propose(0)
    anchor = backend.prefill([1] * 4).argmax()[0]
    for drafts in (None, 0):
        cycle = backend.cycle(Asked(anchor, drafts=drafts))
        backend.commit(1)
        assert (len(cycle.tokens), cycle.propose_seconds) == (1, 0.0)
    assert backend.length() == 6


def test_a_target_alone_runs_its_lanes_together(monkeypatch):
    backend, gpu = load(monkeypatch, gpu := ControlGpu(), LANES, pair=replace(NATIVE_PAIR, drafter=None)), gpu
    found, launched = together(backend, gpu, 3)
    assert [cycle.tokens for cycle in found] == [(0,)] * 3
    assert launched.count("cycle_accept") == 1
