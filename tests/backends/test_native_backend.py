"""The native backend's bookkeeping on a device that keeps only its control block: whatever is called, rows add up."""

import re
from dataclasses import replace

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
from edge_dflash.backends.cuda.measured import REPEATS, force, profile
from edge_dflash.decode.backend import Asked, Backend, Precision, row_steps
from edge_dflash.decode.sampling import Sampling
from edge_dflash.errors import BackendError

CONTEXT, CHUNK = 128, 16
VOCABULARY, BLOCK = NATIVE_PAIR.target.vocab_size, NATIVE_PAIR.drafter.block_size
STATE = Precision("bfloat16", "fp8")


def load(monkeypatch, gpu, pair=NATIVE_PAIR, **options):
    monkeypatch.setattr(native_backend, "Gpu", lambda: gpu)
    weights = StoreWeights(random_store(formats_of()), formats_of())
    sizes = {"max_context": CONTEXT, "prefill_chunk": CHUNK} | options
    return NativeBackend(pair, weights, STATE, cubin=lambda unit: b"", **sizes)


class Steered:
    """Drafts so many tokens; with or without a mask for each row."""

    tolerant = False

    def __init__(self, drafts, masked, ends=BLOCK):
        self.ends = ends  # rows behind which the path ends
        self.count, self.mask = drafts, np.full((VOCABULARY + 31) // 32, 3, np.uint32) if masked else None

    def drafts(self, rows, position):
        return rows.argmax()[: self.count]

    def masks(self, drafts):
        return [self.mask] * min(len(drafts) + 1, self.ends)


DRAFTS = st.none() | st.integers(0, BLOCK)
KEEP = st.none() | st.integers(0, BLOCK)


class Bookkeeping(RuleBasedStateMachine):
    """Calls in any order, against the number of rows that a sequence must have."""

    @initialize()
    def start(self):
        self.gpu = ControlGpu()
        with pytest.MonkeyPatch.context() as patch:
            self.backend = load(patch, self.gpu)
        self.gpu.rows = self.length = 0
        self.open = self.saved = None

    @rule(profiled=st.booleans())
    def reset(self, profiled):
        if profiled and self.length + REPEATS * BLOCK <= CONTEXT:
            profile(self.backend, 1)
        else:
            self.backend.reset()
        self.gpu.rows = self.length = 0
        self.open = None

    @rule(count=st.integers(1, 40))
    def prefill(self, count):
        if self.length + count > CONTEXT:
            with pytest.raises(BackendError, match="the context holds 128"):
                self.backend.prefill([1] * count)
            return
        self.backend.prefill([1] * count)
        self.length, self.open = self.length + count, None

    @rule(anchor=st.integers(0, VOCABULARY - 1))
    def propose(self, anchor):
        if self.length + BLOCK <= CONTEXT:
            assert len(self.backend.propose(anchor)) == BLOCK - 1
            assert self.gpu.words["anchor"] == anchor
            self.open = None

    @rule(count=st.integers(1, BLOCK), keep=KEEP)
    def verify(self, count, keep):
        if self.length + count <= CONTEXT:
            assert len(self.backend.verify([2] * count)) == count
            self.leave_open(count, keep)

    @rule(accept=st.integers(0, BLOCK - 1), anchor=st.integers(0, VOCABULARY - 1), drafts=DRAFTS, keep=KEEP)
    def cycle(self, accept, anchor, drafts, keep):
        if self.length + BLOCK <= CONTEXT:
            self.gpu.accept = accept
            cycle = self.backend.cycle(Asked(anchor, drafts=drafts))
            assert cycle.drafts == (BLOCK - 1 if drafts is None else min(drafts, BLOCK - 1))
            assert cycle.accepted == min(accept, cycle.drafts)
            assert cycle.tokens == tuple(range(cycle.accepted + 1))
            self.leave_open(cycle.accepted + 1, keep)

    @rule(accept=st.integers(0, BLOCK - 1), temperature=st.sampled_from([0.0, 0.7]), keep=KEEP)
    def cycle_with_logits(self, accept, temperature, keep):
        if self.length + BLOCK <= CONTEXT:
            self.gpu.accept = accept
            cycle = self.backend.cycle(Asked(3, Sampling(temperature), logits=True))
            assert cycle.tokens == tuple(range(accept + 1))
            self.leave_open(accept + 1, keep)
            assert cycle.logits().shape == (accept + 1, VOCABULARY)

    @rule(drafts=st.integers(0, BLOCK - 1), ends=st.integers(1, BLOCK), masked=st.booleans(), keep=KEEP)
    def steered(self, drafts, ends, masked, keep):
        if self.length + BLOCK <= CONTEXT:
            self.gpu.accept = BLOCK - 1  # as many as count
            cycle = self.backend.cycle(Asked(5, steering=Steered(drafts, masked, ends)))
            assert cycle.accepted == min(drafts, ends - 1)
            assert cycle.tokens == tuple(range(cycle.accepted + 1))
            self.leave_open(cycle.accepted + 1, keep)

    @rule(temperature=st.sampled_from([0.0, 0.7]), keep=KEEP)
    def plain(self, temperature, keep):
        if self.length < CONTEXT:
            self.gpu.accept = BLOCK - 1
            cycle = self.backend.cycle(Asked(7, Sampling(temperature), drafts=0))
            assert (cycle.tokens, cycle.propose_seconds) == ((0,), 0.0)
            self.leave_open(1, keep)

    def leave_open(self, rows, keep):
        """So many rows may be committed; commit ``keep`` of them at once, unless it is None."""
        self.open = rows
        if keep is not None:
            self.backend.commit(min(rows, keep))
            self.length, self.open = self.length + min(rows, keep), None

    @rule(rows=st.integers(0, BLOCK))
    def commit(self, rows):
        if self.open is None or rows > self.open:
            with pytest.raises(BackendError, match="cannot commit"):
                self.backend.commit(rows)
            return
        self.backend.commit(rows)
        self.length, self.open = self.length + rows, None

    @rule()
    def flush(self):
        self.backend.flush()
        self.open = None
        assert self.gpu.rows == self.length

    @rule()
    def snapshot(self):
        self.saved = self.backend.snapshot()
        self.open = None
        assert self.saved.length == self.gpu.rows == self.length

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restore(self):
        self.backend.restore(self.saved)
        self.gpu.rows = self.length = self.saved.length
        self.open = None

    @invariant()
    def rows_add_up(self):
        """What is in the states and what is pending make the committed rows, once the next pass has been told."""
        assert self.backend.length() == self.length
        before = len(self.gpu.launches)
        self.backend._put(0)
        assert len(self.gpu.launches) - before <= 1
        assert (self.gpu.words["length"], self.gpu.rows + self.gpu.words["pending"]) == (self.length, self.length)


Bookkeeping.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBookkeeping = Bookkeeping.TestCase


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
    backend = load(monkeypatch, gpu, pair)
    launched = {name for name, _ in backend.graphs[1].verify.of(rows).calls}
    found = {re.sub(r"_\d(_\d)?$", "", name) for name in launched if "_nvfp4_" in name}  # less splits and teams
    assert found == linears
    assert any(name.startswith("attend") for name in launched)
    assert any(name.startswith("delta") for name in launched)


def test_cycles_that_are_committed_whole_need_nothing_from_the_host(monkeypatch):
    gpu = ControlGpu()
    backend = load(monkeypatch, gpu)
    loaded, anchor, gpu.accept = len(gpu.launches), 5, 2
    backend.prefill([1] * 8)
    for _ in range(5):
        anchor = backend.cycle(Asked(anchor)).tokens[-1]
        backend.commit(3)
    assert gpu.launches[loaded:].count("cycle_set") == 2  # for the prompt's chunk and for the first anchor
    backend.cycle(Asked(anchor))
    backend.commit(2)
    backend.cycle(Asked(anchor))
    assert gpu.launches[loaded:].count("cycle_set") == 3  # fewer rows than the device had committed


def test_fewer_drafts_run_the_graph_of_the_fewest_rows_that_are_enough(monkeypatch):
    backend = load(monkeypatch, gpu := ControlGpu())
    backend.prefill([1] * 8)
    steps, gpu.accept = row_steps(BLOCK), BLOCK
    for sampling in (Sampling(), Sampling(0.7)):
        for drafts in range(1, BLOCK):
            at = len(gpu.launches)
            cycle = backend.cycle(Asked(5, sampling, drafts=drafts))
            assert (cycle.drafts, cycle.accepted) == (drafts, drafts)
            graphs = backend.graphs[1].cycles.sampled if sampling.temperature else backend.graphs[1].cycles.greedy
            rows = next(step for step in steps if step > drafts)
            calls = graphs.of(drafts + 1).calls
            assert calls is graphs.graphs[rows].calls
            assert gpu.launches[at:][-len(calls) :] == [name for name, _ in calls]
            assert [arguments[2] for name, arguments in calls if name == "cycle_accept"] == [rows]


def test_plain_cycles_need_nothing_from_the_host_but_their_token(monkeypatch):
    gpu = ControlGpu()
    backend = load(monkeypatch, gpu)
    backend.prefill([1] * 8)
    loaded, gpu.accept, anchor = len(gpu.launches), 0, 5
    for _ in range(5):
        anchor = backend.cycle(Asked(anchor, drafts=0)).tokens[-1]
        backend.commit(1)
    assert anchor == 0
    assert gpu.launches[loaded:].count("cycle_set") == 1  # for the first anchor
    assert "sample_choose" not in gpu.launches[loaded:]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_of_a_cycle_are_left_by_one_graph_and_read_on_demand(monkeypatch, temperature):
    backend = load(monkeypatch, gpu := ControlGpu())
    backend.prefill([1] * 8)
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


def test_a_steered_cycle_computes_its_masks_while_the_verify_runs(monkeypatch):
    backend = load(monkeypatch, gpu := ControlGpu())
    backend.prefill([1] * 8)
    seen, steering = [], Steered(3, masked=True)
    steering.drafts = lambda rows, position: seen.append(len(gpu.launches)) or [4, 4, 4]
    steering.masks = lambda drafts: seen.append(len(gpu.launches)) or [steering.mask] * 4
    waited = []
    monkeypatch.setattr(gpu, "synchronize", lambda *asked: waited.append(len(gpu.launches)))
    backend.cycle(Asked(9, Sampling(0.7), steering=steering))
    proposed, verified = seen
    assert verified - proposed == len(backend.graphs[1].verify.of(4).calls)  # launched, and nobody has waited for it
    assert not [at for at in waited if proposed < at < len(gpu.launches)]
    names = gpu.launches[verified:]
    assert (names[0], names[-1], names.count("cycle_accept")) == ("sample_count", "cycle_accept", 1)


def test_nothing_is_allocated_loaded_or_captured_after_load(monkeypatch):
    gpu = ControlGpu()
    backend = load(monkeypatch, gpu)

    def never(*arguments, **options):
        raise AssertionError("after load")

    for name in ("allocate", "pinned", "load", "kernel", "capture"):
        monkeypatch.setattr(gpu, name, never)
    backend.prefill([1] * 2 * CHUNK).argmax()
    backend.propose(1).logits()
    mask = np.full((VOCABULARY + 31) // 32, 3, np.uint32)
    backend.verify([1, 2]).choose(Sampling(0.7, 5, 0.9), backend.length() + 1, [mask, None])
    backend.commit(1)
    for sampling in (Sampling(), Sampling(0.7)):
        for drafts in (None, *range(BLOCK)):
            backend.commit(len(backend.cycle(Asked(1, sampling, drafts=drafts)).tokens))
        backend.commit(len(backend.cycle(Asked(1, sampling, drafts=0)).tokens))
        for masked in (False, True):
            backend.commit(len(backend.cycle(Asked(1, sampling, steering=Steered(3, masked))).tokens))
    saved = backend.snapshot()
    backend.reset()
    backend.restore(saved)
    backend.flush()
    with pytest.raises(AssertionError, match="after load"):
        force(backend, [1])


def test_it_is_a_backend(monkeypatch):
    backend: Backend = load(monkeypatch, ControlGpu())
    assert backend.shape.usable_context == CONTEXT - BLOCK


def test_what_does_not_fit_into_memory_is_said_before_anything_is_loaded(monkeypatch):
    gpu = ControlGpu()
    gpu.free = 1 << 28
    with pytest.raises(BackendError, match=r"the pair needs .* GB \(.*\), a device without kernels has 0.27 GB free"):
        load(monkeypatch, gpu)
    assert gpu.allocations == 0
    assert gpu.closed == 1


def test_the_budget_counts_everything_that_loading_takes(monkeypatch):
    def load_in(free):
        gpu = ControlGpu()
        gpu.free = free
        return load(monkeypatch, gpu), gpu

    backend, gpu = load_in(1 << 40)
    total = sum(backend.budget.values())
    assert sum(gpu.sizes) == total
    least = total + loading._SLACK
    load_in(least)
    with pytest.raises(BackendError, match="the pair needs"):
        load_in(least - 1)


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


def test_ids_outside_the_vocabulary_never_reach_the_device(monkeypatch):
    gpu = ControlGpu()
    backend = load(monkeypatch, gpu)
    before = len(gpu.launches)
    for call in (
        backend.propose,
        lambda token: backend.cycle(Asked(token)),
        lambda token: backend.verify([token]),
        lambda token: backend.prefill([token]),
    ):
        for token in (-1, VOCABULARY):
            with pytest.raises(BackendError, match=f"token id {token} is outside the vocabulary"):
                call(token)
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


def test_a_lane_that_is_not_there_is_refused_before_the_device_is_touched(monkeypatch):
    gpu = ControlGpu()
    backend = load(monkeypatch, gpu)
    saved, before = backend.snapshot(), len(gpu.launches)
    for call in (
        backend.length,
        backend.reset,
        backend.flush,
        backend.snapshot,
        lambda lane: backend.prefill([1], lane),
        lambda lane: backend.propose(1, lane),
        lambda lane: backend.verify([1], lane),
        lambda lane: backend.commit(0, lane),
        lambda lane: backend.restore(saved, lane),
        lambda lane: backend.cycle(Asked(1, lane=lane)),
        lambda lane: backend.cycle(Asked(1, drafts=0, lane=lane)),
    ):
        for lane in (-1, 1):
            with pytest.raises(BackendError, match=f"lane {lane} is outside the 1 of this backend"):
                call(lane)
    assert len(gpu.launches) == before


def test_a_target_alone_runs_its_own_passes(monkeypatch):
    backend = load(monkeypatch, ControlGpu(), replace(NATIVE_PAIR, drafter=None))
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
