"""The target's own answers to the prompts: greedy, and drawn, with the form that each prompt asks for.

They are appended to a file as they come, whole lines only; what is there is not asked again. So a call that was killed
is gone on with by the same call, and the set of answers is that of one that was not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from edge_dflash.common.progress import Progress, unheard
from edge_dflash.decode.options import Options, PlanOptions
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.runner.recording import mend
from edge_dflash.text.prompt import Prompter
from edge_dflash.training.data import TrainingData, TrainingTask
from edge_dflash.training.settings import TrainingRun

Way = Literal["greedy", "sampled", "given"]
STAGE = "answers"
_OF, _SUM = "data_sha256", "sha256"  # keys of a file's first line, and of the others
_SYNC = 5.0  # seconds between two times that the disk is told to keep what it has


@dataclass(frozen=True)
class TargetAnswer:
    """A prompt and an answer to it, as ids."""

    task: int  # index of the task
    way: Way
    number: int  # of drawn answers
    heldout: bool
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # the stop token included, if the answer ended by itself

    @property
    def key(self) -> tuple[int, str, int]:
        """Which answer of a file it is."""
        return self.task, self.way, self.number


def open_prompter(planner: Planner) -> Prompter:
    """What makes the ids of prompts as requests do. Raises RequestError for a planner without a tokenizer."""
    if planner.tokenizer is None:
        raise RequestError("the target has no tokenizer: its prompts cannot be read; give a checkpoint with one")
    return Prompter(planner.tokenizer)


def prompt_ids(prompter: Prompter, task: TrainingTask) -> tuple[int, ...]:
    """Ids of a prompt, as a request of the same messages has them. Raises RequestError where that cannot be."""
    return prompter.prompt(task.asked, Options.of({**task.options, "raw": task.raw})).ids


def make_answers(
    planner: Planner, data: TrainingData, file: Path, run: TrainingRun, progress: Progress = unheard
) -> int:
    """Append the answers that are missing in ``file``; how many tokens were made.

    Tasks to train on are answered greedily and ``run.sampled`` times by seed, unless they have an answer; held-out ones
    greedily. Answers end where the context does; prompts that leave no room are left out. Raises RequestError for a
    task that the bundle cannot be asked, naming its line, and for a file of answers to other data.
    """
    prompter = open_prompter(planner)
    begin_file(file, data)
    done = {one.key for one in read_answers(file)}
    wanted = list(_wanted(data, run.sampled))
    rest = [(task, way, number) for task, way, number in wanted if (task.index, way, number) not in done]
    made, kept, skipped = 0, len(done), len(wanted) - len(rest)
    progress(STAGE, skipped, len(wanted))
    with file.open("ab") as out, ThreadPoolExecutor(2 * planner.shape.lanes) as pool:
        synced, ask = time.monotonic(), partial(_answer, planner, prompter, data, run)
        try:
            for finished, future in enumerate(as_completed([pool.submit(ask, *one) for one in rest]), skipped + 1):
                if (answer := future.result()) is not None:
                    out.write(_line(answer))
                    made += len(answer.tokens)
                    kept += 1
                out.flush()
                if time.monotonic() - synced > _SYNC:
                    os.fsync(out.fileno())
                    synced = time.monotonic()
                progress(STAGE, finished, len(wanted))
        finally:
            pool.shutdown(cancel_futures=True)
        os.fsync(out.fileno())
    if not kept:
        raise RequestError(
            f"no prompt of {data.path} leaves room for an answer in {planner.shape.usable_context} tokens of context; "
            "give shorter prompts, or a target of a larger --max-context"
        )
    return made


def begin_file(file: Path, data: TrainingData) -> None:
    """Write the first line of a file of answers: the hash of the data. Raises RequestError where it has another one."""
    whole_lines(file)
    with file.open("a+b") as open_file:
        open_file.seek(0)
        if not (first := open_file.readline()):
            open_file.write(json.dumps({_OF: data.sha256}).encode() + b"\n")
        elif _body(first).get(_OF) != data.sha256:
            raise RequestError(
                f"{file} has answers to other data than {data.path} holds now; give the file as it was, or remove this"
            )


def whole_lines(file: Path) -> None:
    """Cut what a kill tore at the end of a file, if it is there."""
    with suppress(FileNotFoundError), file.open("r+b") as torn:
        mend(torn.fileno())


def read_answers(file: Path) -> tuple[TargetAnswer, ...]:
    """The answers in a file, by task, way and number; none without a file.

    A line that a kill tore is cut off. Raises RequestError for a damaged file.
    """
    whole_lines(file)
    if not file.exists():
        return ()
    found: dict[tuple[int, str, int], TargetAnswer] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines):
            body = _body(line)
            if number == 0 and _OF in body:
                continue
            try:
                if body.pop(_SUM) != _sum(body):
                    raise ValueError
                prompt, tokens = (tuple(map(int, body.pop(name))) for name in ("prompt", "tokens"))
                one = TargetAnswer(**body, prompt=prompt, tokens=tokens)
            except (ValueError, TypeError, KeyError):
                raise RequestError(f"{file}: line {number + 1} is damaged; remove it and run again") from None
            found[one.key] = one
    return tuple(sorted(found.values(), key=lambda one: one.key))


def _body(line: bytes) -> dict[str, Any]:
    """The object of a line; an empty one where it is none."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _wanted(data: TrainingData, sampled: int) -> Iterator[tuple[TrainingTask, Way, int]]:
    """Task, way and number of all answers."""
    for task in data.tasks:
        given = task.answer is not None and not task.heldout
        yield task, "given" if given else "greedy", 0
        if not given and not task.heldout:
            yield from ((task, "sampled", number) for number in range(sampled))


def _answer(
    planner: Planner,
    prompter: Prompter,
    data: TrainingData,
    run: TrainingRun,
    task: TrainingTask,
    way: Way,
    number: int,
) -> TargetAnswer | None:
    """The answer to one prompt; None where it does not fit."""
    try:
        prompt = prompt_ids(prompter, task)
        if (room := planner.shape.usable_context - len(prompt)) < 1:
            return None
        if way == "given":
            tokens = _given(planner, task)[:room]
        else:
            options: PlanOptions = {**task.options, "raw": task.raw, "max_new_tokens": min(run.new_tokens, room)}  # type: ignore[typeddict-item]
            if way == "sampled":
                options |= {"temperature": run.temperature, "seed": task.index * 1009 + number}
            tokens = planner.plan(task.asked, **options).tokens  # the words: a system prompt is computed once
    except RequestError as error:
        raise RequestError(f"{data.path}: line {task.index + 1}: {error}") from None
    return TargetAnswer(task.index, way, number, task.heldout, prompt, tokens)


def _given(planner: Planner, task: TrainingTask) -> tuple[int, ...]:
    """Ids of the answer that a task has, with the token that ends one unless it was cut."""
    tokenizer, stops = planner.tokenizer, planner.stop_token_ids
    assert tokenizer is not None
    own = tokenizer.eos_token_id
    end = ((own,) if own is not None and own in stops else stops[:1]) if task.whole else ()
    return (*tokenizer.encode_text(task.answer or ""), *end)


def _line(one: TargetAnswer) -> bytes:
    body: dict[str, Any] = {each.name: getattr(one, each.name) for each in fields(one)}
    return json.dumps({**body, _SUM: _sum(body)}).encode() + b"\n"


def _sum(body: dict[str, Any]) -> str:
    """The hash of a line's other keys."""
    return sha256(json.dumps(body).encode()).hexdigest()
