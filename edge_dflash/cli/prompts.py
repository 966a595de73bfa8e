"""Sets of prompts: JSONL files, and what is taken when none is given."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np

from edge_dflash.bench.subjects import Prompts
from edge_dflash.bench.workload import Form
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.cli.generate import read_words
from edge_dflash.common.files import directory
from edge_dflash.demo.checking import plan_schema
from edge_dflash.demo.tasks import HELDOUT, MODELS
from edge_dflash.errors import ContextError
from edge_dflash.pictures.pictured import text_ids
from edge_dflash.planner import Planner, Task
from edge_dflash.quality.texts import parse_tasks

_CALIBRATION = "robot_planning.jsonl"
RANDOM_PROMPTS, RANDOM_TOKENS = 4, 12  # for a bundle without tokenizer


def read_prompts(path: Path) -> list[Task]:
    """Tasks of a JSONL file; see :func:`~edge_dflash.quality.texts.parse_tasks`.

    Raises RequestError naming file and line.
    """
    return parse_tasks(read_words(path), path)


def default_prompts(planner: Planner, max_new_tokens: int, bundle: Path | None = None) -> list[Task]:
    """Prompts that fit: the demo pair's held-out tasks where it is in ``bundle``, else calibration prompts.

    For a bundle without tokenizer pseudo-random ids, always the same.
    """
    if planner.tokenizer is None:
        rng, shape = np.random.default_rng(0), planner.shape
        ids = [rng.integers(0, shape.vocab_size, RANDOM_TOKENS).tolist() for _ in range(RANDOM_PROMPTS)]
        return [text_ids(prompt, shape.image_token_id) for prompt in ids]
    file = HELDOUT if bundle is not None and is_demo(read_manifest(bundle)) else directory("calib") / _CALIBRATION
    return _fitting(planner, file, max_new_tokens)


def bench_prompts(bundle: Path, planner: Planner, max_new_tokens: int, file: Path | None = None) -> Prompts:
    """What a bundle is timed with: ``file``; else tasks like those that its pair was trained for, where that is known.

    Drafts are only as good as the prompts are familiar, so the demo pair gets its held-out tasks and its own schema.
    """
    if file is not None:
        return Prompts(str(file), read_prompts(file))
    if planner.tokenizer is None:
        return Prompts("prompts of random ids (no tokenizer)", default_prompts(planner, max_new_tokens))
    if is_demo(read_manifest(bundle)):
        tasks = _fitting(planner, HELDOUT, max_new_tokens)
        return Prompts("the demo pair's held-out tasks", tasks, Form("plans of the demo's actions", plan_schema()))
    return Prompts(f"calib/{_CALIBRATION}", default_prompts(planner, max_new_tokens))


def _fitting(planner: Planner, file: Path, max_new_tokens: int) -> list[Task]:
    """The prompts of a shipped file that leave room for ``max_new_tokens``."""
    room = planner.shape.usable_context - max_new_tokens
    fitting = [task for task in read_prompts(file) if len(planner.encode(task)) <= room]
    if not fitting:
        raise ContextError(
            f"no prompt of {file.name} and {max_new_tokens} new tokens fit the usable context of "
            f"{planner.shape.usable_context} tokens; give shorter ones with --prompts"
        )
    return fitting


def is_demo(manifest: Manifest) -> bool:
    """Whether the shipped models are in the bundle, by the size and the first MiB of each weight file.

    In any form: with eyes, without the drafter, converted for any arch.
    """
    made_of = {(one.size, one.sha256) for one in manifest.sources if one.file.endswith(".safetensors")}
    shipped = set()
    for path in MODELS.glob("*/*.safetensors"):
        with path.open("rb") as file:
            shipped.add((path.stat().st_size, sha256(file.read(1 << 20)).hexdigest()))
    return bool(made_of) and made_of <= shipped
