"""Several answers to one task: what is asked for them, and which is the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import TypeAlias

from edge_dflash.decode.options import Options
from edge_dflash.errors import RequestError, one_line, short
from edge_dflash.result import Plan

Rank: TypeAlias = Callable[[Plan], float]
"""Gives a plan a number, the higher the better."""


def asked(options: Options, n: int, rank: Rank | None) -> tuple[Options, int]:
    """The options of ``n`` candidates with what their order needs, and how many differ.

    Without a temperature no seed is used, and one is made for all.
    """
    if n > 1 and rank is None and options.logprobs is None:
        return replace(options, logprobs=0), n if options.temperature else 1
    return options, n if options.temperature else 1


def best(plans: Sequence[Plan], n: int, rank: Rank | None, options: Options) -> Plan:
    """The best of the plans, with their scores, the others behind it. Raises what ``rank`` raises."""
    scores = [_likelihood(plan) if rank is None else _ranked(rank, plan) for plan in plans]
    told = [
        replace(plan, score=score, logprobs=() if options.logprobs is None else plan.logprobs)
        for plan, score in zip(plans, scores, strict=True)
    ]
    told.sort(key=lambda plan: -math.inf if plan.score is None else plan.score, reverse=True)
    first, *others = told * (n // len(plans))
    return replace(first, alternatives=tuple(others))


def _likelihood(plan: Plan) -> float:
    """Mean log-probability of the tokens; lowest without one."""
    found = [one.logprob for one in plan.logprobs]
    mean = sum(found) / len(found) if found else -math.inf
    return -math.inf if math.isnan(mean) else mean


def _ranked(rank: Rank, plan: Plan) -> float:
    """The number that ``rank`` gives; also a scalar of NumPy or torch. Raises RequestError where it is none."""
    try:
        value: object = rank(plan)
    except StopIteration as error:  # it would end the loop of whoever called, and no asyncio future takes it
        raise RequestError("rank raised StopIteration; it has to give each plan a number") from error
    try:
        item = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
        number = float(item) if isinstance(item, Real) else math.nan
    except (ArithmeticError, TypeError, ValueError, RuntimeError):  # 10**400
        number = math.nan
    if math.isnan(number):
        raise RequestError(f"rank gave {one_line(short(value))}; give a number that a float can hold, higher is better")
    return number
