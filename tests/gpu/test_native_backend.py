"""The native backend: close to the reference in every format, and bit-equal to itself at every accept length."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from fakes import Grammar, Stepped
from golden_pairs import same_bits
from native_backend_support import ENGINE, WIDE_KV, Nearness, native, prompt

from edge_dflash.bench.device import force, profile
from edge_dflash.checks.lossless import Adversary, ByTurns, drafters, oracle_until
from edge_dflash.decode.backend import Asked
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.generation import generate, stream
from edge_dflash.decode.options import Options
from edge_dflash.decode.sampling import Sampling, choose
from edge_dflash.errors import BackendError

pytestmark = pytest.mark.gpu

PAIRS = ("demo", "dense", "hybrid", "experts", "few")
KINDS = ("bf16", "fp8", "nvfp4", "mixed")
EXACT = (
    ("demo", "nvfp4"),
    ("demo", "bf16"),
    ("dense", "mixed"),
    ("hybrid", "nvfp4"),
    ("experts", "mixed"),
    ("few", "nvfp4"),
)
NEW = 40
OPTIONS = {
    "greedy": Options(max_new_tokens=NEW),
    "sampled": Options(max_new_tokens=NEW, temperature=2.0, top_k=40, top_p=0.9, seed=7),
}


class HostRows:
    """Rows that leave the choice to the host."""

    def __init__(self, rows):
        self.logits, self.argmax, self._rows = rows.logits, rows.argmax, rows

    def __len__(self):
        return len(self._rows)


class HostChoice(Delegate):
    """The backend without choices on the device."""

    def prefill(self, ids, lane=0, sight=None):
        return HostRows(super().prefill(ids, lane, sight))

    def propose(self, anchor, lane=0):
        return HostRows(super().propose(anchor, lane))

    def verify(self, ids, lane=0, parents=None):
        return HostRows(super().verify(ids, lane))


class Rule(Grammar):
    """A grammar whose next tokens hang on the tokens before: half of them, any, one that is forced, or a few."""

    def __init__(self, vocabulary):
        super().__init__()
        self._size = vocabulary

    def allowed(self):
        ids, at = np.arange(self._size), sum(self.path) + len(self.path)
        match at % 5:
            case 0:
                return None
            case 1:
                return ids == at % self._size
            case 2:
                return ids % 97 == at % 97
            case _:
                return (ids + at) % 2 == 0

    def forced(self):
        mask = self.allowed()
        return () if mask is None or mask.sum() > 1 else (int(mask.argmax()),)


PROMPTS = 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PAIRS)
def test_every_pass_is_close_to_the_reference(name, kind):
    near = Nearness(name, kind, ENGINE)
    for seed in range(PROMPTS):
        near.reset()
        near("prefill", prompt(name, 70, seed=seed))  # more than one chunk
        for cycle in range(2):
            block = prompt(name, near.ours.shape.block_size, seed=100 * seed + cycle + 1)
            near("propose", block[0])
            near("verify", block)
            near.commit(3 * cycle % len(block))
        assert near.ours.length() == near.theirs.length()
    near.judge()


@pytest.mark.parametrize("both", [False, True], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [None, 9, 24])
def test_drafts_are_close_to_the_reference_with_every_mask(both, window):
    near = Nearness(f"dense {'bidirectional' if both else 'causal'} {window}", "bf16", ENGINE)
    for seed in range(PROMPTS):
        near.reset()
        near("prefill", prompt("dense", 70, seed=seed))
        near("propose", prompt("dense", 1, seed=100 + seed)[0])
    near.judge()


@pytest.mark.parametrize("name", PAIRS)
def test_wide_kv_is_close_to_the_reference(name):
    near = Nearness(name, "bf16", WIDE_KV)
    for seed in range(PROMPTS):
        near.reset()
        near("prefill", prompt(name, 70, seed=seed))
        near("verify", prompt(name, 5, seed=seed + 1))
    near.judge()


@cache
def plain(name, kind, mode):
    """Prompt, plain tokens, the logits behind each, and the state token by token."""
    backend, ids = native(name, kind), prompt(name, 21)
    backend.reset()
    tokens = generate(backend, ids, replace(OPTIONS[mode], speculative=False)).tokens
    backend.reset()
    rows = [backend.prefill(ids).logits()[0]]
    for token in tokens[:-1]:
        rows.append(backend.verify([token]).logits()[0])
        backend.commit(1)
        backend.flush()
    return ids, tokens, np.stack(rows), backend.snapshot()


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_every_accept_length_leaves_tokens_and_state_of_plain_decoding(name, kind, mode):
    ids, tokens, _, state = plain(name, kind, mode)
    backend = native(name, kind)
    for right in range(backend.shape.block_size):
        backend.reset()
        found = generate(Adversary(backend, [*ids, *tokens], oracle_until(right)), ids, OPTIONS[mode])
        assert found.tokens == tokens
        assert set(found.accept_lengths[:-1]) <= {right + 1}
        assert same_bits(backend.snapshot(), state)


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize(
    ("name", "kind"), [("demo", "fp8"), ("dense", "nvfp4"), ("hybrid", "mixed"), ("experts", "nvfp4"), ("few", "fp8")]
)
def test_adversaries_and_the_own_drafter_leave_the_plain_tokens_and_state(name, kind, mode):
    ids, tokens, _, state = plain(name, kind, mode)
    backend = native(name, kind)
    for run in range(3):
        for drafter in drafters(run, 3, backend.shape.block_size).values():
            backend.reset()
            assert generate(Adversary(backend, [*ids, *tokens], drafter), ids, OPTIONS[mode]).tokens == tokens
            assert same_bits(backend.snapshot(), state)
            backend.reset()
            turns = ByTurns(Adversary(backend, [*ids, *tokens], drafter), run)
            assert generate(turns, ids, OPTIONS[mode]).tokens == tokens
            assert same_bits(backend.snapshot(), state)
    for drafting in (backend, *(ByTurns(backend, start) for start in (1, 4))):  # whole cycles of every number of drafts
        backend.reset()
        assert generate(drafting, ids, OPTIONS[mode]).tokens == tokens
        assert same_bits(backend.snapshot(), state)


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_logits_of_a_row_are_those_of_a_pass_with_that_row_alone(name, kind):
    ids, tokens, rows, _ = plain(name, kind, "greedy")
    backend = native(name, kind)
    size = backend.shape.block_size
    for count in range(1, size + 1):
        backend.reset()
        backend.prefill(ids)
        found = backend.verify(tokens[:count]).logits()
        assert found.tobytes() == rows[1 : count + 1].tobytes()
        backend.commit(count // 2)
        again = backend.verify(tokens[count // 2 : count // 2 + size]).logits()
        assert again.tobytes() == rows[count // 2 + 1 : count // 2 + 1 + len(again)].tobytes()


@pytest.mark.parametrize("name", PAIRS)
def test_a_prompt_in_any_pieces_gives_the_same_bits(name):
    backend, ids = native(name), prompt(name, 90)
    states, random = [], np.random.default_rng(1)
    cuts = [(), (1,), (64,), (65,), (33,), *(random.choice(range(1, 90), 1 + i, replace=False) for i in range(8))]
    for ends in cuts:
        backend.reset()
        for first, last in pairwise((0, *sorted(ends), 90)):
            last = backend.prefill(ids[first:last]).logits()
        states.append((last.tobytes(), backend.snapshot()))
    assert all(logits == states[0][0] and same_bits(state, states[0][1]) for logits, state in states[1:])


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 20, 0.9, 3), Sampling(2.5, seed=2**63)], ids=str)
def test_a_cycle_on_the_device_is_propose_verify_accept_and_commit(name, sampling):
    backend, ids = native(name), prompt(name, 30)
    found = []
    for whole in (True, False):
        backend.reset()
        anchor, history = backend.prefill(ids).argmax()[0], []
        for cycle in range(6):
            if whole:
                tokens = list(backend.cycle(Asked(anchor, sampling)).tokens)
            else:
                drafts = choose(HostRows(backend.propose(anchor)), sampling, backend.length() + 1)
                choices = choose(HostRows(backend.verify([anchor, *drafts])), sampling, backend.length() + 1)
                n = next((i for i, d in enumerate(drafts) if d != choices[i]), len(drafts))
                tokens = choices[: n + 1]
            keep = max(1, len(tokens) - cycle % 2)  # a consumer may take fewer
            backend.commit(keep)
            history.append(tokens)
            anchor = tokens[keep - 1]
        found.append((history, backend.snapshot()))
    assert found[0][0] == found[1][0]
    assert same_bits(found[0][1], found[1][1])


@pytest.mark.parametrize("drafts", [None, 4, 0])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 20, 0.9, 3)], ids=str)
def test_a_cycle_leaves_the_logits_of_its_verify_bit_for_bit(name, sampling, drafts):
    backend, ids = native(name), prompt(name, 30)
    backend.reset()
    anchor = backend.prefill(ids).argmax()[0]
    for _ in range(6):
        before = backend.snapshot()
        quick = backend.cycle(Asked(anchor, sampling, drafts=drafts))
        backend.restore(before)
        cycle = backend.cycle(Asked(anchor, sampling, drafts=drafts, logits=True))
        left = cycle.logits()
        assert (quick.tokens, quick.logits) == (cycle.tokens, None)
        assert left.shape == (len(cycle.tokens), backend.shape.vocab_size)
        backend.restore(before)
        with pytest.raises(BackendError, match="replaced by a later pass"):
            cycle.logits()
        backend.propose(anchor)
        rows = backend.verify([anchor, *cycle.tokens[:-1]])
        assert rows.logits().tobytes() == left.tobytes()
        backend.commit(len(cycle.tokens))
        anchor = cycle.tokens[-1]


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("name", PAIRS)
def test_log_probabilities_are_those_of_plain_decoding_at_every_accept_length(name, constrained, mode):
    backend, ids, options = native(name), prompt(name, 25), replace(OPTIONS[mode], logprobs=5)

    def run(place, **how):
        place.reset()
        controls = Controls(constraint=Stepped(Rule(place.shape.vocab_size)) if constrained else None)
        steps = list(stream(place, ids, replace(options, **how), controls=controls))
        assert all(len(step.logprobs) == len(step.tokens) for step in steps)
        return [one for step in steps for one in step.logprobs]

    plain = run(backend, speculative=False)
    assert run(backend) == plain
    sequence = [*ids, *(one.token for one in plain)]
    for name, drafter in drafters(0, 1, backend.shape.block_size).items():
        assert run(Adversary(backend, sequence, drafter)) == plain, name


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("name", PAIRS)
def test_answers_under_a_grammar_are_those_of_plain_decoding_and_of_choices_on_the_host(name, mode):
    backend, ids = native(name), prompt(name, 25)
    found = []
    for place, speculative in ((backend, True), (backend, False), (HostChoice(backend), True)):
        place.reset()
        grammar = Rule(place.shape.vocab_size)
        result = generate(
            place, ids, replace(OPTIONS[mode], speculative=speculative), controls=Controls(constraint=Stepped(grammar))
        )
        assert grammar.path == list(result.tokens)
        found.append((result.tokens, place.snapshot()))
    assert [tokens for tokens, _ in found[1:]] == [found[0][0]] * 2
    assert all(same_bits(state, found[0][1]) for _, state in found[1:])


@pytest.mark.parametrize("mode", OPTIONS)
def test_choices_on_the_device_are_those_of_the_host(mode):
    backend, ids = native("demo"), prompt("demo", 12)
    found = []
    for place, speculative in ((backend, True), (backend, False), (HostChoice(backend), False)):
        place.reset()
        found.append(generate(place, ids, replace(OPTIONS[mode], speculative=speculative)).tokens)
    assert found[0] == found[1] == found[2]


def test_a_cycle_that_is_not_committed_leaves_nothing():
    backend, ids = native("demo"), prompt("demo", 30)
    states = []
    for dropped in (0, 1):
        backend.reset()
        anchor = backend.prefill(ids).argmax()[0]
        backend.cycle(Asked(anchor))
        backend.commit(1)
        for _ in range(dropped):
            backend.cycle(Asked(anchor))
        states.append(backend.snapshot())
    assert same_bits(*states)


def test_nothing_is_allocated_after_load():
    backend = native("demo")
    before = backend.gpu.allocations, torch.cuda.memory_allocated()
    for mode in OPTIONS.values():
        backend.reset()
        generate(backend, prompt("demo", 100), mode)
        backend.reset()
        generate(backend, prompt("demo", 10), replace(mode, speculative=False))
        backend.reset()
        generate(
            backend, prompt("demo", 10), mode, controls=Controls(constraint=Stepped(Rule(backend.shape.vocab_size)))
        )
    assert (backend.gpu.allocations, torch.cuda.memory_allocated()) == before


@pytest.mark.parametrize("name", PAIRS)
def test_a_restored_snapshot_goes_on_with_the_same_bits(name):
    backend, ids = native(name), prompt(name, 40)
    backend.reset()
    backend.prefill(ids)
    for token in ids[:3]:
        backend.verify([token, token + 1])
        backend.commit(2)
    saved = backend.snapshot()
    wanted = backend.verify(ids[:4]).logits(), backend.propose(ids[0]).logits()
    backend.reset()
    backend.prefill(ids[:7])
    backend.restore(saved)
    assert backend.length() == saved.length
    found = backend.verify(ids[:4]).logits(), backend.propose(ids[0]).logits()
    assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted]
    assert same_bits(backend.snapshot(), saved)


def test_what_cannot_be_done_is_refused_and_changes_nothing():
    backend = native("demo")
    backend.reset()
    backend.prefill(prompt("demo", 20))
    before = backend.snapshot()
    with pytest.raises(BackendError, match="no verify is open"):
        backend.commit(1)
    with pytest.raises(BackendError, match="verify takes 1 to 16"):
        backend.verify([1] * 17)
    with pytest.raises(BackendError, match="token id 1024 is outside"):
        backend.verify([1024])
    with pytest.raises(BackendError, match="the context holds 256"):
        backend.prefill([1] * 237)
    rows = backend.verify([1, 2])
    with pytest.raises(BackendError, match="had 2 rows"):
        backend.commit(3)
    backend.propose(3)
    with pytest.raises(BackendError, match="replaced by a later pass"):
        rows.logits()
    with pytest.raises(BackendError, match="replaced by a later pass"):
        rows.choose(Sampling(1.0), 0, [None])
    with pytest.raises(BackendError, match="no verify is open"):
        backend.commit(1)
    other = native("dense")
    with pytest.raises(BackendError, match="another pair"):
        other.restore(before)
    assert same_bits(backend.snapshot(), before)


def test_the_context_can_be_filled_to_the_last_row():
    backend = native("demo")
    backend.reset()
    ids = prompt("demo", 256 - 16)
    generation = generate(backend, ids[:200], Options())
    assert generation.finish_reason in ("length", "context")
    backend.reset()
    backend.prefill(prompt("demo", 256))
    with pytest.raises(BackendError, match="do not fit the context"):
        backend.verify([1])


def test_a_forced_pattern_accepts_as_told():
    backend = native("demo")
    backend.reset()
    anchor = backend.prefill(prompt("demo", 20)).argmax()[0]
    force(backend, [3, 0, 15])
    try:
        found = []
        for _ in range(6):
            cycle = backend.cycle(Asked(anchor))
            backend.commit(len(cycle.tokens))
            found.append(cycle.accepted)
            anchor = cycle.tokens[-1]
    finally:
        force(backend, None)
    assert sorted(found) == [0, 0, 3, 3, 15, 15]
    assert backend.length() == 20 + 6 + 36


def test_the_profile_names_every_step_of_a_cycle():
    backend = native("demo", "nvfp4", ENGINE)
    backend.reset()
    backend.prefill(prompt("demo", 20))
    times = profile(backend)
    assert sum("lm_head" in t.name for t in times) == 2
    assert sum("GatedDelta" in t.name for t in times) == 6
    assert all(t.seconds >= 0 for t in times)
