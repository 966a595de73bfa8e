"""Whether two options of a ``oneOf`` can hold together: they cannot when no value satisfies both.

That is proven, or it is taken that they can. References are followed, and unions branch; what JSON Schema asserts by
regular expressions is not looked at. The work is bounded for the whole schema.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from edge_dflash.decode.grammar.keywords import Node, is_number, kinds_of
from edge_dflash.errors import RequestError

MAX_STEPS = 100_000  # schemas, and hundreds of values, looked at: half a second
SOON = 3000  # of them for one or two options
_DEPTH = 12  # levels of properties, items and unions that are followed
_FIRST = 16  # items of an array that are followed
_UNIONS = ("anyOf", "oneOf")
_KINDS = frozenset(("null", "boolean", "number", "string", "array", "object"))

T = TypeVar("T")
Flat: TypeAlias = "list[dict[str, Any]]"  # schemas that hold together, without $ref and allOf
Tags: TypeAlias = "dict[str, frozenset[str]]"  # the only values of a required property; of "" + the value itself


def tag_of(node: Mapping[str, Any]) -> str:
    """The property that tells the options of a oneOf apart, as OpenAPI's discriminator names it; else empty."""
    named = node.get("discriminator")
    name = named.get("propertyName") if isinstance(named, dict) and "oneOf" in node else ""
    return name if isinstance(name, str) else ""


class _LateError(Exception):
    """Two options are not told apart soon."""


