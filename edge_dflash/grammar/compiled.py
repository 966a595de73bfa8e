"""Constraints from a JSON Schema, a regular expression or a Lark grammar, by way of the llguidance library.

Knows how a grammar is compiled once and walked by many requests, and how the library's masks become those of the loop.
Knows nothing of models. The library is imported when the first grammar is compiled.

Two properties make constrained speculative decoding equal to constrained plain decoding: a mask is a function of the
tokens pushed so far and of nothing else, and forced tokens are exactly those that the masks along them leave.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from edge_dflash.errors import RequestError
from edge_dflash.grammar.lark_text import prepare
from edge_dflash.grammar.schema_check import schema_text
from edge_dflash.grammar.schema_rewrite import rewrite
from edge_dflash.grammar.vocabulary import Vocabulary, one_line
from edge_dflash.spec.constraint import Mask, Packed, unpack
from edge_dflash.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED = 32  # compiled grammars kept for each tokenizer
MAX_REGEX_BYTES = 16 * 1024
MAX_FORCED = 4096  # tokens that a grammar may force in a row at its start; more is taken for a text that never ends
MAX_LEXER_STATES = 50_000  # 1-2 kB each
_Key = tuple[str, str, bool, int]  # kind, text, whitespace, vocabulary size
_FORCED_AT_ONCE = 64  # tokens that forced() returns at most
TOOL_JSON = {"item_separator": ", ", "key_separator": ": "}  # as chat templates write arguments
_WHITESPACE = r"[ \t\n\r]{1,64}"  # bounded, so that a model cannot go on with blanks for ever


class Grammar:
    """A compiled grammar. :meth:`constraint` gives each request its own state; it may be called from any thread."""

    def __init__(self, matcher: LLMatcher, tokens: int, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        """``matcher`` stands at the start and is only copied; ``tokens`` is the number of ids that it knows."""
        self.matcher = matcher
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids

    def constraint(self) -> GrammarConstraint:
        """Return a fresh constraint, at the grammar's start."""
        return GrammarConstraint(self)


