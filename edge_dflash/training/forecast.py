"""What the training of a drafter will take, told before: bytes of the device and of the disk, and hours at most.

Training is in mixed precision with AdamW: parameters, gradients and both moments in float32, products in BF16 from a
cast copy of the weights; on a CPU all is float32. Coefficients of the activations count the tensors that autograd keeps
in a block of the drafter (tests count them in torch). For the hours a few tokens are timed, as if every answer were as
long as it may be and none shared a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from edge_dflash.board.linux import read_memory
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import EdgeDflashError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import MarkovWalk, SelectorWalk
from edge_dflash.model.specs import DrafterSpec, PairSpec
from edge_dflash.planner import Planner
from edge_dflash.training.answers import open_prompter, prompt_ids
from edge_dflash.training.data import TrainingData, spread
from edge_dflash.training.drafter import drafter_spec, drafter_weights
from edge_dflash.training.evaluate import ways
from edge_dflash.training.settings import TrainingRun
from edge_dflash.training.taps import shard_bytes, tap_rows

FLOAT, BF16 = 4, 2  # bytes
ROWS_MLP = 4  # tensors kept of a layer's MLP for each row of a block
LOGITS = 3.0  # float32 tensors as large as the logits: themselves, their softmax, their gradient
SELECTED, CHAINED = 1.5, 2.5  # more of them, with DFlash2's selector and with DSpark's head and the target's softmax
REPLACED = 36  # bytes of the disk for a parameter: two checkpoints (3 x 4 each, and the best, 4), two in BF16
SPARE = 0.08  # of the sum: what the allocator cannot hand out, and its workspaces
CONTEXT_BYTES = 600 << 20  # of the device, before the first tensor
STAGES = ("answers", "taps", "training", "evaluation")
PROBE_TOKENS = 24  # that are timed, with the drafter and without
_READ = 32  # prompts of a file whose length is counted


@dataclass(frozen=True)
class TrainingDevice:
    """What trains: "cuda" or "cpu"."""

    name: str
    size: int | None  # bytes of its memory; None: not known

    @classmethod
    def found(cls) -> TrainingDevice:
        """That of this machine: its GPU where torch finds one."""
        if torch.cuda.is_available():
            return cls("cuda", torch.cuda.get_device_properties(0).total_memory)
        state = read_memory(Path("/"))
        return cls("cpu", None if state is None else state.total)

    @property
    def mixed(self) -> bool:
        """Whether products are in BF16."""
        return self.name != "cpu"


@dataclass(frozen=True)
class Forecast:
    """What a training needs, at most: every answer is as long as ``--new-tokens`` allows, and none shares a pass."""

    parameters: int  # of the drafter
    memory: Mapping[str, int]  # bytes on the device by purpose, see training_bytes
    device: int | None  # bytes that it has; None: not known
    disk: int  # bytes of the shards of taps
    files: int  # bytes of checkpoints, weights and the second bundle
    seconds: Mapping[str, float]  # by stage; without "training" where it ends behind so many steps
    longest: int  # tokens of a prompt and its answer

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys; bytes and hours."""
        hours = {name: seconds / 3600 for name, seconds in self.seconds.items()}
        sizes = {name: value for name, value in vars(self).items() if name not in ("seconds", "longest")}
        return {**sizes, **{f"{name}_hours": spent for name, spent in hours.items()}, "hours": sum(hours.values())}

    @property
    def time(self) -> str:
        """Hours, for people."""
        besides = "" if "training" in self.seconds else " besides the steps"
        times = ", ".join(f"{name} {clock(spent)}" for name, spent in self.seconds.items())
        return f"time at most{besides}: {clock(sum(self.seconds.values()))} ({times})"

    @property
    def lines(self) -> tuple[str, ...]:
        """All of it, for people."""
        unsaid = ("reused", "total")
        parts = ", ".join(f"{name} {gigabytes(n)}" for name, n in self.memory.items() if n and name not in unsaid)
        there = "" if self.device is None else f" of {gigabytes(self.device)}"
        return (
            f"drafter: {self.parameters / 1e6:,.1f} M parameters",
            f"memory of the device: {gigabytes(self.memory['total'])}{there} ({parts})",
            *filter(None, [memory_warning(self.memory, self.device)]),
            f"disk: {gigabytes(self.disk)} for taps, {gigabytes(self.files)} for checkpoints and bundles",
            self.time,
        )


