"""Does a backend keep its promise: speculative tokens and state equal plain decoding's, whatever the drafter does.

Plain decoding is the reference for each prompt; the pair's own drafter and adversaries then decode the same prompt. An
adversary is a Backend whose ``propose`` is replaced and nothing else. With the plain continuation known, it can force
every accept length on demand: always wrong, an oracle, an oracle that goes wrong after j drafts, and noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from edge_dflash.decode.backend import Asked, Backend, Cycle, Outcome, Rows, Snapshot
from edge_dflash.decode.cycle import host_cycle
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.drafts import NO_DRAFTING, Drafting
from edge_dflash.decode.generation import Generation, generate
from edge_dflash.decode.options import Options
from edge_dflash.decode.shape import PairShape
from edge_dflash.decode.steering import GivenDrafts
from edge_dflash.errors import RequestError, VerificationError
from edge_dflash.pictures.pictured import Pictured
from edge_dflash.weights.formats import Array

OWN = "own"  # the pair's drafter, among the names of adversaries
BY_TURNS = "_by_turns"  # ends the names of runs whose cycles verify another number of drafts each
SAMPLED = Options(temperature=4.0, top_k=50, top_p=0.95, seed=1)  # hot: most choices are not the argmax
SURE = 1e30  # a logit that no temperature, filter or noise outvotes

Drafter = Callable[[int, Sequence[int], PairShape], list[int]]
"""(cycle, the true next K tokens, shape) -> K drafts."""


@dataclass(frozen=True)
class TokenRows:
    """Rows that choose the given tokens at any temperature."""

    tokens: tuple[int, ...]
    vocab_size: int

    def __len__(self) -> int:
        return len(self.tokens)

    def argmax(self) -> list[int]:
        """Return the tokens."""
        return list(self.tokens)

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits [rows, V] float32: SURE for the token, 0 for all others."""
        rows = np.zeros((len(self.tokens), self.vocab_size), np.float32)
        rows[np.arange(len(self.tokens)), self.tokens] = SURE
        return rows


class ByTurns(Delegate):
    """``backend``, whose cycle c verifies at most c mod (K + 1) drafts: each number in turn, and none of them too."""

    def __init__(self, backend: Backend, start: int = 0) -> None:
        super().__init__(backend)
        self._cycle = start

    def cycle(self, asked: Asked) -> Cycle:
        """The backend's own cycle of fewer drafts."""
        return self._backend.cycle(self._fewer(asked))

    def cycles(self, asked: Sequence[Asked]) -> list[Outcome]:
        """The backend's own joint cycle, of fewer drafts in each lane."""
        return self._backend.cycles([self._fewer(one) for one in asked])

    def _fewer(self, asked: Asked) -> Asked:
        drafts = self._cycle % self.shape.verify_rows
        self._cycle += 1
        return replace(asked, drafts=drafts if asked.drafts is None else min(drafts, asked.drafts))


class Adversary(Delegate):
    """``backend`` with its drafter replaced. ``sequence`` is the prompt followed by the plain continuation."""

    def __init__(self, backend: Backend, sequence: Sequence[int], drafter: Drafter) -> None:
        super().__init__(backend)
        self._sequence = list(sequence)
        self._drafter = drafter
        self._cycle = 0

    def cycle(self, asked: Asked) -> Cycle:
        """The backend's own cycle, with other drafts: what a device accepts and commits is tried, too."""
        if asked.steering is not None or not asked.drafting:
            return host_cycle(self, asked)
        return self._backend.cycle(replace(asked, steering=GivenDrafts(self._next(asked.lane))))

    def propose(self, anchor: int, lane: int = 0) -> Rows:
        """Rows that choose the adversary's drafts."""
        return TokenRows(tuple(self._next(lane)), self.shape.vocab_size)

    def _next(self, lane: int) -> list[int]:
        """Drafts of the adversary; past the known continuation the true token is taken to be 0."""
        first, count = self.length(lane) + 1, self.shape.drafts
        truth = [*self._sequence[first : first + count], *[0] * count][:count]
        self._cycle += 1
        return self._drafter(self._cycle - 1, truth, self.shape)


def oracle_until(right: int) -> Drafter:
    """The first ``right`` drafts are true and the next is not: every cycle commits ``right`` + 1 tokens."""

    def drafts(cycle: int, truth: Sequence[int], shape: PairShape) -> list[int]:
        return [*truth[:right], *((token + 1) % shape.vocab_size for token in truth[right:])]

    return drafts


