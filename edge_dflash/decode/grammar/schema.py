"""A JSON Schema, read: refused with the place and the reason, or brought into the plain form that a grammar is made of.

Plain form allows the same documents, said in fewer keywords and values. What forbids nothing is left out. A oneOf is an
anyOf, because no two of its options hold together; the property that a discriminator names is required, as OpenAPI
says. Names of properties are listed, or have a pattern. Formats of whole numbers are their bounds, lengths have no
decimal point. Whatever is referred to is a definition under ``$defs``, and all definitions are referred to.

Schemas have limits on their size, and a document that ends must satisfy one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from edge_dflash.common.pointer import resolve
from edge_dflash.common.rules import refuse_surrogates
from edge_dflash.decode.grammar import keywords
from edge_dflash.decode.grammar.apart import Apart, tag_of
from edge_dflash.decode.grammar.formats import FORMATS, INTEGERS, WITHOUT_LOOKING
from edge_dflash.errors import RequestError, short

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64  # levels of nesting
MAX_LEVELS = 512  # levels of the schema and of all definitions that it refers to, one below the other
MOST_BYTES = 64 * 1024  # that a plain form is longer than its schema: of listed names, and of what is written twice
_PER_NAME = 32  # bytes of what is written beside a listed name
_SHORT = 64  # bytes of a schema that is written again rather than referred to
_PLACE = "#/$defs/"
_DEFINITION = re.compile(r"#/(?:\$defs|definitions)/([\w.-]+)")
_SAME = ("$ref", "allOf", "anyOf", "oneOf")  # schemas inside that are of the same value

Tags: TypeAlias = "tuple[str, ...]"  # properties that discriminators name


def schema_text(schema: object) -> str:
    """:func:`schema_json` of a schema that :func:`plain` takes."""
    text = schema_json(schema)
    plain(json.loads(text))
    return text


def schema_json(schema: object) -> str:
    """JSON text of a schema given as JSON text, a mapping, or a class with ``model_json_schema()`` (Pydantic).

    Raises RequestError when it is neither, is no JSON object, or too big; nothing else of it is looked at.
    """
    model = getattr(schema, "model_json_schema", None)
    if callable(model):
        schema = model()
    if isinstance(schema, str):
        _check_size(schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the schema is no JSON ({error}); give a JSON object") from None
    if not isinstance(schema, Mapping):
        given = f"the schema is of type {type(schema).__name__}"
        raise RequestError(f"{given}; give a JSON object (mapping or text) or a Pydantic model")
    refuse_surrogates(schema, "schema")
    try:
        text = json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema cannot be written as JSON ({error}); use plain JSON values") from None
    _check_size(text)
    return text


def _check_size(text: str) -> None:
    size = len(text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise RequestError(f"the schema has {size} bytes, at most {MAX_BYTES} are taken; make it smaller")


def plain(root: dict[str, Any]) -> dict[str, Any]:
    """The schema in plain form; ``root`` is not changed.

    Raises RequestError when a keyword would not be enforced, or the schema is too deep, has no finite document, or is
    much longer in plain form.
    """
    try:
        return _Reader(root).plain()
    except RecursionError:  # under keywords that are left out
        raise RequestError(f"the schema is nested deeper than {MAX_DEPTH} levels; make it flatter") from None


def inner(node: dict[str, Any], but: tuple[str, ...] = keywords.DEFINITIONS) -> Iterator[tuple[str, Any]]:
    """Schemas directly inside one that was read, with their paths; definitions count where they are referred to."""
    for key, value in node.items():
        if key in keywords.NAMED and key not in but:
            yield from ((f"{key}/{name}", child) for name, child in value.items())
        elif key in keywords.LISTS and isinstance(value, list):
            yield from ((f"{key}/{index}", child) for index, child in enumerate(value))
        elif key in keywords.SINGLE:
            yield key, value


def all_nodes(node: object) -> Iterator[dict[str, Any]]:
    """The schema objects of ``node``: itself, and those inside, with its definitions."""
    if isinstance(node, dict):
        yield node
        for _, child in inner(node, but=()):
            yield from all_nodes(child)


def alone(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A schema inside a plain one, with the definitions that it needs."""
    found: dict[str, Any] = {}
    pending: list[Any] = [schema]
    while pending:
        for node in all_nodes(pending.pop()):
            name = node["$ref"].removeprefix(_PLACE) if "$ref" in node else None
            if name is not None and name not in found:
                found[name] = root["$defs"][name]
                pending.append(found[name])
    return {**schema, "$defs": found} if found else schema


