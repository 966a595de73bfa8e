"""Random mixes of requests that share the passes of one backend, and each of them alone."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from golden_pairs import ENGINE, backend, golden, same_bits
from pictures_support import mixed, picture
from session_support import state_of

from edge_dflash.decode.backend import Asked
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.generation import decode
from edge_dflash.decode.loop import decode_steps, resume
from edge_dflash.decode.options import Options, admit
from edge_dflash.decode.session import SessionManager
from edge_dflash.decode.steering import GivenDrafts
from edge_dflash.decode.store import PrefixStore
from edge_dflash.pictures.pictured import Pictured

LANES = 4
SEES = "vision"
PARTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5], *map(picture, range(3))]


class Forced(Delegate):
    """A backend whose cycles verify some of the drafts as they are, and others behind them."""

    def cycle(self, asked):
        if asked.drafts == 0 or asked.sampling.temperature:
            return self._backend.cycle(asked)
        rows, position = self._backend.propose(asked.anchor, asked.lane), self.length(asked.lane) + 1
        drafts = rows.argmax()
        right = random.Random(position).randrange(len(drafts) + 1)
        drafts[right:] = [(draft + 1) % self.shape.vocab_size for draft in drafts[right:]]
        return self._backend.cycle(replace(asked, steering=GivenDrafts(drafts)))


@cache
def alone(name, prompt, options, steps):
    """Tokens, accept lengths and state of a request on a backend of one lane, after so many steps with tokens."""
    lane = Forced(backend(name, ENGINE, prefill_chunk=16))
    session = SessionManager(lane).open()
    run, made = decode(session, admit(lane.shape, prompt.ids, options, pictures=prompt.pictures)), []
    for step in run:
        made.append(step)
        if sum(bool(one.tokens) for one in made) == steps:
            break
    run.close()
    return [(step.tokens, step.accepted) for step in made if step.tokens], state_of(session).snapshot


class Mix:
    """Requests that come and go as a seed says, on a backend of four lanes, like the worker runs them."""

    def __init__(self, name, seed):
        self.name, self.random, self.lanes = (
            name,
            random.Random(seed),
            Forced(backend(name, ENGINE, prefill_chunk=16, lanes=4)),
        )
        self.manager = SessionManager(self.lanes, store=PrefixStore(1 << 24))
        self.running, self.ended, self.most = [], [], 0

    def arrive(self):
        pick = self.random
        prompt = Pictured(
            tuple(golden(self.name)[pick.choice(("p1.prompt", "p2.prompt"))].tolist())[: pick.randint(1, 40)]
        )
        if self.name == SEES:
            prompt = mixed(*pick.sample(PARTS, pick.randint(1, 5)), [pick.randrange(180)])
        sampled = {"temperature": pick.choice((0.7, 1.3)), "seed": pick.randrange(9), "top_k": pick.choice((0, 20))}
        options = Options(
            max_new_tokens=pick.randint(1, 24),
            speculative=pick.random() < 0.8,
            **(sampled if pick.random() < 0.5 else {}),
        )
        session = self.manager.open()
        half = len(prompt.ids) // 2
        keep = (half,) if half and pick.random() < 0.3 else ()
        run = decode_steps(session, admit(self.lanes.shape, prompt.ids, options, (), keep, prompt.pictures))
        self.running.append((session, run, prompt, options, []))

    def turn(self):
        """A step of each, in a random order; cycles together."""
        waiting, order = [], self.random.sample(self.running, len(self.running))
        order.sort(key=lambda one: bool(one[4]))  # prompts come before the cycles, as the worker has it
        for one in order:
            try:
                found = next(one[1])
            except StopIteration:
                self.end(one)
                continue
            if isinstance(found, Asked):
                waiting.append((one, found))
            elif found.tokens:
                one[4].append(found)
        self.most = max(self.most, len(waiting))
        for (one, _), outcome in zip(waiting, self.lanes.cycles([asked for _, asked in waiting]), strict=True):
            one[4].append(resume(one[1], outcome))

    def end(self, one):
        """It is over, or its user leaves between two steps."""
        self.running.remove(one)
        one[1].close()
        self.ended.append(one)

    def run(self, turns_of_arrivals=14):
        left = turns_of_arrivals
        while self.running or left:
            left -= left > 0
            while left and len(self.running) < LANES and self.random.random() < 0.5:
                self.arrive()
            self.turn()
            for one in list(self.running):
                if self.random.random() < 0.04:
                    self.end(one)
        return self


def differences(mix):
    """Requests of a mix whose tokens, accepted drafts or state are not those that they have alone."""
    found = []
    for session, _, prompt, options, steps in mix.ended:
        wanted, state = alone(mix.name, prompt, options, len(steps)) if steps else ([], None)
        same = [(step.tokens, step.accepted) for step in steps] == wanted
        if not same or (state is not None and not same_bits(state_of(session).snapshot, state)):
            found.append((prompt, options))
    return found
