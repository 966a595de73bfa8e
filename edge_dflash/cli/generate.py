"""``edge-dflash generate``: one prompt through a bundle."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer

from edge_dflash.board.state import read_board_state
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.cli.output import Json, emit_json, say, show, stages
from edge_dflash.cli.plans import (
    WARM_UP_TOKENS,
    candidate_table,
    comparison,
    identical,
    logprob_table,
    plan_json,
    print_part,
    require_same,
    summary,
    timed,
)
from edge_dflash.cli.usage import opt, switch, take_flags
from edge_dflash.common.files import LARGE, is_file, read_bytes
from edge_dflash.decode.grammar.schema import schema_text
from edge_dflash.decode.options import DECLARED, Declaration, Options, PlanOptions
from edge_dflash.errors import RequestError
from edge_dflash.pictures.decode import opened
from edge_dflash.planner import Planner, Task
from edge_dflash.result import Plan
from edge_dflash.runner.planning import MOST_CANDIDATES


def generate(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Directory that a build made.")],
    prompt: Annotated[str | None, opt("TEXT", "The task as text.")] = None,
    prompt_file: Annotated[Path | None, opt("FILE", "Read the task from a UTF-8 file; - is stdin.")] = None,
    ids: Annotated[str | None, opt("IDS", "Prompt as token ids, such as 1,2,3; used as they are.")] = None,
    *,
    image: Annotated[
        list[Path] | None, opt("FILE", "Show the model a PNG or JPEG file before the text; may be given again.")
    ] = None,
    plain: Annotated[bool, switch("--plain", "Decode without the drafter: same tokens, slower.")] = False,
    drafts: Annotated[int | None, opt("K", "Drafts that a cycle verifies; default: as many as pay.", min=0)] = None,
    compare: Annotated[bool, switch("--compare", "Decode with and without the drafter; one table of both.")] = False,
    candidates: Annotated[int, opt("N", "Draw N answers, show the likeliest one.", min=1, max=MOST_CANDIDATES)] = 1,
    json: Json = False,
    **flags: Any,
) -> None:
    """Answer one prompt; the text appears as it is made.

    Give one of --prompt, --prompt-file and --ids, and at most one of --schema, --regex and --grammar. An answer that
    ends by itself (finish_reason stop) has the form that was asked for; one that is cut by --max-new-tokens or
    --deadline is its beginning. A bundle without tokenizer takes and prints token ids.

    --compare decodes a few tokens to warm up, then with the drafter, then without. Exit code 9 when the tokens differ.
    --candidates draws with the seeds --seed, --seed + 1, ...: side by side, as far as the bundle has lanes.

    JSON keys: text (null without tokenizer), tokens, logprobs (of --logprobs, for each token: token, logprob, text and
    top, the likeliest tokens; else null), finish_reason (stop, length, context or deadline), prompt_tokens,
    accept_lengths, accept_length, drafts (verified by each cycle), accepted_drafts, speculative, object (the answer
    parsed, or null), prefill_seconds, first_token_seconds, decode_seconds, total_seconds, tokens_per_second, board
    (joules of this plan, null where the board does not say its power; power mode, watts, degrees, clocks and memory at
    the end, as far as it says them), seed, score (of --candidates: mean log-probability of the tokens; else null),
    alternatives (the other candidates, best first), plain (of --compare, else null: the same without the drafter),
    identical (of --compare: the same tokens; null without it, or when a deadline cut one shorter).
    """
    if compare:
        if plain:
            raise RequestError(
                "--plain and --compare are given; --compare decodes plainly beside it, leave --plain out"
            )
        if candidates > 1:
            raise RequestError("--candidates and --compare are given; give one of them")
    options = _options(flags, speculative=not plain)
    task = with_images(read_task(prompt, prompt_file, ids, raw=flags["raw"]), image or [], raw=flags["raw"])
    Options.of(options)  # what is wrong with a request is said before a bundle is loaded
    _check_bundle(bundle, task, image or [])
    with stages("opening the bundle") as report:
        planner = Planner.open(bundle, drafts=drafts, progress=report)
    with planner:
        if compare:
            with stages("warming up"):
                short: PlanOptions = {**options, "max_new_tokens": WARM_UP_TOKENS}
                planner.plan(task, **short)
        plan, joules = _answer(planner, task, options, candidates, json)
        with stages("the same without the drafter") if compare else nullcontext():
            other = timed(planner, task, {**options, "speculative": False}) if compare else None
    _report(plan, joules, other, json)


def _check_bundle(bundle: Path, task: Task, images: Sequence[Path]) -> None:
    """Refuse by its manifest what a bundle cannot be asked, and images that are none."""
    manifest = read_manifest(bundle)
    if not manifest.tokenizer and not isinstance(task, tuple):
        raise RequestError(f"{bundle} has no tokenizer, a text cannot be read; give --ids")
    if images and manifest.pair.target.vision is None:
        raise RequestError(
            f"--image is given, and the target of {bundle} has no vision tower; leave it out, or build a bundle from a "
            "checkpoint that has one"
        )
    for path in images:
        opened(path)


def _answer(
    planner: Planner, task: Task, options: PlanOptions, candidates: int, json: bool
) -> tuple[Plan, float | None]:
    """The plan, or the best of several, and its joules; printed as it is made, unless ``json`` is."""
    tell = print_part if candidates == 1 and not json else None
    plan, joules = timed(planner, task, options, tell, candidates=candidates)
    if not json:
        print("" if tell else plan.text if plan.text is not None else " ".join(map(str, plan.tokens)))
    return plan, joules


def _flag(name: str, place: Declaration) -> tuple[str, Any, Any, Any]:
    """The flag of an option, with its type and what holds without it."""
    kind = str | None if name == "schema" else get_type_hints(PlanOptions)[name]
    default = Options.__dataclass_fields__[name].default
    return name, kind, default, opt(place.flag, place.doc) if place.flag else switch(f"--{name}", place.doc)


take_flags(generate, 4, (_flag(name, place) for name, place in DECLARED.items() if place.flag is not None))


def _options(flags: dict[str, Any], *, speculative: bool) -> PlanOptions:
    """Options as the planner takes them. Raises RequestError."""
    deadline, schema, grammar = flags["deadline"], flags["schema"], flags["grammar"]
    if deadline is not None and not 0 < deadline < math.inf:
        raise RequestError(f"--deadline is {deadline:g}; give seconds above 0")
    given = {
        **flags,
        "speculative": speculative,
        "schema": None if schema is None else read_schema(schema),
        "grammar": None if grammar is None else read_grammar(grammar),
    }
    return cast("PlanOptions", given)


def _report(plan: Plan, joules: float | None, other: tuple[Plan, float | None] | None, json: bool) -> None:
    """Print what was made; ``other`` is the same without the drafter. Raises VerificationError when the two differ."""
    if json:
        found = plan_json(plan)
        found["board"] = {"joules": joules, **read_board_state().brief()}
        found["plain"] = None if other is None else {**plan_json(other[0]), "joules": other[1]}
        found["identical"] = None if other is None else identical(other[0], plan)
        emit_json(found)
    elif other is None:
        say(summary(plan, joules))
        if plan.alternatives:
            show(candidate_table(plan))
    else:
        show(comparison(*other, plan, joules))
    if plan.logprobs and not json:
        show(logprob_table(plan.logprobs))
    if other is not None:
        require_same(other[0], plan)


def read_task(prompt: str | None, prompt_file: Path | None, ids: str | None, *, raw: bool = False) -> Task:
    """The one prompt that was given. The line end that closes a file is no part of it, unless it is used ``raw``.

    Raises RequestError for none, several, or an unreadable one.
    """
    if sum(given is not None for given in (prompt, prompt_file, ids)) != 1:
        raise RequestError("give exactly one of --prompt, --prompt-file and --ids")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        text = read_words(prompt_file)
        return text if raw else text.removesuffix("\n")
    return parse_ids(ids or "")


def with_images(task: Task, images: Sequence[Path], *, raw: bool) -> Task:
    """The task with images before its text. Raises RequestError where they have no place."""
    if not images:
        return task
    if raw or not isinstance(task, str):
        raise RequestError(f"--image is given with {'--raw' if raw else '--ids'}; give --prompt or --prompt-file")
    shown = [{"type": "image", "image": path} for path in images]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": task}]}]


def read_schema(given: str) -> str:
    """A JSON Schema as text: what was given, or what the file holds. Raises RequestError when it cannot be used."""
    if given.lstrip().startswith("{"):
        return schema_text(given)
    if not is_file(Path(given)):
        raise RequestError(f"--schema is {given[:60]!r}, neither a file nor a JSON object; give one of them")
    return schema_text(read_words(Path(given)))


def read_grammar(given: str) -> str:
    """A Lark grammar: what was given, when it holds a rule, or the file's text. Raises RequestError when it is neither.

    A name of a file with a colon in it is read as a grammar, unless there is such a file.
    """
    if "\n" not in given and len(os.fsencode(given)) < 256 and is_file(Path(given)):
        return read_words(Path(given))
    if ":" not in given:
        raise RequestError(f"--grammar is {given[:60]!r}, neither a file nor rules; give one of them: 'start: \"yes\"'")
    return given


def read_words(path: Path) -> str:
    """The text of a file, - is stdin. Raises RequestError naming the file."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else read_bytes(path, LARGE)
        return data.decode()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give a readable file") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start}); convert it") from None


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids from ``1,2,3`` or ``1 2 3``. Raises RequestError naming the piece that is no id."""
    pieces = text.replace(",", " ").split()
    for piece in pieces:
        if not piece.isascii() or not piece.isdigit() or len(piece) > 12:
            raise RequestError(f"{piece[:24]!r} in --ids is no token id; give non-negative integers such as 1,2,3")
    return tuple(int(piece) for piece in pieces)
