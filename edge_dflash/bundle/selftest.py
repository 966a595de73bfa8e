"""selftest.json: a prompt, its plain tokens and drafts, two lines' log-probabilities, a picture's rows, as at build.

The picture is made by arithmetic and has no file. A row is kept as sums over all of its columns with pseudo-random
signs, so that every weight of the tower takes part and a test of a tower with thousands of columns stays small.

:mod:`edge_dflash.backends.selftest` runs it, :mod:`edge_dflash.builder.record` records it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_dflash.bundle.manifest import read_document
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.files import LARGE, read_bytes
from edge_dflash.common.tables import UNWRITTEN, decode, encode, finite
from edge_dflash.decode.accept import accepted
from edge_dflash.decode.drafts import Drafting
from edge_dflash.decode.replay import Recorded
from edge_dflash.decode.shape import PairShape
from edge_dflash.errors import BundleError
from edge_dflash.model.specs import PatchSpec
from edge_dflash.pictures.pictured import Picture

SELFTEST = "selftest.json"
SCHEMA = 2
FLOOR_SHARE = 0.7  # of the accept length seen at build: the least that passes
BEST = 8  # logits that are recorded of each row
SUMS = 24  # of each row
ROUNDING = 3.0  # times the rounding seen at build: the most that the rows of another arithmetic may move
EQUAL = 1e-9  # of the spread: sums of equal rows
LINES, PASSES = 2, 2  # that are scored, and verifies of one
SAME_NATS, LEAST_NATS = 1e-6, 0.02  # that equal values may move, and those that rounding hardly moves
BLOCKS = (2, 10)  # rows of the language model of the picture, height by width


def bf16_step(value: float) -> float:
    """Distance between BF16 numbers (8 bits of significand) of the magnitude of ``value``; NaN when it is no number."""
    return math.ldexp(1.0, max(math.frexp(value)[1], -125) - 8) if math.isfinite(value) else math.nan


@dataclass(frozen=True)
class BestLogits:
    """The largest logits of the row that chose a token."""

    ids: tuple[int, ...]  # BEST of them, or all; the token first
    logits: tuple[float, ...]
    spread: float  # standard deviation of the whole row

    @classmethod
    def of(cls, row: npt.NDArray[np.float32]) -> BestLogits:
        """Those of logits [V]."""
        ids = np.argsort(-row, kind="stable")[:BEST]
        return cls(tuple(ids.tolist()), tuple(row[ids].tolist()), float(row.std()))

    def moved(self, row: npt.NDArray[np.float32]) -> float:
        """How far these logits stand from each other's recorded distance in another row [V], as a share of the spread.

        The root mean square of the differences, their mean taken off; NaN where logits are not numbers.
        """
        off = row[list(self.ids)].astype(np.float64) - np.array(self.logits)
        rms = math.sqrt(np.square(off - off.mean()).sum() / max(1, len(off) - 1))
        return rms / self.spread if self.spread > 0 else (math.inf if rms else 0.0)


def chart(spec: PatchSpec) -> Picture:
    """The test's picture: waves of another length and phase in each patch and channel."""
    grid, area = (BLOCKS[0] * spec.merge, BLOCKS[1] * spec.merge), spec.patch**2
    patch, channel, pixel = np.indices((grid[0] * grid[1], 3, area))
    waves = np.sin((patch + 1) * 0.7 + (channel + 1) * 1.3 + pixel * (0.05 + 0.01 * patch + 0.03 * channel))
    levels = np.rint(127.5 + 127.5 * waves).astype(np.uint8).reshape(-1, 3 * area)
    return Picture(levels, grid, spec)


@dataclass(frozen=True)
class TowerTest:
    """The rows of the chart at build."""

    sums: tuple[tuple[float, ...], ...]  # [rows, SUMS]
    spread: float  # root mean square of the sums around the mean row
    rounding: float  # share of the spread by which they move when activations are not rounded to BF16

    @classmethod
    def of(cls, rows: npt.NDArray[np.float32], unrounded: npt.NDArray[np.float32]) -> TowerTest:
        """By the rows [tokens, H] that the tower gives, and those it gives with activations in float32."""
        sums = _sums(rows)
        spread = float(_rms(sums - sums.mean(0)))
        test = cls(tuple(map(tuple, sums.tolist())), spread, 0.0)
        return cls(test.sums, spread, test.moved(unrounded))

    def moved(self, rows: npt.NDArray[np.float32]) -> float:
        """How far other rows stand from these, as a share of the spread; NaN where they are not numbers."""
        off = _rms(_sums(rows) - np.array(self.sums))
        return off / self.spread if self.spread > 0 else (math.inf if off else 0.0)

    def judge(self, rows: npt.NDArray[np.float32], *, exact: bool) -> Moved:
        """Compare rows [tokens, H]; ``exact``: they must be the same."""
        bound = EQUAL if exact else ROUNDING * self.rounding + EQUAL
        return Moved(self.moved(rows), bound, "the tower's rows moved by {:.2%} of their spread (at most {:.2%})")

    def fits(self) -> bool:
        """Whether it could be the test of a tower."""
        shape = len(self.sums) == BLOCKS[0] * BLOCKS[1] and {len(row) for row in self.sums} == {SUMS}
        return shape and self.spread > 0 and self.rounding >= 0


