"""Do requests that share their passes have the tokens that each has alone: random mixes on a loaded planner."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

from edge_dflash.checks.lossless import first_difference
from edge_dflash.errors import VerificationError
from edge_dflash.planner import Planner
from edge_dflash.runner.observer import Observer

MIXES = 8


@dataclass(frozen=True)
class MixedRequest:
    """A request of a mix."""

    prompt: tuple[int, ...]
    new_tokens: int
    temperature: float
    seed: int
    speculative: bool
    leaves_after: int | None  # increments; None: it stays

    def options(self) -> dict[str, Any]:
        """As the planner takes them."""
        sampled = {"temperature": self.temperature, "seed": self.seed}
        return {"max_new_tokens": self.new_tokens, "speculative": self.speculative, **sampled}


@dataclass(frozen=True)
class Unlike:
    """A request whose tokens are others than those that it has alone."""

    mix: int
    position: int  # of the first other token
    alone: int | None
    found: int | None


@dataclass(frozen=True)
class MixCheck:
    """What mixes of requests gave."""

    lanes: int
    mixes: int
    requests: int
    tokens: int
    joint_cycles: int  # of two lanes or more
    differences: tuple[Unlike, ...]

    @property
    def ok(self) -> bool:
        """True when nothing differs, and passes were shared."""
        return not self.differences and self.joint_cycles > 0

    @property
    def summary(self) -> str:
        """One line."""
        what = f"{self.requests} requests in {self.mixes} mixes on {self.lanes} lanes, {self.tokens} tokens"
        return f"{what}, {self.joint_cycles} joint cycles, {len(self.differences)} differences"

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        return {**asdict(self), "ok": self.ok}

    def check(self) -> None:
        """Raise VerificationError, naming the first difference, unless all is equal."""
        if self.differences:
            first = self.differences[0]
            raise VerificationError(
                f"requests that share passes differ from those alone: {self.summary}; first: mix {first.mix}, new "
                f"token {first.position}: alone {first.alone}, together {first.found}; open this "
                "bundle with lanes=1 on this machine and report it"
            )
        if not self.joint_cycles:
            raise VerificationError(f"no cycle was shared, so nothing is known: {self.summary}; give more --prompts")


def verify_mixes(
    planner: Planner,
    watching: Watching,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    progress: Callable[[str], None] = lambda line: None,
) -> MixCheck:
    """Random requests together on ``planner``, which was opened with ``watching``, each compared with itself alone."""
    lanes, requests, tokens, unlike = planner.shape.lanes, 0, 0, list[Unlike]()
    watching.passes.clear()
    alone: dict[MixedRequest, tuple[int, ...]] = {}
    for mix in range(MIXES):
        pick = random.Random(mix)
        asked = [_asking(pick, prompts, max_new_tokens) for _ in range(pick.randint(lanes, 2 * lanes))]
        together = _together(planner, asked)
        for one, found in zip(asked, together, strict=True):
            if one not in alone:
                alone[one] = planner.plan(one.prompt, **one.options()).tokens
            cut = len(found) if one.leaves_after is not None else len(alone[one])
            if (first := first_difference(alone[one][:cut], found)) is not None:
                unlike.append(Unlike(mix, *first))
        requests, tokens = requests + len(asked), tokens + sum(map(len, together))
        progress(f"mix {mix + 1} of {MIXES}: {len(asked)} requests on {lanes} lanes")
    joint = sum(one.lanes > 1 for one in watching.passes)
    return MixCheck(lanes, MIXES, requests, tokens, joint, tuple(unlike))


def _asking(pick: random.Random, prompts: Sequence[Sequence[int]], most: int) -> MixedRequest:
    prompt = pick.choice(prompts)
    return MixedRequest(
        prompt=tuple(prompt[: pick.randint(1, len(prompt))]),
        new_tokens=pick.randint(1, most),
        temperature=pick.choice((0.0, 0.0, 0.8, 1.3)),
        seed=pick.randrange(1 << 16),
        speculative=pick.random() < 0.8,
        leaves_after=pick.choice((None, None, None, 1, 2)),
    )


def _together(planner: Planner, asked: Sequence[MixedRequest]) -> list[tuple[int, ...]]:
    """Tokens of requests that run at once."""
    streams = [planner.stream(one.prompt, caller=str(at), **one.options()) for at, one in enumerate(asked)]
    for one, stream in zip(asked, streams, strict=True):
        if one.leaves_after is not None:
            with suppress(StopIteration):
                for _ in range(one.leaves_after):
                    next(stream)
            stream.cancel()
    return [stream.plan.tokens for stream in streams]


@dataclass(frozen=True)
class _Pass:
    """A cycle that ran."""

    end: float  # time.perf_counter()
    lanes: int
    rows: int


class Watching(Observer):
    """Keeps when each cycle ended."""

    def __init__(self) -> None:
        self.passes: list[_Pass] = []

    def passed(self, lanes: int, rows: int) -> None:
        """See Observer."""
        self.passes.append(_Pass(time.perf_counter(), lanes, rows))

    def together(self, lanes: int) -> list[float]:
        """Seconds from a cycle of so many lanes to the next of as many, and nothing between them."""
        pairs = pairwise(self.passes)
        return [after.end - before.end for before, after in pairs if before.lanes == after.lanes == lanes]

    def rows(self, lanes: int) -> float:
        """Rows of such a cycle, mean."""
        return mean([one.rows for one in self.passes if one.lanes == lanes] or [0])
