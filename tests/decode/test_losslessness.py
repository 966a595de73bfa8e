"""Every accept length 0..B-1, forced by an adversarial drafter: same tokens, same state bits as token by token."""

from dataclasses import replace
from functools import cache

import pytest
from fakes import SHAPE, FakeBackend
from golden_pairs import NAMES, golden, same_bits
from verify_support import BACKENDS

from edge_dflash.checks.lossless import Adversary, oracle_until
from edge_dflash.decode.backend import Cycle
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.loop import generate
from edge_dflash.decode.options import Options
from edge_dflash.decode.tree import check_chain
from edge_dflash.errors import BackendError

OPTIONS = {
    "greedy": Options(max_new_tokens=19),
    "sampled": Options(max_new_tokens=19, temperature=4.0, top_k=40, top_p=0.9, seed=7),
}
CASES = [(n, k, m) for n in NAMES for k, m in (("engine", "greedy"), ("engine", "sampled"), ("float32", "greedy"))]


@cache
def plain(name, kind, mode):
    """Plain tokens, and the state after a fresh run of them, one verified and committed row at a time."""
    backend, prompt = BACKENDS[kind](name), golden(name)["p1.prompt"].tolist()
    tokens = generate(backend, prompt, replace(OPTIONS[mode], speculative=False)).tokens
    backend.reset()
    backend.prefill(prompt)
    for token in tokens[:-1]:
        backend.verify([token])
        backend.commit(1)
        backend.flush()
    return prompt, tokens, backend.snapshot()


@pytest.mark.parametrize(("name", "kind", "mode"), CASES)
@pytest.mark.parametrize("right", range(8))
def test_every_accept_length_leaves_tokens_and_state_of_plain_decoding(name, kind, mode, right):
    prompt, tokens, state = plain(name, kind, mode)
    backend = BACKENDS[kind](name)
    found = generate(Adversary(backend, [*prompt, *tokens], oracle_until(right)), prompt, OPTIONS[mode])
    assert found.tokens == tokens
    assert set(found.accept_lengths[:-1]) <= {right + 1}  # the budget may cut the last cycle
    assert len(found.accept_lengths) == -(-18 // (right + 1))
    assert same_bits(backend.snapshot(), state)


@pytest.mark.parametrize("name", NAMES)
def test_engine_and_float32_states_differ_so_equality_is_not_trivial(name):
    states = [plain(name, kind, "greedy")[2] for kind in BACKENDS]
    assert not same_bits(*states)
    assert any(array.any() for array in states[0].arrays.values())


# trees ----------------------------------------------------------------------------------------------------------------

TREE = (-1, 0, 0, 2, 2, 4)  # two drafts for the first position, two behind the second one, one behind the last


class Trees(Delegate):
    """A backend that verifies a tree a cycle, of which the target's ``tokens`` are some branch as far as it goes."""

    def __init__(self, backend, tokens, parents):
        super().__init__(backend)
        self.tokens, self.parents, self.paths = tokens, parents, set()

    def cycle(self, asked):
        length, shape = self.length(), self.shape
        parents = self.parents[: shape.verify_rows] if asked.drafting else (-1,)
        ids = [asked.anchor]
        for row, parent in enumerate(parents[1:], 1):
            depth = 1 if parent == 0 else 2 if parents[parent] == 0 else 3
            right = (self.tokens[length + depth :] or [0])[0]
            only = row + 1 == len(parents) or parent not in parents[row + 1 :]  # the last child of its parent
            ids.append(right if only else (right + 1) % shape.vocab_size)
        choices, path = self.verify(ids, 0, parents).argmax(), [0]
        while children := [
            row for row, parent in enumerate(parents) if parent == path[-1] and ids[row] == choices[path[-1]]
        ]:
            path.append(children[0])
        self.paths.add(tuple(path))
        tokens = (*(ids[row] for row in path[1:]), choices[path[-1]])
        return Cycle(tokens, len(path) - 1, len(ids) - 1, 0.0, 0.0, path=tuple(path))


@pytest.mark.parametrize("name", NAMES)
def test_a_path_of_a_tree_leaves_tokens_and_state_of_plain_decoding(name):
    prompt, tokens, state = plain(name, "engine", "greedy")
    trees = Trees(BACKENDS["engine"](name), [*prompt, *tokens], TREE)
    assert generate(trees, prompt, OPTIONS["greedy"]).tokens == tokens
    assert (0, 2, 4, 5)[: trees.shape.verify_rows] in trees.paths
    assert same_bits(trees.snapshot(), state)


def test_the_loop_commits_the_path_of_a_cycle():
    options = Options(max_new_tokens=18)
    plain = generate(FakeBackend(), (3, 1), options)
    inner = FakeBackend()
    trees = Trees(inner, [3, 1, *plain.tokens], TREE[: SHAPE.verify_rows])
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
