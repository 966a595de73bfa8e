"""Log-probabilities as the OpenAI API writes them: entries of a chat, lists of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_dflash.decode.sampling import TokenLogprob
from edge_dflash.serve.openai import Call

LEAST = -9999.0  # OpenAI's number for a token that is next to impossible; JSON has no infinity


class LogprobWriter:
    """Writes the log-probabilities of one answer, in order. A completion's say where in the text a token begins."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._characters = 0  # begun by the tokens so far

    def add(self, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The field ``logprobs`` for the next tokens; None when they were not asked for.

        Where token ids are wanted, entries have them, and a completion has entries, too.
        """
        if self._call.options.get("logprobs") is None:
            return None
        entries = [{**self._entry(one), "top_logprobs": [self._entry(other) for other in one.top]} for one in found]
        if self._call.chat:
            return {"content": entries, "refusal": None}
        lists = {
            "tokens": [_text(one) for one in found],
            "token_logprobs": [_number(one) for one in found],
            "top_logprobs": [_by_text(one.top) for one in found],
            "text_offset": [self._offset(one) for one in found],
        }
        return {**lists, "content": entries} if self._call.with_tokens else lists

    def _entry(self, one: TokenLogprob) -> dict[str, Any]:
        entry = {"token": _text(one), "logprob": _number(one), "bytes": None if one.text is None else list(one.text)}
        return {**entry, "token_id": one.token} if self._call.with_tokens else entry

    def _offset(self, one: TokenLogprob) -> int:
        """Characters before the one that the token begins, or of which it is a further part."""
        text = one.text or b""
        before = self._characters - (1 if text and _continues(text[0]) else 0)
        self._characters += sum(not _continues(byte) for byte in text)
        return max(before, 0)


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with a character, and does not begin one."""
    return byte & 0xC0 == 0x80


def _by_text(top: Sequence[TokenLogprob]) -> dict[str, float]:
    """The likeliest of several tokens that have the same text."""
    found: dict[str, float] = {}
    for one in top:
        found.setdefault(_text(one), _number(one))
    return found


def _text(one: TokenLogprob) -> str:
    return f"token_id:{one.token}" if one.text is None else one.text.decode(errors="replace")


def _number(one: TokenLogprob) -> float:
    return one.logprob if one.logprob >= LEAST else LEAST  # NaN, too
