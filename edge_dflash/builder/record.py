"""The recording of a bundle's self-test: its prompt, the tokens and drafts of the reference backend, warnings.

The weights are those that the build just wrote. The reference backend holds all of them as float32, so only pairs of
up to ``MAX_PARAMETERS`` are recorded: a build must not need more memory than a few layers of a large model. The bytes
depend on model, recipe and arithmetic, not on when or in how many runs the build was made.

What rounding does to this pair is measured here, too: the target goes over the recorded tokens again with activations
in float32, and how far its logits move is the scale by which another backend's logits are judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.backends.reference.dense import arithmetic
from edge_dflash.builder.convert import one_thread
from edge_dflash.builder.scales import read_prompts
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import PASSES, SCHEMA, BestLogits, ScoredLine, SelfTest, TowerTest, accept_floor, chart
from edge_dflash.common.files import directory
from edge_dflash.decode.backend import Backend, Precision
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.decode.replay import Recorded, replay, scored
from edge_dflash.errors import BuildError, RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec
from edge_dflash.pictures.pictured import text_ids
from edge_dflash.text.tokenizer import Tokenizer

MAX_PARAMETERS = 600_000_000  # of target and drafter: 2.4 GB as float32
NEW_TOKENS = 48  # at least; the last cycle is recorded whole
PROMPTS = "robot_planning.jsonl"  # in calib/
PROMPT_TOKENS = 512  # at most
RANDOM_TOKENS = 32  # prompt of a pair without tokenizer
LOW_ACCEPT_LENGTH = 1.2  # below, drafting costs more than it gives on any machine

Progress = Callable[[int, int], None]  # (tokens done, tokens in all)


def no_selftest(pair: PairSpec, max_context: int) -> str | None:
    """Why a pair gets no self-test, as a warning; None when it gets one."""
    size = sum(math.prod(weight.shape) for weight in pair_programs(pair).weights.values())
    if size > MAX_PARAMETERS:
        return (
            f"no self-test is recorded: the pair has {size / 1e6:,.0f} M parameters, the reference backend takes up to "
            f"{MAX_PARAMETERS / 1e6:,.0f} M in a build; check the bundle with edge-dflash verify"
        )
    if _room(pair, max_context) < 1:
        least = NEW_TOKENS + 2 * pair.rows + 1
        return f"no self-test is recorded: max_context is {max_context}, a self-test needs at least {least}"
    return None


def fit_warning(test: SelfTest) -> str | None:
    """What to tell when the drafter does not seem to fit the target; None when it does."""
    if not test.drafted or test.accept_length >= LOW_ACCEPT_LENGTH:
        return None
    return (
        f"the drafter does not fit the target: accept length {test.accept_length:.2f} on the self-test's prompt, "
        f"wanted at least {LOW_ACCEPT_LENGTH}; usual causes: a drafter of another target or version, a wrong "
        "mask_token_id or target_layer_ids in its config.json, weights that were renamed or quantized twice"
    )


def record_selftest(bundle: Bundle, progress: Progress = lambda done, total: None) -> SelfTest:
    """Decode the self-test's prompt with the reference backend, with the pair's drafter and plainly.

    Only for pairs for which :func:`no_selftest` is None. Raises BuildError when the two disagree.
    """
    manifest = bundle.manifest
    source, prompt = _prompt(bundle, _room(bundle.pair, manifest.max_context))

    def load(precision: Precision) -> ReferenceBackend:
        context = len(prompt) + NEW_TOKENS + 2 * manifest.pair.rows
        return ReferenceBackend(
            bundle.pair, bundle, precision, max_context=context, prefill_chunk=manifest.prefill_chunk
        )

    with one_thread():
        backend = load(manifest.precision)
        tokens, drafts, lengths, best = _speculate(backend, prompt, progress)
        backend.reset()
        plain = generate(backend, prompt, Options(max_new_tokens=len(tokens), speculative=False)).tokens
        if plain != tuple(tokens):
            raise BuildError(
                f"the reference backend's speculative and plain tokens differ on {source}: this is a defect of "
                "edge-dflash or of its PyTorch, please report it with the output of edge-dflash verify"
            )
        size = 2 + PASSES * backend.shape.verify_rows
        both = [line for line in (prompt[-size:], plain[:size]) if len(line) > 1]
        lines = [ScoredLine(line, tuple(scored(backend, line)), 0.0) for line in both]
        seen = _rows(backend, bundle.pair)
        del backend  # its float32 weights
        wide = load(replace(manifest.precision, activations="float32"))
        moved, unrounded = _moved(wide, prompt, plain, lengths, best), _rows(wide, bundle.pair)
        mean = sum(lengths) / len(lengths)
        return SelfTest(
            schema=SCHEMA,
            source=source,
            arithmetic=arithmetic(),
            prompt=prompt,
            tokens=plain,
            drafts=tuple(map(tuple, drafts)),
            accept_lengths=tuple(lengths),
            accept_length=mean,
            accept_floor=accept_floor(mean),
            best=tuple(best),
            rounding=statistics.median(moved),
            rounding_most=max(moved),
            tower=None if seen is None or unrounded is None else TowerTest.of(seen, unrounded),
            lines=tuple(replace(one, rounding=one.moved(scored(wide, one.tokens))) for one in lines),
        )


def _speculate(
    backend: Backend, prompt: tuple[int, ...], progress: Progress
) -> tuple[list[int], list[list[int]], list[int], list[BestLogits]]:
    """Tokens, the drafts of each cycle, the tokens it committed, the tokens' logits; whole cycles, no stop tokens."""
    tokens, best, drafts, lengths = list[int](), list[BestLogits](), list[list[int]](), list[int]()
    for cycle, one in enumerate(replay(backend, prompt, see=len)):
        tokens += one.tokens
        best += map(BestLogits.of, one.rows.logits()[: len(one.tokens)])
        if cycle:
            drafts.append(list(one.drafts))
            lengths.append(len(one.tokens))
        if len(tokens) > NEW_TOKENS:
            break
        progress(len(tokens), NEW_TOKENS + 1)
    return tokens, drafts, lengths, best