class _Reader:
    """One schema, each part of which is written once. ``where`` is a place in it, as errors name it."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        known = {name for key in keywords.DEFINITIONS if isinstance(root.get(key), dict) for name in root[key]}
        self._fresh = (name for name in map("left{}".format, count()) if name not in known)
        self._targets: dict[str, keywords.Node] = {}  # of references
        self._pending: list[tuple[str, str, Tags]] = []  # definitions to be written: name, reference
        self._places: dict[tuple[str, Tags], str] = {}  # of a reference: the name of its definition
        self._taken: set[str] = set()  # names
        self._defs: dict[str, Any] = {}
        self._shared: dict[str, str] = {}  # a schema as JSON: the name of its definition
        self._depth = 0  # of the deepest schema
        self._left = MOST_BYTES
        self._checked: set[int] = set()  # ids of schemas of names

    def plain(self) -> dict[str, Any]:
        made: dict[str, Any] = self._node(self._root, "#", 1)
        levels = {"": self._depth}
        while self._pending:
            name, reference, tags = self._pending.pop()
            self._depth = 0
            node = self._node(self._targets[reference], reference, 1, tags)
            self._defs[name] = {} if node is True else node
            levels[reference] = self._depth
        if sum(levels.values()) > MAX_LEVELS:
            raise RequestError(
                f"the schema and the definitions that it refers to are {sum(levels.values())} levels deep in all, "
                f"at most {MAX_LEVELS} are taken; use fewer definitions"
            )
        for reference in self._targets:
            self._check_leads_on(reference)
        apart = Apart(partial(resolve, self._root))
        for where, target in (("#", self._root), *self._targets.items()):
            _check_options(target, where, [], apart)
        self._check_ends()
        return {**made, "$defs": self._defs} if self._defs else made

    def _node(self, node: Any, where: str, depth: int, tags: Tags = ()) -> Any:
        """A schema in plain form; ``tags`` are required, by its options where it has some."""
        self._depth = max(self._depth, depth)
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise RequestError(f"the schema at {where} is {short(node)}; a schema is an object, true or false")
        if depth > MAX_DEPTH:
            raise RequestError(f"the schema is nested deeper than {MAX_DEPTH} levels at {where}; make it flatter")
        keywords.check(node, where)
        made: dict[str, Any] = {}
        kept = [key for key in node if not keywords.forbids_nothing(key, node)]
        for key in kept:
            if key in keywords.TAKEN:
                made[key] = self._value(key, node, where, depth + 1, tags)
        if "propertyNames" in kept:
            self._name(node, made, where)
        else:
            keywords.check_least(node, where)
        if "unevaluatedProperties" in kept:
            made["additionalProperties"] = False
        if "oneOf" in made:
            options = made.pop("oneOf")
            if "anyOf" in made:
                made["allOf"] = [*made.get("allOf", ()), {"anyOf": options}]
            else:
                made["anyOf"] = options
        if "type" in made and node.get("nullable") is True:
            made["type"] = keywords.kinds_of(node)
        if made.get("format") in INTEGERS and keywords.may_be(node, "integer", "number"):
            _be_within(made, *INTEGERS[made.pop("format")])
        if needed := [tag for tag in tags if tag in node.get("properties", ()) or made.keys().isdisjoint(_SAME)]:
            made["required"] = list(dict.fromkeys([*made.get("required", ()), *needed]))
        return made

    def _value(self, key: str, node: dict[str, Any], where: str, depth: int, tags: Tags) -> Any:
        """A keyword's value, with the schemas inside."""
        value, inside = node[key], f"{where}/{key}"
        if key == "oneOf" and (tag := tag_of(node)):
            tags = tuple(dict.fromkeys((*tags, tag)))
        if key == "$ref":
            return self._reference(value, tags)
        if key in keywords.NAMED:
            return {name: self._node(child, f"{inside}/{name}", depth) for name, child in value.items()}
        if key in keywords.LISTS and isinstance(value, list):
            tags = tags if key in _SAME else ()
            return [self._node(child, f"{inside}/{index}", depth, tags) for index, child in enumerate(value)]
        if key in keywords.SINGLE:
            return self._node(value, inside, depth)
        if key == "pattern":
            return WITHOUT_LOOKING.get(value, value)
        if key in keywords.COUNTS or (keywords.is_number(value) and value == 0):  # 2.0 is 2, -0.0 is 0
            return int(value)
        return value

    def _reference(self, reference: str, tags: Tags) -> str:
        """The place of a definition, which is written later."""
        found = self._targets.setdefault(reference, resolve(self._root, reference))
        required = found.get("required", ()) if isinstance(found, dict) else ()
        tags = tuple(tag for tag in tags if tag not in required)
        if (reference, tags) not in self._places:
            own = _DEFINITION.fullmatch(reference)
            if own and own[1] not in self._taken:
                name = own[1]
            else:
                name = next(self._fresh)
                if reference != "#" or tags:
                    self._spend(len(json.dumps(found)), f"$ref {reference[:60]!r} cannot be followed")
            self._taken.add(name)
            self._places[reference, tags] = name
            self._pending.append((name, reference, tags))
        return _PLACE + self._places[reference, tags]

    def _spend(self, nbytes: int, what: str) -> None:
        """Count what is written besides the schema. Raises RequestError when it is too much in all."""
        self._left -= nbytes
        if self._left < 0:
            raise RequestError(
                f"{what}: written out, the schema would grow by more than {MOST_BYTES} bytes; list fewer names, "
                "and refer to definitions under $defs"
            )

    # Names of properties ---------------------------------------------------------------------------------------------

    def _name(self, node: dict[str, Any], made: dict[str, Any], where: str) -> None:
        """Say propertyNames by other keywords."""
        names, rest = self._names(node, where), made.get("additionalProperties", True)
        made["additionalProperties"] = False
        if isinstance(names, str):
            keywords.check_least(node, where)
            made["patternProperties"] = {names: rest}
            return
        text = json.dumps(rest)
        if len(text) > _SHORT:
            if text not in self._shared:
                self._shared[text] = next(self._fresh)
                self._defs[self._shared[text]] = rest
            rest = {"$ref": _PLACE + self._shared[text]}
        known, listed = made.get("properties", {}), set(names)
        made["properties"] = {name: known[name] for name in known if name in listed}
        made["properties"] |= {name: rest for name in names if name not in known}
        if made.get("minProperties") == len(made["properties"]):
            del made["minProperties"]
            made["required"] = list(dict.fromkeys([*made.get("required", ()), *made["properties"]]))

    def _names(self, node: dict[str, Any], where: str) -> list[str] | str:
        """The names that properties may have, or their pattern. Raises RequestError where no other keywords say it."""
        names: keywords.Node = node["propertyNames"]
        for _ in range(16):
            if isinstance(names, dict) and id(names) not in self._checked:
                keywords.check(names, f"{where}/propertyNames")
                self._checked.add(id(names))
            if not isinstance(names, dict) or set(_says(names)) != {"$ref"}:
                break
            names = resolve(self._root, names["$ref"])
        if not isinstance(names, dict) or node.get("patternProperties"):
            raise keywords.unenforced("propertyNames", where)
        says = _says(names)
        if says.keys() in ({"enum"}, {"const"}):
            listed = says.get("enum", [says.get("const")])
            texts = list(dict.fromkeys(name for name in listed if isinstance(name, str)))
            what = f"the schema's keyword 'propertyNames' at {where} would not be enforced"
            self._spend(len(listed) * _PER_NAME + sum(map(len, texts)), what)
            return texts
        if not node.get("properties"):
            if says.keys() == {"pattern"}:
                return WITHOUT_LOOKING.get(says["pattern"], str(says["pattern"]))
            if says.keys() == {"format"} and len(patterns := FORMATS.get(says["format"], ())) == 1:
                return f"^(?:{patterns[0]})$"
            if says.keys() <= {"minLength", "maxLength"}:
                low, high = says.get("minLength", 0), says.get("maxLength", "")
                return f"^(?s:.{{{low:.0f},{high and format(high, '.0f')}}})$"
        raise keywords.unenforced("propertyNames", where)

    # What holds of the whole -----------------------------------------------------------------------------------------

    def _check_leads_on(self, reference: str) -> None:
        """Raise RequestError for a reference that leads to itself, through references alone."""
        seen, node = {reference}, self._targets[reference]
        while isinstance(node, dict) and "$ref" in node:
            following = node["$ref"]
            if following in seen:
                raise RequestError(f"$ref {short(reference)} leads to itself and says nothing; define what is there")
            seen.add(following)
            node = self._targets[following]

    def _check_ends(self) -> None:
        finite: set[str] = set()
        while fresh := {name for name, node in self._targets.items() if name not in finite and _ends(node, finite)}:
            finite |= fresh
        if not _ends(self._root, finite):
            raise RequestError(
                "no finite document satisfies the schema: a required part contains itself; "
                "make that property optional, or allow null or an empty array"
            )


