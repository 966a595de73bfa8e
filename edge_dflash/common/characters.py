"""Texts must be texts: a lone surrogate (U+D800 to U+DFFF) is no character, and neither UTF-8 nor a tokenizer takes it.

JSON and Python's strings can hold one, in values and in keys alike. Everything that comes in is looked through here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_dflash.errors import RequestError


def lone_surrogate(value: Any, where: str) -> str | None:
    """Where a text inside ``value`` holds a lone surrogate, as a path that begins with ``where``; None: nowhere.

    Looks into mappings, their keys, and sequences; at nothing twice.
    """
    pending: list[tuple[Any, str]] = [(value, where)]
    seen: set[int] = set()
    while pending:
        value, where = pending.pop()
        if isinstance(value, str):
            if not _is_text(value):
                return where
        elif (
            isinstance(value, Mapping | Sequence) and not isinstance(value, bytes | bytearray) and id(value) not in seen
        ):
            seen.add(id(value))
            if isinstance(value, Mapping):
                if any(isinstance(key, str) and not _is_text(key) for key in value):
                    return f"a key of {where or 'the body'}"
                pending += [(item, f"{where}.{key}" if where else str(key)) for key, item in value.items()]
            else:
                pending += [(item, f"{where}[{at}]") for at, item in enumerate(value) if not isinstance(item, int)]
    return None


def refuse_surrogates(value: Any, where: str) -> None:
    """Raise RequestError, naming the place, when a text inside ``value`` holds a lone surrogate."""
    if (place := lone_surrogate(value, where)) is not None:
        raise RequestError(surrogate_message(place))


def surrogate_message(place: str) -> str:
    """The message of such an error."""
    return f"{place[:200]} holds a lone surrogate (U+D800 to U+DFFF), which is no character; remove it"


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
