"""Log-probabilities as the command line shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from edge_dflash.decode.sampling import TokenLogprob


def entry(one: TokenLogprob) -> dict[str, Any]:
    """A token for ``--json``: ``text`` is null without tokenizer, ``logprob`` for a token that is impossible."""
    text = None if one.text is None else one.text.decode(errors="replace")
    logprob = one.logprob if math.isfinite(one.logprob) else None
    return {"token": one.token, "logprob": logprob, "text": text, "top": [entry(other) for other in one.top]}


def logprob_table(tokens: Sequence[TokenLogprob]) -> Table:
    """A line for each token, with the likeliest ones."""
    table = Table("token", "logprob", "likeliest", title="log-probabilities", title_justify="left")
    for one in tokens:
        top = ", ".join(f"{_name(other)} {other.logprob:.3f}" for other in one.top)
        table.add_row(escape(_name(one)), f"{one.logprob:.3f}", escape(top))
    return table


def _name(one: TokenLogprob) -> str:
    return str(one.token) if one.text is None else repr(one.text.decode(errors="replace"))
