"""Images among the parts of messages: checked, named, and kept apart while a chat template writes the prompt.

A template never sees an image. One character that no message holds stands for each; behind the template it becomes the
control tokens that models of the Qwen family read an image between, whatever the template knows of images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edge_dflash.errors import RequestError, short
from edge_dflash.text.template import Message, content_text

ROLES = ("user", "tool")  # whose messages may hold images
_KINDS = ("image", "image_url")
_STANDINS = range(0xE100, 0xF8FF)  # private use
_FORMS = '{"type": "image", "image": ...} or {"type": "image_url", "image_url": {"url": "data:image/..."}}'


def is_image(part: object) -> bool:
    """Whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def with_parts(message: Message, index: int) -> Message:
    """The message with its content as one text, or as a list of texts and images where there are some.

    Raises RequestError for parts of another kind, and for an image of somebody who shows none.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    where = f"content of message {index}"
    if not isinstance(message, Mapping) or isinstance(content, str | None):
        return message
    if not isinstance(content, list | tuple) or not any(map(is_image, content)):
        return {**message, "content": content_text(content, where)}
    if message.get("role") not in ROLES:
        raise RequestError(f"message {index} of role {short(message.get('role'))} holds an image; a user shows images")
    return {**message, "content": [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]}


def _part(part: Any, where: str) -> Mapping[str, object]:
    if not is_image(part):
        return {"type": "text", "text": content_text([part], where.rpartition("[")[0]) or ""}
    kind = part["type"]
    source = part.get(kind)
    if kind == "image_url" and isinstance(source, Mapping):
        if unknown := [key for key in source if key not in ("url", "detail")]:
            raise RequestError(f"{where}.image_url.{unknown[0]!s:.60} is unknown here; known are url, detail")
        source = source.get("url")
    if source is None or (unknown := [key for key in part if key not in ("type", kind)]):
        raise RequestError(f"{where} is no image ({short(list(part))}); give {_FORMS}, or a part of type text")
    return {"type": "image", "image": source}


def sources_of(messages: Sequence[Message]) -> list[object]:
    """What the images of messages are given as, in order."""
    return [part["image"] for message in messages for part in _parts(message) if is_image(part)]


def changed(messages: Sequence[Message], change: Callable[[object], Mapping[str, object]]) -> list[Message]:
    """Messages with other parts in the place of images; ``change`` is told what an image is given as."""
    return _changed(messages, lambda parts: [change(part["image"]) if is_image(part) else part for part in parts])


def renamed(messages: Sequence[Message], names: Sequence[str]) -> list[Message]:
    """Messages whose images, in order, are these names."""
    rest = iter(names)
    return changed(messages, lambda _: {"type": "image", "image": next(rest)})


def without(messages: Sequence[Message]) -> list[Message]:
    """Messages of text alone: nothing in the place of images."""
    cleared = changed(messages, lambda _: {"type": "text", "text": ""})
    return [with_parts(message, index) for index, message in enumerate(cleared)]


def marked(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Messages of text alone, and the character that stands for each image in them; no character without images."""
    if not sources_of(messages):
        return list(messages), ""
    text = json.dumps(list(messages), ensure_ascii=False, default=str)
    mark = next((chr(code) for code in _STANDINS if chr(code) not in text), None)
    if mark is None:
        raise RequestError("the messages hold every character of private use; remove them")

    def joined(parts: Sequence[Mapping[str, Any]]) -> str:
        return "".join(mark if is_image(part) else str(part["text"]) for part in parts)

    return _changed(messages, joined), mark


def unmarked(pieces: Sequence[str], mark: str, count: int, controls: Sequence[str]) -> list[str]:
    """Text, control token, ..., text, with ``controls`` (an odd number) in the place of every mark.

    Raises RequestError when the template wrote another number of them than ``count``.
    """
    found = sum(piece.count(mark) for piece in pieces[::2])
    if found != count:
        raise RequestError(f"the chat template writes {found} of {count} images; correct chat_template.jinja")
    between = [piece for control in controls for piece in (control, "")][:-1]
    made = list[str]()
    for at, piece in enumerate(pieces):
        first, *rest = piece.split(mark) if at % 2 == 0 else (piece,)
        made.append(first)
        for text in rest:
            made += [*between, text]
    return made


def _parts(message: Message) -> Iterator[Mapping[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    yield from content if isinstance(content, list | tuple) else ()


def _changed(messages: Sequence[Message], change: Callable[[Sequence[Mapping[str, Any]]], object]) -> list[Message]:
    """Messages in which every content with parts was changed."""
    return [
        {**message, "content": change(parts)} if (parts := list(_parts(message))) else message for message in messages
    ]