class Apart:
    """Tells the options of a schema's oneOfs apart. ``resolve`` gives what a reference points to."""

    def __init__(self, resolve: Callable[[str], Node]) -> None:
        self._resolve = resolve
        self._steps, self._until = 0, MAX_STEPS
        self._keys: dict[int, dict[str, Any]] = {}  # id of a node: its values by key

    def together(self, node: dict[str, Any], around: Sequence[Node]) -> tuple[int, int] | None:
        """Two options of a node's oneOf that may hold together; None when none do.

        What is ``around`` the node holds too. Raises RequestError when there are too many to tell.
        """
        options: list[Node] = node["oneOf"]
        beside: list[Node] = [{key: value for key, value in node.items() if key != "oneOf"}]
        if tag := tag_of(node):
            beside.append({"required": [tag]})
        for first, second in self._pairs(options, beside):
            both = [*beside, options[first], options[second]]
            if not any(
                self._soon(self._impossible, parts) for parts in ([both, [*around, *both]] if around else [both])
            ):
                return first, second
        return None

    def _soon(self, find: Callable[[Sequence[Node], int], T], parts: Sequence[Node]) -> T | None:
        """What is found out of schemas that hold together, if it is soon."""
        self._until = self._steps + SOON
        try:
            return find(parts, 0)
        except _LateError:
            return None
        finally:
            self._until = MAX_STEPS

    def _spend(self, steps: int = 1) -> None:
        self._steps += steps
        if self._until < self._steps <= MAX_STEPS:
            raise _LateError
        if self._steps > MAX_STEPS:
            raise RequestError(
                "the options of oneOf are too many to be told apart; let all differ in the constant of one property "
                "that they require, or use anyOf"
            )

    def _pairs(self, options: Sequence[Node], beside: Sequence[Node]) -> Iterator[tuple[int, int]]:
        """The pairs that the constant of one property, or their own, does not tell apart."""
        tags = [self._soon(self._tags, [*beside, option]) or {} for option in options]
        names = Counter(name for each in tags for name in each)
        values = Counter(name for name, _ in {(name, value) for each in tags for name in each for value in each[name]})
        name = max(names, key=lambda one: (names[one], values[one]), default=None)
        untold: list[int] = []
        told: dict[str, list[int]] = {}
        for index, each in enumerate(tags):
            if name is None or name not in each:
                self._spend(index)
                yield from ((other, index) for other in range(index))
                untold.append(index)
                continue
            yield from ((other, index) for other in untold)
            sharing = {other for value in each[name] for other in told.get(value, ())}
            yield from ((other, index) for other in sorted(sharing))
            for value in each[name]:
                told.setdefault(value, []).append(index)

    # What satisfies several schemas at once --------------------------------------------------------------------------

    def _flat(self, parts: Sequence[Node]) -> Flat | None:
        """The parts, their references and allOf written out; None when one is false."""
        flat: Flat = []
        seen: set[str] = set()
        pending = list(reversed(parts))
        while pending:
            node = pending.pop()
            self._spend()
            if node is False:
                return None
            if not isinstance(node, dict):
                continue
            flat.append(node)
            pending += reversed(node.get("allOf", ()))
            if "$ref" in node and node["$ref"] not in seen:
                seen.add(node["$ref"])
                pending.append(self._resolve(node["$ref"]))
        return flat

    def _impossible(self, parts: Sequence[Node], depth: int) -> bool:
        flat = self._flat(parts)
        if flat is None:
            return True
        if depth > _DEPTH:
            return False
        rest, unions = _parted(flat)
        kinds = _kinds(flat)
        if (values := self._values(flat)) is not None:
            return not any(_kind(value) in kinds and _within(value, flat) for value in values.values())
        if all(self._empty(kind, rest, depth) for kind in kinds):
            return True
        return bool(unions) and all(self._impossible([*rest, *unions[1:], one], depth + 1) for one in _options(unions))

    def _empty(self, kind: str, flat: Flat, depth: int) -> bool:
        """Whether no value of one type satisfies the schemas, which have no unions."""
        if kind == "number":
            return _no_number(flat)
        if kind == "string":
            return _most(flat, "minLength") > _least(flat, "maxLength")
        if kind == "array":
            low = _most(flat, "minItems")
            first = ([_item(node, index) for node in flat] for index in range(min(int(low), _FIRST)))
            return low > _least(flat, "maxItems") or any(self._impossible(one, depth + 1) for one in first)
        if kind == "object":
            required = _required(flat)
            self._spend(len(required))
            if max(_most(flat, "minProperties"), len(required)) > _least(flat, "maxProperties"):
                return True
            return any(self._impossible([_property(node, name) for node in flat], depth + 1) for name in required)
        return False

    def _values(self, flat: Flat) -> dict[str, Any] | None:
        """The only values that satisfy const and enum, by key; None when there are none of these keywords."""
        found: dict[str, Any] | None = None
        for node in flat:
            if "const" not in node and "enum" not in node:
                continue
            if id(node) not in self._keys:
                named = {_key(value): value for value in node.get("enum", [node.get("const")])}
                only = {_key(node["const"])} if "const" in node else named.keys()
                self._keys[id(node)] = {key: value for key, value in named.items() if key in only}
            known = self._keys[id(node)]
            self._spend(len(known) // 100)
            found = known if found is None else {key: value for key, value in found.items() if key in known}
        return found

    def _tags(self, parts: Sequence[Node], depth: int) -> Tags:
        """What tells a schema from others at once: its values, and those of properties that it requires."""
        flat = self._flat(parts)
        if flat is None or depth > _DEPTH:
            return {}
        rest, unions = _parted(flat)
        values = self._values(flat)
        found: Tags = {} if values is None else {"": frozenset(values)}
        if _kinds(flat) <= {"object"}:
            for name in _required(flat):
                self._spend()
                inside = self._flat([_property(node, name) for node in flat])
                if inside is not None and (values := self._values(inside)) is not None:
                    found["+" + name] = frozenset(values)
        if unions:
            each = [self._tags([*rest, one], depth + 1) for one in _options(unions)]
            for name in set.intersection(*map(set, each)):
                found.setdefault(name, frozenset().union(*(one[name] for one in each)))
        return found


def _parted(flat: Flat) -> tuple[Flat, Flat]:
    """The schemas without their unions, and the unions."""
    rest = [{key: value for key, value in node.items() if key not in (*_UNIONS, "$ref", "allOf")} for node in flat]
    return rest, [{key: node[key]} for node in flat for key in _UNIONS if key in node]


def _options(unions: Flat) -> list[Node]:
    (options,) = unions[0].values()
    return list(options)


def _key(value: object) -> str:
    """A JSON value as a text that equal ones share: 1 and 1.0, but not true."""
    text = json.dumps(value)
    whole = json.loads(text, parse_float=lambda text: int(number) if (number := float(text)).is_integer() else number)
    return json.dumps(whole, sort_keys=True)


def _kind(value: object) -> str:
    """The type of a JSON value; whole numbers are numbers."""
    names = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def _kinds(flat: Flat) -> set[str]:
    """Types that all schemas allow, whole numbers among the others."""
    named = ({"number" if kind == "integer" else kind for kind in kinds_of(node)} for node in flat if "type" in node)
    return set(_KINDS).intersection(*named)


def _within(value: object, flat: Flat) -> bool:
    """Whether a number or a text may satisfy the bounds; True of all else."""
    if is_number(value):
        whole = value % 1 == 0 or not any(kinds_of(node) and "number" not in kinds_of(node) for node in flat)
        return whole and not _no_number([*flat, {"minimum": value, "maximum": value}])
    return not isinstance(value, str) or _most(flat, "minLength") <= len(value) <= _least(flat, "maxLength")


def _most(flat: Flat, key: str, default: float = 0) -> float:
    return max((node[key] for node in flat if is_number(node.get(key))), default=default)


def _least(flat: Flat, key: str) -> float:
    return min((node[key] for node in flat if is_number(node.get(key))), default=float("inf"))


def _no_number(flat: Flat) -> bool:
    low, high = _most(flat, "minimum", -float("inf")), _least(flat, "maximum")
    above, below = _most(flat, "exclusiveMinimum", -float("inf")), _least(flat, "exclusiveMaximum")
    return low > high or above >= min(high, below) or below <= low


def _required(flat: Flat) -> list[str]:
    return list(dict.fromkeys(name for node in flat for name in node.get("required", ())))


def _property(node: Mapping[str, Any], name: str) -> Node:
    """What a schema says of a property; true where a pattern may."""
    named: Mapping[str, Node] = node.get("properties", {})
    rest: Node = True if node.get("patternProperties") else node.get("additionalProperties", True)
    return named.get(name, rest)


def _item(node: Mapping[str, Any], index: int) -> Node:
    """What a schema says of an item."""
    items: Any = node.get("items", True)
    listed = isinstance(items, list)
    first: list[Node] = items if listed else node.get("prefixItems", [])
    rest: Node = node.get("additionalItems", True) if listed else items
    return first[index] if index < len(first) else rest