def _rows(backend: Backend, pair: PairSpec) -> npt.NDArray[np.float32] | None:
    """What the vision tower makes of the self-test's picture."""
    return None if pair.target.vision is None else backend.see(chart(pair.target.vision.patches)).host()


def _moved(
    backend: Backend, prompt: tuple[int, ...], tokens: tuple[int, ...], lengths: list[int], best: list[BestLogits]
) -> list[float]:
    """How far the logits of each token move on another backend."""
    ends = [sum(lengths[:cycle]) for cycle in range(len(lengths) + 1)]
    ahead = [tokens[at + 1 : end] for at, end in pairwise(ends)]  # what a cycle commits but its last token
    passes = replay(backend, prompt, Recorded(tokens, ahead, lengths), see=len, propose=False)
    logits = [row for one in passes for row in one.rows.logits()]
    return [one.moved(row) for one, row in zip(best, logits, strict=True)]


def _room(pair: PairSpec, max_context: int) -> int:
    """Most tokens of a prompt: the recorded cycles and one block must fit behind it."""
    return min(PROMPT_TOKENS, max_context - NEW_TOKENS - 2 * pair.rows)


def _prompt(bundle: Bundle, room: int) -> tuple[str, tuple[int, ...]]:
    """Where the prompt is from and its ids: the first calibration prompt that fits, or the end of the first one."""
    first: tuple[str, tuple[int, ...]] | None = None
    for name, ids in _calibration_prompts(bundle) if bundle.manifest.tokenizer else ():
        if len(ids) <= room:
            return f"{name} of {PROMPTS}", ids
        first = first or (name, ids)
    if first is not None:
        return f"end of {first[0]} of {PROMPTS}", first[1][-room:]
    target = bundle.pair.target
    random = np.random.default_rng(0).integers(0, target.vocab_size, min(RANDOM_TOKENS, room)).tolist()
    return "pseudo-random ids", tuple(text_ids(random, target.vision.image_token_id if target.vision else None))


def _calibration_prompts(bundle: Bundle) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and ids of the calibration prompts that the chat template takes."""
    tokenizer = Tokenizer.open(bundle.path / "tokenizer")
    for prompt in read_prompts(directory("calib") / PROMPTS):
        try:
            if tokenizer.template is None:
                ids = tokenizer.encode("\n\n".join(message["content"] for message in prompt.messages))
            else:
                ids = tokenizer.encode_chat(prompt.messages)
        except RequestError:  # a template without system messages, for example
            continue
        if ids:
            yield prompt.id, ids
