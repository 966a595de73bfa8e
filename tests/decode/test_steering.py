"""A grammar that gives up along the drafts, where plain decoding never comes, costs accept length and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import SHAPE, FakeBackend, Grammar, Stepped

from edge_dflash.decode.controls import Controls, Interrupted
from edge_dflash.decode.generation import generate, stream
from edge_dflash.decode.options import Options
from edge_dflash.errors import RequestError

PROMPT = (3, 1, 4)
OPTIONS = Options(max_new_tokens=20)


class Brittle(Grammar):
    """Allows everything below 60, and cannot go on after any token that is not of the wanted path."""

    def __init__(self, wanted, where):
        super().__init__()
        self.wanted, self.where, self.raised = wanted, where, 0  # where: the method that raises

    def _check(self, name, path):
        if name == self.where and list(path) != list(self.wanted[: len(path)]):
            self.raised += 1
            raise RequestError("the grammar cannot go on; make it simpler")

    def allowed(self):
        self._check("allowed", self.path)
        return np.arange(SHAPE.vocab_size) < 60

    def push(self, token):
        self._check("push", [*self.path, token])
        if token >= 60 or (self.where == "forced" and self.path != list(self.wanted[: len(self.path)])):
            return False  # and what is forced is asked for then
        self.path.append(token)
        return True

    def forced(self):
        self._check("forced", self.path)
        return ()


def wanted():
    return generate(
        FakeBackend(),
        PROMPT,
        replace(OPTIONS, speculative=False),
        controls=Controls(constraint=Stepped(Brittle((), None))),
    ).tokens


@pytest.mark.parametrize("where", ["allowed", "push", "forced"])
@pytest.mark.parametrize("right", range(SHAPE.block_size))
def test_a_grammar_that_gives_up_beside_the_plain_path_changes_nothing(where, right):
    plain = wanted()
    grammar = Brittle(plain, where)
    backend = FakeBackend(right=lambda position: right)
    result = generate(backend, PROMPT, OPTIONS, controls=Controls(constraint=Stepped(grammar)))
    assert result.tokens == plain
    assert grammar.path == list(plain)
    assert (grammar.raised > 0) == (right < SHAPE.block_size - 1)
    assert min(result.accept_lengths[:-1]) >= 1 + right


def test_a_grammar_that_gives_up_on_the_plain_path_fails_both_alike():
    plain = wanted()
    for speculative in (True, False):
        grammar, seen = Brittle((*plain[:9], 61), "push"), []
        controls, options = Controls(constraint=Stepped(grammar)), replace(OPTIONS, speculative=speculative)
        steps = stream(FakeBackend(), PROMPT, options, controls=controls)
        with pytest.raises(RequestError, match="cannot go on"):  # noqa: PT012
            for step in steps:
                seen += step.tokens
        assert tuple(seen) == plain[: len(seen)]
        assert len(seen) <= 9


@pytest.mark.parametrize("method", ["amend", "masks", "advance"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_step_that_is_interrupted_commits_nothing(method, call):
    calls = []

    class Constraint:
        def _called(self, name):
            calls.append(name)
            if name == method and calls.count(method) == call:
                raise Interrupted("cancelled")

        def amend(self, free, ask):
            self._called("amend")
            return list(free)

        def masks(self, drafts):
            self._called("masks")
            return [None] * (len(drafts) + 1)

        def advance(self, tokens):
            self._called("advance")

    backend = FakeBackend()
    done = generate(backend, (3, 1, 4), Options(max_new_tokens=20), controls=Controls(constraint=Constraint()))
    assert done.finish_reason == "cancelled"
    assert backend.length() == 3 + max(0, len(done.tokens) - 1)
