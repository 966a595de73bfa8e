"""What the training of a drafter will take: bytes of the device and of the disk by arithmetic, and hours as given.

Parameters are those of the pair's programs. Training is in mixed precision with AdamW: parameters, gradients and both
moments in float32, products in BF16 from a cast copy of the weights; on a CPU all is float32. Coefficients of the
activations count the tensors that autograd keeps in a block of the drafter (tests count them in torch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

from edge_dflash.errors import RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import MarkovWalk, SelectorWalk
from edge_dflash.model.specs import DrafterSpec, PairSpec

FLOAT, BF16 = 4, 2  # bytes
ROWS_MLP = 4  # tensors kept of a layer's MLP for each row of a block
LOGITS = 3.0  # float32 tensors as large as the logits: themselves, their softmax, their gradient
SELECTED, CHAINED = 1.5, 2.5  # more of them, with DFlash2's selector and with DSpark's head and the target's softmax
REPLACED = 36  # bytes of the disk for a parameter: two checkpoints (3 x 4 each), the best twice (4), two in BF16
SPARE = 0.08  # of the sum: what the allocator cannot hand out, and its workspaces
CONTEXT_BYTES = 600 << 20  # of the device, before the first tensor


@dataclass(frozen=True)
class BatchSize:
    """One pass of a training step."""

    sequences: int  # S, at a time
    tokens: int  # T, of the longest of them
    anchors: int  # A, blocks of a sequence
    accumulate: int = 1  # passes of a step

    def __post_init__(self) -> None:
        """Raise RequestError for a size below 1."""
        for one in fields(self):
            if (value := getattr(self, one.name)) < 1:
                raise RequestError(f"{one.name} of a training batch is {value}; give at least 1")


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes on the device in a training step, at its peak."""

    parameters: int
    gradients: int
    moments: int  # both of AdamW
    casts: int  # BF16 copies of the weights
    frozen: int  # the target's embedding and head
    taps: int  # of the batch
    activations: int
    logits: int
    reused: int  # of the gradients, in the place of activations and logits: in a step of one pass
    spare: int  # and the device's own context

    @property
    def total(self) -> int:
        """All of them, what is reused once."""
        every: int = sum(getattr(self, one.name) for one in fields(self))
        return every - 2 * self.reused


