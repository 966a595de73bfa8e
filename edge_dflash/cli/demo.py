"""``edge-dflash demo``: the shipped pair, built once, makes a plan with and without speculation."""

from __future__ import annotations

import json as jsonlib
import shlex
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from edge_dflash.cli.output import Json, emit_json, say, show, stages
from edge_dflash.cli.plans import WARM_UP_TOKENS, comparison, identical, require_same, timed
from edge_dflash.cli.usage import opt, switch
from edge_dflash.common.files import check_place, check_writable, directory, scratch, write_whole
from edge_dflash.demo import tasks
from edge_dflash.demo.checking import plan_schema, schema_problems
from edge_dflash.demo.drawing import png
from edge_dflash.demo.world import PlanLines, scene_lines
from edge_dflash.errors import BundleError, RequestError
from edge_dflash.planner import Planner
from edge_dflash.result import Plan, json_object
from edge_dflash.version import __version__

RECIPE = "demo-cpu.yaml"


def demo(
    task: Annotated[
        str | None,
        opt(
            "TEXT",
            "A task of your own: a scene and a goal as in edge_dflash/demo/task.txt, it knows no others. With --image "
            "a goal alone, such as 'Bring red_mug to Anna.'",
        ),
    ] = None,
    image: Annotated[
        bool, switch("--image", "Plan from a picture of the scene: drawn, seen by a small vision tower.")
    ] = False,
    save: Annotated[Path | None, opt("FILE", "With --image: write the picture there, as a PNG.")] = None,
    index: Annotated[int, opt("N", "Which of the 64 held-out tasks, from 0.", min=0)] = 0,
    bundle: Annotated[
        Path | None, opt("DIR", "Where the demo's bundle is or will be; default: ~/.cache/edge-dflash.")
    ] = None,
    json: Json = False,
) -> None:
    """Make a robot plan with the shipped demo pair, with and without its drafter, and compare.

    With --image the scene is a picture and the text says only what a picture cannot: the goal and the house rules.

    The first run builds the bundle (seconds to a minute); later runs open it. The held-out tasks were never trained
    on. Exit code 9 when the two outputs differ.

    JSON keys: identical (speculative output equals plain output), accept_length (mean tokens committed per verify),
    valid (the plan fits the schema and names only what is in the scene), done (the simulator ran its steps: they do the
    task; null for a task or goal of your own), object (the plan, or null), plain_seconds, speculative_seconds, ratio
    (speculative / plain), tokens, accept_lengths, text, task, problems, bundle.
    """
    if save is not None and not image:
        raise RequestError(f"--save {save} is given without --image: only a picture can be saved; add --image")
    request = _request(task, index, image, save)
    where = bundle if bundle is not None else default_bundle(image=image)
    with _open(where, ours=bundle is None, image=image) as planner:
        say(f"task: {request.title}")
        with stages("warming up"):
            planner.plan(request.messages, max_new_tokens=WARM_UP_TOKENS)
        if not json:
            request.tell(image=image)
        lines = PlanLines()
        tell = None if json else lambda part: print(lines(part.text or ""), end="", flush=True)
        speculative, joules = timed(planner, request.messages, {}, tell)
        if not json:
            print("\n")
        with stages("the same without the drafter"):
            plain, plain_joules = timed(planner, request.messages, {"speculative": False})
    text = speculative.text or ""
    problems = request.problems(text)
    if json:
        emit_json({**_json(request, where, plain, speculative, problems), "done": request.done(text)})
    else:
        show(comparison(plain, plain_joules, speculative, joules))
        print("valid plan" if not problems else "not a valid plan: " + "; ".join(problems), flush=True)
        _explain(request, text, where)
    require_same(plain, speculative)


@dataclass(frozen=True)
class _Request:
    """What is asked, and the held-out task that it is, if it is one."""

    title: str
    messages: list[dict[str, Any]]
    task: tasks.Task | None
    simulated: bool = False  # whether the goal is one that the simulator knows

    def tell(self, *, image: bool) -> None:
        """Say what the scene is, and the house rules."""
        if self.task is None:
            return
        for line in scene_lines(self.task.scene):
            say(line)
        if image:
            say("  (the model sees a picture of it; --save FILE writes the picture)")
        if self.simulated:
            say(f"rules: {', '.join(self.task.rules) or 'none'}")

    def problems(self, text: str) -> list[str]:
        """Why a text is no valid plan: of a task of one's own only the form is known."""
        if self.task is not None:
            return tasks.check_plan(self.task, text)
        plan = json_object(text)
        return ["not a JSON object"] if plan is None else schema_problems(plan, plan_schema())

    def done(self, text: str) -> bool | None:
        """Whether a text does the task, by simulation; None: not known."""
        if self.task is None or not self.simulated:
            return None
        return not self.problems(text) and not tasks.check_success(self.task, text)