def forecast(
    run: TrainingRun,
    planner: Planner,
    bundle: Bundle,
    data: Sequence[TrainingData],
    evaluated: int,
    device: TrainingDevice,
) -> Forecast | None:
    """The forecast of a run whose first bundle is open; None where a few tokens cannot be timed.

    ``evaluated``: tasks that are decoded before and after.
    """
    prompter, usable = open_prompter(planner), planner.shape.usable_context
    read = [(task, len(prompt_ids(prompter, task))) for each in data for task in spread(each.tasks, _READ)]
    fitting = [(task, length) for task, length in read if length + PROBE_TOKENS < usable]
    if not fitting:
        return None
    task, rates = fitting[0][0], []
    try:
        for speculative in (True, False):
            plan = planner.plan(task.asked, raw=task.raw, max_new_tokens=PROBE_TOKENS, speculative=speculative)
            rates.append(max(1, len(plan.tokens) - 1) / max(plan.timings.decode_seconds, 1e-6))
    except EdgeDflashError:  # what is wrong with the task is said where it is answered
        return None
    prompt = sum(length for _, length in fitting) / len(fitting)
    prompt_rate = plan.prompt_tokens / max(plan.timings.prefill_seconds, 1e-6)
    one, plain = (prompt / prompt_rate + run.new_tokens / rate for rate in rates)
    tasks = [task for each in data for task in each.tasks]
    asked = sum(1 if task.heldout else 1 + run.sampled for task in tasks if task.heldout or task.answer is None)
    given = sum(task.answer is not None and not task.heldout for task in tasks)
    tokens = round((asked + given) * min(prompt + run.new_tokens, usable))
    longest = min(max(length for _, length in fitting) + run.new_tokens, usable)
    stages = {"answers": asked * one, "taps": tokens / prompt_rate}
    if run.minutes:
        stages["training"] = 60 * run.minutes
    stages["evaluation"] = 2 * len(ways(tasks)) * (evaluated * one + min(run.plain, evaluated) * plain)
    return Forecast(
        parameters=drafter_parameters(bundle.pair),
        memory=training_bytes(bundle.pair, run, longest, mixed=device.mixed),
        device=device.size,
        disk=shard_bytes(bundle.pair, tokens),
        files=training_files(bundle),
        seconds=stages,
        longest=longest,
    )


def memory_warning(needed: Mapping[str, int], device: int | None) -> str | None:
    """What to tell where a device of so many bytes (None: not known) is too small; else None."""
    if device is None or needed["total"] <= device:
        return None
    return (
        f"warning: a step needs about {gigabytes(needed['total'])} of memory, the device has {gigabytes(device)}; give "
        "fewer --sequences or --anchors, and more --accumulate"
    )


def drafter_parameters(pair: PairSpec) -> int:
    """Parameters that are trained."""
    return sum(prod(weight.shape) for weight in drafter_weights(pair).values())


def training_bytes(pair: PairSpec, run: TrainingRun, tokens: int, *, mixed: bool = True) -> dict[str, int]:
    """Bytes on the device by purpose at the peak of a step, of answers that have ``tokens`` with their prompts.

    ``mixed``: products in BF16; without, nothing is cast and the device has no context. "moments" are both of AdamW,
    "frozen" the target's embedding and head, "reused" those of the gradients that lie in the place of activations and
    logits, in a step of one pass: counted once in the "total".
    """
    drafter, target = drafter_spec(pair), pair.target
    width, parameters = BF16 if mixed else FLOAT, drafter_parameters(pair)
    proposing = run.sequences * run.anchors * drafter.drafts
    known = {
        "parameters": FLOAT * parameters,
        "gradients": FLOAT * parameters,
        "moments": 2 * FLOAT * parameters,
        "casts": BF16 * parameters if mixed else 0,
        "frozen": 2 * target.vocab_size * target.hidden_size * width,  # a tied head is rounded in another way
        "taps": run.sequences * tokens * tap_rows(drafter) * target.hidden_size * width,
        "activations": activation_bytes(drafter, run, tokens, width),
        "logits": round(proposing * target.vocab_size * (logit_tensors(pair) * FLOAT + (width if mixed else 0))),
    }
    reused = min(known["gradients"], known["activations"] + known["logits"]) if run.accumulate == 1 else 0
    total = sum(known.values()) - reused
    spare = round(SPARE * total) + CONTEXT_BYTES if mixed else 0
    return {**known, "reused": reused, "spare": spare, "total": total + spare}


def activation_bytes(drafter: DrafterSpec, run: TrainingRun, tokens: int, width: int) -> int:
    """Bytes that autograd keeps of the drafter's layers; ``width`` of a product's input, 2 or 4.

    The residual stream, what norms read and what they make of it stay in float32. Attention keeps no scores, but its
    mask: a number for each row of a block and each key.
    """
    attention, hidden = drafter.attention, drafter.hidden_size
    heads, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    context = run.sequences * tokens
    block = run.anchors * drafter.block_size
    rows = run.sequences * block
    rotary = attention.head_dim * FLOAT  # cosines and sines of a row
    row = hidden * (4 * FLOAT + 2 * width) + heads * (2 * FLOAT + 2 * width) + kv * 2 * FLOAT + 2 * rotary
    row += width * ROWS_MLP * drafter.intermediate_size
    keys = (context + rows) * 2 * width * kv + context * (2 * kv * FLOAT + rotary)
    mask = rows * (tokens + block) * width
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


def training_files(bundle: Bundle) -> int:
    """Bytes on the disk besides taps and the first bundle: checkpoints, weights, the other bundle."""
    return REPLACED * drafter_parameters(bundle.pair) + bundle.manifest.size


def clock(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def gigabytes(size: int) -> str:
    """Bytes in words."""
    if size < 10**6:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e9:.2f} GB" if size >= 10**8 else f"{size / 1e6:.1f} MB"
