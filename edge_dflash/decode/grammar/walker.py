"""A grammar that the llguidance library compiled, and steps along it. Runs in a process of the grammar's.

Two properties make constrained speculative decoding equal to constrained plain decoding: a mask is a function of the
tokens pushed so far and of nothing else, and forced tokens are exactly those that the masks along them leave.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_dflash.decode.grammar.calls import Calls
from edge_dflash.decode.grammar.lark_text import prepare
from edge_dflash.decode.grammar.library import Vocabulary, in_our_words
from edge_dflash.decode.grammar.schema_check import check
from edge_dflash.decode.grammar.schema_rewrite import rewrite
from edge_dflash.decode.grammar.wire import Source
from edge_dflash.errors import RequestError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_FORCED = 4096  # tokens that a grammar may force in a row at its start; more is taken for a text that never ends
MAX_LEXER_STATES = 50_000  # 1-2 kB each
_TRIED = 4  # choices when a grammar is tried out; each takes a mask
_FORCED_AT_ONCE = 64  # tokens that forced() returns at most
_WHITESPACE = r"[ \t\n\r]{1,64}"  # bounded, so that a model cannot go on with blanks for ever


@dataclass(frozen=True)
class Compiled:
    """A grammar at its start. ``matcher`` is only copied; ``tokens``: number of ids it covers."""

    matcher: LLMatcher
    tokens: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]


class Walker:
    """The grammar behind the tokens of one request.

    Stop tokens are allowed where the text so far is whole, and nothing but them after one. Special tokens are never
    allowed, unless a Lark grammar names them. ``packed``, ``push`` and ``forced`` raise RequestError when the grammar
    turns out too complex at this point; :meth:`pop` leads back to where it was not.
    """

    def __init__(self, grammar: Compiled) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._anchor, self._anchored = grammar.matcher, 0  # a matcher that is only copied, and how much it has consumed
        self._pushed: list[int] = []  # without stop tokens
        self._stopped = 0  # stop tokens pushed, all at the end
        self._words: bytes | None = None  # mask of this position, once it was asked for

    @property
    def ended(self) -> bool:
        """Whether a stop token was pushed."""
        return self._stopped > 0

    def packed(self) -> bytes:
        """Tokens that may come next, as ceil(vocab_size / 32) words of 32 bits."""
        if self._words is None:
            self._words = self._compute()
        return self._words

    def push(self, token: int) -> bool:
        """Step over a token. False, and no step, when it is not allowed."""
        if token in self._grammar.stop_token_ids:
            if not _holds(self.packed(), token):
                return False
            self._stopped += 1
            self._words = None
            return True
        if self._stopped or not 0 <= token < min(self._grammar.tokens, self._grammar.vocab_size):
            return False
        self._refuse_error()
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._refuse_error()
        if taken:
            self._pushed.append(token)
            self._words = None
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
        self._words = None
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
            bits = int.from_bytes(self.packed(), "little")
            return (bits.bit_length() - 1,) if bits and bits & (bits - 1) == 0 else ()
        return tuple(found)

    def _compute(self) -> bytes:
        grammar, stop = self._grammar, self._grammar.stop_token_ids
        words = bytearray(4 * ((grammar.vocab_size + 31) // 32))
        if not self._stopped:
            bits = self._matcher.compute_bitmask()
            self._refuse_error()
            whole, rest = divmod(min(grammar.tokens, grammar.vocab_size), 8)
            words[:whole] = bits[:whole]
            if rest:
                words[whole] = bits[whole] & ((1 << rest) - 1)
        if self._stopped or any(_holds(words, token) for token in stop):
            for token in stop:
                words[token // 8] |= 1 << token % 8
        return bytes(words)

    def _refuse_error(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the grammar cannot go on after {len(self._pushed)} tokens "
                f"({in_our_words('grammar', self._matcher.get_error())})"
            )


def compiled(source: Source, vocabulary: Vocabulary, stop_token_ids: tuple[int, ...]) -> Compiled:
    """Compile a grammar. Raises RequestError when it is invalid or nothing satisfies it. Takes any time and memory."""
    from llguidance import LLMatcher, LLParserLimits

    if source.kind == "calls":
        return _of_calls(source, vocabulary, stop_token_ids)
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
    grammar = Compiled(matcher, vocabulary.size, source.vocab_size, stop_token_ids)
    _try_out(grammar, kind)
    return grammar


def _of_calls(source: Source, vocabulary: Vocabulary, stop_token_ids: tuple[int, ...]) -> Compiled:
    """Calls are held to their names alone where the library refuses their schemas and they may be."""
    calls = Calls.from_json(source.text)

    def made(text: str) -> Compiled:
        return compiled(replace(source, kind="tools", text=text), vocabulary, stop_token_ids)

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
        schema = json.loads(source.text)
        check(schema)
        text = json.dumps(rewrite(schema), ensure_ascii=False)
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
