"""Names of sessions: what one may be, and the bodies that give one."""

from __future__ import annotations

from typing import Any

from edge_dflash.serve.fields import Fields
from edge_dflash.serve.refusal import Refusal

NAME = {"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}  # JSON Schema
WHY = "give 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit"
_ALNUM = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")


def session_name(name: str) -> bool:
    """Whether a session may have this name. What may, names one file of the state directory, and no path."""
    return 1 <= len(name) <= 64 and name[0] in _ALNUM and all(c in _ALNUM or c in "._-" for c in name)


def checked_name(name: object, param: str) -> str:
    """The name of a session. Raises Refusal."""
    if not isinstance(name, str) or not session_name(name):
        shown = repr(name)[:60]
        raise Refusal(f"{param} is {shown}; {WHY}", param=param)
    return name


def other_name(body: dict[str, Any]) -> str | None:
    """Read the body of a save: the name of another session, ``to``."""
    fields = Fields(body)
    to = fields.text("to", facts=NAME)
    fields.done()
    return None if to is None else checked_name(to, "to")


def new_name(body: dict[str, Any]) -> str:
    """Read the body of a fork: the name of the new session, ``to``."""
    fields = Fields(body)
    to = fields.text("to", facts=NAME, needed="give the name of the new session")
    fields.done()
    return checked_name(to, "to")
