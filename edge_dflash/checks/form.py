"""The JSON Schemas that plans are timed under, and how much a grammar has to replace of what is drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import ne
from typing import Any

from edge_dflash.backends.host import Delegate
from edge_dflash.decode.backend import Backend, Rows
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.grammar.compiled import compile_schema
from edge_dflash.decode.loop import stream
from edge_dflash.decode.options import Options
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner

ACTIONS = ("navigate", "open", "close", "pick", "place", "inspect", "announce", "wait")
_COLOURS = ("red", "blue", "green", "grey")
_THINGS = ("mug", "toolbox", "helmet", "sensor", "wrench", "cable")
WORDS = ("steps", "action", "target", *ACTIONS, *_COLOURS, *(f"_{thing}" for thing in _THINGS))
_ENDLESS = 4096  # steps, more than are ever generated


@dataclass(frozen=True)
class Form:
    """A JSON Schema for plans."""

    what: str  # in words
    schema: Mapping[str, Any]


def _steps(target: Mapping[str, Any], **items: int) -> dict[str, Any]:
    step = {
        "type": "object",
        "properties": {"action": {"enum": list(ACTIONS)}, "target": target},
        "required": ["action", "target"],
        "additionalProperties": False,
    }
    steps = {"type": "array", "items": step, **items}
    return {"type": "object", "properties": {"steps": steps}, "required": ["steps"], "additionalProperties": False}


STEPS = Form(
    f"steps of an action ({len(ACTIONS)}) and a target (text)",
    _steps({"type": "string", "maxLength": 64}, minItems=1, maxItems=16),
)
# For random weights. Targets are the names of a scene: text would always run to its longest, where masks cost most.
# It never ends, so that as many tokens come as were asked for.
SCENE_STEPS = Form(
    f"endless steps of an action ({len(ACTIONS)}) and a target ({len(_COLOURS) * len(_THINGS)} names)",
    _steps({"enum": [f"{colour}_{thing}" for colour in _COLOURS for thing in _THINGS]}, minItems=_ENDLESS),
)


class _Watched(Delegate):
    """A backend whose cycles are decided on the host; counts drafts that are not verified as they were drafted."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._drafted: list[int] = []
        self.verified = self.replaced = 0  # drafts

    def propose(self, anchor: int, lane: int = 0) -> Rows:
        rows = super().propose(anchor, lane)
        self._drafted = rows.argmax()
        return rows

    def verify(self, ids: Sequence[int], lane: int = 0) -> Rows:
        self.verified += len(ids) - 1
        self.replaced += sum(map(ne, ids[1:], self._drafted))
        return super().verify(ids, lane)


def replaced_share(planner: Planner, form: Form, prompt: Sequence[int], tokens: int) -> float:
    """Share of the drafts behind ``prompt`` in whose place the grammar puts another token, refused or forced.

    Raises RequestError without a tokenizer.
    """
    backend, tokenizer, stop = _Watched(planner.backend), planner.tokenizer, planner.stop_token_ids
    if tokenizer is None:
        raise RequestError("a bundle without tokenizer takes no schema; leave it out")
    grammar = compile_schema(form.schema, tokenizer, backend.shape.vocab_size, stop)
    backend.reset()
    options = Options(max_new_tokens=tokens)
    for _ in stream(backend, prompt, options, stop_token_ids=stop, controls=Controls(constraint=grammar.constraint())):
        pass
    return backend.replaced / max(backend.verified, 1)
