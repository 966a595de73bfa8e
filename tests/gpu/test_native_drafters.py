"""Drafters whose drafts depend on each other, and blocks whose anchor drafts, on the native backend."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from fakes import Stepped
from golden_pairs import same_bits
from native_backend_support import ENGINE, checkpoint, device_cubin, prompt, rms, store
from store_weights import StoreWeights
from test_native_backend import OPTIONS, Rule

from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.backends.cuda.rows import NativeRows
from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.checks.lossless import Adversary, ByTurns, drafters, oracle_until
from edge_dflash.decode.backend import Asked, Precision
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.generation import generate
from edge_dflash.decode.sampling import Sampling, pack
from edge_dflash.decode.walk import WalkRows
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import GroupedConvSpec, MarkovSpec, SelectorSpec
from edge_dflash.weights.formats import WideWeight

pytestmark = pytest.mark.gpu

KINDS = {
    "dflash2": {"kind": "dflash2", "conv": GroupedConvSpec(2, 16), "head": SelectorSpec(32, 16)},
    "vanilla": {"kind": "dspark", "anchor_drafts": True, "head": MarkovSpec("vanilla", 64, 64, "markov")},
    "gated": {"kind": "dspark", "anchor_drafts": True, "head": MarkovSpec("gated", 32, None, None)},
    "rnn": {"kind": "dspark", "anchor_drafts": True, "head": MarkovSpec("rnn", 32, 40, "hidden")},
    "plain rows": {"kind": "dspark", "head": MarkovSpec("vanilla", 32, 16)},
    "anchor": {"kind": "dspark", "anchor_drafts": True},
}
PAIRS = [("dense", kind) for kind in KINDS] + [("hybrid", kind) for kind in ("dflash2", "vanilla", "rnn")]
HEADS = [(name, kind) for name, kind in PAIRS if kind != "anchor"]


class Extended:
    """The store of a base pair, and random values for what its drafter adds."""

    def __init__(self, base, weights):
        self._base, self._weights, self.kv_scale, self._kept = base, weights, base.kv_scale, {}

    def get(self, name):
        if not any(part in name for part in ("_conv.", "candidate_selector", "markov_head", "confidence_head")):
            return self._base.get(name)
        if name not in self._kept:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            x = torch.randn(self._weights[name].shape, generator=generator)
            scale = 0.2 if "_conv." in name else 0.3 if name.endswith((".bias", ".proj")) else 0.6
            x = x * (scale if "codebook" in name or "markov_w" in name or x.ndim == 1 else scale * x.shape[-1] ** -0.5)
            if name.endswith("base_kernel"):
                x[:, 0] += 1.0
            self._kept[name] = WideWeight(x.bfloat16().view(torch.int16).numpy().view(np.uint16))
        return self._kept[name]


@cache
def pair(name, kind):
    base, _, _ = checkpoint(name)
    block = 7 if kind in ("vanilla", "rnn") and name == "dense" else base.drafter.block_size
    drafter = replace(base.drafter, block_size=block, **KINDS[kind])
    made = replace(base, drafter=drafter)
    weights = pair_programs(made).weights
    return made, Extended(store(name, "nvfp4"), weights), weights


@cache
def native(name, kind, lanes=1):
    made, held, weights = pair(name, kind)
    found = StoreWeights(held, {n: held.get(n).format for n in weights})
    return NativeBackend(made, found, ENGINE, cubin=device_cubin, max_context=256, prefill_chunk=64, lanes=lanes)


def reference(name, kind, precision=ENGINE):
    torch.set_num_threads(4)
    made, held, _ = pair(name, kind)
    return ReferenceBackend(made, held, precision, max_context=256)


def head_rows(backend, anchor):
    """The head's logits on the draft rows of a propose pass, without the walk."""
    rows = backend.propose(anchor)
    if isinstance(backend, NativeBackend):
        return NativeRows(backend, len(rows), rows._first, rows._ids).logits()
    return rows.base if isinstance(rows, WalkRows) else rows.logits()


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_head_rows_are_close_to_the_reference(name, kind):
    """As test_native_backend.Nearness, of the rows before the walk."""
    places = native(name, kind), reference(name, kind), reference(name, kind, Precision("float32", ENGINE.kv))
    squares = []
    for seed in range(6):
        for place in places:
            place.reset()
            place.prefill(prompt(name, 70, seed=seed))
        ours, rounded, exact = (head_rows(place, prompt(name, 1, seed=100 + seed)[0]) for place in places)
        assert ours.shape == (places[0].shape.drafts, places[0].shape.vocab_size)
        squares.append([rms(a - b) ** 2 for a, b in ((ours, rounded), (ours, exact), (rounded, exact))])
    to_rounded, to_exact, allowed = np.sqrt(np.sum(squares, axis=0))
    assert allowed > 0
    assert to_rounded <= 1.6 * allowed
    assert to_exact <= 1.5 * allowed


