"""What is decided in each slot of a pass: its choices, its walk, its acceptance are those that it has alone."""

from functools import cache

import numpy as np
import pytest
import torch
from native_state_support import Device, bf16
from test_native_sample import FILTERS, logits
from test_native_walk import op_of

from edge_dflash.backends.cuda.kernels import cycle as native_cycle
from edge_dflash.backends.cuda.kernels import sample, small, walk
from edge_dflash.backends.cuda.kernels.cycle import COUNTED_WORDS, RESULT_WORDS, CycleKernels, Result, SlotWords
from edge_dflash.backends.cuda.kernels.sample import Block, Chooser, Sampler, SamplingBuffers, Span
from edge_dflash.backends.cuda.kernels.small import Small
from edge_dflash.backends.cuda.kernels.walk import DeviceWalk, WalkBuffers, WalkShape, WalkWeights
from edge_dflash.backends.cuda.memory import CONTROL_BYTES, Allocator, Control, Matrix
from edge_dflash.backends.cuda.slots import IDLE
from edge_dflash.decode.sampling import Sampling, choose_row, pack
from edge_dflash.weights.formats import bf16_to_f32

pytestmark = pytest.mark.gpu

SLOTS, ROWS = 4, 5  # ROWS of a slot's 16 in sampling buffers
LENGTHS = (7, 0, 300, 41)


@cache
def device():
    return Device()


@pytest.fixture(scope="module", autouse=True)
def _device():
    yield
    device.cache_clear()


def settings_of(number, vocabulary):
    """Greedy, and sampled with every filter."""
    top_k, top_p = FILTERS[number % len(FILTERS)]
    return Sampling() if number % 4 == 3 else Sampling(0.7 + number % 3, min(top_k, vocabulary), top_p, 90 + number)


