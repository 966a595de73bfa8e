"""A form that an answer must have, compiled by the llguidance library, and walks along it; run in other processes.

Two properties make constrained speculative decoding equal to constrained plain decoding: a mask is a function of the
tokens pushed so far and of nothing else, and forced tokens are exactly those that the masks along them leave.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from edge_dflash.decode.grammar.calls import Calls
from edge_dflash.decode.grammar.library import Vocabulary, in_our_words, prepare
from edge_dflash.decode.grammar.rewrite import rewrite
from edge_dflash.errors import RequestError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_FORCED = 4096  # tokens that a grammar may force in a row at its start; more is taken for a text that never ends
MAX_LEXER_STATES = 50_000  # 1-2 kB each
_TRIED = 4  # choices when a grammar is tried out; each takes a mask
_FORCED_AT_ONCE = 64  # tokens that forced() returns at most
_WHITESPACE = r"[ \t\n\r]{1,64}"  # bounded, so that a model cannot go on with blanks for ever


@dataclass(frozen=True)
class Source:
    """A form that an answer must have as a whole, for a model of ``vocab_size`` ids.

    - "schema": JSON text. Properties come in the order in which it names them. ``whitespace`` False: no blanks outside
      strings; True: up to 64 in a row.
    - "regex": in the syntax of Rust's regex crate, without look-around and back-references.
    - "grammar": Lark in the dialect of llguidance, from its rule ``start``. ``<name>`` is a special token,
      ``%json {...}`` a JSON Schema, to which ``whitespace`` applies.
    - "calls": JSON of the :class:`~edge_dflash.decode.grammar.calls.Calls` that it may have.
    - "tools": Lark, made of them.
    """

    kind: Literal["schema", "regex", "grammar", "calls", "tools"]
    text: str
    whitespace: bool
    vocab_size: int


@dataclass(frozen=True)
class Compiled:
    """A grammar at its start. ``matcher`` is only copied; ``tokens``: ids that it and the model have."""

    matcher: LLMatcher
    tokens: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]


class Walker:
    """The grammar behind the tokens of one request.

    Stop tokens are allowed where the text so far is whole, and nothing but them after one. Special tokens are never
    allowed, unless a Lark grammar names them. ``packed``, ``push`` and ``forced`` raise RequestError when the grammar
    turns out too complex at this point, and leave the walker there.
    """

    def __init__(self, grammar: Compiled) -> None:
        self.ended = False  # a stop token was pushed
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._pushed: list[int] = []  # without stop tokens
        self._words: bytes | None = None  # mask of this position, once it was asked for

    def copy(self) -> Walker:
        """Another one at the same place: drafts are tried on it.

        The library's own rollback is not used: in version 1.9 masks after it may be those of the path that was left.
        """
        other = copy(self)
        other._matcher, other._pushed = self._matcher.deep_copy(), [*self._pushed]
        return other

    def packed(self) -> bytes:
        """Tokens that may come next, as ceil(vocab_size / 32) words of 32 bits."""
        if self._words is None:
            self._words = self._compute()
        return self._words

    def forget(self) -> None:
        """Make the mask of this position anew when it is asked for."""
        self._words = None

    def push(self, token: int) -> bool:
        """Step over a token. False, and no step, when it is not allowed."""
        if token in self._grammar.stop_token_ids:
            if not _holds(self.packed(), token):
                return False
            self.ended, self._words = True, None
            return True
        if self.ended or not 0 <= token < self._grammar.tokens:
            return False
        self._refuse_error()
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._refuse_error()
        if taken:
            self._pushed.append(token)
            self._words = None
        return taken

    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next, in order, at most 64; empty when there is a choice."""
        if self.ended:
            return ()
        self._refuse_error()
        forced = self._matcher.compute_ff_tokens()[:_FORCED_AT_ONCE]
        found = list(takewhile(lambda token: token not in self._grammar.stop_token_ids, forced))
        self._refuse_error()
        found = found[: self._matcher.validate_tokens(found)]
        if not found:
            bits = int.from_bytes(self.packed(), "little")
            return (bits.bit_length() - 1,) if bits and bits & (bits - 1) == 0 else ()
        return tuple(found)

    def _compute(self) -> bytes:
        grammar, stop = self._grammar, self._grammar.stop_token_ids
        words = bytearray(4 * ((grammar.vocab_size + 31) // 32))
        if not self.ended:
            bits = self._matcher.compute_bitmask()
            self._refuse_error()
            whole, rest = divmod(grammar.tokens, 8)
            words[:whole] = bits[:whole]
            if rest:
                words[whole] = bits[whole] & ((1 << rest) - 1)
        if self.ended or any(_holds(words, token) for token in stop):
            for token in stop:
                words[token // 8] |= 1 << token % 8
        return bytes(words)

    def _refuse_error(self) -> None:
        if self._matcher.is_error():
            why = in_our_words("grammar", self._matcher.get_error())
            self._matcher = self._grammar.matcher.deep_copy()
            self._matcher.consume_tokens(self._pushed)
            raise RequestError(f"the grammar cannot go on after {len(self._pushed)} tokens ({why})")


def amend(walker: Walker, free: Sequence[int]) -> tuple[list[int], bool]:
    """Drafts that the grammar allows, made from the ``free`` ones, and whether one is to be chosen next.

    The walker steps over them. A draft that is refused is replaced by what is forced there. The path ends where nothing
    is, or where the grammar becomes too complex.
    """
    path: list[int] = []
    forced: list[int] = []  # in place of the draft that was refused, and of those after it
    with contextlib.suppress(RequestError):
        for draft in free:
            token = forced.pop(0) if forced else draft
            if not walker.push(token):
                forced = [*walker.forced()]
                if not forced:
                    walker.packed()
                    return path, True
                if not walker.push(token := forced.pop(0)):
                    break
            path.append(token)
            if walker.ended:
                break
    return path, False


def masks(walker: Walker, drafts: Sequence[int]) -> Iterator[bytes]:
    """The masks before the first draft, after it, ...; the walker steps over them.

    They end, without a reason, at a draft that is not allowed, and after a stop token. Raises RequestError when the
    grammar becomes too complex.
    """
    yield walker.packed()
    for draft in drafts:
        if walker.ended or not walker.push(draft):
            return
        yield walker.packed()


def compiled(source: Source, vocabulary: Vocabulary) -> Compiled:
    """Compile a grammar. Raises RequestError when it is invalid or nothing satisfies it. Takes any time and memory."""
    from llguidance import LLMatcher, LLParserLimits

    if source.kind == "calls":
        return _of_calls(source, vocabulary)
    kind = source.kind
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary.tokenizer, _grammar_text(source, vocabulary), log_level=0, limits=limits)
    if matcher.is_error():
        raise RequestError(f"the {kind} cannot be used: {in_our_words(kind, matcher.get_error(), source.text)}")
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
        raise RequestError(f"nothing satisfies the {kind} ({in_our_words(kind, probe.get_error(), source.text)})")
    tokens = min(vocabulary.size, source.vocab_size)
    grammar = Compiled(matcher, tokens, source.vocab_size, vocabulary.stop_token_ids)
    _try_out(grammar, kind)
    return grammar


def _of_calls(source: Source, vocabulary: Vocabulary) -> Compiled:
    """Calls are held to their names alone where the library refuses their schemas and they may be."""
    calls = Calls.from_json(source.text)

    def made(text: str) -> Compiled:
        return compiled(replace(source, kind="tools", text=text), vocabulary)

    try:
        return made(calls.grammar())
    except RequestError:
        free = []
        for tool in calls.where_it_can():
            try:
                made(replace(calls, which="forced", tools=(tool,)).grammar())
            except RequestError:
                free.append(tool["name"])
        if not free:
            raise
        return made(calls.grammar(free))


def _try_out(grammar: Compiled, kind: str) -> None:
    """Take a few tokens. Raises RequestError for a grammar that is too complex for them: no request would get on."""
    walker, stops = Walker(grammar), sum(1 << token for token in set(grammar.stop_token_ids))
    try:
        for _ in range(_TRIED):
            tokens = walker.forced()
            if not tokens:
                bits = int.from_bytes(walker.packed(), "little") & ~stops
                if not bits:
                    return
                tokens = ((bits & -bits).bit_length() - 1,)  # the first
            if not all(map(walker.push, tokens)):
                return
    except RequestError as error:
        raise RequestError(f"the {kind} cannot be used: {error}") from None


def _grammar_text(source: Source, vocabulary: Vocabulary) -> str:
    """A grammar in the library's form."""
    from llguidance import LLMatcher

    options = _json_options(source.whitespace)
    if source.kind == "schema":
        text = json.dumps(rewrite(json.loads(source.text)), ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    spaced = {"item_separator": ", ", "key_separator": ": "}  # as chat templates write arguments
    calls = {**options, **spaced} if source.kind == "tools" else options
    return LLMatcher.grammar_from_lark(prepare(source.text, vocabulary.special.get, calls, options))


def _json_options(whitespace: bool) -> dict[str, object]:
    """How the library is to read a schema: nothing of it ignored, blanks bounded, each name spelled in one way."""
    strict: dict[str, object] = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": whitespace}
    strict["json_allowed_escapes"] = 'nrbtf"\\'  # with u a free name could be that of a property, spelled otherwise
    return {**strict, "whitespace_pattern": _WHITESPACE} if whitespace else strict


def _holds(words: bytes | bytearray, token: int) -> bool:
    return bool(words[token // 8] >> token % 8 & 1)
