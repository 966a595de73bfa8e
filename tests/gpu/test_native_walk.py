"""The walk on the device: candidates, scores and tokens of every head, and convolutions with what follows them."""

import numpy as np
import pytest
import torch
from golden_pairs import GOLDEN
from native_state_support import Device, bf16
from safetensors.torch import load_file

from edge_dflash.backends.cuda.kernels import conv, sample, small, walk
from edge_dflash.backends.cuda.kernels.walk import DeviceWalk, WalkBuffers, WalkShape, WalkWeights
from edge_dflash.backends.cuda.memory import Allocator, Matrix, Norm
from edge_dflash.backends.reference.dense import grouped_conv
from edge_dflash.decode.sampling import GREEDY, Sampling, choose_row, pack
from edge_dflash.decode.walk import WalkRows, best
from edge_dflash.model.ops import GroupedConv, MarkovWalk, SelectorWalk

pytestmark = pytest.mark.gpu

HEADS = ("selector", "vanilla", "gated", "rnn")
LARGE = (248_320, 5120, 256, 16, 7)  # vocabulary, hidden, rank, candidates, rows
SMALL = (500, 128, 16, None, 8)
SIZES = {"large": LARGE, "small": SMALL, "64": (151_936, 2560, 256, 64, 16), "wide": (9000, 72, 512, 256, 17)}
NAMES = {
    "before": "markov_head.markov_w1.weight", "after": "markov_head.markov_w2.weight",
    "judge": "confidence_head.proj.weight", "judge_bias": "confidence_head.proj.bias",
}  # fmt: skip
SELECTOR = {
    "before": "candidate_selector.predecessor_codebook", "after": "candidate_selector.successor_codebook",
    "matrix": "candidate_selector.hidden_projection.weight",
}  # fmt: skip
MIX = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
SAMPLINGS = (GREEDY, Sampling(1.0, seed=3), Sampling(0.7, 20, 0.9, 5), Sampling(1.3, 3, 1.0, 2**64 - 1),
             Sampling(2.0, 0, 0.5, 1))  # fmt: skip


def op_of(head, rank, top, judged=None):
    if head == "selector":
        return SelectorWalk(inputs=("h", "l"), output="w", rank=rank, top_k=top or 16, projection="matrix",
                            predecessor="before", successor="after")  # fmt: skip
    mix = None if head == "vanilla" else ("matrix", "bias")
    judge = ("judge", "judge_bias") if judged else None
    return MarkovWalk(inputs=("h", "l"), output="w", kind=head, rank=rank, top_k=top, predecessor="before",
                      successor="after", mix=mix, confidence=judged, judge=judge)  # fmt: skip