class GrammarConstraint:
    """The grammar behind the tokens of one request (a :class:`~edge_dflash.spec.constraint.Constraint`).

    Stop tokens are allowed where the text so far is whole, and nothing but them after one. Special tokens are never
    allowed, unless a Lark grammar names them. ``allowed``, ``push`` and ``forced`` raise RequestError when the grammar
    turns out too complex at this point; :meth:`pop` leads back to where it was not.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._anchor, self._anchored = grammar.matcher, 0  # a matcher that is only copied, and how much it has consumed
        self._pushed: list[int] = []  # without stop tokens
        self._stopped = 0  # stop tokens pushed, all at the end
        self._words: Packed | None = None  # mask of this position, once it was asked for
        self._mask: Mask | None = None  # the same as flags
        self._bits = np.zeros((grammar.tokens + 31) // 32, np.uint32)  # as the library writes them

    @property
    def complete(self) -> bool:
        """Whether the text so far is whole: the grammar may end here."""
        return _holds(self.packed(), self._grammar.stop_token_ids[0])

    def allowed(self) -> Mask:
        """Tokens that may come next, bool [vocab_size], read-only. About 0.1 ms for 248,000 tokens."""
        if self._mask is None:
            self._mask = unpack(self.packed(), self._grammar.vocab_size)
            self._mask.flags.writeable = False
        return self._mask

    def packed(self) -> Packed:
        """The same as words [ceil(vocab_size / 32)], read-only."""
        if self._words is None:
            self._words = self._compute()
            self._words.flags.writeable = False
        return self._words

    def push(self, token: int) -> bool:
        """Step over a token. False, and no step, when it is not allowed."""
        if token in self._grammar.stop_token_ids:
            if not _holds(self.packed(), token):
                return False
            self._stopped += 1
            self._words = self._mask = None
            return True
        if self._stopped or not 0 <= token < min(self._grammar.tokens, self._grammar.vocab_size):
            return False
        self._refuse_error()
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._refuse_error()
        if taken:
            self._pushed.append(token)
            self._words = self._mask = None
        return taken

    def pop(self, count: int) -> None:
        """Step back over the last ``count`` tokens. Raises ValueError when fewer were pushed.

        The library's own rollback is not used: in version 1.9 masks behind it may be those of the path that was left.
        A copy of the matcher where the last step back ended goes forward instead (30 us for 200 tokens).
        """
        if not 0 <= count <= len(self._pushed) + self._stopped:
            raise ValueError(f"cannot step back over {count} of {len(self._pushed) + self._stopped} tokens")
        if count == 0 and not self._matcher.is_error():
            return
        self._words = self._mask = None
        stops = min(count, self._stopped)
        self._stopped -= stops
        rest = count - stops
        if rest or self._matcher.is_error():
            del self._pushed[len(self._pushed) - rest :]
            if len(self._pushed) < self._anchored:
                self._anchor, self._anchored = self._grammar.matcher, 0
            self._matcher = self._anchor.deep_copy()
            if len(self._pushed) > self._anchored:
                self._matcher.consume_tokens(self._pushed[self._anchored :])
                self._anchor, self._anchored = self._matcher.deep_copy(), len(self._pushed)

    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next, in order, at most 64; empty when there is a choice."""
        if self._stopped:
            return ()
        self._refuse_error()
        found: list[int] = []
        stop = self._grammar.stop_token_ids
        for token in self._matcher.compute_ff_tokens()[:_FORCED_AT_ONCE]:
            if token in stop:
                break
            found.append(token)
        self._refuse_error()
        found = found[: self._matcher.validate_tokens(found)]
        if not found:
            words = self.packed()
            if np.count_nonzero(words) > 1:
                return ()
            only = int(words.argmax())
            bits = int(words[only])
            return (32 * only + bits.bit_length() - 1,) if bits & (bits - 1) == 0 else ()
        return tuple(found)

    def _compute(self) -> Packed:
        grammar, stop = self._grammar, self._grammar.stop_token_ids
        words: Packed = np.zeros((grammar.vocab_size + 31) // 32, np.uint32)
        if not self._stopped:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._refuse_error()
            whole, rest = divmod(min(grammar.tokens, grammar.vocab_size), 32)
            words[:whole] = self._bits[:whole]
            if rest:
                words[whole] = self._bits[whole] & np.uint32((1 << rest) - 1)
        if self._stopped or any(_holds(words, token) for token in stop):
            for token in stop:
                words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def _refuse_error(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the grammar cannot go on after {len(self._pushed)} tokens "
                f"({one_line(self._matcher.get_error())}); make it simpler"
            )


def compile_schema(
    schema: object, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int], *, whitespace: bool = False
) -> Grammar:
    """Compile a JSON Schema: JSON text, a mapping, or a class with ``model_json_schema()`` (Pydantic).

    ``vocab_size`` is the model's, ``stop_token_ids`` end an answer. Properties come in the order in which the schema
    names them. ``whitespace`` False gives compact JSON, without blanks outside strings; True allows up to 64 in a row.
    Raises RequestError, naming the reason, for a schema that is invalid, too big, has a keyword that would not be
    enforced, or that nothing can satisfy.
    """
    text = schema_text(schema)
    enforced = json.dumps(rewrite(json.loads(text)), ensure_ascii=False)

    def source(_: Vocabulary) -> str:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_json_schema(enforced, overrides=_json_options(whitespace))  # type: ignore[arg-type]

    return _compiled("schema", text, whitespace, tokenizer, vocab_size, stop_token_ids, source)


