"""Names of sessions: what one may be, and the bodies that give one."""

from __future__ import annotations

import re
from typing import Any

from edge_dflash.errors import short
from edge_dflash.serve.fields import Fields
from edge_dflash.serve.refusal import Refusal

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NAME = {"pattern": f"^{_NAME}$"}  # JSON Schema
WHY = "give 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit"


def session_name(name: str) -> bool:
    """Whether a session may have this name. What may, names one file of the state directory, and no path."""
    return re.fullmatch(_NAME, name) is not None


def checked_name(name: object, param: str) -> str:
    """The name of a session. Raises Refusal."""
    if not isinstance(name, str) or not session_name(name):
        raise Refusal(f"{param} is {short(name)}; {WHY}", param=param)
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
