"""The walks of propose passes, against a transcription of the published formulas in float64."""

from dataclasses import replace
from itertools import product

import drafter_maths
import numpy as np
import pytest
import torch
from fakes import FakeRows

from edge_dflash.backends.reference.dense import grouped_conv
from edge_dflash.decode.backend import Asked
from edge_dflash.decode.cycle import drafted
from edge_dflash.decode.sampling import GREEDY, Sampling, choose, choose_row, pack
from edge_dflash.decode.walk import WalkRows
from edge_dflash.model import dflash2, dspark
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.ops import GroupedConv
from edge_dflash.model.specs import MarkovSpec, SelectorSpec

V, H, K, RANK, ANCHOR = 48, 24, 7, 8, 5
HOT = Sampling(temperature=1.5, top_k=20, seed=3)
HEADS = [
    SelectorSpec(RANK, 6),
    *(
        MarkovSpec(kind, RANK, None, judge)
        for kind in ("vanilla", "gated", "rnn")
        for judge in (None, "hidden", "markov")
    ),
]


def op(head):
    """The walk that the builder makes of a head, and the shapes of its weights."""
    g = GraphBuilder("propose", commits=False)
    hidden = g.embed("ids", "rows", V, H, "hidden")
    logits = g.linear(hidden, "head", V, "lm_head", "logits")
    (dflash2 if isinstance(head, SelectorSpec) else dspark).walk(g, hidden, logits, head)
    program = g.program(logits=logits)
    return program.walk, {name: program.weights[name].shape for name in program.walk.weights}


def case(head, seed=0):
    """A walk with random weights and rows: the rows, and what they were made of."""
    walk, shapes = op(head)
    rng = np.random.default_rng(seed)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    hidden, logits = (rng.standard_normal((K, n)).astype(np.float32) for n in (H, V))
    return WalkRows(walk, weights.__getitem__, hidden, logits, ANCHOR), walk, weights, hidden, logits


def truth(walk, weights, hidden, logits):
    """Tokens, candidates, scores, confidence by the transcription."""
    if isinstance(walk_rank := getattr(walk, "projection", None), str):
        found = drafter_maths.selector(
            hidden, logits, ANCHOR, walk.top_k, *(weights[n] for n in (walk_rank, walk.predecessor, walk.successor))
        )
        return (*found, [])
    parts = [weights[name] for name in (*(walk.mix or ()),)] or [None, None]
    judge = [weights[name] for name in (walk.judge or ())] or [None, None]
    tokens, scores, confidence = drafter_maths.markov(
        walk.kind, hidden, logits, ANCHOR, weights[walk.predecessor], weights[walk.successor], *parts, *judge
    )
    return tokens, [range(V)] * K, scores, confidence


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_a_greedy_walk_is_that_of_the_formulas(head, seed):
    rows, *made = case(head, seed)
    tokens, candidates, scores, confidence = truth(*made)
    assert rows.argmax() == tokens
    for (ids, found), wanted_ids, wanted in zip(rows.candidates(), candidates, scores, strict=True):
        assert list(ids) == list(wanted_ids)
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    np.testing.assert_allclose(rows.confidence(), confidence, atol=1e-6)
    assert len(rows.confidence()) == (K if getattr(head, "confidence", None) else 0)
    assert rows.argmax() != [int(i) for i in rows.base.argmax(-1)]  # the walk changes what is proposed


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_logits_are_the_scores_along_the_walk(head):
    rows, *_ = case(head)
    tokens, scores = rows.argmax(), rows.logits()
    assert scores.shape == (K, V)
    assert [int(i) for i in scores.argmax(-1)] == tokens
    allowed = head.top_k or V
    assert (np.isfinite(scores).sum(-1) == allowed).all()


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_a_sampled_walk_chooses_each_row_behind_what_was_chosen_before(head):
    rows, *_ = case(head)
    tokens = choose(rows, HOT, 100)
    assert tokens != rows.argmax()
    assert choose(rows, HOT, 100) == tokens  # by seed and position alone
    scores = rows.logits()
    assert [choose_row(scores[row], HOT, 100 + row) for row in range(K)] == tokens
    assert choose(rows, replace(HOT, seed=4), 100) != tokens