def _says(names: dict[str, Any]) -> dict[str, Any]:
    """What of a schema forbids some text."""
    texts = "string" in keywords.kinds_of(names)
    return {
        key: value
        for key, value in names.items()
        if not keywords.forbids_nothing(key, names) and not (key == "type" and texts)
    }


def _be_within(made: dict[str, Any], low: int, high: int) -> None:
    """Let numbers be whole, and within bounds besides those that are given."""
    made["type"] = list(dict.fromkeys("integer" if kind == "number" else kind for kind in keywords.kinds_of(made)))
    for key, bound, sign in (("minimum", low, 1), ("maximum", high, -1)):
        given = made.get(key)
        if not keywords.is_number(given) or (bound - given) * sign > 0:
            made[key] = bound
            if isinstance(made.get(f"exclusive{key.capitalize()}"), bool):  # it was of the other bound
                del made[f"exclusive{key.capitalize()}"]


def _check_options(node: keywords.Node, where: str, around: list[keywords.Node], apart: Apart) -> None:
    """Raise RequestError when two options of a oneOf may hold together; ``around``: what holds of the same value."""
    if not isinstance(node, dict):
        return
    if "oneOf" in node and (found := apart.together(node, around)):
        raise RequestError(
            f"that only one option of a oneOf holds would not be enforced, because options {found[0]} and {found[1]} "
            f"could hold together; give each a type and let them differ in it or in a required constant, or use anyOf "
            f"(at {where})"
        )
    here = {key: value for key, value in node.items() if key not in _SAME[1:]}
    for path, child in inner(node):
        key, _, index = path.partition("/")
        others: list[keywords.Node] = []
        if key in _SAME:
            parts = enumerate(node["allOf"]) if key == "allOf" else ()
            others = [*around, here, *(part for number, part in parts if str(number) != index)]
        _check_options(child, f"{where}/{path}", others, apart)


