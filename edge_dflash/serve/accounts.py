"""Who asks. An account owns its sessions and has a share of the queue.

At the Unix socket it is the user at the other end, over TCP a key of the key file. Callers over TCP without a key
cannot be told apart: they count as the service's own user.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from edge_dflash.errors import ConfigError

Keys: TypeAlias = Mapping[str, str]  # account by API key
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


def own() -> str:
    """The account of the service's own user."""
    return f"uid-{os.geteuid()}"


def peer(one: socket.socket | None) -> str:
    """The account at the other end of a connection: its user where that is known, else :func:`own`."""
    if one is None or one.family != socket.AF_UNIX:
        return own()
    credentials = struct.Struct("iII")  # pid, uid, gid
    _, uid, _ = credentials.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return f"uid-{uid}"


def read_keys(path: str) -> Keys:
    """The keys in a file: one alone, or a line ``NAME KEY`` for each account. Two keys of a name are one account's.

    Raises ConfigError when it cannot be read, holds a key that is too short, or everybody could read it.
    """
    try:
        mode = Path(path).stat().st_mode
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the API key {path}: {error.strerror}; give a readable file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the API key {path} is not ASCII; write a new one") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"everybody can read the API key {path}; chmod o-rwx it")
    keys: dict[str, str] = {}
    lines = [line.split() for line in text.splitlines() if line.strip()] or [[""]]
    for number, words in enumerate(lines, 1):
        *names, key = words
        if len(names) > 1 or (len(lines) > 1 and not names) or not all(map(_NAME.fullmatch, names)):
            raise ConfigError(f"the API key {path}, line {number}: give one key alone, or lines of NAME KEY")
        if len(key) < 16 or not key.isprintable():
            raise ConfigError(f"the API key {path} has {len(key)} characters; give at least 16, without blanks")
        if key in keys:
            raise ConfigError(f"the API key {path}, line {number}: the key is there twice; give each account its own")
        keys[key] = f"key-{names[0]}" if names else "key"
    return keys
