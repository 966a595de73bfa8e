"""A schema as the grammar library is given it: the same documents, but numbers end and formats mean what they say.

- Numbers are those of a 64-bit integer's range with at most 10 digits behind the point. The library's own have no
  bound, so a model could write digits until its budget is used up. Values that the schema names (``const``, ``enum``,
  bounds, ``multipleOf``) stay possible, whatever their digits. The bounds are written as ``minimum``, ``maximum`` and
  ``multipleOf``: the automaton then tracks where a number can still end, which no count of digits from outside does.
- Where a schema leaves a value free, it becomes a reference to a definition of any JSON value with such numbers. Not
  where schemas are intersected (``allOf``, keywords beside ``anyOf`` or ``$ref``): the library cannot intersect what
  refers to itself, and free values there have numbers without bound.
- ``format`` and ``contentEncoding`` become the patterns of :mod:`edge_dflash.decode.grammar.formats`.

It is brought into plain form first (:mod:`edge_dflash.decode.grammar.schema`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from itertools import count
from math import prod, ulp
from typing import Any
from urllib.parse import quote, unquote

from edge_dflash.common.pointer import resolve
from edge_dflash.decode.grammar import keywords
from edge_dflash.decode.grammar.formats import ENCODINGS, FORMATS
from edge_dflash.decode.grammar.schema import all_nodes, inner, plain
from edge_dflash.errors import RequestError

FRACTION_DIGITS = 10  # of the library's multipleOf: it takes no finer power of ten
_NUMBERS = frozenset(("number", "integer"))
_STEP = 1e-10
_NARROW = 1e-6  # in a narrower range the library may find no multiple of the step, by rounding
_APPLICATORS = frozenset(("$ref", "allOf", "anyOf", "const", "enum"))
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def rewrite(root: dict[str, Any]) -> dict[str, Any]:
    """The schema for the library. ``root`` is not changed."""
    return _Rewriting(plain(root)).root()


class _Rewriting:
    """One schema. A node is *merged* when the library may intersect what is at its place with something else."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._merged = _merged(root)
        self._usual = all(abs(number) <= keywords.LARGEST for number in _numbers(root, ("const", "enum")))
        multiples = set(_numbers(root, ("multipleOf",)))
        if self._merged and len(multiples) > 1 and _overflow(multiples):
            raise RequestError("the values of multipleOf are too large to be combined; write one multipleOf of them")
        self._digits = digits = all(_is_fine(number) for number in _numbers(root, (*_BOUNDS, "const", "enum")))
        self._fine = digits and not multiples and not (self._merged and _crossed(root))
        names = (f"any{number or ''}" for number in count())
        self._names = (name for name in names if name not in root.get("$defs", {}))  # of added definitions
        self._added: dict[str, Any] = {}  # definitions
        self._shared: dict[str, str] = {}  # schema of a scalar as JSON: its definition
        self._any = ""

    def root(self) -> dict[str, Any]:
        made = self._node(self._root, merged=False)
        assert isinstance(made, dict)
        return {**made, "$defs": {**made.get("$defs", {}), **self._added}} if self._added else made

    def _free(self) -> dict[str, Any]:
        """A reference to any value."""
        free = {"$ref": f"#/$defs/{self._any}"}
        if not self._any:
            self._any = next(self._names)
            free["$ref"] += self._any
            number: dict[str, Any] = {"type": "number"}
            self._bound(number, merged=False)
            options = [{"type": ["null", "boolean", "string"]}, number, {"type": "array", "items": free}]
            self._added[self._any] = {"anyOf": [*options, {"type": "object", "additionalProperties": free}]}
        return free

    def _share(self, made: dict[str, Any]) -> dict[str, Any]:
        """A reference to a schema of numbers: the library takes milliseconds to compile the bounds of each."""
        key = json.dumps(made)
        if key not in self._shared:
            self._shared[key] = next(self._names)
            self._added[self._shared[key]] = made
        return {"$ref": f"#/$defs/{self._shared[key]}"}

    def _node(self, node: Any, *, merged: bool) -> Any:
        if not isinstance(node, dict):
            return self._free() if node is True and not merged else node
        merged = id(node) in self._merged  # a definition's place says nothing; its references do
        kept = dict(node)
        if not kept.keys() - keywords.DEFINITIONS and not merged:
            kept |= self._free()
        made = {key: self._value(key, value, merged or _intersects(node)) for key, value in kept.items()}
        if self._digits and keywords.may_be(node, "number"):
            _include(made)
        _add_patterns(made)
        if not kept.keys() & _APPLICATORS and kept.keys() - keywords.DEFINITIONS:
            if not merged:
                self._close(made)
            self._bound(made, merged=merged)
            if not merged and node is not self._root and _is_open(node):
                return self._share(made)
        elif "type" in kept and not kept.keys() & {"const", "enum"}:
            self._bound(made, merged=True)
        return made

    def _value(self, key: str, value: Any, merged: bool) -> Any:
        if key in keywords.NAMED:
            free = merged or key in keywords.DEFINITIONS
            return {name: self._node(child, merged=free) for name, child in value.items()}
        if key == "$ref":  # as a URI, which the library wants
            return "#" + quote(unquote(value[1:]), safe="/~!$&'()*+,;=:@")
        if key in keywords.LISTS and isinstance(value, list):
            return [self._node(child, merged=merged) for child in value]
        if key in keywords.SINGLE:
            return self._node(value, merged=merged)
        if key in ("const", "enum"):  # the library writes -0.0 as -0 and takes nothing else for it
            return json.loads(json.dumps(value), parse_float=lambda text: float(text) or 0)
        return value

    def _close(self, made: dict[str, Any]) -> None:
        """Name what the schema leaves free inside arrays and objects."""
        kinds = keywords.kinds_of(made)
        if not kinds or "array" in kinds:
            made.setdefault("additionalItems" if isinstance(made.get("items"), list) else "items", self._free())
        if not kinds or "object" in kinds:
            made.setdefault("additionalProperties", self._free())

    def _bound(self, made: dict[str, Any], *, merged: bool) -> None:
        """Let numbers end."""
        kinds = keywords.kinds_of(made)
        if (kinds and _NUMBERS.isdisjoint(kinds)) or (merged and not self._usual):  # a larger value is named elsewhere
            return
        low, high = _limit(made, "minimum"), _limit(made, "maximum")
        for key, given, bound in (("minimum", low, -keywords.LARGEST), ("maximum", high, keywords.LARGEST)):
            if given is None or abs(given) > keywords.LARGEST:
                made[key] = bound
                made.pop(f"exclusive{key.capitalize()}", None)
        own = all(_is_fine(value) for key in _BOUNDS if keywords.is_number(value := made.get(key)))
        fine = self._fine if merged else own and "multipleOf" not in made
        wide = low is None or high is None or high - low >= _NARROW
        if fine and wide and (not kinds or "number" in kinds):
            made["multipleOf"] = _STEP