class Case:
    """A walk on the device and in NumPy; ``weights`` are BF16 values, as torch tensors, and biases as arrays."""

    def __init__(self, op, weights, hidden, scores, anchor=9):
        self.device, self.op, self.anchor = device(), op, anchor
        self.hidden, self.scores = hidden, scores
        self.weights = {
            name: weight if isinstance(weight, np.ndarray) else weight.numpy() for name, weight in weights.items()
        }
        (rows, columns), vocabulary = hidden.shape, scores.shape[1]
        gpu, memory = self.device.gpu, Allocator(self.device.gpu)
        self.shape = WalkShape(op, rows, columns, vocabulary)

        def up(name):
            return self.device.up(weights[name].bfloat16())

        loaded, buffers = WalkWeights.load(op, up, weights.__getitem__, memory), WalkBuffers.take(memory, self.shape)
        self.walker = DeviceWalk(gpu, self.device.module(walk.UNIT), self.shape, loaded, buffers)
        stride = -(-vocabulary // 16) * 16
        self.logits = Matrix(self.device.poisoned(2 * rows * stride), stride)
        self.put(scores)
        self.rows = self.device.rows(hidden)
        self.tokens = self.device.poisoned(4 * rows)
        self.sampling = sample.SamplingBuffers.take(memory, 32, vocabulary)
        self.sampling.clear(gpu)
        self.device.set(length=40, anchor=anchor)
        self.counted = gpu.upload(np.array([rows + 1, 0, 0], np.int32))

    def put(self, scores):
        """Other logits; what lies behind a row's last is larger."""
        rows, vocabulary = scores.shape
        padded = torch.full((rows, self.logits.stride), torch.inf).bfloat16()
        padded[:, :vocabulary] = self.scores = scores
        self.device.gpu.write(self.logits.pointer, padded.view(torch.int16).numpy())

    def prepare(self):
        self.walker.prepare(self.rows, self.logits)

    def walk(self, sampling=GREEDY, position=0, masks=None, first=0, others=None):
        """Tokens and scores [rows, candidates] after a walk."""
        gpu, rows = self.device.gpu, self.shape.rows
        settings = np.zeros(1, sample.SETTINGS)
        sample.write_sampling(settings, sampling)
        settings["position"], settings["first"] = position, first
        settings["stop"] = first + len(masks or ())
        settings["masked"] = sum(1 << (first + i) for i, mask in enumerate(masks or ()) if mask is not None)
        gpu.write(self.sampling.settings, settings)
        for row, mask in enumerate(masks or (), first):
            if mask is not None:
                width = 4 * sample.mask_words(self.shape.vocabulary)
                gpu.write(self.sampling.masks.at(row * width, width), mask)
        given = {} if others is None else {"others": others}
        self.walker.walk(self.logits, self.device.control, self.counted, self.tokens, self.sampling, **given)
        gpu.synchronize()
        scores = gpu.read(self.walker.buffers.scores, (rows, self.shape.top), np.float32)
        return gpu.read(self.tokens, (rows,), np.int32).tolist(), scores

    def ids(self):
        rows, top = self.shape.rows, self.shape.top
        if self.shape.whole:
            return np.tile(np.arange(top), (rows, 1))
        return self.device.gpu.read(self.walker.buffers.ids, (rows, top), np.int32)

    def check(self, tokens, scores, sampling, position, masks=None, first=0, others=None):
        """Scores are those of NumPy along the device's path, tokens the choices of the device's scores."""
        host = WalkRows(self.op, self.weights.__getitem__, self.hidden.numpy(), self.scores.numpy(), self.anchor)
        step, ids = host._step(), self.ids()
        masks = dict(enumerate(masks, first)) if masks is not None else dict.fromkeys(range(self.shape.rows))
        for row, token in enumerate(tokens):
            theirs = dict(
                zip(*(x.tolist() for x in step.scores(row, tokens[row - 1] if row else self.anchor)), strict=True)
            )
            wanted = np.array([theirs[i] for i in ids[row].tolist()], np.float32)
            np.testing.assert_allclose(scores[row], wanted, rtol=2e-5, atol=1e-4)  # sums in FP32
            if row < first:
                continue
            wide = np.full(self.shape.vocabulary, -np.inf, np.float32)
            wide[ids[row]] = scores[row]
            mask = masks.get(row)
            if mask is not None and not any(mask[i // 32] >> (i % 32) & 1 for i in ids[row].tolist()):
                assert token == others[row]
            else:
                chosen = sampling if row in masks else GREEDY
                assert token == choose_row(wide, chosen, position + row - first, mask)
        return step


def random_case(head, sizes, judged=None, seed=0):
    """Random weights."""
    vocabulary, hidden, rank, top, rows = sizes
    generator = torch.Generator().manual_seed(seed)
    width = {"selector": (rank, hidden), "gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}
    weights = {name: bf16(vocabulary, rank, generator=generator, scale=rank**-0.25) for name in ("before", "after")}
    if head in width:
        weights["matrix"] = bf16(*width[head], generator=generator, scale=width[head][1] ** -0.5)
        weights["bias"] = bf16(width[head][0], generator=generator).numpy()
    if judged:
        weights["judge"] = bf16(1, hidden + rank * (judged == "markov"), generator=generator, scale=hidden**-0.5)
        weights["judge_bias"] = np.array([0.25], np.float32)
    logits = bf16(rows, vocabulary, generator=generator, scale=3)
    return Case(op_of(head, rank, top, judged), weights, bf16(rows, hidden, generator=generator), logits)


@pytest.fixture(scope="module", autouse=True)
def _device():
    yield
    device.made = None


def device():
    if getattr(device, "made", None) is None:
        device.made = Device()
    return device.made


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("head", HEADS)
def test_walks_score_as_numpy_and_choose_as_sampling_does(head, size):
    case = random_case(head, SIZES[size])
    case.prepare()
    for sampling in SAMPLINGS:
        tokens, scores = case.walk(sampling)
        case.check(tokens, scores, sampling, 41)
        again, same = case.walk(sampling)
        assert tokens == again
        assert np.array_equal(scores, same)


@pytest.mark.parametrize("prompt", range(3))
@pytest.mark.parametrize("head", HEADS)
def test_golden_drafts(head, prompt):
    """Hidden rows and logits of the goldens, rounded to BF16: their tokens, and scores as near as that rounding."""
    name = "qwen3_5-tiny-dflash2" if head == "selector" else f"qwen3-tiny-dspark-{head}"
    held = load_file(GOLDEN / name / "model.safetensors")
    golden = {
        key.removeprefix(f"p{prompt}."): value
        for key, value in load_file(GOLDEN / f"golden_{name.replace('-tiny', '')}.safetensors").items()
    }
    judged = {"vanilla": "markov", "rnn": "hidden"}.get(head)
    names = SELECTOR if head == "selector" else NAMES
    weights = {key: held[name].float() for key, name in names.items() if name in held}
    if head in ("gated", "rnn"):
        weights["matrix"], weights["bias"] = (held[f"{MIX[head]}.{end}"].float() for end in ("weight", "bias"))
    for key in {"bias", "judge_bias"} & weights.keys():
        weights[key] = weights[key].numpy()
    hidden, logits = golden["cycle0_draft_hidden"], golden["cycle_draft_logits"][0]
    if head == "selector":
        hidden = hidden[1:]
    else:
        logits = golden["cycle0_base_logits"]
    rounded = [part.bfloat16().float() for part in (hidden, logits)]
    case = Case(op_of(head, 16, 16 if head == "selector" else None, judged), weights, *rounded,
                anchor=int(golden["greedy_tokens"][0]))  # fmt: skip
    case.prepare()
    tokens, scores = case.walk()
    case.check(tokens, scores, GREEDY, 41)
    assert tokens == golden["cycle_draft_tokens"][0].tolist()
    wide = np.full(logits.shape, -np.inf, np.float32)
    np.put_along_axis(wide, case.ids(), scores, axis=1)
    if head == "selector":
        wanted, found = (
            golden["cycle_scores"][0].numpy(),
            np.take_along_axis(wide, golden["cycle_candidates"][0].numpy(), 1),
        )
        assert np.isfinite(found).mean() > 0.95  # the last candidate may be another one
        wanted = np.where(np.isfinite(found), wanted, -np.inf)
    else:
        wanted, found = golden["cycle_draft_logits"][0].numpy(), wide
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.02)
    if judged:
        confidence = case.device.gpu.read(case.walker.buffers.confidence, (7,), np.float32)
        np.testing.assert_allclose(confidence, golden["cycle_confidence"][0].numpy(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["flat", "few", "last", "short"])
@pytest.mark.parametrize("top", [1, 16, 64, 256])
def test_candidates_are_the_largest_logits_the_lower_id_first(kind, top):
    case = random_case("selector", (30_000, 64, 8, top, 8))
    generator = torch.Generator().manual_seed(top)
    scores = case.scores.clone()
    if kind == "flat":
        scores[:] = -0.0
        scores[:, ::3] = 0.0
    elif kind == "few":
        scores = torch.randint(-2, 3, scores.shape, generator=generator).float()
    elif kind == "last":
        scores[:, -300:] += 100
        scores = scores.bfloat16().float()
    else:
        scores[:, 8192 * 2 + 5 :] = -torch.inf
    case.put(scores)
    for _ in range(2):
        case.prepare()
        wanted = [best(row, top).tolist() for row in case.scores.numpy()]
        assert case.ids().tolist() == wanted
    values = case.device.gpu.read(case.walker.buffers.values, (8, top), np.float32)
    assert np.array_equal(values, np.take_along_axis(case.scores.numpy(), np.array(wanted), 1))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("size", ["small", "large"])
def test_masks_and_a_walk_from_a_row_on(head, size):
    case = random_case(head, SIZES[size])
    case.prepare()
    rows, vocabulary, rng = case.shape.rows, case.shape.vocabulary, np.random.default_rng(0)
    others = np.arange(100, 100 + rows).astype(np.int32)
    pointer = case.device.gpu.upload(others)
    tokens, _ = case.walk()
    for sampling in (GREEDY, Sampling(1.0, 5, 0.9, 7)):
        for first, count in ((0, rows), (3, 1), (2, 3)):
            masks = [None, pack(rng.random(vocabulary) < 0.5), pack(np.arange(vocabulary) == vocabulary - 1)]
            masks = (masks * rows)[:count]
            before = tokens[:first]
            tokens, scores = case.walk(sampling, 70, masks, first, pointer)
            assert tokens[:first] == before
            case.check(tokens, scores, sampling, 70, masks, first, others)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("head", HEADS)
def test_numbers_out_of_range_give_some_token(head, value):
    """A filter may then leave no candidate: the walk reads nothing else's memory for it and ends."""
    case = random_case(head, SMALL)
    case.put(torch.full_like(case.scores, value))
    case.prepare()
    for sampling in (GREEDY, Sampling(1.0, 0, 0.5, 7), Sampling(0.5, 5, 0.9, 3)):
        tokens, _ = case.walk(sampling)
        assert all(0 <= token < case.shape.vocabulary for token in tokens)


@pytest.mark.parametrize("judged", ["hidden", "markov"])
@pytest.mark.parametrize("head", HEADS[1:])
def test_confidence_cuts_the_proposal(head, judged):
    case = random_case(head, SMALL, judged)
    case.prepare()
    tokens, scores = case.walk()
    wanted = case.check(tokens, scores, GREEDY, 41).confidence
    gpu = case.device.gpu
    found = gpu.read(case.walker.buffers.confidence, (8,), np.float32)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for limit in (8, 3, 0):
        for threshold in (0.0, 0.1, float(np.median(found)), 1.5):
            bits = int(np.float32(threshold).view(np.int32))
            gpu.write(case.counted, np.array([limit + 1, bits, -1], np.int32))
            case.walk()
            cut = next((i for i, value in enumerate(found) if value < threshold), 8)
            assert gpu.read(case.counted, (3,), np.int32)[2] == min(cut, limit) + 1


@pytest.mark.parametrize(("columns", "taps", "group"), [(128, 2, 16), (5120, 2, 16), (96, 3, 3), (64, 1, 64)])
@pytest.mark.parametrize("side", [0, 1])
def test_convolutions_are_the_references(columns, taps, group, side):
    made, rows = device(), 8
    gpu, generator = made.gpu, torch.Generator().manual_seed(columns + side)
    kernels = conv.Convolutions(gpu, made.module(conv.UNIT))
    op = GroupedConv(inputs=("u", "c"), output="y", base="b", side=side, taps=taps, group_size=group)
    u, c = bf16(rows, columns, generator=generator), bf16(rows, 2 * taps * columns // group, generator=generator)
    base, x = bf16(2, taps, columns, generator=generator), bf16(rows, columns, generator=generator)
    weight = torch.rand(columns, generator=generator) + 0.5
    wanted = grouped_conv(op, u, c, base).bfloat16()
    given = (made.rows(u), made.rows(c), made.up(base))
    out, normal, theirs = (Matrix(made.poisoned(2 * rows * columns), columns) for _ in range(3))
    kernels.convolve(op, *given, out, rows, columns)
    assert torch.equal(made.read(out.pointer, (rows, columns), torch.bfloat16), wanted)
    added = (x + wanted.float()).bfloat16()
    kernels.convolve(op, *given, out, rows, columns, made.rows(x))
    assert torch.equal(made.read(out.pointer, (rows, columns), torch.bfloat16), added)
    norm = Norm(made.up(weight), 1e-6, normal)
    kernels.convolve(op, *given, out, rows, columns, made.rows(x), norm)
    assert torch.equal(made.read(out.pointer, (rows, columns), torch.bfloat16), added)
    plain = small.Small(gpu, made.module(small.UNIT))
    plain.rms_norm(out, norm.weight, theirs, rows, columns, 1e-6)
    parts = [made.read(part.pointer, (rows, columns), torch.int16) for part in (normal, theirs)]
    assert torch.equal(*parts)