def host_rows(backend, name, kind, anchor):
    """NumPy's walk over the native backend's own hidden rows and logits."""
    _, held, _ = pair(name, kind)
    frame = backend.loaded.passes["propose"]
    step, first = frame.schedule.steps[-1], backend.loaded.common.layout.first_draft
    rows = NativeRows(backend, backend.shape.drafts, first, backend.host.drafts)
    matrix = frame._matrix(step.reads[0]).behind(first)
    columns = frame.schedule.widths[step.reads[0]]
    bits = backend.gpu.read(matrix.pointer.at(0, 2 * matrix.stride * len(rows)), (len(rows), matrix.stride), np.uint16)
    hidden = (bits[:, :columns].astype(np.uint32) << 16).view(np.float32)
    return WalkRows(step.op, lambda weight: held.get(weight).float32(), hidden, rows.logits(), anchor)


@pytest.mark.parametrize(("name", "kind"), HEADS)
def test_walks_are_numpys_over_the_same_rows(name, kind):
    backend, rng = native(name, kind), np.random.default_rng(0)
    vocabulary, count = backend.shape.vocab_size, backend.shape.drafts
    for seed in range(4):
        backend.reset()
        backend.prefill(prompt(name, 40 + seed, seed=seed))
        ours = backend.propose(3 + seed)
        theirs = host_rows(backend, name, kind, 3 + seed)
        assert ours.argmax() == theirs.argmax()
        steps = [
            (Sampling(1.0, seed=seed), 50, [None] * count, 0),
            (Sampling(0.8, 5, 0.9, seed), 50, [pack(rng.random(vocabulary) < 0.5) for _ in range(count)], 0),
            (Sampling(), 52, [pack(np.arange(vocabulary) % 97 == 5)], 2),
            (Sampling(), 52, [None, pack(np.arange(vocabulary) == 7)], 3),
        ]
        for step in steps:
            assert ours.choose(*step) == theirs.choose(*step)
            found, wanted = ours.logits(), theirs.logits()
            assert np.array_equal(np.isinf(found), np.isinf(wanted))
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(ours.confidence(), theirs.confidence(), rtol=1e-5)
        assert ours.argmax() == theirs.argmax()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 20, 0.9, 3)], ids=str)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_cycle_verifies_the_drafts_of_its_propose_pass(name, kind, sampling):
    backend, ids = native(name, kind), prompt(name, 30)
    found, asked = [], Asked(0, sampling)
    for whole in (True, False):
        backend.reset()
        anchor, history = backend.prefill(ids).argmax()[0], []
        for _ in range(5):
            position = backend.length() + 1
            if whole:
                cycle = backend.cycle(replace(asked, anchor=anchor))
                drafts = backend.gpu.read(backend.loaded.common.buffers.ids, (backend.shape.verify_rows,), np.int32)
                tokens = list(cycle.tokens)
                assert drafts[0] == anchor
                assert cycle.drafts == backend.shape.drafts
                drafts = drafts[1:].tolist()
            else:
                rows = backend.propose(anchor)
                drafts = rows.choose(sampling, position, [None] * len(rows)) if sampling.temperature else rows.argmax()
                rows = backend.verify([anchor, *drafts])
                choices = rows.choose(sampling, position, [None] * len(rows))
                n = next((i for i, d in enumerate(drafts) if d != choices[i]), len(drafts))
                tokens = choices[: n + 1]
            backend.commit(len(tokens))
            history.append((drafts, tokens))
            anchor = tokens[-1]
        found.append((history, backend.snapshot()))
    assert found[0][0] == found[1][0]
    assert same_bits(found[0][1], found[1][1])


