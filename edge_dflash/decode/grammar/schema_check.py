"""Which JSON Schemas are taken: one is refused here, with the place and the reason, before a grammar is made of it.

JSON Schema lets a validator ignore what it does not know; here a keyword that would not be enforced is an error,
because the caller wrote it to be obeyed. Schemas have limits on their size,
and a document that ends must satisfy one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from edge_dflash.common.pointer import resolve
from edge_dflash.common.rules import refuse_surrogates
from edge_dflash.common.suggest import slip_of
from edge_dflash.decode.grammar.schema_apart import Apart
from edge_dflash.decode.grammar.schema_idle import closes, forbids_nothing
from edge_dflash.decode.grammar.schema_keywords import (
    DEFINITIONS,
    KNOWN,
    LISTS,
    NAMED,
    SINGLE,
    Node,
    check_least,
    check_values,
    kinds_of,
)
from edge_dflash.decode.grammar.schema_names import Names
from edge_dflash.errors import RequestError, short

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64  # levels of nesting
MAX_NESTING = 160  # levels of its JSON: two for most levels of a schema
MAX_LEVELS = 512  # levels of the schema and of all definitions that it refers to, one below the other


def schema_text(schema: object) -> str:
    """:func:`schema_json` of a schema that :func:`check` takes."""
    text = schema_json(schema)
    check(json.loads(text))
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


def check(root: dict[str, Any]) -> None:
    """Raise RequestError when a keyword would not be enforced, or the schema is too deep or has no finite document."""
    _check_nesting(root)
    apart = Apart(partial(resolve, root))
    targets: dict[str, Node] = {}
    names = Names(partial(resolve, root))
    levels = _walk(root, "#", 1, names)
    pending = [root]
    while pending:
        for node in _nodes(pending.pop()):
            reference = node.get("$ref")
            if reference is None or reference in targets:
                continue
            targets[reference] = found = resolve(root, reference)
            levels += _walk(found, str(reference), 1, names)
            if isinstance(found, dict):
                pending.append(found)
    if levels > MAX_LEVELS:
        raise RequestError(
            f"the schema and the definitions that it refers to are {levels} levels deep in all, "
            f"at most {MAX_LEVELS} are taken; use fewer definitions"
        )
    for reference in targets:
        _check_leads_on(reference, targets)
    for where, target in (("#", root), *targets.items()):
        _check_options(target, where, [], apart)
    finite: set[str] = set()
    while fresh := {name for name, node in targets.items() if name not in finite and _ends(node, finite)}:
        finite |= fresh
    if not _ends(root, finite):
        raise RequestError(
            "no finite document satisfies the schema: a required part contains itself; "
            "make that property optional, or allow null or an empty array"
        )


def _check_leads_on(reference: str, targets: Mapping[str, Node]) -> None:
    """Raise RequestError for a reference that leads to itself, through references alone."""
    seen, node = {reference}, targets.get(reference)
    while isinstance(node, dict) and "$ref" in node:
        following = str(node["$ref"])
        if following in seen:
            raise RequestError(f"$ref {short(reference)} leads to itself and says nothing; define what is there")
        seen.add(following)
        node = targets.get(following)


def _check_nesting(root: object) -> None:
    """Also of what stands under keywords that are left out."""
    level = [root]
    for _ in range(MAX_NESTING):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise RequestError(f"the schema is nested deeper than {MAX_DEPTH} levels; make it flatter")


def _check_size(text: str) -> None:
    size = len(text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise RequestError(f"the schema has {size} bytes, at most {MAX_BYTES} are taken; make it smaller")


def _walk(node: object, where: str, depth: int, names: Names) -> int:
    """Check one schema and those inside; return how many levels there are."""
    if isinstance(node, bool):
        return 1
    if not isinstance(node, dict):
        raise RequestError(f"the schema at {where} is {short(node)}; a schema is an object, true or false")
    if depth > MAX_DEPTH:
        raise RequestError(f"the schema is nested deeper than {MAX_DEPTH} levels at {where}; make it flatter")
    _check_keywords(node, where)
    inside = (_walk(child, f"{where}/{path}", depth + 1, names) for path, child in children(node, where))
    levels = 1 + max(inside, default=0)
    listed = False
    if "propertyNames" in node and not forbids_nothing("propertyNames", node):
        if isinstance(said := names.schema(node), dict) and names.is_new(said):
            _check_keywords(said, f"{where}/propertyNames")
        found = names.said(node, where)
        if found is None:
            raise _unenforced("propertyNames", where)
        listed = not isinstance(found, str)
    if not listed:
        check_least(node, where)
    return levels


def _check_keywords(node: dict[str, Any], where: str) -> None:
    kept = {key: value for key, value in node.items() if not forbids_nothing(key, node)}
    for key in kept.keys() - KNOWN - {"propertyNames"}:  # which depends on the others, and is looked at after them
        if not closes(key, node):
            raise _unenforced(key, where)
    reference = node.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise RequestError(
            f"$ref at {where} is {short(reference)}; only references inside the schema (#/...) are taken"
        )
    if "$id" in node and where != "#":
        raise RequestError(f"$id at {where} would change what references mean; remove it")
    check_values(kept, where, kinds_of(node))


def _unenforced(key: str, where: str) -> RequestError:
    close = slip_of(key, KNOWN - {key})
    advice = f"did you mean {close!r}? " if close else ""
    return RequestError(
        f"the schema's keyword {short(key)} at {where} would not be enforced; {advice}"
        "remove it, or write the rule with other keywords"
    )


def _check_options(node: object, where: str, around: list[Node], apart: Apart) -> None:
    """Raise RequestError when two options of a oneOf may hold together; ``around``: what holds of the same value."""
    if not isinstance(node, dict):
        return
    if "oneOf" in node and (found := apart.together(node, around)):
        raise RequestError(
            f"that only one option of a oneOf holds would not be enforced, because options {found[0]} and {found[1]} "
            f"could hold together; give each a type and let them differ in it or in a required constant, or use anyOf "
            f"(at {where})"
        )
    here = {key: value for key, value in node.items() if key not in ("allOf", "anyOf", "oneOf")}
    for path, child in inner(node):
        key, _, index = path.partition("/")
        others: list[Node] = []
        if key in ("allOf", "anyOf", "oneOf"):
            parts = enumerate(node["allOf"]) if key == "allOf" else ()
            others = [*around, here, *(part for number, part in parts if str(number) != index)]
        _check_options(child, f"{where}/{path}", others, apart)


def children(node: dict[str, Any], where: str) -> Iterator[tuple[str, object]]:
    """Schemas directly inside ``node``, with their paths."""
    for key in NAMED:
        named = node.get(key, {})
        if not isinstance(named, dict):
            raise RequestError(f"{key} at {where} is {short(named)}; give an object of schemas")
        yield from ((f"{key}/{name}", child) for name, child in named.items())
    for key in LISTS:
        several = node.get(key, [])
        if isinstance(several, list):
            yield from ((f"{key}/{index}", child) for index, child in enumerate(several))
        elif key not in SINGLE:
            raise RequestError(f"{key} at {where} is {short(several)}; give a list of schemas")
    for key in SINGLE:
        if key in node and not isinstance(node[key], list):
            yield key, node[key]


def inner(node: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Schemas directly inside ``node``, definitions left out: they count where they are referred to."""
    return (one for one in children(node, "#") if one[0].partition("/")[0] not in DEFINITIONS)


def _nodes(node: object) -> Iterator[dict[str, Any]]:
    """The schema objects of ``node``, itself and those inside."""
    if isinstance(node, dict):
        yield node
        for _, child in inner(node):
            yield from _nodes(child)


def all_nodes(node: object) -> Iterator[dict[str, Any]]:
    """The same, and those of its definitions."""
    if isinstance(node, dict):
        yield node
        for _, child in children(node, "#"):
            yield from all_nodes(child)


def _ends(node: Node, finite: set[str]) -> bool:
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
    kinds = kinds_of(node)
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