def _explain(request: _Request, text: str, where: Path) -> None:
    """Say what was checked, and what to do next."""
    names = "" if request.task is None else ", and every name in it is in the scene"
    say(f"valid means: JSON of the demo's plan schema{names}")
    if (done := request.done(text)) is not None:
        say(f"the simulator ran the steps of the plan: they {'do' if done else 'do not do'} the task")
    say("drafts follow this machine's speed: passes and accept length vary, tokens do not")
    say(f"next, check every token on this machine: {shlex.join(['edge-dflash', 'verify', str(where)])}")
    say("      build a bundle of your own pair:     edge-dflash build --help")


def _request(text: str | None, index: int, image: bool, save: Path | None) -> _Request:
    """A task of one's own, or a held-out one, perhaps with another goal."""
    if text is not None and not image:
        return _Request(" ".join(text.split()), [{"role": "user", "content": text}], None)
    held_out = (tasks.PICTURED if image else tasks.HELDOUT).read_text(encoding="utf-8").splitlines()
    if index >= len(held_out):
        raise RequestError(f"--index {index} is given, held-out tasks are 0 to {len(held_out) - 1}")
    task = tasks.task_from_json(jsonlib.loads(held_out[index]))
    if not image:
        return _Request(task.goal_text, list(task.messages), task, simulated=True)
    task = task if text is None else tasks.with_goal(task, text)
    if save is not None:
        check_writable(save, "--save")
        write_whole(save, png(tasks.picture(task)))
        say(f"the picture: {save}")
    return _Request(task.goal_text, tasks.messages(task), task, simulated=text is None)


def default_bundle(*, image: bool = False) -> Path:
    """Where the demo's bundle is kept: another place for every version of edge-dflash, the models and the recipe."""
    digest = sha256(__version__.encode())
    for path in [directory("engines") / RECIPE, *sorted(tasks.MODELS.rglob("*"))]:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    name = "demo-image" if image else "demo"
    return Path.home() / ".cache" / "edge-dflash" / f"{name}-{__version__}-{digest.hexdigest()[:12]}"


def _open(where: Path, *, ours: bool, image: bool) -> Planner:
    """Open the bundle; a missing one is built. A damaged one in our own cache is built again."""
    if not where.exists():
        _build(where, image=image)
        ours = False  # what was just built is not built again
    try:
        with stages("opening the bundle") as report:
            return Planner.open(where, progress=report)
    except BundleError as error:
        if not ours:
            raise
        say(f"warning: {error}; building the demo again")
        shutil.rmtree(where)
    return _open(where, ours=False, image=image)


def _build(where: Path, *, image: bool) -> None:
    say(f"building the demo's bundle: {where}")
    check_place(where, "--bundle")
    where.parent.mkdir(parents=True, exist_ok=True)
    resume = ["edge-dflash", "demo", *(["--image"] if image else []), "--bundle", str(where)]
    with stages() as report, scratch(where.parent, f".{where.name}.target-") as made:
        from edge_dflash.builder.write import BuildConfig, build  # torch, only here, and it takes seconds

        target = tasks.MODELS / "target"
        if image:
            tasks.assemble(target := made / "target")
        recipe = directory("engines") / RECIPE
        result = build(
            BuildConfig(target, tasks.MODELS / "drafter", where, recipe=recipe, resume=shlex.join(resume)), report
        )
    say(f"built: {result.bytes / 1e6:.1f} MB in {result.seconds:.1f} s")


def _json(request: _Request, where: Path, plain: Plan, speculative: Plan, problems: list[str]) -> dict[str, Any]:
    seconds, plain_seconds = speculative.timings.total_seconds, plain.timings.total_seconds
    return {
        "identical": identical(plain, speculative) is not False,
        "valid": not problems,
        "plain_seconds": plain_seconds,
        "speculative_seconds": seconds,
        "ratio": seconds / plain_seconds,
        "tokens": len(speculative.tokens),
        **{name: getattr(speculative, name) for name in ("accept_length", "accept_lengths", "object", "text")},
        "task": request.title,
        "problems": problems,
        "bundle": str(where),
    }
