"""Images of a request: read before it is queued, named in the conversation, placed among the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from edge_dflash.decode.controls import Interrupted
from edge_dflash.decode.pictured import Picture, Placed
from edge_dflash.errors import ImageError, RequestError
from edge_dflash.model.specs import VisionSpec
from edge_dflash.pictures.decode import DEFAULT_LIMITS, ImageLimits
from edge_dflash.pictures.gate import Gate, in_flight
from edge_dflash.pictures.picture import pictures_of
from edge_dflash.text.images import marked, renamed, sources_of, unmarked, without
from edge_dflash.text.template import Message
from edge_dflash.text.tokenizer import Tokenizer

Ended: TypeAlias = Literal["deadline", "cancelled"]
_NAME = "picture:"  # and a digest: an image of a conversation that goes on
MOST_IMAGES = 16


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


@dataclass(frozen=True)
class Shown:
    """Messages whose images are names, and the pictures by these names."""

    messages: list[Message]
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    ended: Ended | None = None  # why the request ended while they were read: its messages have none of them then


def name_of(picture: Picture) -> str:
    """What a conversation calls a picture."""
    return _NAME + picture.digest.hex()


def read_images(
    reader: ImageReader | None,
    messages: list[Message],
    known: Mapping[str, Picture],
    check: Callable[[], None] = lambda: None,
) -> Shown:
    """Decode the images of messages, several at a time. ``known``: pictures that names in them may mean.

    ``check`` is asked before and while they wait for memory; what it raises ends that.

    Raises RequestError without a tower and for too many images, ImageError for one that is none.
    """
    if not (sources := sources_of(messages)):
        return Shown(messages)
    if reader is None:
        raise RequestError(
            f"the request has {len(sources)} images, and this target has no vision tower; leave them out, or build a "
            "bundle from a checkpoint that has one"
        )
    fresh = [source for source in sources if not _is_name(source)]
    if len(fresh) > reader.most:
        raise RequestError(f"the request has {len(fresh)} images, at most {reader.most} are taken; give fewer")
    try:
        read = iter(pictures_of(fresh, reader.vision.patches, reader.limits, reader.gate, check))
    except Interrupted as interrupted:
        return Shown(without(messages), ended=interrupted.reason)
    pictures = [_known(source, known) if _is_name(source) else next(read) for source in sources]
    names = [name_of(picture) for picture in pictures]
    return Shown(renamed(messages, names), dict(zip(names, pictures, strict=True)))


def _is_name(source: object) -> bool:
    return isinstance(source, str) and source.startswith(_NAME)


def _known(source: object, known: Mapping[str, Picture]) -> Picture:
    if (found := known.get(str(source))) is None:
        raise ImageError(f"image {str(source)[:60]!r} is the name of another conversation's; give the image itself")
    return found


@dataclass(frozen=True)
class Placing:
    """Messages of text for the chat template, and what their images become in what it writes."""

    messages: list[Message]
    pictures: list[Picture]
    mark: str

    @classmethod
    def of(cls, shown: Shown) -> Placing:
        """Messages with stand-ins in the place of images."""
        messages, mark = marked(shown.messages)
        return cls(messages, [shown.pictures[str(name)] for name in sources_of(shown.messages)], mark)

    def encode(
        self, tokenizer: Tokenizer, pieces: Sequence[str], reader: ImageReader | None, first: int = 0
    ) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """Ids of a template's pieces with a placeholder for each row of a picture, and where the pictures stand.

        ``first``: tokens before them. Of the messages, the last that have so many pictures as the pieces have
        stand-ins count.
        """
        if not self.mark or reader is None:
            return tokenizer.encode_pieces(pieces), ()
        count = sum(piece.count(self.mark) for piece in pieces[::2])
        pictures = self.pictures[len(self.pictures) - count :] if first else self.pictures
        vision = reader.vision
        controls = [
            _control(tokenizer, token)
            for token in (vision.vision_start_token_id, vision.image_token_id, vision.vision_end_token_id)
        ]
        ids, placed, rest = list[int](), list[Placed](), iter(pictures)
        for token in tokenizer.encode_pieces(unmarked(pieces, self.mark, len(pictures), controls)):
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