def _merged(root: dict[str, Any]) -> set[int]:
    """Ids of the nodes that are merged."""
    visited: set[tuple[int, bool]] = set()
    pending: list[tuple[Any, bool]] = [(root, False)]
    while pending:
        node, merged = pending.pop()
        if isinstance(node, dict) and (id(node), merged) not in visited:
            visited.add((id(node), merged))
            inside = [child for _, child in inner(node)]
            if "$ref" in node:
                inside.append(resolve(root, node["$ref"]))
            pending += ((child, merged or _intersects(node)) for child in inside)
    return {found for found, merged in visited if merged}


def _intersects(node: dict[str, Any]) -> bool:
    """Whether the library intersects what is inside ``node``."""
    enforced = [key for key in node if key not in keywords.DEFINITIONS]
    applied = [key for key in enforced if key in _APPLICATORS]
    if len(node.get("allOf", ())) > 1:
        return True
    return (bool(applied) and len(enforced) > 1) or ("properties" in node and "patternProperties" in node)


def _is_open(node: dict[str, Any]) -> bool:
    """Whether a schema is one of numbers only, of which some satisfy it: what no number satisfies is left in place."""
    numbers = (
        bool(keywords.kinds_of(node)) and _NUMBERS.issuperset(keywords.kinds_of(node)) and "multipleOf" not in node
    )
    return numbers and (_limit(node, "minimum") is None or _limit(node, "maximum") is None)


def _numbers(root: dict[str, Any], keys: tuple[str, ...]) -> Iterator[int | float]:
    """Numbers that a schema names under some keywords."""
    return filter(
        keywords.is_number, keywords.scalars_in(*(node[key] for node in all_nodes(root) for key in keys if key in node))
    )


def _is_fine(number: int | float) -> bool:
    """Whether a number has no more digits behind the point than are written where none is named."""
    exponent = Decimal(str(number)).normalize().as_tuple().exponent
    return isinstance(exponent, int) and exponent >= -FRACTION_DIGITS


def _overflow(multiples: set[int | float]) -> bool:
    """Whether the library, which combines multiples as 32-bit integers, might not notice that one does not fit."""
    exact = [abs(Decimal(str(number))).normalize() for number in multiples]
    digits = max(-int(number.as_tuple().exponent) for number in exact)
    return prod(int(number.scaleb(max(digits, 0))) for number in exact) >= 2**32


def _crossed(root: dict[str, Any]) -> bool:
    """Whether some lower and some upper bound are so near that there may be no multiple of the step between them."""
    low = list(_numbers(root, ("minimum", "exclusiveMinimum")))
    high = list(_numbers(root, ("maximum", "exclusiveMaximum")))
    return len(low) * len(high) > 10_000 or any(abs(b - a) < _NARROW for a in low for b in high)


def _limit(made: dict[str, Any], key: str) -> float | None:
    """The bound on one side, inclusive or not; None when the schema has none."""
    inclusive, exclusive = made.get(key), made.get(f"exclusive{key.capitalize()}")
    given = [value for value in (inclusive, exclusive) if keywords.is_number(value)]
    return None if not given else float(max(given) if key == "minimum" else min(given))


def _include(made: dict[str, Any]) -> None:
    """Write whole exclusive bounds as inclusive ones, a step away: the library takes 0 for above 0 and at most 0.5."""
    for key, further, sign in (("minimum", max, 1), ("maximum", min, -1)):
        bound = made.get(f"exclusive{key.capitalize()}")
        if keywords.is_number(bound) and bound % 1 == 0 and abs(bound) < keywords.LARGEST:
            del made[f"exclusive{key.capitalize()}"]
            within = bound + sign * max(_STEP, 4 * ulp(bound))
            made[key] = further(within, made.get(key, within))


def _add_patterns(made: dict[str, Any]) -> None:
    """Let strings match formats and encodings as a whole, besides what they must already."""
    formats, encodings = FORMATS.get(made.pop("format", ""), ()), ENCODINGS.get(made.pop("contentEncoding", ""), ())
    patterns = [f"^(?:{pattern})$" for pattern in (*formats, *encodings)]
    if patterns and "pattern" not in made:
        made["pattern"] = patterns.pop(0)
    same_type = {"type": made["type"]} if "type" in made else {}
    if patterns:
        made["allOf"] = [*made.get("allOf", ()), *({**same_type, "pattern": pattern} for pattern in patterns)]