class Slots:
    """Logits of some slots and a Chooser over them; poison behind every row's last column."""

    def __init__(self, vocabulary, seed):
        self.device, gpu = device(), device().gpu
        self.buffers = SamplingBuffers.take(Allocator(gpu), 16, vocabulary, SLOTS)
        self.buffers.clear(gpu)
        stride = -(-vocabulary // 16) * 16
        padded = np.full((16 * SLOTS, stride), 0x7F00, np.uint16)
        padded[: SLOTS * ROWS, :vocabulary] = bits = logits("normal", SLOTS * ROWS, vocabulary, seed)
        self.matrix, self.rows = Matrix(gpu.upload(padded), stride), bf16_to_f32(bits)
        self.sampler = Sampler(gpu, self.device.module(sample.UNIT))
        self.chooser = Chooser(gpu, self.sampler, self.buffers, self.matrix, ROWS)
        self.ids = gpu.upload(np.full(16 * SLOTS, -1, np.int32))
        for slot, length in enumerate(LENGTHS):
            self.device.set(slot, length=length, lane=slot)

    def chosen(self):
        found = self.device.gpu.read(self.ids, (SLOTS * ROWS,), np.int32).tolist()
        return [found[ROWS * slot : ROWS * (slot + 1)] for slot in range(SLOTS)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("vocabulary", [1000, 20_000])
def test_each_slot_chooses_by_its_own_settings(vocabulary, seed):
    ours = Slots(vocabulary, seed)
    samplings = [settings_of(seed + slot, vocabulary) for slot in range(SLOTS)]
    ours.chooser.prepare(*samplings)
    block = Block(ours.device.word(Control.LENGTH), 1, 1, ROWS)
    ours.sampler.choose(ours.buffers, ours.matrix, ours.ids, block, Span(ROWS, SLOTS))
    for slot, found in enumerate(ours.chosen()):
        rows, position = ours.rows[ROWS * slot :], LENGTHS[slot] + 1
        assert found == [-1, *(choose_row(rows[r], samplings[slot], position + r) for r in range(1, ROWS))]


@pytest.mark.parametrize("seed", range(6))
def test_each_slot_has_masks_and_rows_of_its_own(seed):
    vocabulary, rng = 3000, np.random.default_rng(seed)
    ours, wanted = Slots(vocabulary, seed), []
    for slot in range(SLOTS):
        first, count = (0, 0) if slot == 2 else (int(rng.integers(0, 3)), int(rng.integers(1, 3)))  # slot 2 is idle
        masks = [pack(rng.random(vocabulary) < 0.1) if rng.random() < 0.7 else None for _ in range(count)]
        sampling, position = settings_of(seed + slot, vocabulary), int(rng.integers(0, 500))
        ours.chooser.write(sampling, position, masks, first, slot)
        rows = ours.rows[ROWS * slot + first :]
        chosen = [choose_row(rows[i], sampling, position + i, mask) for i, mask in enumerate(masks)]
        wanted.append([-1] * first + chosen + [-1] * (ROWS - first - count))
        assert ours.chooser.choose(sampling, position, masks, first, slot) == chosen  # asked for alone
    ours.chooser.enqueue(ours.ids, span=Span(ROWS, SLOTS))
    assert ours.chosen() == wanted
    b, gpu = ours.buffers, ours.device.gpu
    for pointer, value in ((b.chunks, 0), (b.bins, 0), (b.arrived, 0), (b.tops, 2**32 - 1)):
        assert (gpu.read(pointer, (pointer.nbytes // 4,), np.uint32) == value).all()


HEADS = ("selector", "vanilla", "gated", "rnn")


@pytest.mark.parametrize("judged", [None, "hidden", "markov"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("rows", "top"), [(5, 16), (17, 64)])
def test_each_slot_walks_as_it_does_alone(head, judged, rows, top):
    """Slots of a walk against a walk of one slot with the same rows: every bit that it leaves."""
    if judged and head == "selector":
        pytest.skip("has no confidence")
    vocabulary, hidden, rank, apart = 9000, 72, 16, rows + 1  # a block has the anchor's row besides
    g, gpu, made = torch.Generator().manual_seed(rows), device().gpu, device()
    width = {"selector": (rank, hidden), "gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}
    tensors = {name: made.up(bf16(vocabulary, rank, generator=g).bfloat16()) for name in ("before", "after")}
    vectors = {"judge_bias": np.array([0.25], np.float32)}
    if head in width:
        tensors["matrix"] = made.up(bf16(*width[head], generator=g, scale=width[head][1] ** -0.5).bfloat16())
        vectors["bias"] = bf16(width[head][0], generator=g).numpy()
    tensors["judge"] = made.up(bf16(1, hidden + rank * (judged == "markov"), generator=g).bfloat16())
    op = op_of(head, rank, top, judged)
    shape, memory, stride = WalkShape(op, rows, hidden, vocabulary), Allocator(gpu), 9008
    weights = WalkWeights.load(op, tensors.__getitem__, vectors.__getitem__, memory)
    x = bf16(SLOTS * apart, hidden, generator=g)
    scores = torch.full((SLOTS * apart, stride), torch.inf)
    scores[:, :vocabulary] = bf16(SLOTS * apart, vocabulary, generator=g, scale=3)
    module, sampling = made.module(walk.UNIT), SamplingBuffers.take(memory, 32, vocabulary, SLOTS)
    sampling.clear(gpu)
    settings = np.zeros(SLOTS, sample.SETTINGS)
    for slot in range(SLOTS):
        sample.write_sampling(settings[slot : slot + 1], settings_of(slot, vocabulary))
    gpu.write(sampling.settings, settings)
    counted = np.array([[rows + 1, np.float32(0.5).view(np.int32), -1]] * SLOTS, np.int32)

    def walked(first, slots):
        """Bits of everything, by slot."""
        walker = DeviceWalk(gpu, module, shape, weights, WalkBuffers.take(memory, shape, slots), apart)
        part = slice(first * apart, (first + slots) * apart)
        rows_of, logits_of = made.rows(x[part]), Matrix(made.up(scores[part].bfloat16()), stride)
        counts, tokens = gpu.upload(counted[first : first + slots]), made.poisoned(4 * slots * apart)
        for slot in range(slots):
            made.set(slot, length=LENGTHS[first + slot], anchor=100 + first + slot, lane=slot)
        own = sampling.settings.at(first * sample.SETTINGS.itemsize, slots * sample.SETTINGS.itemsize)
        walker.prepare(rows_of.behind(1), logits_of.behind(1), slots)
        found = []
        for given in (None, sampling.__class__(**{**vars(sampling), "settings": own})):
            walker.walk(logits_of.behind(1), made.control, counts, tokens.at(4, tokens.nbytes - 4), given, slots=slots)
            parts = [gpu.read(tokens, (slots, apart), np.int32)[:, 1:], gpu.read(counts, (slots, 3), np.int32)]
            b = walker.buffers
            parts += [gpu.read(b.ids, (slots, rows, top), np.int32), gpu.read(b.scores, (slots, rows, top), np.int32)]
            parts += [gpu.read(b.confidence, (slots, rows), np.int32)] if judged else []
            found.append(parts)
        return [[part[slot].tobytes() for parts in found for part in parts] for slot in range(slots)]

    together = walked(0, SLOTS)
    assert together == [walked(slot, 1)[0] for slot in range(SLOTS)]
    assert len({tokens[0] for tokens in together}) == SLOTS  # or the comparison says little


def test_slots_are_set_drafted_for_accepted_and_committed_apart():
    made, gpu, block = device(), device().gpu, 6
    cycle = CycleKernels(gpu, made.module(native_cycle.UNIT))
    gpu.fill(made.control, 0xAB)
    words = [SlotWords(2, 10, 3, 70), IDLE, SlotWords(0, 20, 0, 71, 9)]
    cycle.set(made.control, {0: words[0], 2: words[2], 1: words[1]})
    each = CONTROL_BYTES // 4
    found = gpu.read(made.control, (8, each), np.int32)
    assert found[:3, :5].tolist() == [[10, 3, 0, 70, 2], [0, 0, 0, 0, -1], [20, 0, 9, 71, 0]]
    assert (found[3:] == np.frombuffer(b"\xab" * 4, np.int32)[0]).all()
    ids = gpu.upload(np.full(32, -1, np.int32))
    cycle.ids(made.control, ids, block, mask=5, slots=3)
    assert gpu.read(ids, (3, block), np.int32).tolist() == [[anchor] + [5] * 5 for anchor in (70, 0, 71)]
    drafts = np.arange(100, 100 + 3 * block).reshape(3, block).astype(np.int32)  # a slot's row 0 is no draft
    pointer = gpu.upload(drafts)
    cycle.ids(made.control, ids, 4, drafts=pointer.at(4, pointer.nbytes - 4), slots=3, apart=block)
    wanted = [[anchor, *drafts[slot, 1:4]] for slot, anchor in enumerate((70, 0, 71))]
    assert gpu.read(ids, (3, 4), np.int32).tolist() == wanted
    choices = drafts[:, 1:5].copy()
    choices[0, 2], choices[1, 0] = 9, 8  # slot 0 accepts two, slot 2 as many as count
    counted = gpu.upload(np.array([[4, 0, 0], [1, 0, 0], [2, 0, 0]], np.int32))
    result, clock = made.poisoned(4 * 3 * RESULT_WORDS), gpu.upload(np.array([1000, 3000, 7, 7, 7], np.uint64))
    what = (pointer.at(4, pointer.nbytes - 4), gpu.upload(choices), 4, made.control, result, clock)
    cycle.accept(*what, valid=counted, slots=3, apart=block, valid_apart=COUNTED_WORDS)
    first, _, last = (Result.of(one, 4) for one in gpu.read(result, (3, RESULT_WORDS), np.int32))
    assert (first.accepted, first.counted, first.choices) == (2, 3, tuple(choices[0].tolist()))
    assert (last.accepted, last.counted, last.choices) == (1, 1, tuple(choices[2].tolist()))
    assert first.propose_seconds == pytest.approx(2e-6)
    found = gpu.read(made.control, (8, each), np.int32)[:3, :5].tolist()
    assert found == [[13, 3, 0, 9, 2], [0, 0, 0, 0, -1], [22, 2, 9, int(choices[2, 1]), 0]]
    pattern = gpu.upload(np.array([0, 3, 1], np.int32))
    for turn in range(3):  # cycles are counted by lane: 7 so far in each
        cycle.accept(*what, pattern, slots=3, apart=block)
        first, _, last = (Result.of(one, 4) for one in gpu.read(result, (3, RESULT_WORDS), np.int32))
        assert first.accepted == last.accepted == [3, 1, 0][turn]
    assert gpu.read(clock, (5,), np.uint64)[2:].tolist() == [10, 7, 10]
    Small(gpu, made.module(small.UNIT)).replayed(made.control, 2)
    found = gpu.read(made.control, (8, each), np.int32)
    assert found[:3, Control.PENDING].tolist() == [0, 0, 1]
