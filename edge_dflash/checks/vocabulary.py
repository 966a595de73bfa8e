"""A tokenizer of any vocabulary size, made in code: what a synthetic pair needs to answer under a schema.

Byte-level BPE as published models have it: every byte, JSON punctuation, runs of letters with and without a space
before them, one end-of-text token. The words are random letters; how many tokens there are and how long they are is
what the cost of a grammar's masks depends on.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from edge_dflash.errors import RequestError
from edge_dflash.text.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
LEAST = 2048  # ids
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_LENGTHS = (6, 12, 15, 16, 14, 11, 9, 7, 4, 3, 2, 1)  # weights of words of 3, 4, ... letters, a space counted
_SPACE = "\u0120"  # how byte-level BPE spells a space
_PUNCTUATION = (
    '{"',
    '":',
    '":"',
    '","',
    '"}',
    '"},',
    '"},{"',
    '":[{"',
    '"}]',
    '"}]}',
    '",',
    '"]',
    "},",
    "}]",
    "[{",
    '["',
)
# As in Qwen's tokenizers: a run of letters takes one character before it, digits stand alone.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def synthetic_tokenizer(size: int, words: Iterable[str] = ()) -> Tokenizer:
    """A tokenizer of exactly ``size`` ids, the last of which ends a text; the same every time, in seconds.

    ``words`` are ASCII texts that get a token each, where the split leaves them whole. Raises RequestError below
    ``LEAST`` ids.
    """
    if size < LEAST:
        raise RequestError(f"a synthetic tokenizer of {size} ids is too small; give at least {LEAST}")
    vocabulary, merges = _merged((*_PUNCTUATION, *words), size - 1)
    tokenizer = HfTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return Tokenizer(tokenizer, None, size - 1)


def _merged(texts: Iterable[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """``size`` tokens and the merges that make them: bytes, ``texts`` (merged first), letter pairs, random words."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []

    def add(left: str, right: str) -> bool:
        if left + right in vocabulary:
            return False
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
        return True

    for text in texts:
        for end in range(1, len(text)):
            add(text[:end], text[end])
    spaced = [_SPACE + letter for letter in _LETTERS]
    pairs = [a + b for a in _LETTERS for b in _LETTERS]
    for token in (*spaced, *pairs):
        add(token[:-1], token[-1])
    starts, ends = {2: pairs + spaced}, {1: list(_LETTERS), 2: pairs}  # what words begin and end with, by length
    random, lengths = Random(size), range(3, 3 + len(_LENGTHS))
    while len(vocabulary) < size:
        (length,) = random.choices(lengths, _LENGTHS)
        cut = random.randint(2, length - 1)
        if cut not in starts or length - cut not in ends:
            continue
        left, right = random.choice(starts[cut]), random.choice(ends[length - cut])
        if add(left, right):
            starts.setdefault(length, []).append(left + right)
            if not left.startswith(_SPACE):
                ends.setdefault(length, []).append(left + right)
    return vocabulary, merges