@dataclass(frozen=True)
class Forecast:
    """What a training needs, at most."""

    parameters: int  # of the drafter
    memory: TrainingBytes
    disk: int  # bytes of the shards of taps
    files: int  # bytes of checkpoints, weights and the second bundle
    stages: Mapping[str, float | None]  # hours of each; None: not measured
    device: int | None = None  # bytes that the device has

    @property
    def hours(self) -> float | None:
        """Hours of all stages; None where one was not measured."""
        found = list(self.stages.values())
        return None if None in found else sum(hours or 0.0 for hours in found)

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys; bytes and hours."""
        return {
            "parameters": self.parameters,
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "device": self.device,
            "disk": self.disk,
            "files": self.files,
            **{f"{name}_hours": hours for name, hours in self.stages.items()},
            "hours": self.hours,
        }

    @property
    def lines(self) -> tuple[str, ...]:
        """The same for people."""
        parts = ", ".join(
            f"{name} {gigabytes(size)}" for name, size in asdict(self.memory).items() if name != "reused" and size
        )
        times = ", ".join(f"{name} {_hours_text(hours)}" for name, hours in self.stages.items())
        there = "" if self.device is None else f" of {gigabytes(self.device)}"
        return (
            f"drafter: {self.parameters / 1e6:,.1f} M parameters",
            f"memory of the device: {gigabytes(self.memory.total)}{there} ({parts})",
            *filter(None, [memory_warning(self.memory, self.device)]),
            f"disk: {gigabytes(self.disk)} for taps, {gigabytes(self.files)} for checkpoints and bundles",
            f"time at most: {_hours_text(self.hours)} ({times})",
        )


def memory_warning(needed: TrainingBytes, device: int | None) -> str | None:
    """What to tell where a device of so many bytes (None: not known) is too small; else None."""
    if device is None or needed.total <= device:
        return None
    return (
        f"warning: a step needs about {gigabytes(needed.total)} of memory, the device has {gigabytes(device)}; give "
        "fewer --sequences or --anchors, and more --accumulate"
    )


def drafter_parameters(pair: PairSpec) -> int:
    """Parameters that are trained. Raises RequestError without a drafter."""
    _drafter(pair)
    weights = pair_programs(pair).weights
    return sum(prod(weight.shape) for name, weight in weights.items() if name.startswith("drafter."))


def training_bytes(pair: PairSpec, batch: BatchSize, *, mixed: bool = True) -> TrainingBytes:
    """Peak of a training step. ``mixed``: products in BF16; without, nothing is cast and the device has no context."""
    drafter, target = _drafter(pair), pair.target
    width, parameters = BF16 if mixed else FLOAT, drafter_parameters(pair)
    taps = batch.sequences * batch.tokens * tap_rows(drafter) * target.hidden_size * width
    proposing = batch.sequences * batch.anchors * drafter.drafts
    logits = round(proposing * target.vocab_size * (logit_tensors(pair) * FLOAT + (width if mixed else 0)))
    known = {
        "parameters": FLOAT * parameters,
        "gradients": FLOAT * parameters,
        "moments": 2 * FLOAT * parameters,
        "casts": BF16 * parameters if mixed else 0,
        "frozen": 2 * target.vocab_size * target.hidden_size * width,  # a tied head is rounded in another way
        "taps": taps,
        "activations": activation_bytes(drafter, batch, width),
        "logits": logits,
    }
    reused = min(known["gradients"], known["activations"] + logits) if batch.accumulate == 1 else 0
    spare = round(SPARE * (sum(known.values()) - reused)) + CONTEXT_BYTES if mixed else 0
    return TrainingBytes(**known, reused=reused, spare=spare)


def activation_bytes(drafter: DrafterSpec, batch: BatchSize, width: int) -> int:
    """Bytes that autograd keeps of the drafter's layers; ``width`` of a product's input, 2 or 4.

    The residual stream, what norms read and what they make of it stay in float32. Attention keeps no scores, but its
    mask: a number for each row of a block and each key.
    """
    attention, hidden = drafter.attention, drafter.hidden_size
    heads, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    context = batch.sequences * batch.tokens
    block = batch.anchors * drafter.block_size
    rows = batch.sequences * block
    turns = attention.head_dim * FLOAT  # cosines and sines of a row
    row = hidden * (4 * FLOAT + 2 * width) + heads * (2 * FLOAT + 2 * width) + kv * 2 * FLOAT + 2 * turns
    row += width * ROWS_MLP * drafter.intermediate_size
    keys = (context + rows) * 2 * width * kv + context * (2 * kv * FLOAT + turns)
    mask = rows * (batch.tokens + block) * width
    before = context * hidden * (2 * FLOAT + width) + rows * hidden * 3 * FLOAT
    return before + drafter.num_layers * (rows * row + keys + mask)


def logit_tensors(pair: PairSpec) -> float:
    """Float32 tensors as large as the logits of the proposing rows, at the peak."""
    match pair_programs(pair).propose.walk:
        case SelectorWalk():
            return LOGITS + SELECTED
        case MarkovWalk():
            return LOGITS + CHAINED
        case _:
            return LOGITS


def tap_rows(drafter: DrafterSpec) -> int:
    """Rows of the target's width that are kept of a token: its taps, and what the head reads where DSpark learns it."""
    return len(drafter.target_layer_ids) + drafter.anchor_drafts


def shard_bytes(pair: PairSpec, tokens: int) -> int:
    """Bytes on the disk of ``tokens``: an id (4 bytes) and BF16 rows."""
    return tokens * (4 + tap_rows(_drafter(pair)) * pair.target.hidden_size * BF16)


def training_files(pair: PairSpec, bundle: int) -> int:
    """Bytes on the disk besides taps and the first bundle, of so many bytes: checkpoints, weights, the other bundle."""
    return REPLACED * drafter_parameters(pair) + bundle


def forecast(
    pair: PairSpec,
    batch: BatchSize,
    *,
    tokens: int,
    stages: Mapping[str, float | None],
    mixed: bool = True,
    bundle: int = 0,
    device: int | None = None,
) -> Forecast:
    """The forecast of a training on ``tokens`` of prompts and answers, whose ``stages`` take these hours.

    ``bundle``: bytes of one; ``device``: bytes of its memory. Raises RequestError without a drafter.
    """
    return Forecast(
        parameters=drafter_parameters(pair),
        memory=training_bytes(pair, batch, mixed=mixed),
        disk=shard_bytes(pair, tokens),
        files=training_files(pair, bundle),
        stages=stages,
        device=device,
    )


def _hours_text(hours: float | None) -> str:
    if hours is None:
        return "not measured"
    return f"{60 * hours:.1f} min" if hours < 1 else f"{hours:.1f} h"


def gigabytes(size: int) -> str:
    """Bytes in words."""
    if size < 10**6:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e9:.2f} GB" if size >= 10**8 else f"{size / 1e6:.1f} MB"


def _drafter(pair: PairSpec) -> DrafterSpec:
    if pair.drafter is None:
        raise RequestError("the pair has no drafter to train; give --drafter, or a geometry to begin from")
    return pair.drafter
