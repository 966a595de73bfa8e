"""Every accept length 0..K, forced by an adversarial drafter: tokens, log-probabilities and state as token by token."""

from dataclasses import replace
from functools import cache

import pytest
from fakes import FakeBackend
from golden_pairs import EXPERTS, NAMES, WALKS, golden, pair, same_bits
from pictures_support import mixed, picture
from verify_support import BACKENDS

from edge_dflash.checks.lossless import Adversary, oracle_until, verify_lossless
from edge_dflash.decode.backend import Cycle
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.generation import collect, generate, stream
from edge_dflash.decode.options import Options
from edge_dflash.decode.tree import branch, check_chain
from edge_dflash.errors import BackendError
from edge_dflash.pictures.pictured import Pictured

SAMPLED = Options(temperature=4.0, top_k=40, top_p=0.9, seed=7)
MODES = {"greedy": Options(), "sampled": SAMPLED}
CASES = [
    *((n, k, m) for n in NAMES for k, m in (("engine", "greedy"), ("engine", "sampled"), ("float32", "greedy"))),
    *((n, "float32", m) for n in WALKS for m in MODES),
    *((EXPERTS, k, m) for k in BACKENDS for m in MODES),
    ("vision", "engine", "greedy"),
]
SEEN = mixed([165, 27, 143], picture(0), [36, 105], picture(1), [165, 27, 143])


def run(backend, said, mode, **changes):
    """Tokens, accept lengths and log-probabilities of an answer of 19 tokens."""
    options = replace(MODES[mode], max_new_tokens=19, logprobs=4, **changes)
    steps = list(stream(backend, said.ids, options, pictures=said.pictures))
    found = collect(steps)
    return found.tokens, found.accept_lengths, [one for step in steps for one in step.logprobs]


@cache
def plain(name, kind, mode):
    """A prompt, its plain answer, and the state after a fresh run of it, one verified and committed row at a time."""
    backend = BACKENDS[kind](name)
    said = SEEN if name == "vision" else Pictured(golden(name)["p1.prompt"].tolist())
    tokens, _, logprobs = run(backend, said, mode, speculative=False)
    backend.reset()
    backend.prefill(said.ids, 0, said.sight(0, len(said.ids), lambda placed: backend.see(placed.picture)))
    for token in tokens[:-1]:
        backend.verify([token])
        backend.commit(1)
        backend.flush()
    return said, tokens, logprobs, backend.snapshot()


