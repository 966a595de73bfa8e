"""Images among the parts of messages: checked, read, named, and placed among the tokens of the prompt.

A chat template never sees an image. One character that no message holds stands for each; behind the template it becomes
the control tokens that models of the Qwen family read an image between, whatever the template knows of images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edge_dflash.errors import ImageError, RequestError, short
from edge_dflash.model.specs import VisionSpec
from edge_dflash.pictures.decode import DEFAULT_LIMITS, Gate, ImageLimits, in_flight
from edge_dflash.pictures.picture import pictures_of
from edge_dflash.pictures.pictured import Picture, Placed
from edge_dflash.text.template import TEXT_PART, Message, content_text, text_of
from edge_dflash.text.tokenizer import Tokenizer

_NAME = "picture:"  # and a digest: an image of a conversation that goes on
MOST_IMAGES = 16
ROLES = ("user", "tool")  # whose messages may hold images
_KINDS = ("image", "image_url")
_STANDINS = range(0xE100, 0xF8FF)  # private use
_DETAILS = ("auto", "low", "high")  # without effect: an image is resized as the model's processor does
_URL = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'


def is_image(part: object) -> bool:
    """Whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def with_parts(message: Message, index: int) -> Message:
    """The message with its content as one text, or as a list of texts and images where there are some.

    Raises RequestError for parts of another kind, and for an image of somebody who shows none.
    """
    if not isinstance(message, Mapping) or isinstance(message.get("content"), str | None):
        return message
    return {**message, "content": read_content(message["content"], message.get("role"), f"content of message {index}")}


def read_content(
    content: Any, role: object, where: str, *, only_urls: bool = False
) -> str | list[Mapping[str, object]] | None:
    """A content as one text, or as a list of texts and images where there are some.

    ``only_urls``: an image is a data URL, as the OpenAI API has it: whoever asks reads no file and no address here.
    Raises RequestError, naming ``where``, for parts of another kind, and for an image of somebody who shows none.
    """
    kinds = _KINDS[1:] if only_urls else _KINDS
    images = [is_image(part) and part["type"] in kinds for part in content] if isinstance(content, list | tuple) else []
    if not any(images):
        return content_text(content, where)
    if role not in ROLES:
        raise RequestError(f"{where} of role {short(role)} holds an image; a user shows images")
    return [_part(part, f"{where}[{at}]", only_urls, image=images[at]) for at, part in enumerate(content)]


def _forms(only_urls: bool) -> str:
    return _URL if only_urls else f'{{"type": "image", "image": ...}} or {_URL}'


def _part(part: Any, where: str, only_urls: bool, *, image: bool) -> Mapping[str, object]:
    if not image:
        return {"type": "text", "text": text_of(part, where, f"give parts {TEXT_PART} or {_forms(only_urls)}")}
    kind = part["type"]
    given = part.get(kind)
    inner = given if kind == "image_url" and isinstance(given, Mapping) else {"url": given}
    source: Any = inner.get("url")
    wrong = source is None or (only_urls and (inner is not given or not isinstance(source, str)))
    if wrong or any(key not in ("type", kind) for key in part):
        keys = short(list(part))
        raise RequestError(f"{where} is no image ({keys}); give {_forms(only_urls)}, or a part of type text")
    if unknown := [key for key in inner if key not in ("url", "detail")]:
        raise RequestError(f"{where}.image_url.{unknown[0]!s:.60} is unknown here; known are url, detail")
    if inner.get("detail", "auto") not in _DETAILS:
        raise RequestError(f"{where}.image_url.detail is {short(inner['detail'])}; give one of {', '.join(_DETAILS)}")
    if only_urls and not source.startswith("data:"):
        raise RequestError(
            f"{where}.image_url.url is {short(source)}; nothing is fetched: give data:image/png;base64,..."
        )
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


@dataclass(frozen=True)
class ImageReader:
    """What a target's images are, and how many a request may have."""

    vision: VisionSpec
    limits: ImageLimits = DEFAULT_LIMITS
    most: int = MOST_IMAGES

    @cached_property
    def gate(self) -> Gate:
        """The bound on the memory of images that are being read, of all requests together."""
        return Gate(in_flight(self.limits.pixels))


def name_of(picture: Picture) -> str:
    """What a conversation calls a picture."""
    return _NAME + picture.digest.hex()


def read_images(
    reader: ImageReader | None,
    messages: list[Message],
    known: Mapping[str, Picture],
    check: Callable[[], None] = lambda: None,
) -> tuple[list[Message], dict[str, Picture]]:
    """Messages whose images are names, and the pictures by these names, decoded several at a time.

    ``known``: pictures that names in the messages may mean. ``check`` is asked before and while they wait for memory;
    what it raises ends that. Raises RequestError without a tower and for too many images, ImageError for one that is
    none.
    """
    sources = sources_of(messages)
    if reader is None:
        raise RequestError(
            f"the request has {len(sources)} images, and this target has no vision tower; leave them out, or build a "
            "bundle from a checkpoint that has one"
        )
    fresh = [source for source in sources if not _is_name(source)]
    if len(fresh) > reader.most:
        raise RequestError(f"the request has {len(fresh)} images, at most {reader.most} are taken; give fewer")
    read = iter(pictures_of(fresh, reader.vision.patches, reader.limits, reader.gate, check))
    pictures = [_known(source, known) if _is_name(source) else next(read) for source in sources]
    names = [name_of(picture) for picture in pictures]
    return renamed(messages, names), dict(zip(names, pictures, strict=True))


def _is_name(source: object) -> bool:
    return isinstance(source, str) and source.startswith(_NAME)


def _known(source: object, known: Mapping[str, Picture]) -> Picture:
    if (found := known.get(str(source))) is None:
        raise ImageError(f"image {str(source)[:60]!r} is the name of another conversation's; give the image itself")
    return found


def encode_shown(
    tokenizer: Tokenizer, pieces: Sequence[str], mark: str, pictures: Sequence[Picture], vision: VisionSpec, first: int
) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
    """Ids of a template's pieces with a placeholder for each row of a picture, and where the pictures stand.

    ``first``: tokens before them, to which the first pictures belong: as many of the last count as the pieces have
    marks.
    """
    if first:
        pictures = pictures[len(pictures) - sum(piece.count(mark) for piece in pieces[::2]) :]
    controls = [
        _control(tokenizer, token)
        for token in (vision.vision_start_token_id, vision.image_token_id, vision.vision_end_token_id)
    ]
    ids, placed, rest = list[int](), list[Placed](), iter(pictures)
    for token in tokenizer.encode_pieces(unmarked(pieces, mark, len(pictures), controls)):
        if token != vision.image_token_id:
            ids.append(token)
            continue
        picture = next(rest)
        placed.append(Placed(first + len(ids), picture))
        ids += [token] * picture.tokens
    return tuple(ids), tuple(placed)


def _control(tokenizer: Tokenizer, token: int) -> str:
    name = tokenizer.token(token)
    if name is None or tokenizer.control_id(name) != token:
        raise RequestError(f"token {token}, which images need, is no control token of this tokenizer; build it again")
    return name
