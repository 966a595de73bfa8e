"""Control tokens of a tokenizer, and text encoded without them.

Control tokens are the added tokens of ``tokenizer.json`` (``<|im_end|>``, ``<think>``), but for those that are words:
not special, and made of letters, digits and blanks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from edge_dflash.errors import RequestError

_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_BATCH = 64  # texts a call: other threads wait while it takes texts and gives results


class ControlTokens:
    """The control tokens of ``tokenizer``, by their spelling."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._tokens = {token.content: (number, token) for number, token in added.items() if _is_control(token)}
        words = {number: token for number, token in added.items() if not _is_control(token)}
        self._words, self._moved = _without_controls(tokenizer, words)
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._forbidden = frozenset(  # a single character (padding may be "!") has its id in texts, too
            number for name, (number, _) in self._tokens.items() if name != unknown and len(name) > 1
        )
        self.names = tuple(self._tokens)

    def id(self, name: str) -> int | None:
        """Its id, or None for a text that is no control token."""
        return self._tokens[name][0] if name in self._tokens else None

    def encode(self, pieces: Sequence[str]) -> tuple[int, ...]:
        """Ids of text, control token, text, ..., text; each text as if there were no control tokens.

        Raises RequestError for a text that becomes one all the same: the tokenizer's model may hold it as a word.
        """
        texts, controls = list(pieces[::2]), [self._tokens[name] for name in pieces[1::2]]
        for index, (_, token) in enumerate(controls):  # as the tokenizer does: blanks beside it belong to the token
            if token.lstrip:
                texts[index] = texts[index].rstrip(_BLANKS)
            if token.rstrip:
                texts[index + 1] = texts[index + 1].lstrip(_BLANKS)
        ids = list[int]()
        for index, words in enumerate(encode_all(self._words, texts)):
            found = [self._moved.get(word, word) for word in words] if self._moved else words
            if not self._forbidden.isdisjoint(found):
                raise RequestError("a text spells a control token that this tokenizer cannot tell from text; remove it")
            ids += found
            if index < len(controls):
                ids.append(controls[index][0])
        return tuple(ids)


def encode_all(tokenizer: HfTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text as ``tokenizer`` makes them; nothing is added. Raises RequestError for a lone surrogate."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise RequestError("the text holds a lone surrogate, which is no character; remove it") from None
    each = list(dict.fromkeys(texts))  # what a template writes between messages comes often
    ids = dict[str, list[int]]()
    for at in range(0, len(each), _BATCH):
        some = each[at : at + _BATCH]
        # the batch call lets other threads run meanwhile, which encode does not: a second for each MB
        found = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        ids.update(zip(some, (text.ids for text in found), strict=True))
    return [ids[text] for text in texts]


def _is_control(token: AddedToken) -> bool:
    """Whether an added token is more than a word."""
    return bool(token.special or re.search(r"[^\w\s]", token.content))


def _without_controls(tokenizer: HfTokenizer, words: Mapping[int, AddedToken]) -> tuple[HfTokenizer, dict[int, int]]:
    """The tokenizer with ``words`` as its only added tokens, and their ids by those that they have there.

    It shares the model, so it costs no memory.
    """
    plain = HfTokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    plain.add_tokens(list(words.values()))
    moved = ((plain.token_to_id(token.content), number) for number, token in words.items())
    return plain, {there: here for there, here in moved if there is not None}