@pytest.mark.parametrize(("name", "kind", "mode"), CASES)
@pytest.mark.parametrize("right", range(8))
def test_every_accept_length_leaves_tokens_and_state_of_plain_decoding(name, kind, mode, right):
    said, tokens, logprobs, state = plain(name, kind, mode)
    backend = BACKENDS[kind](name)
    found = run(Adversary(backend, [*said.ids, *tokens], oracle_until(right)), said, mode)
    assert (found[0], found[2]) == (tokens, logprobs)
    assert set(found[1][:-1]) <= {right + 1}  # the budget may cut the last cycle
    assert len(found[1]) == -(-18 // (right + 1))
    assert same_bits(backend.snapshot(), state)


@pytest.mark.parametrize("name", NAMES)
def test_engine_and_float32_states_differ_so_equality_is_not_trivial(name):
    states = [plain(name, kind, "greedy")[3] for kind in BACKENDS]
    assert not same_bits(*states)
    assert any(array.any() for array in states[0].arrays.values())


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", [*WALKS, EXPERTS])
def test_speculative_is_plain_with_every_drafter(name, kind):
    """Each pair in both kinds; the answer to the long prompt ends in another tile of keys."""
    which = (0, 2)[([*WALKS, EXPERTS].index(name) + (kind == "engine")) % 2]
    prompt = golden(name)[f"p{which}.prompt"].tolist()
    result = verify_lossless(BACKENDS[kind](name), [prompt], max_new_tokens=28, sampled=SAMPLED)
    assert (result.differences, result.untried) == ((), ())
    assert set(range(1, pair(name).verify_rows + 1)) <= set(result.histogram["staircase"])


# trees ----------------------------------------------------------------------------------------------------------------

LAST = (-1, 0, 0, 2, 2, 4)  # where a row is followed by two, the last one is right
FIRST = (-1, 0, 0, 1, 1, 3, 2)  # the first one


class Trees(Delegate):
    """A backend that verifies a tree a cycle, one branch of which is the target's ``tokens``."""

    def __init__(self, backend, tokens, parents):
        super().__init__(backend)
        self.tokens, self.parents, self.paths = tokens, parents[: backend.shape.verify_rows], set()

    def cycle(self, asked):
        length, vocabulary = self.length(), self.shape.vocab_size
        parents, ids = self.parents if asked.drafting else (-1,), [asked.anchor]
        for row, parent in enumerate(parents[1:], 1):
            right = (self.tokens[length + len(branch(parents, row)) - 1 :] or [0])[0]
            others = parents[row + 1 :] if self.parents[3] == 2 else parents[1:row]
            ids.append((right + 1) % vocabulary if parent in others else right)
        choices, path = self.verify(ids, 0, parents).argmax(), [0]
        while following := [r for r, parent in enumerate(parents) if parent == path[-1] and ids[r] == choices[parent]]:
            path.append(following[0])
        self.paths.add(tuple(path))
        tokens = (*(ids[row] for row in path[1:]), choices[path[-1]])
        return Cycle(tokens, len(path) - 1, len(ids) - 1, 0.0, 0.0, path=tuple(path))


@pytest.mark.parametrize(("tree", "path"), [(LAST, (0, 2, 4, 5)), (FIRST, (0, 1, 3, 5))])
@pytest.mark.parametrize("name", NAMES)
def test_a_path_of_a_tree_leaves_tokens_and_state_of_plain_decoding(name, tree, path):
    said, tokens, _, state = plain(name, "engine", "greedy")
    trees = Trees(BACKENDS["engine"](name), [*said.ids, *tokens], tree)
    assert generate(trees, said.ids, Options(max_new_tokens=19)).tokens == tokens
    assert path in trees.paths
    assert same_bits(trees.snapshot(), state)


def test_the_loop_commits_the_path_of_a_cycle():
    options, inner = Options(max_new_tokens=18), FakeBackend()
    plain = generate(FakeBackend(), (3, 1), options)
    trees = Trees(inner, [3, 1, *plain.tokens], LAST)
    assert generate(trees, (3, 1), options).tokens == plain.tokens
    assert trees.paths == {(0, 2, 3)}
    assert inner.committed == [3, 1, *plain.tokens[:-1]]


@pytest.mark.parametrize("engine", [lambda: BACKENDS["engine"](NAMES[0]), FakeBackend])
def test_rows_that_do_not_follow_each_other_are_not_committed(engine):
    backend = engine()
    backend.prefill([3, 1])
    for rows, path, message in (
        (3, None, "row 2 does not follow row 1"),
        (2, (0, 3), "row 3 does not follow row 0"),
        (1, (1,), "row 1 does not follow row -1"),
        (3, (0, 2), "3 rows of"),
        (5, None, "had 4 rows"),
    ):
        backend.verify([1, 2, 3, 4], 0, (-1, 0, 0, 2))
        with pytest.raises(BackendError, match=message):
            backend.commit(rows, 0, path)
    backend.verify([1, 2, 3])
    backend.commit(2, 0, (0, 1, 2))
    assert backend.length() == 4


@pytest.mark.parametrize("parents", [(0, 0, 0), (-1, 1, 0), (-1, 0), (-1, -1, 0), (-1, 0, 2)])
def test_what_is_no_tree_is_refused(parents):
    backend = BACKENDS["engine"](NAMES[0])
    backend.prefill([3, 1])
    with pytest.raises(BackendError, match=r"parents|row 0"):
        backend.verify([1, 2, 3], 0, parents)


def test_a_backend_of_chains_names_another_tree():
    check_chain((-1, 0, 1), "native")
    with pytest.raises(BackendError, match=r"native backend verifies chains.*\[-1, 0, 0\]"):
        check_chain((-1, 0, 0), "native")
