"""What the llguidance library is given and what it says: a tokenizer and a Lark grammar as it sees them, its messages.

Of its dialect of Lark (https://github.com/guidance-ai/llguidance, docs/syntax.md) only the lexical shape is read:
comments, strings, regular expressions, ``<token>`` and ``%json {...}``; the library parses the rules. Its messages are
cleaned of its names; those that would not be understood are said in our words, with the place and a remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edge_dflash.common.rules import refuse_surrogates
from edge_dflash.decode.grammar.rewrite import rewrite
from edge_dflash.errors import RequestError, one_line, refused

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_BYTES = 64 * 1024  # of a Lark grammar
MAX_RULES = 500  # the library follows rules by recursion: a long chain of them would exhaust the stack
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
        self.size = int(self.tokenizer.vocab_size)  # ids of the library's vocabulary


# Lark -----------------------------------------------------------------------------------------------------------------

_LEXICON = re.compile(
    r"""
      (?P<skip> //[^\n]* | \#[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/ )
    | (?P<form> ^form: \s* )? %json \s* (?P<json> (?=\{) )
    | < (?P<name> [^<>\s"\[\]]+ ) >
    | \[ [^\]\n]* (?P<option> \b(?:temperature|max_tokens|stop)\b ) \s* =
    | (?P<rule> : )
    """,
    re.VERBOSE | re.MULTILINE,
)


def prepare(
    text: str,
    token_id: Callable[[str], int | None],
    json_options: Mapping[str, object],
    form_options: Mapping[str, object] | None = None,
) -> str:
    """Return the grammar with token names as ids and with ``json_options`` in each inline schema.

    ``form_options``: those of a rule ``form`` that is a schema, if they are others. Raises RequestError for a grammar
    that is too big, names an unknown token, holds a schema that is refused, or uses an option of lexemes that decoding
    here would not obey.
    """
    size = len(text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise RequestError(f"the grammar has {size} bytes, at most {MAX_BYTES} are taken; make it smaller")
    parts: list[str] = []
    position, rules = 0, 0
    while found := _LEXICON.search(text, position):
        parts.append(text[position : found.start()])
        position = found.end()
        if found["json"] is not None:
            schema, position = _inline_schema(text, position)
            options = json_options if found["form"] is None or form_options is None else form_options
            parts.append(f"{found['form'] or ''}%json {json.dumps({**rewrite(schema), 'x-guidance': dict(options)})}")
        elif found["name"] is not None:
            parts.append(_special(found["name"], token_id))
        elif found["option"] is not None:
            raise RequestError(
                f"the grammar sets {found['option']}, which would not be enforced; use lazy or suffix on the rule"
            )
        else:
            rules += found["rule"] is not None
            parts.append(found[0])
    if rules > MAX_RULES:
        raise RequestError(f"the grammar has {rules} rules, at most {MAX_RULES} are taken; use fewer rules")
    return "".join((*parts, text[position:]))


def _inline_schema(text: str, start: int) -> tuple[dict[str, object], int]:
    """The schema that begins at ``start``, and where it ends."""
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the grammar's %json is no JSON ({error}); give a JSON object") from None
    refuse_surrogates(schema, "the grammar's %json")
    return schema, end


def _special(name: str, token_id: Callable[[str], int | None]) -> str:
    found = token_id(f"<{name}>")
    if found is None:
        raise RequestError(
            f"the grammar names the token <{name[:40]}>, which the tokenizer lacks; write text in quotes"
        )
    return f"<[{found}]>"


# Messages -----------------------------------------------------------------------------------------------------------

_WORDS = {  # what the library says: what that means, and what to do
    r"min/maxProperties only supported": "minProperties and maxProperties are enforced only where all properties that "
    "are named are required; require them, or remove the limit",
    r"patternProperty regexes (/.*/ and /.*/) are not disjoint": r"patternProperties \1 can match one name; make them "
    "match different names",
    r"circular references with sibling keys are not supported: (?:json-schema:/*)?(\S+)": r"$ref \1 leads to itself "
    "beside other keywords; move them into the definition",
    r"intersection stack level exceeded": "schemas that refer to themselves are combined, by allOf or by keywords "
    "beside $ref; write the combination out",
    r"'multipleOf' has too many digits": "multipleOf has too many digits; give at most 9, and at most 10 behind the "
    "point",
    r"Regex is empty": "no text matches its pattern, format and length together; make them less strict",
    r"Failed to generate regex for": "its minimum and maximum cannot be enforced together; give bounds within those of "
    "a 64-bit integer",
    r"Unsatisfiable schema: ([^\n]*)": r"nothing satisfies it: \1; make it less strict",
    r"lookarounds not supported yet; .* in (regex /.*/)": r"the \1 has ^, $ or a word boundary inside, which would not "
    "be enforced; remove it",
    r"regex parse error:\s*\n\s*(.*?)\n[^\n]*\nerror: (look-around|backreferences)": r"the regex /\1/ is not valid: "
    r"\2 would not be enforced; write it without",
    r"regex parse error:\s*\n\s*(.*?)\n[^\n]*\nerror: ([^\n]*)": r"the regex /\1/ is not valid: \2; write it in the "
    "syntax of Rust's regex crate",
    r"too many (?:states|expressions)|Current row has \d+ items": "too many ways are open at once; make it simpler",
    r"NoExtension": "no text leads to its end; make it less strict",
    r"(?i)too ?complex|too deeply nested|fuel|limits? (?:exceeded|reached)|Unable to determine if regex": "it is too "
    "complex, or nested too deeply; make it simpler",
    r"no start rule found": "it has no start rule; name the rule that the answer must match start",
    r"lexer error": "a character stands where none of the language can; quote texts with double quotes",
}
_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ", re.MULTILINE)
_NAMED = re.compile(r"\b(?:pattern|allOf|multipleOf|minimum|\w+Properties)\b")  # keywords in our words
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
    for pattern, meaning in _WORDS.items():
        if found := re.search(pattern, message):
            words, named = found.expand(meaning), frozenset(_NAMED.findall(meaning))
            places = list(_holding(json.loads(text), "#", named)) if kind == "schema" and named else []
            more = f" (at {', '.join(places[:3])}{', ...' * (len(places) > 3)})" if places else ""
            return one_line(f"{where}{words}{more}")
    return one_line(f"{where}{' '.join(_OWN.sub('', message).split()) or 'it cannot be used'}; change it there")


def _holding(node: Any, where: str, keywords: frozenset[str]) -> Iterator[str]:
    """Places of a schema that hold one of the keywords."""
    if isinstance(node, dict) and not keywords.isdisjoint(node):
        yield where
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _holding(child, f"{where}/{key}", keywords)
