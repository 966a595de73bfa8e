"""What the llguidance library is given and what it says: a tokenizer as it sees it, its messages in our words.

Its messages name its options, its types and its sources. A table turns the known ones into what was found, where, and
what to do instead; what is not known is cleaned of the library's own names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
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

_ASSERTIONS = {"Start": "^", "End": "$", "StartLF": "^", "EndLF": "$"}
_Words = Callable[["re.Match[str]"], str]

_KNOWN: tuple[tuple[str, str | _Words, str], ...] = (  # pattern; our words; keyword of a schema whose places are named
    (
        r"oneOf constraints are not supported",
        "that only one option of a oneOf holds would not be enforced, because two could hold together; let them differ "
        "in their type or in a required constant, or use anyOf",
        "oneOf",
    ),
    (
        r"min/maxProperties only supported",
        "minProperties and maxProperties are enforced only where all properties that are named are required; "
        "require them, or remove the limit",
        "minProperties maxProperties",
    ),
    (
        r"patternProperty regexes (?P<a>/.*/) and (?P<b>/.*/) are not disjoint",
        lambda m: f"patternProperties {m['a']} and {m['b']} can match one name; make them match different names",
        "patternProperties",
    ),
    (
        r"circular references with sibling keys are not supported: (?:json-schema:/*)?(?P<ref>\S+)",
        lambda m: f"$ref {m['ref']} leads to itself beside other keywords; move them into the definition",
        "",
    ),
    (
        r"intersection stack level exceeded",
        "schemas that refer to themselves are combined, by allOf or by keywords beside $ref; write the combination out",
        "allOf",
    ),
    (
        r"Value for 'multipleOf' has too many digits",
        "multipleOf has too many digits; give at most 9, and at most 10 behind the point",
        "multipleOf",
    ),
    (
        r"Unable to determine if regex is empty",
        "pattern, format and length of a text are too complex together; make them simpler",
        "pattern",
    ),
    (
        r"Regex is empty",
        "no text matches its pattern, format and length together; make them less strict",
        "pattern",
    ),
    (
        r"Failed to generate regex for (?:float|integer) range",
        "its bounds of a number cannot be enforced together; give bounds within those of a 64-bit integer",
        "minimum maximum",
    ),
    (
        r"Unsatisfiable schema: (?P<why>[^\n]*)",
        lambda m: f"nothing satisfies it: {m['why']}; make it less strict",
        "",
    ),
    (
        r"lookarounds not supported yet; (?P<kind>\w+) in regex /(?P<regex>.*)/",
        lambda m: (
            f"the regex {m['regex']!r} has {_ASSERTIONS.get(m['kind'], 'a word boundary')} inside, "
            "which would not be enforced; remove it"
        ),
        "",
    ),
    (
        r"regex parse error:\s*\n\s*(?P<regex>.*?)\n[^\n]*\nerror: (?P<what>look-around|backreferences)",
        lambda m: f"the regex {m['regex']!r} is not valid: {m['what']} would not be enforced; write it without",
        "pattern",
    ),
    (
        r"regex parse error:\s*\n\s*(?P<regex>.*?)\n\s*\^+\s*\nerror: (?P<why>[^\n]*)",
        lambda m: f"the regex {m['regex']!r} is not valid: {m['why']}; write it in the syntax of Rust's regex crate",
        "",
    ),
    (r"no start rule found", "it has no start rule; name the rule that the answer must match start", ""),
    (
        r"too many (?:states|expressions)|Current row has \d+ items",
        "it leaves too many ways open at once; make it simpler",
        "",
    ),
    (r"too deeply nested", "it is nested too deeply; use more rules", ""),
    (r"NoExtension", "no text leads to its end; make it less strict", ""),
    (
        r"(?:Lexer|Parser)TooComplex|too complex|fuel|limits? (?:exceeded|reached)",
        "it is too complex; make it simpler",
        "",
    ),
    (r"lexer error", "a character stands where none of the language can; quote texts with double quotes", ""),
)
_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ", re.MULTILINE)
_SOURCE = re.compile(r"^\s*(?:\d+ \| .*|\^+)\s*$", re.MULTILINE)  # lines of the grammar that the library repeats
_OWN = re.compile(
    r"\bjson-schema:/*|\(at (?:EOF|\"[^\n]*\)\))|<non-verbose/>|\b(?:Some|Ok|Err)\b|"
    r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b|\b[a-z]+::\w+|`"
)


def in_our_words(kind: str, message: str, text: str = "") -> str:
    """What is wrong with a grammar, in one line: where, what, and what to do.

    ``kind`` is "schema", "regex", "grammar" or "tools", ``text`` the grammar as it was given.
    """
    place = _PLACE.search(message) if kind == "grammar" else None
    where = f"line {place['line']}, column {place['column']}: " if place else ""
    for pattern, words, keywords in _KNOWN:
        if found := re.search(pattern, message):
            said = words if isinstance(words, str) else words(found)
            return one_line(f"{where}{said}{_places(kind, text, keywords)}")
    plain = _OWN.sub("", _PLACE.sub("", _SOURCE.sub("", message)))
    return one_line(f"{where}{' '.join(plain.split()) or 'it cannot be used'}; change it there")


def _places(kind: str, text: str, keywords: str) -> str:
    """Where a schema has one of the keywords."""
    if kind != "schema" or not keywords:
        return ""
    try:
        found = list(_holding(json.loads(text), "#", set(keywords.split())))
    except (ValueError, RecursionError):
        return ""
    more = ", ..." if len(found) > 3 else ""
    return f" (at {', '.join(found[:3])}{more})" if found else ""


def _holding(node: Any, where: str, keywords: set[str]) -> Iterator[str]:
    if isinstance(node, dict):
        if keywords & node.keys():
            yield where
        for key, child in node.items():
            yield from _holding(child, f"{where}/{key}", keywords)
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _holding(child, f"{where}/{index}", keywords)