def oracle(cycle: int, truth: Sequence[int], shape: PairShape) -> list[int]:
    """Every draft is accepted."""
    return list(truth)


def staircase(start: int = 0) -> Drafter:
    """Cycle c accepts (start + c) mod (K + 1) drafts, so K + 1 cycles go through every accept length."""
    return lambda cycle, truth, shape: oracle_until((start + cycle) % shape.verify_rows)(cycle, truth, shape)


def noise(seed: int = 0) -> Drafter:
    """Half of the drafts true, half random, drawn anew for every cycle."""

    def drafts(cycle: int, truth: Sequence[int], shape: PairShape) -> list[int]:
        random = np.random.default_rng((seed, cycle))
        return [true if random.random() < 0.5 else int(random.integers(shape.vocab_size)) for true in truth]

    return drafts


def drafters(run: int, runs: int, rows: int) -> dict[str, Drafter]:
    """Adversaries for one of ``runs`` generations of verify passes of ``rows``.

    The staircases of all of them together start all over the block.
    """
    return {
        "always_wrong": oracle_until(0),
        "oracle": oracle,
        "staircase": staircase(run * rows // runs),
        "noise": noise(run),
    }


@dataclass(frozen=True)
class Difference:
    """Where a speculative run first left plain decoding."""

    prompt: int  # index of the prompt
    drafter: str
    temperature: float
    what: str  # "tokens", "finish_reason", or the name of a state array
    position: int  # index of the first different token of the continuation; -1 for state
    plain: int | str | None
    speculative: int | str | None


@dataclass(frozen=True)
class SpeculativeRun:
    """One speculative generation, compared with plain decoding."""

    prompt: int
    drafter: str
    temperature: float
    tokens: int
    accept_lengths: tuple[int, ...]
    drafting: Drafting = NO_DRAFTING


@dataclass(frozen=True)
class Verification:
    """The outcome over all prompts, drafters and sampling settings."""

    block_size: int
    verify_rows: int
    prompts: int
    runs: tuple[SpeculativeRun, ...]
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """True when nothing differs."""
        return not self.differences

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per verify, greedily and with the pair's own drafter; 0 without such a cycle."""
        lengths = [n for run in self.runs if (run.drafter, run.temperature) == (OWN, 0) for n in run.accept_lengths]
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the drafts that the target accepted, by position, greedily and with the pair's own drafter."""
        runs = [run.drafting for run in self.runs if (run.drafter, run.temperature) == (OWN, 0)]
        return sum(runs, NO_DRAFTING).acceptance

    @property
    def histogram(self) -> dict[str, dict[int, int]]:
        """For each drafter: how often each number of tokens was committed by a verify."""
        counts: dict[str, Counter[int]] = {}
        for run in self.runs:
            counts.setdefault(run.drafter, Counter()).update(run.accept_lengths)
        return {name: dict(sorted(count.items())) for name, count in counts.items()}

    @property
    def untried(self) -> tuple[int, ...]:
        """Accept lengths 1..K + 1 that no run reached: too few new tokens were asked for."""
        seen = {n for count in self.histogram.values() for n in count}
        return tuple(n for n in range(1, self.verify_rows + 1) if n not in seen)

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys."""
        return {
            "ok": self.ok,
            "accept_length": self.accept_length,
            "acceptance": list(self.acceptance),
            "differences": [asdict(difference) for difference in self.differences],
            "prompts": self.prompts,
            "runs": len(self.runs),
            "tokens": sum(run.tokens for run in self.runs),
            "block_size": self.block_size,
            "accept_histogram": {name: {str(n): c for n, c in h.items()} for name, h in self.histogram.items()},
            "untried_accept_lengths": list(self.untried),
        }

    def check(self) -> None:
        """Raise VerificationError, naming the first difference, unless all is equal."""
        if self.differences:
            d = self.differences[0]
            where = f" at new token {d.position}" if d.position >= 0 else ""
            raise VerificationError(
                f"speculative differs from plain in {len(self.differences)} places; first: prompt {d.prompt}, drafter "
                f"{d.drafter}, temperature {d.temperature:g}, {d.what}{where}: plain {d.plain}, speculative "
                f"{d.speculative}; do not use this bundle on this machine and report it"
            )


def verify_lossless(
    backend: Backend,
    prompts: Sequence[Sequence[int] | Pictured],
    *,
    max_new_tokens: int = 64,
    stop_token_ids: tuple[int, ...] = (),
    sampled: Options | None = SAMPLED,
    progress: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Compare speculative with plain decoding for each prompt, greedily and with ``sampled`` (None: not).

    Tokens, finish reason and the flushed state of both models (bit for bit) must be equal. The backend is reset.
    One prompt needs B (B + 1) / 2 + 1 new tokens for the staircase to reach every accept length; several share the
    work, and ``untried`` tells what is left. Raises RequestError for no prompts, or one that is not admitted.
    """
    if not prompts:
        raise RequestError("no prompts are given to verify; give at least one")
    runs: list[SpeculativeRun] = []
    differences: list[Difference] = []
    modes = [Options(), *([sampled] if sampled else [])]
    work = [(index, mode) for index in range(len(prompts)) for mode in modes]
    for number, (index, mode) in enumerate(work):
        options = replace(mode, max_new_tokens=max_new_tokens)
        prompt = given if isinstance(given := prompts[index], Pictured) else Pictured(given)
        ask = partial(generate, prompt=prompt.ids, stop_token_ids=stop_token_ids, pictures=prompt.pictures)
        backend.reset()
        plain = ask(backend, options=replace(options, speculative=False))
        state = backend.snapshot()
        others = dict[str, Drafter | None]()
        by_turns: dict[str, Drafter | None] = {OWN + BY_TURNS: None, "oracle" + BY_TURNS: oracle}
        if backend.shape.drafts:
            others = {**drafters(number, len(work), backend.shape.verify_rows), **by_turns}
        for name, drafter in {OWN: None, **others}.items():
            backend.reset()
            drafting = backend if drafter is None else Adversary(backend, [*prompt.ids, *plain.tokens], drafter)
            drafting = ByTurns(drafting, number) if name in by_turns else drafting
            found = ask(drafting, options=options)
            made = (len(found.tokens), found.accept_lengths, found.drafting)
            runs.append(SpeculativeRun(index, name, options.temperature, *made))
            unlike = (*_compare(plain, found), *_compare_states(state, backend.snapshot()))
            differences += [Difference(index, name, options.temperature, *what) for what in unlike]
        progress(f"prompt {index + 1} of {len(prompts)}, temperature {options.temperature:g}")
    backend.reset()
    shape = backend.shape
    return Verification(shape.block_size, shape.verify_rows, len(prompts), tuple(runs), tuple(differences))


_Found = tuple[str, int, int | str | None, int | str | None]  # the last four fields of Difference


def first_difference(alone: Sequence[int], found: Sequence[int]) -> tuple[int, int | None, int | None] | None:
    """Position and tokens of the first difference, None for one that is missing; None when all are equal."""
    pairs = enumerate(zip_longest(alone, found))
    return next(((at, ours, theirs) for at, (ours, theirs) in pairs if ours != theirs), None)


def _compare(plain: Generation, found: Generation) -> list[_Found]:
    """First different token, or the finish reason."""
    if (first := first_difference(plain.tokens, found.tokens)) is not None:
        return [("tokens", *first)]
    if plain.finish_reason != found.finish_reason:
        return [("finish_reason", len(plain.tokens), plain.finish_reason, found.finish_reason)]
    return []


def _compare_states(plain: Snapshot, found: Snapshot) -> list[_Found]:
    """Names of the state arrays whose bits differ."""
    if (ours := f"{plain.length}, {plain.delta}") != (theirs := f"{found.length}, {found.delta}"):
        return [("length and delta", -1, ours, theirs)]
    names = sorted(plain.arrays.keys() | found.arrays.keys())
    pairs = ((name, plain.arrays.get(name), found.arrays.get(name)) for name in names)
    return [(name, -1, _describe(a), _describe(b)) for name, a, b in pairs if not _same_bits(a, b)]


def _same_bits(a: Array | None, b: Array | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def _describe(array: Array | None) -> str | None:
    """Dtype, shape and checksum of an array; None when it is missing."""
    return None if array is None else f"{array.dtype}{list(array.shape)} crc32 {crc32(array.tobytes()):08x}"
