"""The JSON Schemas that plans are timed under, and how much a grammar has to replace of what is drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.spec.constraint import Constraint, Mask, Packed, packed
from edge_dflash.spec.grammar import compile_schema
from edge_dflash.spec.loop import Controls, DecodeOptions, stream

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


class _Counted:
    """A constraint that counts the tokens it refuses."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self.refused = 0

    def allowed(self) -> Mask | None:
        return self._constraint.allowed()

    def packed(self) -> Packed | None:
        return packed(self._constraint)

    def push(self, token: int) -> bool:
        taken = self._constraint.push(token)
        self.refused += not taken
        return taken

    def pop(self, count: int) -> None:
        self._constraint.pop(count)

    def forced(self) -> tuple[int, ...]:
        return self._constraint.forced()


def replaced_share(planner: Planner, form: Form, prompt: Sequence[int], tokens: int) -> float:
    """Share of the drafts behind ``prompt`` that the grammar refuses, so that another token takes their place.

    Raises RequestError without a tokenizer.
    """
    backend, tokenizer, stop = planner.backend, planner.tokenizer, planner.stop_token_ids
    if tokenizer is None:
        raise RequestError("a bundle without tokenizer takes no schema; leave it out")
    counted = _Counted(compile_schema(form.schema, tokenizer, backend.shape.vocab_size, stop).constraint())
    backend.reset()
    options = DecodeOptions(max_new_tokens=tokens, stop_token_ids=stop)
    steps = list(stream(backend, prompt, options, controls=Controls(counted)))
    cycles = sum(1 for step in steps if step.tokens) - 1  # the first tokens are the prompt's
    return counted.refused / (max(cycles, 1) * (backend.shape.block_size - 1))
