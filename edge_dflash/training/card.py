"""The card of a trained drafter: what was measured, and whether it is better than what the training began with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from edge_dflash.backends import load
from edge_dflash.builder.card import CARD, CardLengths, CardTarget, DrafterCard, check_prompts, headline
from edge_dflash.bundle.manifest import fingerprint
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.tables import encode
from edge_dflash.training.answers import TargetAnswer
from edge_dflash.training.data import TrainingData
from edge_dflash.training.evaluate import Measure
from edge_dflash.training.trainer import TrainingState
from edge_dflash.training.workdir import TrainingRun
from edge_dflash.version import __version__

LEARNT = 1.2  # accept length below which a drafter hardly drafts
FELL = 0.9  # of the accept length before, of one way of asking


def card_of(
    run: TrainingRun,
    trained: Path,
    bundle: Bundle,
    data: Sequence[TrainingData],
    answers: Sequence[Sequence[TargetAnswer]],
    state: TrainingState,
    measures: Mapping[str, Measure],
) -> DrafterCard:
    """What is written beside the drafter, of bundles with it as it began (``bundle``) and ``trained``."""
    target, begins = bundle.pair.target, run.begins
    old, new = (measures[f"{name}, {headline(measures)}"].accept_length for name in ("before", "after"))
    prompts = sorted((one.prompt for file in answers for one in file if one.heldout), key=len)
    backend = load(Bundle.open(trained, check_hashes=False))
    try:
        checks = check_prompts(backend, prompts, target.eos_token_ids)
    finally:
        backend.close()
    return DrafterCard(
        data_sha256=" ".join(each.sha256 for each in data),
        prompts=sum(len(each.training) for each in data),
        heldout=sum(len(each.heldout) for each in data),
        steps=state.step,
        best_step=state.best_step,
        seconds=round(state.seconds, 1),
        accept_length=CardLengths(round(old, 4) if begins else None, round(new, 4)),
        target=CardTarget(run.target.resolve().name, target.architecture, fingerprint(bundle.manifest)),
        kind=bundle.pair.drafter.kind if bundle.pair.drafter else "",
        created_by=f"edge-dflash {__version__}",
        better=new >= old or not begins,
        measures={name: _numbers(one) for name, one in measures.items()},
        acceptance={name: tuple(one.acceptance) for name, one in measures.items()},
        checks=checks,
    )


def warnings(card: DrafterCard, folder: Path) -> Iterator[str]:
    """What to tell of a drafter that lies in ``folder``."""
    if not card.better:
        yield f"warning: the trained drafter is worse than its start on the held-out prompts; it is kept in {folder}"
    elif card.best_step == 0:
        yield (
            "warning: no step was better than the start on held-out answers, so the drafter is as it began; give more "
            "prompts, or another --rate"
        )
    elif card.accept_length.after < LEARNT:
        yield f"warning: accept length {card.accept_length.after:.2f}: the drafter has learnt little; train it longer"
    for name, one in card.measures.items():
        when, _, way = name.partition(", ")
        old, new = card.measures.get(f"before, {way}", one)["accept_length"], one["accept_length"]
        if when == "after" and card.better and card.accept_length.before is not None and new < FELL * old:
            yield f"warning: {way}: accept length fell from {old:.2f} to {new:.2f}; give prompts as they will be asked"
    if not card.lossless:
        yield "warning: answers with and without the drafter differ, which is a defect: report it, with this card"
    if card.checked_length < LEARNT:
        yield (
            f"note: {CARD} has {len(card.checks)} free answers, of accept length {card.checked_length:.2f}: too little "
            "for a build to see a fault by; `edge-dflash verify` measures on your own prompts"
        )


def _numbers(one: Measure) -> dict[str, float]:
    body = encode(one)
    return {name: float(value) for name, value in body.items() if isinstance(value, int | float)}