@dataclass(frozen=True)
class Moved:
    """Values here against those at build."""

    moved: float  # NaN when one is not a number
    bound: float
    words: str = ""  # with places for both

    @property
    def ok(self) -> bool:
        """Whether they pass."""
        return self.moved <= self.bound  # False for NaN

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return self.moved <= EQUAL

    @property
    def summary(self) -> str:
        """The numbers in a few words."""
        return self.words.format(self.moved, self.bound)

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys."""
        return {"ok": self.ok, "moved": finite(self.moved), "bound": self.bound}


@dataclass(frozen=True)
class ScoredLine:
    """A line, and the log-probability of each of its tokens but the first, at build."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    rounding: float  # nats by which they move when activations are not rounded to BF16: root mean square

    def moved(self, found: Sequence[float]) -> float:
        """Nats by which other values stand off, root mean square; NaN where one is not a number."""
        return float(_rms(np.subtract(found, self.logprobs)))

    def judge(self, moved: float, *, exact: bool) -> Moved:
        """Whether values may move so far; ``exact``: they must be the same."""
        bound = SAME_NATS if exact else ROUNDING * self.rounding + LEAST_NATS
        return Moved(moved, bound, "log-probabilities moved by {:.2g} nats (at most {:.2g})")


def _sums(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Sums [rows, SUMS] of each row's columns with signs, in float64."""
    columns = np.arange(rows.shape[1], dtype=np.uint32)
    signs = [((columns * np.uint32(2654435761) >> np.uint32(7 + one)) & 1) * 2.0 - 1.0 for one in range(SUMS)]
    return np.stack([(rows.astype(np.float64) * sign).sum(1) for sign in signs], 1)


def _rms(values: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(values).mean()))


