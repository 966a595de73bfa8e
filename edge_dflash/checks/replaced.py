"""How many drafts a grammar replaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import ne
from typing import Any

from edge_dflash.decode.backend import Backend, Rows
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.grammar.compiled import compile_form
from edge_dflash.decode.grammar.schema_check import schema_json
from edge_dflash.decode.grammar.wire import Source
from edge_dflash.decode.loop import stream
from edge_dflash.decode.options import Options
from edge_dflash.decode.tree import Parents
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner


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

    def verify(self, ids: Sequence[int], lane: int = 0, parents: Parents | None = None) -> Rows:
        self.verified += len(ids) - 1
        self.replaced += sum(map(ne, ids[1:], self._drafted))
        return super().verify(ids, lane, parents)


def replaced_share(planner: Planner, schema: Mapping[str, Any], prompt: Sequence[int], tokens: int) -> float:
    """Share of the drafts behind ``prompt`` in whose place the grammar puts another token, refused or forced.

    Raises RequestError without a tokenizer.
    """
    backend, tokenizer, stop = _Watched(planner.backend), planner.tokenizer, planner.stop_token_ids
    if tokenizer is None:
        raise RequestError("a bundle without tokenizer takes no schema; leave it out")
    source = Source("schema", schema_json(schema), False, backend.shape.vocab_size)
    grammar = compile_form(source, tokenizer, stop)
    backend.reset()
    options = Options(max_new_tokens=tokens)
    for _ in stream(backend, prompt, options, stop_token_ids=stop, controls=Controls(constraint=grammar.constraint())):
        pass
    return backend.replaced / max(backend.verified, 1)
