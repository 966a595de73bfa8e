"""``edge-dflash generate``: one prompt through a bundle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_dflash.cli.output import emit_json, say, stages
from edge_dflash.errors import RequestError
from edge_dflash.plan import Plan
from edge_dflash.planner import Planner, Task
from edge_dflash.telemetry.state import read_board_state


def generate(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Directory that a build made.")],
    prompt: Annotated[str | None, typer.Option(help="The task as text.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the task from a UTF-8 file; - is stdin.")] = None,
    ids: Annotated[str | None, typer.Option(help="Prompt as token ids, such as 1,2,3; used as they are.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not put the text into the chat template.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="Token budget; default: what the context holds.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the best token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k best tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the best tokens of this probability mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Makes a drawn answer repeatable.")] = 0,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the chat template ask for thinking.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without the drafter: same tokens, slower.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line of stdout.")] = False,
) -> None:
    """Answer one prompt; the text appears as it is made.

    Give one of --prompt, --prompt-file and --ids. A bundle without tokenizer takes and prints token ids.

    JSON keys: text (null without tokenizer), tokens, finish_reason (stop, length or context), prompt_tokens,
    accept_lengths, accept_length, speculative, json (the answer parsed, or null), prefill_seconds,
    first_token_seconds, decode_seconds, total_seconds, tokens_per_second, board (power mode, watts, degrees, clocks
    and memory as the board says them at the end; empty where it says nothing).
    """
    task = read_task(prompt, prompt_file, ids)
    with stages("opening the bundle") as report:
        planner = Planner.open(bundle, progress=report)
    with planner:
        if raw and isinstance(task, str):
            if planner.tokenizer is None:
                raise RequestError(f"{bundle} has no tokenizer, --raw text cannot be read; give --ids")
            task = planner.tokenizer.encode(task)
        stream = planner.stream(
            task,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            thinking=thinking,
            speculative=not plain,
        )
        for part in stream:
            if not json:
                print(part.text if part.text is not None else "".join(f"{i} " for i in part.tokens), end="", flush=True)
        plan = stream.plan
    if json:
        emit_json({**plan_json(plan), "board": read_board_state().brief()})
    else:
        print()
        say(summary(plan))


def read_task(prompt: str | None, prompt_file: Path | None, ids: str | None) -> Task:
    """The one prompt that was given. Raises RequestError for none, several, or an unreadable one."""
    if sum(given is not None for given in (prompt, prompt_file, ids)) != 1:
        raise RequestError("give exactly one of --prompt, --prompt-file and --ids")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        try:
            data = sys.stdin.buffer.read() if str(prompt_file) == "-" else prompt_file.read_bytes()
            return data.decode()
        except OSError as error:
            raise RequestError(f"cannot read {prompt_file}: {error.strerror}; give a readable file") from None
        except UnicodeDecodeError as error:
            raise RequestError(f"{prompt_file} is not UTF-8 text (byte {error.start}); convert it") from None
    return parse_ids(ids or "")


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids from ``1,2,3`` or ``1 2 3``. Raises RequestError naming the piece that is no id."""
    pieces = text.replace(",", " ").split()
    for piece in pieces:
        if not piece.isascii() or not piece.isdigit() or len(piece) > 12:
            raise RequestError(f"{piece[:24]!r} in --ids is no token id; give non-negative integers such as 1,2,3")
    return tuple(int(piece) for piece in pieces)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The keys of a plan that ``generate --json`` documents."""
    return {
        "text": plan.text,
        "tokens": list(plan.tokens),
        "finish_reason": plan.finish_reason,
        "prompt_tokens": plan.prompt_tokens,
        "accept_lengths": list(plan.accept_lengths),
        "accept_length": plan.accept_length,
        "speculative": plan.speculative,
        "json": plan.object,
        "prefill_seconds": plan.timings.prefill_seconds,
        "first_token_seconds": plan.timings.first_token_seconds,
        "decode_seconds": plan.timings.decode_seconds,
        "total_seconds": plan.timings.total_seconds,
        "tokens_per_second": plan.tokens_per_second,
    }


def summary(plan: Plan) -> str:
    """One line about a plan for people."""
    how = f"accept length {plan.accept_length:.2f}" if plan.speculative else "plain decoding"
    return (
        f"{len(plan.tokens)} tokens ({plan.finish_reason}) after {plan.prompt_tokens} of prompt, {how}, "
        f"{plan.tokens_per_second:.1f} tokens/s, {plan.timings.total_seconds:.2f} s"
    )
