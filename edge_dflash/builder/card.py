"""card.json of a trained drafter: what it was trained on and how well it did, and whether a bundle of it still does.

Accept lengths of different prompts do not compare. So the card holds a few held-out prompts, as token ids, with what
greedy decoding committed on them when the training ended; a build answers the same prompts by the same rule
(:func:`check_prompts`) with the weights of the bundle, and warns when less is accepted by more than MARGIN.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.builder.convert import one_thread
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.files import SMALL, is_there, parse_json, read_bytes, write_whole
from edge_dflash.common.tables import decode, encode
from edge_dflash.decode.backend import Backend
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.errors import BundleError, CheckpointError

CARD = "card.json"
FORMAT = 1
MOST_PROMPTS = 8  # of a card
NEW_TOKENS = 64  # of each of its answers
PROMPT_TOKENS = 2048  # of each of its prompts, at most
MARGIN = 0.15  # of the card's accept length that a bundle may lose: its drafter is quantized, and its target anew


@dataclass(frozen=True)
class CardTarget:
    """The target that the drafter was trained for."""

    name: str  # of its directory, without the path
    architecture: str
    fingerprint: str = ""  # of the bundle it ran as; "": a checkpoint


@dataclass(frozen=True)
class CardLengths:
    """Accept lengths on the held-out split, tokens committed by a verify, bonus included."""

    before: float | None  # of the drafter that the training began with; None: random weights
    after: float


@dataclass(frozen=True)
class CardCheck:
    """A held-out prompt, and the tokens that each verify of its greedy answer committed."""

    prompt: tuple[int, ...]
    accept_lengths: tuple[int, ...]


@dataclass(frozen=True)
class DrafterCard:
    """What card.json holds."""

    data_sha256: str  # of the file of prompts
    prompts: int  # trained on
    heldout: int  # prompts that were not
    steps: int
    seconds: float  # of training
    accept_length: CardLengths
    target: CardTarget
    kind: str = "dflash"  # of the drafter
    created_by: str = ""
    best_step: int | None = None  # whose weights it has; None: not known
    better: bool = True  # than what the training began with, on the held-out split
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by name, such as "after, sampled"
    acceptance: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # share of drafts accepted, by position
    checks: tuple[CardCheck, ...] = ()  # at most MOST_PROMPTS
    format: int = FORMAT

    @property
    def way(self) -> str:
        """The way of answering that the accept lengths are of."""
        return headline(self.measures)

    @property
    def lossless(self) -> bool:
        """Whether all answers that were decoded plainly too had the same tokens."""
        return all(one.get("equal") == one.get("compared") for one in self.measures.values())

    @property
    def checked_length(self) -> float:
        """Mean accept length of the checks; 0 without one."""
        return accept_length(self.checks)


def headline(measures: Mapping[str, object]) -> str:
    """Which of the ways that were measured speaks for a drafter: of the form, where tasks have one."""
    return "greedy, schema" if "after, greedy, schema" in measures else "greedy"


def accept_length(checks: Sequence[CardCheck]) -> float:
    """Tokens committed by a verify of all these answers, mean; 0 without one."""
    lengths = [length for check in checks for length in check.accept_lengths]
    return sum(lengths) / len(lengths) if lengths else 0.0


def check_prompts(
    backend: Backend, prompts: Sequence[Sequence[int]], stop_token_ids: Sequence[int]
) -> tuple[CardCheck, ...]:
    """Answer the first MOST_PROMPTS of these prompts (token ids) greedily, NEW_TOKENS at most each.

    Prompts that do not fit are left out. ``stop_token_ids`` are the eos_token_ids of the target's spec. What ran before
    on ``backend`` is forgotten.
    """
    room = min(PROMPT_TOKENS, backend.shape.usable_context - NEW_TOKENS)
    options, found = Options(max_new_tokens=NEW_TOKENS), []
    for prompt in [tuple(prompt) for prompt in prompts if 0 < len(prompt) <= room][:MOST_PROMPTS]:
        backend.reset()
        made = generate(backend, prompt, options, stop_token_ids=stop_token_ids)
        found.append(CardCheck(prompt, made.accept_lengths))
    backend.reset()
    return tuple(found)


def check_bundle(bundle: Bundle, card: DrafterCard) -> tuple[CardCheck, ...]:
    """The card's prompts, answered by the reference backend with a bundle's weights."""
    manifest, prompts = bundle.manifest, [check.prompt for check in card.checks]
    if not prompts or not manifest.pair.drafts:
        return ()
    with one_thread():
        context = min(manifest.max_context, PROMPT_TOKENS + NEW_TOKENS + 2 * manifest.pair.rows)
        backend = ReferenceBackend(
            bundle.pair, bundle, manifest.precision, max_context=context, prefill_chunk=manifest.prefill_chunk
        )
        return check_prompts(backend, prompts, manifest.pair.target.eos_token_ids)


def card_warning(card: DrafterCard, here: Sequence[CardCheck]) -> str | None:
    """What to tell when ``here``, the card's prompts answered by a bundle, accepts less than the card says; else None.

    A warning too where the card itself says that the training made the drafter worse.
    """
    if not card.better:
        return (
            f"{CARD} says that this drafter is worse than the one its training began with (accept length "
            f"{card.accept_length.after:.2f}, before {card.accept_length.before or 0.0:.2f}); build with that one"
        )
    prompts = {check.prompt for check in here}
    said, found = accept_length([check for check in card.checks if check.prompt in prompts]), accept_length(here)
    if not here or found >= (1.0 - MARGIN) * said:
        return None
    return (
        f"accept length {found:.2f} on the {len(here)} prompts of the drafter's {CARD}, which says {said:.2f} (wanted "
        f"at least {(1.0 - MARGIN) * said:.2f}); usual causes: another target than {card.target.name}, which it was "
        "trained for, or a recipe that stores the pair in fewer bits; train it for this target, or change the recipe"
    )


def read_card(directory: Path) -> DrafterCard | None:
    """The card of a drafter's checkpoint; None when it has none. Raises CheckpointError for one that is damaged."""
    path = directory / CARD
    if not is_there(path):
        return None
    remedy = "train the drafter again, or move the file away to build without it"
    try:
        body = parse_json(read_bytes(path, SMALL))
        card = decode(DrafterCard, body, str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); {remedy}") from None
    except BundleError as error:
        raise CheckpointError(f"{error}; {remedy}") from None
    if card.format != FORMAT:
        raise CheckpointError(f"{path}: format is {card.format}, this version reads {FORMAT}; {remedy}")
    if len(card.checks) > MOST_PROMPTS:
        raise CheckpointError(f"{path}: {len(card.checks)} checks, wanted at most {MOST_PROMPTS}; {remedy}")
    return card


def write_card(directory: Path, card: DrafterCard) -> None:
    """Write the card into a drafter's checkpoint, whole or not at all."""
    write_whole(directory / CARD, json.dumps(encode(card), indent=1, allow_nan=False).encode() + b"\n")
