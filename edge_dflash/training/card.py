"""The card of a trained drafter: what was measured, and whether it is better than what the training began with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edge_dflash.backends import load
from edge_dflash.builder.card import CardLengths, CardTarget, DrafterCard, check_prompts
from edge_dflash.bundle.manifest import fingerprint
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.tables import encode
from edge_dflash.training.answers import TargetAnswer
from edge_dflash.training.data import TrainingData
from edge_dflash.training.evaluate import Measure
from edge_dflash.training.trainer import TrainingState
from edge_dflash.training.workdir import TrainingRun
from edge_dflash.version import __version__


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
    target = bundle.pair.target
    way = "greedy, schema" if "after, greedy, schema" in measures else "greedy"
    old, new = (measures[f"{name}, {way}"].accept_length for name in ("before", "after"))
    prompts = [one.prompt for file in answers for one in file if one.heldout and one.way != "sampled"]
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
        seconds=round(state.seconds, 1),
        accept_length=CardLengths(round(old, 4) if _begins(run) else None, round(new, 4)),
        target=CardTarget(run.target.resolve().name, target.architecture, fingerprint(bundle.manifest)),
        kind=bundle.pair.drafter.kind if bundle.pair.drafter else "",
        created_by=f"edge-dflash {__version__}",
        better=new >= old or not _begins(run),
        measures={name: _numbers(one) for name, one in measures.items()},
        acceptance={name: tuple(one.acceptance) for name, one in measures.items()},
        checks=checks,
    )


def _begins(run: TrainingRun) -> bool:
    """Whether the training began with a drafter that somebody trained."""
    return run.drafter is not None and any(run.drafter.glob("*.safetensors"))


def _numbers(one: Measure) -> dict[str, float]:
    body = encode(one)
    return {name: float(value) for name, value in body.items() if isinstance(value, int | float)}