def compile_regex(pattern: str, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> Grammar:
    """Compile a regular expression that the whole answer must match, in the syntax of Rust's regex crate.

    Without look-around and back-references. Arguments and errors as for :func:`compile_schema`.
    """
    size = len(pattern.encode(errors="replace"))
    if size > MAX_REGEX_BYTES:
        raise RequestError(f"the regex has {size} bytes, at most {MAX_REGEX_BYTES} are taken; make it smaller")

    def source(_: Vocabulary) -> str:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_regex(pattern)

    return _compiled("regex", pattern, False, tokenizer, vocab_size, stop_token_ids, source)


def compile_lark(
    grammar: str, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int], *, whitespace: bool = False
) -> Grammar:
    """Compile a Lark grammar in the dialect of llguidance; the answer must match its rule ``start``.

    ``<name>`` is a special token, ``%json {...}`` a JSON Schema, to which ``whitespace`` applies. Arguments and errors
    as for :func:`compile_schema`. A grammar whose choices never lead to an end is not always found out here.
    """

    def source(vocabulary: Vocabulary) -> str:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_lark(prepare(grammar, vocabulary.special.get, _json_options(whitespace)))

    return _compiled("grammar", grammar, whitespace, tokenizer, vocab_size, stop_token_ids, source)


def compile_tools(grammar: str, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> Grammar:
    """Compile what :func:`~edge_dflash.grammar.tool_form.tool_grammar` made. Errors as for :func:`compile_schema`."""

    def source(vocabulary: Vocabulary) -> str:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_lark(
            prepare(grammar, vocabulary.special.get, {**_json_options(False), **TOOL_JSON})
        )

    return _compiled("tools", grammar, False, tokenizer, vocab_size, stop_token_ids, source)


def _holds(words: Packed, token: int) -> bool:
    return bool(int(words[token // 32]) >> token % 32 & 1)


_vocabularies: WeakKeyDictionary[Tokenizer, dict[tuple[int, ...], tuple[Vocabulary, OrderedDict[_Key, Grammar]]]]
_vocabularies = WeakKeyDictionary()
_lock = threading.Lock()


def _compiled(
    kind: str,
    text: str,
    whitespace: bool,
    tokenizer: Tokenizer,
    vocab_size: int,
    stop_token_ids: Sequence[int],
    source: Callable[[Vocabulary], str],
) -> Grammar:
    """The grammar of the cache, or a new one of ``source``."""
    stop = tuple(sorted(set(stop_token_ids)))
    for token in stop:
        if not 0 <= token < vocab_size:
            raise RequestError(f"stop token id {token} is outside the vocabulary of {vocab_size}")
    key = (kind, text, whitespace, vocab_size)
    with _lock:
        by_stop = _vocabularies.setdefault(tokenizer, {})
        if stop not in by_stop:
            by_stop[stop] = (Vocabulary(tokenizer, stop), OrderedDict())
        vocabulary, grammars = by_stop[stop]
        if key not in grammars:
            matcher = _matcher(kind, vocabulary.tokenizer, source(vocabulary))
            grammars[key] = Grammar(matcher, vocabulary.size, vocab_size, stop)
        grammars.move_to_end(key)
        while len(grammars) > CACHED:
            grammars.popitem(last=False)
        return grammars[key]


def _matcher(kind: str, tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """A matcher at the grammar's start. Raises RequestError when the grammar is invalid or nothing satisfies it."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise RequestError(f"the {kind} cannot be used: {one_line(matcher.get_error())}; change it there")
    if warnings := matcher.get_grammar_warnings():
        raise RequestError(
            f"the {kind} has parts that would not be enforced: {one_line('; '.join(warnings))}; remove them"
        )
    probe = matcher.deep_copy()
    forced = len(probe.compute_ff_tokens())
    if forced > MAX_FORCED:
        raise RequestError(
            f"the {kind} leaves no choice for more than {MAX_FORCED} tokens ({forced}); "
            "end the recursion, or make the text that it fixes shorter"
        )
    if not probe.is_error():
        probe.compute_bitmask()
    if probe.is_error():
        raise RequestError(f"nothing satisfies the {kind} ({one_line(probe.get_error())}); make it less strict")
    return matcher


def _json_options(whitespace: bool) -> dict[str, object]:
    """How the library is to read a schema: nothing of it ignored, blanks bounded."""
    strict: dict[str, object] = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": whitespace}
    return {**strict, "whitespace_pattern": _WHITESPACE} if whitespace else strict
