"""Sessions that run by turns on a backend of several lanes: each cycle is in its session's lane."""

from dataclasses import replace

from fakes import SHAPE, FakeBackend

from edge_dflash.backends.host_cycle import host_cycle
from edge_dflash.decode.loop import decode, generate
from edge_dflash.decode.options import Options, admit
from edge_dflash.decode.session import SessionManager

OPTIONS = Options(max_new_tokens=12, draft_confidence=0.25)
PROMPTS = ((3, 1, 4), (1, 5, 9, 2))


class Lanes:
    """A backend of several lanes, each of which is a fake one; ``asked`` of its cycles are kept."""

    def __init__(self, count):
        self.shape, self.asked = replace(SHAPE, lanes=count), []
        self._lanes = [FakeBackend() for _ in range(count)]

    def __getattr__(self, name):
        def call(*arguments, lane=None):
            *arguments, lane = arguments if lane is None else (*arguments, lane)
            return getattr(self._lanes[lane], name)(*arguments)

        return call

    def cycle(self, asked):
        self.asked.append(asked)
        return host_cycle(self, asked)


def test_sessions_by_turns_have_the_tokens_that_they_have_alone():
    backend = Lanes(len(PROMPTS))
    manager, found = SessionManager(backend), [[] for _ in PROMPTS]
    runs = [decode(manager.open(), admit(SHAPE, prompt, OPTIONS)) for prompt in PROMPTS]
    for steps in zip(*runs, strict=True):
        for tokens, step in zip(found, steps, strict=True):
            tokens.extend(step.tokens)
    assert [tuple(tokens) for tokens in found] == [generate(FakeBackend(), p, OPTIONS).tokens for p in PROMPTS]
    assert {(one.lane, one.threshold) for one in backend.asked} == {(0, 0.25), (1, 0.25)}
