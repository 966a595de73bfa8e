"""A tokenizer as the llguidance library sees it.

Knows the layout of tokenizer.json as far as added tokens go. Knows nothing of grammars.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_dflash.errors import RequestError, one_line

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_STRING = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS = (*range(1, 11), 12, 14, 20, 30)
SLICES = [*(f"{_STRING}{{1,{length}}}" for length in _LENGTHS), f"{_STRING}+"]
"""Tokens that the library takes or leaves together: pieces of JSON strings of up to so many characters.

Its own slices are of 10, 30 and any number; where a string's ``maxLength`` left room for fewer than 30, each of 150,000
tokens was looked at: 0.6 ms a mask, with these 0.04 until about 14 characters are left. Masks are the same.
"""
_HIDDEN = "\U0010ffff\U0010fffe"  # noncharacters of Unicode: no text holds them


class Vocabulary:
    """The library's tokenizer, and ``special``: the ids of the added tokens by name.

    ``text`` is tokenizer.json, ``size`` its number of ids. Added tokens (``<think>``, ``<|im_end|>``) are hidden behind
    names that no text holds. Else the library would read their spelling inside a string as the token, force it there,
    and then refuse it.
    """

    def __init__(self, text: str, size: int, stop_token_ids: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        files = json.loads(text)
        vocabulary = files["model"].get("vocab")
        self.special: dict[str, int] = {}
        for token in files.get("added_tokens", ()):
            name = token["content"]
            self.special[name] = token["id"]
            token["content"], token["special"] = _HIDDEN + name, True
            if isinstance(vocabulary, dict) and name in vocabulary:
                vocabulary[_HIDDEN + name] = vocabulary.pop(name)
        for place in ("post_processor", "padding", "truncation"):  # they name added tokens, and nothing here uses them
            files[place] = None
        known = [token for token in stop_token_ids if token < size]
        if not known:
            raise RequestError(
                f"structured output needs a stop token of the tokenizer, of {size} ids; got {tuple(stop_token_ids)}"
            )
        try:
            self.tokenizer: LLTokenizer = LLTokenizer(json.dumps(files), eos_token=known, slices=SLICES)
        except Exception as error:  # of what kind depends on what the tokenizer lacks
            raise RequestError(f"structured output does not know this kind of tokenizer ({one_line(error)})") from None
        for byte in (*range(0xC0), *range(0xC2, 0xF5)):  # those that UTF-8 uses
            ids = self.tokenizer.tokenize_bytes(bytes([byte]))
            if self.tokenizer.decode_bytes(ids) != bytes([byte]):
                raise RequestError(f"structured output needs a token for every byte; 0x{byte:02x} has none")

    @property
    def size(self) -> int:
        """Number of ids that the library knows."""
        return int(self.tokenizer.vocab_size)
