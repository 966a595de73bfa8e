"""A request that the service has admitted, and how its call becomes the planner's request."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from edge_dflash.decode.options import PlanOptions
from edge_dflash.errors import ContextError
from edge_dflash.planner import Planner
from edge_dflash.runner.stream import AsyncPlanStream, PlanStream
from edge_dflash.serve.openai import Call
from edge_dflash.serve.refusal import Refusal
from edge_dflash.serve.replies import Writer
from edge_dflash.serve.sessions import Sessions
from edge_dflash.session import PlannerSession


@dataclass(eq=False)
class Running:
    """A request that was admitted."""

    call: Call
    writer: Writer
    stream: AsyncPlanStream
    sessions: Sessions  # its caller's
    disconnected: bool = False
    held: str | None = None  # its session, while it has it
    session_error: str | None = None  # why its session was not saved
    counted: bool = False
    began: float = 0.0  # time.perf_counter() of its call to the planner

    def leave(self) -> None:
        """Its client is gone."""
        self.disconnected = True
        self.stream.cancel()


def queue(
    planner: Planner, session: PlannerSession | None, call: Call, *, account: str, until: float | None
) -> PlanStream:
    """Hand a call of an account to the planner, to end by ``until`` (time.perf_counter()). Errors: Planner.stream."""
    task: Any = call.task
    if isinstance(task, str):
        if planner.tokenizer is None:
            raise Refusal("this model has no tokenizer; give token ids as the prompt", param="prompt")
        words = planner.tokenizer
        task = words.encode(task) if call.options.get("raw") else words.encode_text(task)
    options = PlanOptions(**call.options)
    named = options.get("caller", "")
    options["caller"] = f"{account}/{named}" if named else account
    if until is not None:
        options["deadline"] = max(0.0, until - time.perf_counter())
    try:
        return planner.stream(task, session=session, **options)
    except ContextError:
        if not call.budget_is_default or options.get("max_new_tokens") is None:
            raise
    options["max_new_tokens"] = None
    return planner.stream(task, session=session, **options)
