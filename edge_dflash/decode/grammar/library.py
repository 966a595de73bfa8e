"""What the llguidance library is given and what it says: a tokenizer as it sees it, its messages in our words.

Its messages name its options, its types and its sources. Those that users meet are said with the place and a remedy;
what is not known is cleaned of the library's own names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from edge_dflash.common.panics import refused
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
        self.stop_token_ids = tuple(stop_token_ids)
        known = [token for token in stop_token_ids if token < size]
        if not known:
            raise RequestError(
                f"structured output needs a stop token of the tokenizer, of {size} ids; got {tuple(stop_token_ids)}"
            )
        unknown = "structured output does not know this kind of tokenizer"
        try:
            with refused(RequestError, unknown, "leave forms out"):
                self.tokenizer: LLTokenizer = LLTokenizer(json.dumps(files), eos_token=known, slices=SLICES)
        except RequestError:
            raise
        except Exception as error:  # of what kind depends on what the tokenizer lacks
            raise RequestError(f"{unknown} ({one_line(error)}); leave forms out") from None
        for byte in (*range(0xC0), *range(0xC2, 0xF5)):  # those that UTF-8 uses
            ids = self.tokenizer.tokenize_bytes(bytes([byte]))
            if self.tokenizer.decode_bytes(ids) != bytes([byte]):
                raise RequestError(f"structured output needs a token for every byte; 0x{byte:02x} has none")

    @property
    def size(self) -> int:
        """Number of ids of the library's vocabulary."""
        return int(self.tokenizer.vocab_size)


# Messages -----------------------------------------------------------------------------------------------------------

_INVALID = r"the regex '\g<regex>' is not valid: "
_KNOWN = (  # what the library says; our words; keywords of a schema whose places are named
    (
        r"min/maxProperties only supported",
        "minProperties and maxProperties are enforced only where all properties that are named are required; "
        "require them, or remove the limit",
        ("minProperties", "maxProperties"),
    ),
    (
        r"patternProperty regexes (?P<a>/.*/) and (?P<b>/.*/) are not disjoint",
        r"patternProperties \g<a> and \g<b> can match one name; make them match different names",
        ("patternProperties",),
    ),
    (
        r"circular references with sibling keys are not supported: (?:json-schema:/*)?(?P<ref>\S+)",
        r"$ref \g<ref> leads to itself beside other keywords; move them into the definition",
        (),
    ),
    (
        r"intersection stack level exceeded",
        "schemas that refer to themselves are combined, by allOf or by keywords beside $ref; write the combination out",
        ("allOf",),
    ),
    (
        r"Value for 'multipleOf' has too many digits",
        "multipleOf has too many digits; give at most 9, and at most 10 behind the point",
        ("multipleOf",),
    ),
    (
        r"Unable to determine if regex is empty",
        "pattern, format and length of a text are too complex together; make them simpler",
        ("pattern",),
    ),
    (
        r"Regex is empty",
        "no text matches its pattern, format and length together; make them less strict",
        ("pattern",),
    ),
    (
        r"Failed to generate regex for (?:float|integer) range",
        "its bounds of a number cannot be enforced together; give bounds within those of a 64-bit integer",
        ("minimum", "maximum"),
    ),
    (r"Unsatisfiable schema: (?P<why>[^\n]*)", r"nothing satisfies it: \g<why>; make it less strict", ()),
    (
        r"lookarounds not supported yet; (?:Start|End)\w* in regex /(?P<regex>.*)/",
        r"the regex '\g<regex>' has ^ or $ inside, which would not be enforced; remove it",
        (),
    ),
    (
        r"lookarounds not supported yet; .* in regex /(?P<regex>.*)/",
        r"the regex '\g<regex>' has a word boundary inside, which would not be enforced; remove it",
        (),
    ),
    (
        r"regex parse error:\s*\n\s*(?P<regex>.*?)\n[^\n]*\nerror: (?P<what>look-around|backreferences)",
        _INVALID + r"\g<what> would not be enforced; write it without",
        ("pattern",),
    ),
    (
        r"regex parse error:\s*\n\s*(?P<regex>.*?)\n\s*\^+\s*\nerror: (?P<why>[^\n]*)",
        _INVALID + r"\g<why>; write it in the syntax of Rust's regex crate",
        (),
    ),
    (r"no start rule found", "it has no start rule; name the rule that the answer must match start", ()),
    (
        r"too many (?:states|expressions)|Current row has \d+ items",
        "it leaves too many ways open at once; make it simpler",
        (),
    ),
    (r"too deeply nested", "it is nested too deeply; use more rules", ()),
    (r"NoExtension", "no text leads to its end; make it less strict", ()),
    (
        r"(?:Lexer|Parser)TooComplex|too complex|fuel|limits? (?:exceeded|reached)",
        "it is too complex; make it simpler",
        (),
    ),
    (r"lexer error", "a character stands where none of the language can; quote texts with double quotes", ()),
)
_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ", re.MULTILINE)
_OWN = re.compile(  # lines of the grammar that the library repeats, places, its names
    r"^\s*(?:\d+ \| .*|\^+)\s*$|^(?:at )?\d+\(\d+\): |\bjson-schema:/*|\(at (?:EOF|\"[^\n]*\)\))|<non-verbose/>|"
    r"\b(?:Some|Ok|Err)\b|\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b|\b[a-z]+::\w+|`",
    re.MULTILINE,
)


def in_our_words(kind: str, message: str, text: str = "") -> str:
    """What is wrong with a grammar, in one line: where, what, and what to do.

    ``kind`` is "schema", "regex", "grammar" or "tools", ``text`` the grammar as it was given.
    """
    place = _PLACE.search(message) if kind == "grammar" else None
    where = f"line {place['line']}, column {place['column']}: " if place else ""
    for pattern, words, keywords in _KNOWN:
        if found := re.search(pattern, message):
            places = list(_holding(json.loads(text), "#", keywords)) if kind == "schema" and keywords else []
            more = ", ..." if len(places) > 3 else ""
            return one_line(
                f"{where}{found.expand(words)}" + (f" (at {', '.join(places[:3])}{more})" if places else "")
            )
    return one_line(f"{where}{' '.join(_OWN.sub('', message).split()) or 'it cannot be used'}; change it there")


def _holding(node: Any, where: str, keywords: Collection[str]) -> Iterator[str]:
    """Places of a schema that hold one of the keywords."""
    inside: Iterable[tuple[object, Any]] = ()
    if isinstance(node, dict):
        if not node.keys().isdisjoint(keywords):
            yield where
        inside = node.items()
    elif isinstance(node, list):
        inside = enumerate(node)
    for key, child in inside:
        yield from _holding(child, f"{where}/{key}", keywords)