def _ends(node: keywords.Node, finite: set[str]) -> bool:
    """Whether some finite document may satisfy ``node``, when of the references only ``finite`` have one.

    Least fixed point of the schema as a grammar; True when in doubt.
    """
    if isinstance(node, bool):  # the library tells what a false schema makes impossible
        return True
    if "$ref" in node and node["$ref"] not in finite:
        return False
    choices = [node[key] for key in ("anyOf", "oneOf") if key in node]
    if not all(any(_ends(child, finite) for child in several) for several in choices):
        return False
    if not all(_ends(child, finite) for child in node.get("allOf", ())):
        return False
    kinds = keywords.kinds_of(node)
    if "const" in node or "enum" in node or not kinds or not set(kinds) <= {"array", "object"}:
        return True
    return ("array" in kinds and _array_ends(node, finite)) or ("object" in kinds and _object_ends(node, finite))


def _object_ends(node: dict[str, Any], finite: set[str]) -> bool:
    properties, rest = node.get("properties", {}), node.get("additionalProperties", True)
    return all(_ends(properties.get(name, rest), finite) for name in node.get("required", ()))


def _array_ends(node: dict[str, Any], finite: set[str]) -> bool:
    items = node.get("items", True)
    first = items if isinstance(items, list) else node.get("prefixItems", [])
    rest = node.get("additionalItems", True) if isinstance(items, list) else items
    least = node.get("minItems", 0)
    if not isinstance(least, int):
        return True
    return all(_ends(child, finite) for child in first[:least]) and (least <= len(first) or _ends(rest, finite))