@cache
def plain(name, kind, mode):
    backend, ids = native(name, kind), prompt(name, 21)
    backend.reset()
    tokens = generate(backend, ids, replace(OPTIONS[mode], speculative=False)).tokens
    return ids, tokens, backend.snapshot()


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_accept_length_and_adversary_leaves_tokens_and_state_of_plain_decoding(name, kind, mode):
    ids, tokens, state = plain(name, kind, mode)
    backend = native(name, kind)
    others = [oracle_until(right) for right in range(backend.shape.verify_rows)]
    others += drafters(1, 3, backend.shape.verify_rows).values()
    runs = [Adversary(backend, [*ids, *tokens], drafter) for drafter in others]
    for place in (backend, ByTurns(backend), ByTurns(backend, 3), *runs, ByTurns(runs[-1], 1)):
        backend.reset()
        found = generate(place, ids, OPTIONS[mode])
        assert found.tokens == tokens
        assert same_bits(backend.snapshot(), state)


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_answers_under_a_grammar_are_those_of_plain_decoding(name, kind, mode):
    backend, ids, found = native(name, kind), prompt(name, 25), []
    for speculative in (False, True):
        backend.reset()
        grammar = Rule(backend.shape.vocab_size)
        options = replace(OPTIONS[mode], speculative=speculative)
        result = generate(backend, ids, options, controls=Controls(constraint=Stepped(grammar)))
        assert grammar.path == list(result.tokens)
        found.append((result.tokens, backend.snapshot()))
    assert found[0][0] == found[1][0]
    assert same_bits(found[0][1], found[1][1])


@pytest.mark.parametrize(("name", "kind"), [("dense", "vanilla"), ("hybrid", "rnn")])
def test_unsure_drafts_are_not_verified(name, kind):
    backend, ids = native(name, kind), prompt(name, 30)
    backend.reset()
    anchor = backend.prefill(ids).argmax()[0]
    sure = backend.propose(anchor).confidence()
    state, counts = backend.snapshot(), set()
    for threshold in (0.0, *sorted(sure), 1.0):
        for drafts in (None, 3):
            backend.restore(state)
            cycle = backend.cycle(Asked(anchor, threshold=threshold, drafts=drafts))
            cut = next((i for i, value in enumerate(sure) if value < threshold), len(sure))
            assert cycle.drafts == min(cut, drafts or len(sure))
            counts.add(cycle.drafts)
            backend.commit(len(cycle.tokens))
            backend.restore(state)
            wanted = backend.verify([anchor]).argmax()
            assert cycle.tokens[:1] == tuple(wanted)
    assert {0, 3, len(sure)} <= counts


@pytest.mark.parametrize(("name", "kind"), HEADS[:2])
def test_nothing_is_allocated_after_load(name, kind):
    backend = native(name, kind)
    before = backend.gpu.allocations, torch.cuda.memory_allocated()
    for mode in OPTIONS.values():
        backend.reset()
        controls = Controls(constraint=Stepped(Rule(backend.shape.vocab_size)))
        generate(backend, prompt(name, 10), mode, controls=controls)
    assert (backend.gpu.allocations, torch.cuda.memory_allocated()) == before
