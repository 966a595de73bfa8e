"""The files of a checkpoint that a tokenizer and its chat templates are read from.

A tokenizer may have several templates: "default", and "tool_use" for requests with tools, as transformers takes them.
Other names are for programs that ask for them, which nothing here does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edge_dflash.common.files import SMALL, is_there, read_text
from edge_dflash.errors import BundleError, one_line

DEFAULT, TOOL_USE = "default", "tool_use"
TEMPLATE_FILE, OLDER_FILE, FOLDER = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE_FILE,
    OLDER_FILE,  # of processors that are older than chat_template.jinja
)
_NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\.jinja")
_MOST_NAMED = 64
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = "additional_special_tokens"


def tokenizer_files(directory: Path) -> tuple[Path, ...]:
    """The files that a tokenizer and its templates are read from, as far as they exist."""
    named = (f"{FOLDER}/{name}" for name in _named_files(directory))
    return tuple(path for name in (*TOKENIZER_FILES, *named) if is_there(path := directory / name))


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Raises BundleError for a file that cannot be read.

    ``chat_template.jinja`` replaces those of ``tokenizer_config.json``, which come before ``chat_template.json``; those
    of ``additional_chat_templates`` are added to them.
    """
    found: dict[str, str] = {}
    if is_there(directory / TEMPLATE_FILE):
        found[DEFAULT] = read(directory / TEMPLATE_FILE, str)
    elif config.get("chat_template"):
        found = _by_name(config["chat_template"])
    elif is_there(directory / OLDER_FILE):
        found = _by_name(read_object(directory / OLDER_FILE).get("chat_template"))
    for name in _named_files(directory):
        found[name.removesuffix(".jinja")] = read(directory / FOLDER / name, str)
    return found


def special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What templates may name: special tokens, a list of further ones, and those of the model's own names."""
    older = directory / "special_tokens_map.json"
    known = {**(read_object(older) if is_there(older) else {}), **{k: v for k, v in config.items() if v}}
    extra = known.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **{n: known[n] for n in _SPECIAL_TOKENS if known.get(n)}}
    tokens: dict[str, Any] = {name: _content(token) for name, token in named.items()}
    listed = known.get(_LISTED) or (extra if isinstance(extra, list) else [])
    if isinstance(listed, list) and listed:
        tokens[_LISTED] = [_content(token) for token in listed]
    return tokens


def read(path: Path, parse: Callable[[str], Any], most: int = SMALL) -> Any:
    """What ``parse`` makes of a file. Raises BundleError."""
    try:
        return parse(read_text(path, most))
    except Exception as error:  # the library of tokenizers raises bare Exception
        why = error.strerror if isinstance(error, OSError) else None  # without the path, which is named beside it
        raise BundleError(f"cannot read {path} ({one_line(why or error)}); build the bundle again") from None


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object. Raises BundleError."""
    value = read(path, json.loads)
    if not isinstance(value, dict):
        raise BundleError(f"{path} holds {type(value).__name__}, wanted an object; build the bundle again")
    return value


def _named_files(directory: Path) -> list[str]:
    """Files of additional_chat_templates, in their order."""
    try:
        names = sorted(path.name for path in (directory / FOLDER).iterdir() if _NAMED.fullmatch(path.name))
    except OSError:  # there is no such folder
        return []
    if len(names) > _MOST_NAMED:
        raise BundleError(f"{directory / FOLDER} has {len(names)} templates, at most {_MOST_NAMED} are taken")
    return names


def _by_name(given: object) -> dict[str, str]:
    """Templates as files write them: one, a list of named ones, or an object of them."""
    if isinstance(given, str):
        return {DEFAULT: given}
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    items = given.items() if isinstance(given, dict) else ()
    return {name: text for name, text in items if isinstance(name, str) and isinstance(text, str)}


def _content(token: object) -> str:
    """A special token is a string or an object with its ``content``."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