@pytest.mark.parametrize(("head", "row"), [*product(HEADS, range(K))], ids=str)
def test_a_row_asked_again_has_the_predecessor_that_it_had(head, row):
    rows, *_ = case(head)
    for sampling in (GREEDY, HOT):
        tokens, scores = choose(rows, sampling, 40), rows.logits()
        forbidden = np.arange(V) != tokens[row]
        (other,) = choose(rows, sampling, 40 + row, [pack(forbidden)], first=row)
        assert other == choose_row(scores[row], sampling, 40 + row, pack(forbidden))
        again = choose(rows, sampling, 40 + row + 1, [None] * (K - row - 1), first=row + 1)
        assert np.array_equal(rows.logits()[: row + 1], scores[: row + 1])
        assert len(again) == K - row - 1


def test_a_mask_that_leaves_no_candidate_is_answered_by_the_head():
    rows, _, _, _, logits = case(SelectorSpec(RANK, 4))
    rows.argmax()
    allowed = np.ones(V, np.bool_)
    allowed[rows.candidates()[2][0]] = False
    for sampling in (GREEDY, HOT):
        (token,) = choose(rows, sampling, 9, [pack(allowed)], first=2)
        assert allowed[token]
        assert token == choose_row(logits[2], sampling, 9, pack(allowed))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_walk_over_the_best_of_all_tokens_is_the_whole_walk(kind):
    whole, _, weights, hidden, logits = case(MarkovSpec(kind, RANK, None, "markov"), 2)
    for top_k in (V, 6):
        walk, _ = op(MarkovSpec(kind, RANK, top_k, "markov"))
        some = WalkRows(walk, weights.__getitem__, hidden, logits, ANCHOR)
        found = some.logits()
        if top_k == V:
            assert some.argmax() == whole.argmax()
            np.testing.assert_array_equal(found, whole.logits())
            assert some.confidence() == whole.confidence()
        best = np.sort(np.argsort(-logits, -1, kind="stable")[:, :top_k], -1)
        assert [list(ids) for ids, _ in some.candidates()] == best.tolist()


def test_ties():
    for head, wanted in ((SelectorSpec(RANK, 3), [9, 4]), (MarkovSpec("vanilla", RANK, None, None), [4, 4])):
        walk, shapes = op(head)
        weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        logits = np.zeros((2, V), np.float32)
        logits[0, 9], logits[0, 4] = 3, 2  # the walk will make them equal
        logits[1, [7, 4]] = 1
        projected = np.zeros((2, H), np.float32)
        if isinstance(head, SelectorSpec):
            projected[0, 0] = 1
            weights[walk.projection][0, 0] = weights[walk.predecessor][ANCHOR, 0] = weights[walk.successor][4, 0] = 1
        else:
            weights[walk.predecessor][ANCHOR, 0] = weights[walk.successor][4, 0] = 1
        rows = WalkRows(walk, weights.__getitem__, projected, logits, ANCHOR)
        assert rows.argmax() == wanted
        assert rows.logits()[0, 9] == rows.logits()[0, 4]


@pytest.mark.parametrize(
    ("confidence", "count"), [([0.9, 0.4, 0.8], 1), ([0.5, 0.5, 0.5], 3), ([0.1, 1, 1], 0), ([], 3)]
)
def test_drafts_end_before_the_first_that_is_unsure(confidence, count):
    rows = FakeRows(np.eye(3))
    rows.confidence = lambda: confidence
    assert drafted(Asked(0, threshold=0.5), rows, 1) == [0, 1, 2][:count]


@pytest.mark.parametrize(("side", "taps", "group"), [*product((0, 1), (1, 2, 3), (4, 8, 24))])
def test_a_grouped_convolution_is_that_of_the_formula(side, taps, group):
    rng = np.random.default_rng(taps)
    u, c, base = (rng.standard_normal(s).astype(np.float32) for s in ((8, H), (8, 2 * taps * H // group), (2, taps, H)))
    conv = GroupedConv(inputs=("u", "c"), output="y", base="base", side=side, taps=taps, group_size=group)
    found = grouped_conv(conv, *map(torch.from_numpy, (u, c, base))).numpy()
    np.testing.assert_allclose(found, drafter_maths.grouped_conv(u, c, base, side, taps, group), atol=1e-5)
    first = found[0] / u[0] - np.repeat(c[0].reshape(2, taps, -1)[side, 0], group)
    np.testing.assert_allclose(first, base[side, 0], atol=1e-3)  # row 0 has no row before it
    shorter = grouped_conv(conv, *map(torch.from_numpy, (u[:5], c[:5], base))).numpy()
    assert np.array_equal(shorter, found[:5])
    u[-1] += 1
    changed = grouped_conv(conv, *map(torch.from_numpy, (u, c, base))).numpy()
    assert np.array_equal(changed[:-1], found[:-1])
