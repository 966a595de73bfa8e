"""Drafters with a walk never change what is decoded, and are compared with their goldens."""

from dataclasses import replace

import drafter_maths
import numpy as np
import pytest
from fakes import Grammar, Stepped
from golden_pairs import WALKS, golden, pair, programs, store
from verify_support import exact

from edge_dflash.bench.golden import check_golden
from edge_dflash.checks.lossless import Adversary, drafters, oracle_until
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.cycle import host_cycle
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.model.ops import SelectorWalk
from edge_dflash.model.program import PairPrograms

SAMPLED = Options(temperature=4.0, top_k=40, top_p=0.9, seed=7)


def prompts(name, count=3):
    return [golden(name)[f"p{i}.prompt"].tolist() for i in range(count)]


class Forced(Grammar):
    """A grammar of classes: the token at step i is i modulo 3, and every fifth one is forced."""

    def allowed(self):
        forced = self.forced()
        return np.arange(512) == forced[0] if forced else np.arange(512) % 3 == len(self.path) % 3

    def forced(self):
        return (300 + len(self.path) % 3,) if len(self.path) % 5 == 4 else ()


@pytest.mark.parametrize("mode", [Options(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", WALKS)
def test_a_grammar_changes_nothing_either(name, mode):
    backend, prompt, options = exact(name), prompts(name)[0], replace(mode, max_new_tokens=24)

    def run(drafting, **changes):
        backend.reset()
        return generate(drafting, prompt, replace(options, **changes), controls=Controls(constraint=Stepped(Forced())))

    plain = run(backend, speculative=False).tokens
    assert [token % 3 for token in plain] == [i % 3 for i in range(24)]
    own = run(backend)
    assert own.tokens == plain
    assert max(own.accept_lengths) > 1
    rights = range(int(mode == SAMPLED), 8, 2)  # half of the accept lengths in each mode
    for drafter in (*drafters(1, 2, backend.shape.verify_rows).values(), *map(oracle_until, rights)):
        assert run(Adversary(backend, [*prompt, *plain], drafter)).tokens == plain


class Unsure(Delegate):
    """Verifies only the drafts before the first that the drafter is less sure of than ``threshold``."""

    def __init__(self, backend, threshold):
        super().__init__(backend)
        self.threshold, self.proposed = threshold, []

    def cycle(self, asked):
        return host_cycle(self, replace(asked, threshold=self.threshold))

    def verify(self, ids, lane=0, parents=None):
        self.proposed.append(len(ids) - 1)
        return super().verify(ids, lane)


@pytest.mark.parametrize("mode", [Options(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", WALKS)
def test_a_threshold_changes_how_many_drafts_are_verified_and_no_token(name, mode):
    backend, prompt, options = exact(name), prompts(name)[0], replace(mode, max_new_tokens=24)
    plain = generate(backend, prompt, replace(options, speculative=False)).tokens
    confident = getattr(pair(name).drafter.head, "confidence", None) is not None
    given = float(golden(name).get("p0.threshold", np.array([0.5]))[0])
    for threshold, wanted in ((0.0, {7}), (given, set(range(8))), (1.1, {0})):
        backend.reset()
        unsure = Unsure(backend, threshold)
        assert generate(unsure, prompt, options).tokens == plain
        assert set(unsure.proposed) <= (wanted if confident else {7})
        if mode == Options() and threshold == given:
            assert (len(set(unsure.proposed)) > 1) == confident


def failing(report):
    return {result.key.split(".", 1)[1] for result in report.failures}


@pytest.mark.parametrize("name", WALKS)
def test_rows_read_by_the_other_rule_are_found(name):
    spec = pair(name)
    keys = {key: value for key, value in golden(name).items() if key.startswith("p0.") and "short" not in key}
    other = replace(spec, drafter=replace(spec.drafter, anchor_drafts=not spec.drafter.anchor_drafts))
    assert {"cycle_accepted", "cycle_draft_tokens"} <= failing(check_golden(other, store(name), keys))


def without(name, role):
    """Programs of a pair whose propose pass lacks one part."""
    whole = programs(name)
    ops = tuple(role(op) for op in whole.propose.ops)
    return PairPrograms(whole.prefill, whole.verify, replace(whole.propose, ops=tuple(op for op in ops if op)))


def dropped(field, value):
    return lambda op: replace(op, **{field: value}) if hasattr(op, field) else op


def no_walk(op):
    return None if op.output == "walk" else op


FAULTS = [
    ("qwen3_5-dflash2", no_walk, "cycle_draft_tokens"),
    ("qwen3_5-dflash2", dropped("side", 0), "cycle0_conv.0.attention.after"),
    ("qwen3_5-dflash2", dropped("top_k", 4), "cycle_candidates"),
    *((name, no_walk, "cycle_draft_tokens") for name in WALKS[:3]),
    ("qwen3-dspark-vanilla", dropped("top_k", 1), "cycle_draft_tokens"),
]


@pytest.mark.parametrize(("name", "fault", "key"), FAULTS)
def test_a_part_that_is_ignored_fails_its_golden(name, fault, key):
    keys = {k: v for k, v in golden(name).items() if k.startswith("p0.") and "short" not in k}
    report = check_golden(pair(name), store(name), keys, without(name, fault))
    assert not report.ok
    assert key in failing(report) or f"p0.{key}" in report.unknown


def wide(name, weight):
    return store(name).get(weight).float32()


@pytest.mark.parametrize("prompt", ["p0", "p1", "p2"])
@pytest.mark.parametrize("name", WALKS)
def test_the_transcription_makes_the_golden_walk_of_the_golden_rows(name, prompt):
    given = {key.split(".", 1)[1]: value for key, value in golden(name).items() if key.startswith(f"{prompt}.")}
    walk, anchor, hidden = programs(name).propose.walk, int(given["greedy_tokens"][0]), given["cycle0_draft_hidden"]
    if isinstance(walk, SelectorWalk):
        tables = (wide(name, weight) for weight in walk.weights)
        tokens, ids, scores = drafter_maths.selector(
            hidden[1:], given["cycle_draft_logits"][0], anchor, walk.top_k, *tables
        )
        assert [sorted(row) for row in ids] == [sorted(row) for row in given["cycle_candidates"][0].tolist()]
        np.testing.assert_allclose(np.sort(scores, -1), np.sort(given["cycle_scores"][0], -1), atol=1e-4)
    else:
        mix, judge = ([wide(name, weight) for weight in part or ()] for part in (walk.mix, walk.judge))
        tokens, scores, confidence = drafter_maths.markov(
            walk.kind,
            hidden,
            given["cycle0_base_logits"],
            anchor,
            wide(name, walk.predecessor),
            wide(name, walk.successor),
            *(mix or (None, None)),
            *judge,
        )
        np.testing.assert_allclose(scores, given["cycle_draft_logits"][0], atol=1e-4)
        np.testing.assert_allclose(confidence, given.get("cycle_confidence", [[]])[0], atol=1e-5)
    assert tokens == given["cycle_draft_tokens"][0].tolist()


@pytest.mark.parametrize("prefix", ["", "short_"])
def test_the_transcription_makes_the_golden_convolution_of_the_first_layer(prefix):
    name = WALKS[3]
    spec, given = pair(name).drafter, golden(name)
    wanted = given[f"p0.{prefix}cycle0_conv.0.attention.before"]
    block = [int(given["p0.greedy_tokens"][0])] + [spec.mask_token_id] * (len(wanted) - 1)
    x = wide(name, "target.embed_tokens")[block].astype(np.float64)
    norm = wide(name, "drafter.layers.0.input_layernorm")
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.rms_norm_eps) * norm
    c = h @ wide(name, "drafter.layers.0.attention_conv.kernel_projection").T.astype(np.float64)
    base = wide(name, "drafter.layers.0.attention_conv.base_kernel")
    found = drafter_maths.grouped_conv(h, c, base, 0, spec.conv.taps, spec.conv.group_size)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
