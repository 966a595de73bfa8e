"""``propertyNames`` as other keywords say it: names that are listed, or a pattern."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from edge_dflash.decode.grammar.schema_formats import FORMATS, WITHOUT_LOOKING
from edge_dflash.decode.grammar.schema_idle import forbids_nothing
from edge_dflash.decode.grammar.schema_keywords import Node, kinds_of
from edge_dflash.errors import RequestError

MOST_BYTES = 64 * 1024  # that a plain form is longer than its schema: of listed names, and of what is written twice
_PER_NAME = 32  # bytes of what is written beside it


class Names:
    """The names that objects of one schema may have. All that they are written as is counted."""

    def __init__(self, resolve: Callable[[str], Node]) -> None:
        """``resolve`` gives what a reference points to."""
        self._resolve = resolve
        self._left = MOST_BYTES
        self._seen: set[int] = set()  # ids

    def is_new(self, names: dict[str, Any]) -> bool:
        """Whether a schema of names is looked at for the first time."""
        new = id(names) not in self._seen
        self._seen.add(id(names))
        return new

    def schema(self, node: dict[str, Any]) -> Node:
        """What a schema says of the names of properties, references followed."""
        names: Node = node["propertyNames"]
        for _ in range(16):
            if not isinstance(names, dict) or set(_says(names)) != {"$ref"}:
                break
            names = self._resolve(names["$ref"])
        return names

    def said(self, node: dict[str, Any], where: str = "#") -> list[str] | str | None:
        """The names, or their pattern; None where other keywords cannot say it. Raises RequestError for too many."""
        names = self.schema(node)
        if not isinstance(names, dict) or node.get("patternProperties"):
            return None
        says = _says(names)
        if says.keys() in ({"enum"}, {"const"}):
            listed = says.get("enum", [says.get("const")])
            what = f"the schema's keyword 'propertyNames' at {where} would not be enforced"
            self.spend(len(listed) * _PER_NAME, what)
            texts = list(dict.fromkeys(name for name in listed if isinstance(name, str)))
            self.spend(sum(map(len, texts)), what)
            return texts
        if node.get("properties"):
            return None
        if says.keys() == {"pattern"}:
            pattern: str = says["pattern"]
            return WITHOUT_LOOKING.get(pattern, pattern)
        if says.keys() == {"format"} and len(patterns := FORMATS.get(says["format"], ())) == 1:
            return f"^(?:{patterns[0]})$"
        if says.keys() <= {"minLength", "maxLength"}:
            low, high = says.get("minLength", 0), says.get("maxLength", "")
            return f"^(?s:.{{{low:.0f},{high and format(high, '.0f')}}})$"
        return None

    def spend(self, nbytes: int, what: str) -> None:
        """Count what is written besides the schema. Raises RequestError when it is too much in all."""
        self._left -= nbytes
        if self._left < 0:
            raise RequestError(
                f"{what}: written out, the schema would grow by more than {MOST_BYTES} bytes; list fewer names, "
                "and refer to definitions under $defs"
            )

    def spend_copy(self, reference: str, node: Node) -> None:
        """Count a schema that is written once more."""
        self.spend(len(json.dumps(node)), f"$ref {reference[:60]!r} cannot be followed")


def _says(names: dict[str, Any]) -> dict[str, Any]:
    """What forbids some text."""
    texts = "string" in kinds_of(names)
    return {
        key: value for key, value in names.items() if not forbids_nothing(key, names) and not (key == "type" and texts)
    }
