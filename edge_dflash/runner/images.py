"""Images of a request: read before it is queued, named in the conversation, placed among the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from edge_dflash.decode.pictured import Picture, Placed
from edge_dflash.errors import ImageError, RequestError
from edge_dflash.model.specs import VisionSpec
from edge_dflash.pictures.decode import DEFAULT_LIMITS, Gate, ImageLimits, in_flight
from edge_dflash.pictures.picture import pictures_of
from edge_dflash.text.images import renamed, sources_of, unmarked
from edge_dflash.text.template import Message
from edge_dflash.text.tokenizer import Tokenizer

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
