"""JSON pointers (RFC 6901) as the references of a JSON Schema write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from edge_dflash.errors import RequestError, short


def resolve(root: Mapping[str, Any], reference: str) -> dict[str, Any] | bool:
    """What a reference of this schema points to. Raises RequestError where that is no schema."""
    found: Any = root
    for part in unquote(reference).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            raise RequestError(f"$ref {short(reference)} points to nothing in the schema; define it under $defs")
    if not isinstance(found, Mapping | bool):
        raise RequestError(f"$ref {short(reference)} points to {short(found)}, which is no schema")
    return found  # type: ignore[return-value]  # as JSON
