"""``edge-dflash demo``: the shipped pair, built once, makes a plan with and without speculation."""

from __future__ import annotations

import json as jsonlib
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from edge_dflash.cli.output import Json, emit_json, say, show, stages
from edge_dflash.cli.plans import WARM_UP_TOKENS, comparison, print_part, require_same, same_tokens, timed
from edge_dflash.common.files import directory
from edge_dflash.demo.actions import plan_schema, schema_problems
from edge_dflash.demo.drawing import png
from edge_dflash.demo.seeing import PICTURED, assemble, messages, picture, with_goal
from edge_dflash.demo.tasks import HELDOUT, MODELS, Task, check_plan, task_from_json
from edge_dflash.errors import BundleError, RequestError
from edge_dflash.planner import Planner
from edge_dflash.result import Plan, json_object
from edge_dflash.version import __version__

RECIPE = "demo-cpu.yaml"


def demo(
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A task of your own: a scene and a goal as in edge_dflash/demo/task.txt, it knows no others. With "
            "--image a goal alone, such as 'Bring red_mug to Anna.'",
        ),
    ] = None,
    image: Annotated[
        bool, typer.Option("--image", help="Plan from a picture of the scene: drawn, seen by a small vision tower.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --image: write the picture there, as a PNG.")
    ] = None,
    index: Annotated[int, typer.Option(min=0, metavar="N", help="Which of the 64 held-out tasks, from 0.")] = 0,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the demo's bundle is or will be; default: ~/.cache/edge-dflash."),
    ] = None,
    json: Json = False,
) -> None:
    """Make a robot plan with the shipped demo pair, with and without its drafter, and compare.

    With --image the scene is a picture and the text says only what a picture cannot: the goal and the house rules.

    The first run builds the bundle (seconds to a minute); later runs open it. The held-out tasks were never trained
    on. Exit code 9 when the two outputs differ.

    JSON keys: identical (speculative output equals plain output), accept_length (mean tokens committed per verify),
    valid (the plan fits the schema and names only what is in the scene), object (the plan, or null),
    plain_seconds, speculative_seconds, ratio (speculative / plain), tokens, accept_lengths, text, task, problems,
    bundle.
    """
    request = _pictured(index, task, save) if image else _own(task) if task is not None else _heldout(index)
    if save is not None and not image:
        raise RequestError(f"--save {save} is given without --image: only a picture can be saved; add --image")
    where = bundle if bundle is not None else default_bundle(image=image)
    with _open(where, ours=bundle is None, image=image) as planner:
        say(f"task: {request.title}")
        with stages("warming up"):
            planner.plan(request.messages, max_new_tokens=WARM_UP_TOKENS)
        speculative, joules = timed(planner, request.messages, {}, None if json else print_part)
        if not json:
            print("\n")
        with stages("the same without the drafter"):
            plain, plain_joules = timed(planner, request.messages, {"speculative": False})
    problems = request.problems(speculative.text or "")
    if json:
        emit_json(_json(request, where, plain, speculative, problems))
    else:
        show(comparison(plain, plain_joules, speculative, joules))
        print("valid plan" if not problems else "not a valid plan: " + "; ".join(problems))
    require_same(plain, speculative)


@dataclass(frozen=True)
class _Request:
    """What is asked, and the held-out task that it is, if it is one."""

    title: str
    messages: list[dict[str, Any]]
    task: Task | None

    def problems(self, text: str) -> list[str]:
        """Why a text is no valid plan: of a task of one's own only the form is known."""
        if self.task is not None:
            return check_plan(self.task, text)
        plan = json_object(text)
        return ["not a JSON object"] if plan is None else schema_problems(plan, plan_schema())


def _own(text: str) -> _Request:
    return _Request(" ".join(text.split()), [{"role": "user", "content": text}], None)


def _task(index: int, file: Path) -> Task:
    lines = file.read_text(encoding="utf-8").splitlines()
    if index >= len(lines):
        raise RequestError(f"--index {index} is given, held-out tasks are 0 to {len(lines) - 1}")
    return task_from_json(jsonlib.loads(lines[index]))


def _heldout(index: int) -> _Request:
    task = _task(index, HELDOUT)
    return _Request(task.goal_text, list(task.messages), task)


def _pictured(index: int, goal: str | None, save: Path | None) -> _Request:
    task = _task(index, PICTURED)
    if goal is not None:
        task = with_goal(task, goal)
    if save is not None:
        save.write_bytes(png(picture(task)))
        say(f"the picture: {save}")
    return _Request(task.goal_text, messages(task), task)


def default_bundle(*, image: bool = False) -> Path:
    """Where the demo's bundle is kept: another place for every version of edge-dflash, the models and the recipe."""
    digest = sha256(__version__.encode())
    for path in [directory("engines") / RECIPE, *sorted(MODELS.rglob("*"))]:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    name = "demo-image" if image else "demo"
    return Path.home() / ".cache" / "edge-dflash" / f"{name}-{__version__}-{digest.hexdigest()[:12]}"


def _open(where: Path, *, ours: bool, image: bool) -> Planner:
    """Open the bundle; a missing one is built. A damaged one in our own cache is built again."""
    if not where.exists():
        _build(where, image=image)
    try:
        with stages("opening the bundle") as report:
            return Planner.open(where, progress=report)
    except BundleError as error:
        if not ours:
            raise
        say(f"warning: {error}; building the demo again")
        shutil.rmtree(where)
    _build(where, image=image)
    with stages("opening the bundle") as report:
        return Planner.open(where, progress=report)


def _build(where: Path, *, image: bool) -> None:
    say(f"building the demo's bundle: {where}")
    where.parent.mkdir(parents=True, exist_ok=True)
    with stages() as report, TemporaryDirectory(dir=where.parent) as scratch:
        from edge_dflash.builder.write import BuildConfig, build  # torch, only here, and it takes seconds

        target = MODELS / "target"
        if image:
            assemble(target := Path(scratch) / "target")
        result = build(BuildConfig(target, MODELS / "drafter", where, recipe=directory("engines") / RECIPE), report)
    say(f"built: {result.bytes / 1e6:.1f} MB in {result.seconds:.1f} s")


def _json(request: _Request, where: Path, plain: Plan, speculative: Plan, problems: list[str]) -> dict[str, Any]:
    return {
        "identical": same_tokens(plain, speculative),
        "accept_length": speculative.accept_length,
        "valid": not problems,
        "object": speculative.object,
        "plain_seconds": plain.timings.total_seconds,
        "speculative_seconds": speculative.timings.total_seconds,
        "ratio": speculative.timings.total_seconds / plain.timings.total_seconds,
        "tokens": len(speculative.tokens),
        "accept_lengths": list(speculative.accept_lengths),
        "text": speculative.text,
        "task": request.title,
        "problems": problems,
        "bundle": str(where),
    }
