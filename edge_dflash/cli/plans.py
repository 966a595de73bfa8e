"""Plans as the command line times and shows them; the same task with and without the drafter side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from edge_dflash.board.state import EnergyMeter
from edge_dflash.checks.lossless import first_difference
from edge_dflash.cli.output import Columns, tabled
from edge_dflash.common.tables import finite
from edge_dflash.decode.logprobs import TokenLogprob
from edge_dflash.decode.options import PlanOptions
from edge_dflash.errors import VerificationError
from edge_dflash.planner import Planner, Task
from edge_dflash.result import Increment, Plan

WARM_UP_TOKENS = 8  # before two ways of decoding are compared
_SHOWN = 60  # characters of a candidate


def timed(
    planner: Planner,
    task: Task,
    options: PlanOptions,
    tell: Callable[[Increment], None] | None = None,
    *,
    candidates: int = 1,
) -> tuple[Plan, float | None]:
    """A plan and its joules, None where the board does not say its power; ``tell`` gets every increment.

    Of several ``candidates`` the best, and the joules of all.
    """
    power = EnergyMeter()
    power.begin()
    began = time.perf_counter()
    try:
        if candidates > 1:
            plan = planner.plan(task, n=candidates, **options)
            return plan, power.joules(began, time.perf_counter())
        stream = planner.stream(task, **options)
        for part in stream:
            if tell is not None:
                tell(part)
    finally:
        power.end()
    timings = stream.plan.timings
    return stream.plan, power.joules(began + timings.queue_seconds, began + timings.total_seconds)


def candidate_table(plan: Plan) -> Table:
    """A line for each candidate, the best first."""
    table = Table("seed", "score", "tokens", "end", "answer", title="candidates", title_justify="left")
    for one in (plan, *plan.alternatives):
        text = " ".join((one.text if one.text is not None else str(list(one.tokens))).split())
        shown = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
        table.add_row(str(one.seed), f"{one.score:z.4f}", str(len(one.tokens)), one.finish_reason, escape(shown))
    return table


def print_part(part: Increment) -> None:
    """Print what is new of an answer: its text, or token ids without a tokenizer."""
    print(part.text if part.text is not None else "".join(f"{i} " for i in part.tokens), end="", flush=True)


def comparison(plain: Plan, plain_joules: float | None, speculative: Plan, joules: float | None) -> Table:
    """Both ways of decoding in one table."""
    shorter = min(len(plain.tokens), len(speculative.tokens))
    words = {True: "the same tokens", False: "DIFFERENT TOKENS", None: f"the first {shorter} tokens are the same"}
    end = f"{len(speculative.tokens)} tokens ({speculative.finish_reason}) after {speculative.prompt_tokens} of prompt"
    columns: Columns = {
        "decoding": ("0", ""),
        "seconds": (lambda way: way[1].timings.total_seconds, ".2f"),
        "first token": (lambda way: way[1].timings.first_token_seconds, ".2f"),
        "tokens/s": (lambda way: way[1].tokens_per_second, ".1f"),
        "passes": (lambda way: len(way[1].accept_lengths), "d"),
        "accept length": (lambda way: way[1].accept_length, ".2f"),
    }
    if plain_joules is not None and joules is not None:
        columns["joules"] = ("2", ".1f")
    ways = (("plain", plain, plain_joules), ("speculative", speculative, joules))
    return tabled(f"{end}: {words[identical(plain, speculative)]}", ways, columns)


def identical(plain: Plan, speculative: Plan) -> bool | None:
    """Whether both made the same tokens; None when a deadline cut one shorter, and they are the same so far."""
    pairs = zip(plain.tokens, speculative.tokens, strict=False)
    cut = "deadline" in (plain.finish_reason, speculative.finish_reason) and all(a == b for a, b in pairs)
    return None if cut and len(plain.tokens) != len(speculative.tokens) else plain.tokens == speculative.tokens


def require_same(plain: Plan, speculative: Plan) -> None:
    """Raise VerificationError unless both made the same tokens."""
    if identical(plain, speculative) is False:
        first, *_ = first_difference(plain.tokens, speculative.tokens) or (0,)
        raise VerificationError(
            f"speculative and plain output differ from token {first} on; see edge-dflash verify, and report it"
        )


def plan_json(plan: Plan) -> dict[str, Any]:
    """The keys of a plan that ``generate --json`` documents."""
    same = (
        "text",
        "tokens",
        "finish_reason",
        "prompt_tokens",
        "accept_lengths",
        "accept_length",
        "speculative",
        "object",
    )
    times = ("prefill_seconds", "first_token_seconds", "decode_seconds", "total_seconds")
    return {
        **{name: getattr(plan, name) for name in (*same, "tokens_per_second", "seed")},
        **{name: getattr(plan.timings, name) for name in times},
        "logprobs": [_logprob(one) for one in plan.logprobs] or None,
        "drafts": plan.drafting.drafts,
        "accepted_drafts": plan.drafting.accepted,
        "score": None if plan.score is None else finite(plan.score),
        "alternatives": [plan_json(one) for one in plan.alternatives],
    }


def summary(plan: Plan, joules: float | None) -> str:
    """One line about a plan for people."""
    how = "plain decoding"
    if plan.speculative:
        how = f"accept length {plan.accept_length:.2f}, at most {plan.drafting.mean + 1:.3g}"
    return (
        f"{len(plan.tokens)} tokens ({plan.finish_reason}) after {plan.prompt_tokens} of prompt, {how}, "
        f"{plan.tokens_per_second:.1f} tokens/s, {plan.timings.total_seconds:.2f} s"
        + (f", {joules:.1f} J" if joules is not None else "")
    )


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    """A token for ``--json``: ``text`` is null without tokenizer, ``logprob`` for a token that is impossible."""
    text = None if one.text is None else one.text.decode(errors="replace")
    top = [_logprob(other) for other in one.top]
    return {"token": one.token, "logprob": finite(one.logprob), "text": text, "top": top}


def logprob_table(tokens: Sequence[TokenLogprob]) -> Table:
    """A line for each token, with the likeliest ones."""
    table = Table("token", "logprob", "likeliest", title="log-probabilities", title_justify="left")
    for one in tokens:
        top = ", ".join(f"{_name(other)} {other.logprob:z.3f}" for other in one.top)
        table.add_row(escape(_name(one)), f"{one.logprob:z.3f}", escape(top))
    return table


def _name(one: TokenLogprob) -> str:
    return str(one.token) if one.text is None else repr(one.text.decode(errors="replace"))
