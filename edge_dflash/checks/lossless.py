"""Does a backend keep its promise: speculative tokens and state equal plain decoding's, whatever the drafter does.

Plain decoding is the reference for each prompt; the pair's own drafter and the adversaries of
:mod:`edge_dflash.checks.adversary` then decode the same prompt. Knows the Backend protocol only, no model and no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from zlib import crc32

from edge_dflash.checks.adversary import Adversary, drafters
from edge_dflash.decode.backend import Backend, Snapshot
from edge_dflash.decode.loop import Generation, generate
from edge_dflash.decode.options import Options
from edge_dflash.errors import RequestError, VerificationError
from edge_dflash.weights.formats import Array

OWN = "own"  # the pair's drafter, among the names of adversaries
SAMPLED = Options(temperature=4.0, top_k=50, top_p=0.95, seed=1)  # hot: most choices are not the argmax


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
class Run:
    """One speculative generation that was compared with plain decoding."""

    prompt: int
    drafter: str
    temperature: float
    tokens: int
    accept_lengths: tuple[int, ...]


@dataclass(frozen=True)
class Verification:
    """The outcome over all prompts, drafters and sampling settings."""

    block_size: int
    prompts: int
    runs: tuple[Run, ...]
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """True when nothing differs."""
        return not self.differences

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per verify, greedily and with the pair's own drafter; 0 without such a cycle."""
        own = [run for run in self.runs if run.drafter == OWN and run.temperature == 0]
        lengths = [n for run in own for n in run.accept_lengths]
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def histogram(self) -> dict[str, dict[int, int]]:
        """For each drafter: how often each number of tokens was committed by a verify."""
        counts: dict[str, Counter[int]] = {}
        for run in self.runs:
            counts.setdefault(run.drafter, Counter()).update(run.accept_lengths)
        return {name: dict(sorted(count.items())) for name, count in counts.items()}

    @property
    def untried(self) -> tuple[int, ...]:
        """Accept lengths 1..B that no run reached: too few new tokens were asked for."""
        seen = {n for count in self.histogram.values() for n in count}
        return tuple(n for n in range(1, self.block_size + 1) if n not in seen)

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys."""
        return {
            "ok": self.ok,
            "accept_length": self.accept_length,
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
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop_token_ids: tuple[int, ...] = (),
    sampled: Options | None = SAMPLED,
    progress: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Compare speculative with plain decoding for each prompt (token ids), greedily and with ``sampled`` (None: not).

    Tokens, finish reason and the flushed state of both models (bit for bit) must be equal. The backend is reset.
    One prompt needs ``max_new_tokens`` of B (B + 1) / 2 + 1 for the staircase drafter to reach every accept length;
    several prompts share the work, and ``untried`` tells what is left. Raises RequestError for no prompts and for a
    prompt that the backend does not admit.
    """
    if not prompts:
        raise RequestError("no prompts are given to verify; give at least one")
    runs: list[Run] = []
    differences: list[Difference] = []
    modes = [Options(), *([sampled] if sampled else [])]
    runs_of_plain = [(index, mode) for index in range(len(prompts)) for mode in modes]
    for number, (index, mode) in enumerate(runs_of_plain):
        options = replace(mode, max_new_tokens=max_new_tokens)
        prompt = prompts[index]
        backend.reset()
        plain = generate(backend, prompt, replace(options, speculative=False), stop_token_ids=stop_token_ids)
        state = backend.snapshot()
        adversaries = drafters(number, len(runs_of_plain), backend.shape.block_size)
        for name, drafter in {OWN: None, **adversaries}.items():
            backend.reset()
            drafting = backend if drafter is None else Adversary(backend, [*prompt, *plain.tokens], drafter)
            found = generate(drafting, prompt, options, stop_token_ids=stop_token_ids)
            runs.append(Run(index, name, options.temperature, len(found.tokens), found.accept_lengths))
            for difference in (*_compare(plain, found), *_compare_states(state, backend.snapshot())):
                differences.append(Difference(index, name, options.temperature, *difference))
        progress(f"prompt {index + 1} of {len(prompts)}, temperature {options.temperature:g}")
    backend.reset()
    return Verification(backend.shape.block_size, len(prompts), tuple(runs), tuple(differences))


_Found = tuple[str, int, int | str | None, int | str | None]  # the last four fields of Difference


def _compare(plain: Generation, found: Generation) -> list[_Found]:
    """First different token, or the finish reason."""
    for position in range(max(len(plain.tokens), len(found.tokens))):
        pair = [g.tokens[position] if position < len(g.tokens) else None for g in (plain, found)]
        if pair[0] != pair[1]:
            return [("tokens", position, pair[0], pair[1])]
    if plain.finish_reason != found.finish_reason:
        return [("finish_reason", len(plain.tokens), plain.finish_reason, found.finish_reason)]
    return []


def _compare_states(plain: Snapshot, found: Snapshot) -> list[_Found]:
    """Names of the state arrays whose bits differ."""
    if plain.length != found.length:
        return [("length", -1, plain.length, found.length)]
    found_names = sorted(plain.arrays.keys() | found.arrays.keys())
    pairs = [(name, plain.arrays.get(name), found.arrays.get(name)) for name in found_names]
    return [(name, -1, _describe(a), _describe(b)) for name, a, b in pairs if not _same_bits(a, b)]


def _same_bits(a: Array | None, b: Array | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _describe(array: Array | None) -> str | None:
    """Dtype, shape and checksum of an array; None when it is missing."""
    return None if array is None else f"{array.dtype}{list(array.shape)} crc32 {crc32(array.tobytes()):08x}"