@dataclass(frozen=True)
class SelfTest:
    """What selftest.json holds."""

    schema: int
    source: str  # where the prompt is from
    arithmetic: str  # what computed this; where it is the same, all bits are
    prompt: tuple[int, ...]  # token ids
    tokens: tuple[int, ...]  # plain greedy tokens after the prompt
    drafts: tuple[tuple[int, ...], ...]  # of each cycle: K ids
    accept_lengths: tuple[int, ...]  # tokens committed by each cycle; the first token is the prefill's
    accept_length: float  # their mean
    accept_floor: float  # least mean that passes
    best: tuple[BestLogits, ...]  # of each token
    rounding: float  # how far the best logits move when activations are not rounded to BF16: of the median row
    rounding_most: float  # and of the row where they move most; shares of the spread
    tower: TowerTest | None = field(default=None, metadata=UNWRITTEN)  # of a target with a vision tower
    lines: tuple[ScoredLine, ...] = field(default=(), metadata=UNWRITTEN)  # scored; none in older files

    @property
    def resolution(self) -> float:
        """One BF16 step of the best logit as a share of the spread, of the median row."""
        return statistics.median(bf16_step(one.logits[0]) / one.spread if one.spread else 0.0 for one in self.best)

    @property
    def recorded(self) -> Recorded:
        """What is replayed."""
        return Recorded(self.tokens, self.drafts, self.accept_lengths)

    @property
    def plain(self) -> SelfTest:
        """The same tokens without drafts, one a cycle."""
        cycles = len(self.tokens) - 1
        return replace(self, drafts=((),) * cycles, accept_lengths=(1,) * cycles, accept_length=1.0, accept_floor=1.0)

    @property
    def drafting(self) -> Drafting:
        """What became of the drafts."""
        return Drafting(tuple(map(len, self.drafts)), tuple(n - 1 for n in self.accept_lengths))

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the drafts that the target accepted, by position."""
        return self.drafting.acceptance

    @property
    def drafted(self) -> int:
        """Number of drafts."""
        return sum(map(len, self.drafts))


def accept_floor(accept_length: float) -> float:
    """Least accept length that passes: FLOOR_SHARE of the one seen at build, at least 1."""
    return max(1.0, FLOOR_SHARE * accept_length)


def dump_selftest(test: SelfTest) -> bytes:
    """The one text that :func:`parse_selftest` accepts for this self-test."""
    return (json.dumps(encode(test), sort_keys=True, allow_nan=False) + "\n").encode()


def parse_selftest(text: bytes, shape: PairShape, where: str = SELFTEST) -> SelfTest:
    """Read a self-test for a pair of ``shape``. Raises BundleError naming field, found and wanted."""
    test = decode(SelfTest, read_document(text, where, SCHEMA, SCHEMA), where)
    _check(test, shape, where)
    if dump_selftest(test) != text:
        raise BundleError(f"{where}: not the text that a build writes; it was changed, build the bundle again")
    return test


def load_selftest(bundle: Bundle) -> SelfTest | None:
    """The self-test of a bundle; None when it has none. Raises BundleError."""
    manifest = bundle.manifest
    if SELFTEST not in manifest.files:
        return None
    file = bundle.path / SELFTEST
    try:
        text = read_bytes(file, LARGE)
    except OSError as error:
        raise BundleError(f"cannot read {file}: {error.strerror}; check its permissions") from None
    shape = PairShape.of(manifest.pair, manifest.max_context, manifest.prefill_chunk)
    test = parse_selftest(text, shape, str(file))
    if (manifest.pair.target.vision is None) != (test.tower is None) or (test.tower and not test.tower.fits()):
        found = "no rows" if test.tower is None else "other rows"
        raise BundleError(f"{file}: tower has {found} than the target's tower makes; build the bundle again")
    return test


def _check(test: SelfTest, shape: PairShape, where: str) -> None:
    """Compare the fields with each other and with the pair."""

    def refuse(field: str, found: object, wanted: str) -> BundleError:
        return BundleError(f"{where}: {field} is {found}, wanted {wanted}; build the bundle again")

    if not test.prompt:
        raise refuse("prompt", "empty", "at least one token id")
    for name, ids in (("prompt", test.prompt), ("tokens", test.tokens), *(("drafts", ids) for ids in test.drafts)):
        if odd := [token for token in ids if not 0 <= token < shape.vocab_size]:
            raise refuse(name, f"token id {odd[0]}", f"ids of the vocabulary of {shape.vocab_size}")
    if (used := len(test.prompt) + len(test.tokens)) > shape.usable_context:
        raise refuse("prompt and tokens", f"{used} tokens", f"at most {shape.usable_context} (the usable context)")
    if not test.drafts or len(test.drafts) != len(test.accept_lengths):
        raise refuse("accept_lengths", f"{len(test.accept_lengths)} numbers", f"as many as drafts ({len(test.drafts)})")
    if short := [ids for ids in test.drafts if len(ids) != shape.drafts]:
        raise refuse("drafts", f"{len(short[0])} ids in a cycle", f"{shape.drafts} (the drafts of a cycle)")
    at = 0
    for cycle, (drafts, length) in enumerate(zip(test.drafts, test.accept_lengths, strict=True)):
        ahead = test.tokens[at + 1 :]
        if length != (wanted := accepted(drafts[: len(ahead)], ahead) + 1):
            raise refuse(f"accept_lengths[{cycle}]", length, f"{wanted}, by drafts and tokens")
        at += length
    if at + 1 != len(test.tokens):
        raise refuse("tokens", f"{len(test.tokens)} ids", f"{at + 1}, by accept_lengths")
    mean = sum(test.accept_lengths) / len(test.accept_lengths)
    if test.accept_length != mean:
        raise refuse("accept_length", test.accept_length, f"{mean}, the mean of accept_lengths")
    if not 1.0 <= test.accept_floor <= mean:
        raise refuse("accept_floor", test.accept_floor, f"1 to {mean} (accept_length)")
    if len(test.best) != len(test.tokens):
        raise refuse("best", f"of {len(test.best)} tokens", f"of {len(test.tokens)}, as many as tokens")
    for at, (best, token) in enumerate(zip(test.best, test.tokens, strict=True)):
        known = len(best.ids) == len(best.logits) and all(0 <= one < shape.vocab_size for one in best.ids)
        if not known or best.ids[:1] != (token,) or best.spread < 0:
            raise refuse(f"best[{at}]", best.ids, f"ids of the vocabulary and their logits, token {token} first")
    for at, line in enumerate(test.lines):
        if at >= LINES or not 2 <= len(line.tokens) == len(line.logprobs) + 1 <= shape.usable_context:
            raise refuse(f"lines[{at}]", f"{len(line.tokens)} ids", f"one of {LINES}, of at least 2, and a value less")
        if odd := [token for token in line.tokens if not 0 <= token < shape.vocab_size]:
            raise refuse(f"lines[{at}]", f"token id {odd[0]}", f"ids of the vocabulary of {shape.vocab_size}")
        if line.rounding < 0:
            raise refuse(f"lines[{at}].rounding", line.rounding, "0 or more")
    if not 0 <= test.rounding <= test.rounding_most:
        raise refuse("rounding", test.rounding, f"0 to {test.rounding_most} (rounding_most)")
