"""What callers hand over as an image -> RGB pixels of our own, bounded in bytes, pixels, memory and time.

Files are PNG or JPEG, read by Pillow. Orientation by EXIF is applied, then transparency is dropped and greys and
palettes become RGB, as transformers' image loading does; 16 bits a channel keep their upper 8. Of an animated file the
first frame counts. A caller may write to its memory or its file meanwhile: each is copied once, and only the copy is
read.

What costs a decoder time or memory is counted before one is asked: a scan of a progressive JPEG may be 16 bytes, and
each goes through every block of the picture. A compressed text of a PNG file may be a thousandth of what is made of
it.

Bytes in flight are bounded over all requests of a planner (:class:`Gate`). Callers are let in in the order of their
coming, so that a large picture is not passed over for ever by small ones.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import ImageError

PIXEL_BYTES = 16
"""Most that a pixel takes while it is decoded and resized: a progressive JPEG's coefficients and planes take 12."""
TEXT_BYTES = 8 << 20
"""Most that a compressed text of a PNG file takes: the decoder reads up to a megabyte of each, twice."""
_SLICE = 0.05  # seconds between two looks at a caller's deadline


def in_flight(pixels: int) -> int:
    """Bytes that pictures may have in flight where a request may have so many pixels."""
    return PIXEL_BYTES * pixels


class Gate:
    """Lets callers in while the bytes that they hold together fit ``budget``. Used from any thread."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._held = 0
        self._waiting: deque[object] = deque()  # the first comes next
        self._changed = threading.Condition()

    @property
    def held(self) -> int:
        """Bytes in flight now."""
        return self._held

    @contextmanager
    def hold(self, size: int, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold ``size`` bytes, at most the budget, when those before have let go.

        ``check`` is asked before that, again and again; what it raises ends the waiting.
        """
        size, mine = min(size, self.budget), object()
        check()
        with self._changed:
            self._waiting.append(mine)
            try:
                while self._waiting[0] is not mine or self._held + size > self.budget:
                    self._changed.wait(_SLICE)
                    check()
                self._held += size
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()


MOST_SCANS = 64  # of a JPEG file; encoders write 1 to about 16
FULL_SCANS = 13  # of a picture of all the pixels that a request may have; encoders write about 10
MOST_WORK = 1 << 28  # scans of a JPEG file times its pixels, where that is more: some 2 seconds of a core
MOST_PARTS = 65_536  # segments of a JPEG file, chunks of a PNG file
# Markers that decoders act upon, in compressed data too: no escape, no restart, nothing reserved.
_MARKER = re.compile(rb"\xff([\xc0-\xc7\xc9-\xcf\xd8-\xdd\xe0-\xef\xfe])")
_START, _END, _SCAN = 0xD8, 0xD9, 0xDA
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # each says the size of the picture
_TEXTS = (b"zTXt", b"iTXt", b"iCCP")  # chunks that are compressed


@dataclass
class Parts:
    """What a PNG or JPEG file says of itself. Sizes are 0 where it does not say them."""

    height: int = 0
    width: int = 0
    count: int = 0  # segments or chunks; counting stops after MOST_PARTS
    scans: int = 0
    texts: int = 0  # compressed ones


def parts_of(data: bytes, pixels: int = 0) -> Parts:
    """The parts of a file. Raises ImageError for more than any encoder writes, or more work than a picture is.

    ``pixels``: those that a request may have.
    """
    parts = _of_jpeg(data) if data.startswith(b"\xff\xd8") else _of_png(data)
    if parts.scans > MOST_SCANS or parts.count > MOST_PARTS:
        kind, most = ("scans", MOST_SCANS) if parts.scans > MOST_SCANS else ("parts", MOST_PARTS)
        raise ImageError(f"an image file has more than {most:,} {kind}; save it again as PNG or baseline JPEG")
    most = max(MOST_WORK, FULL_SCANS * pixels)
    if parts.scans > 1 and (work := parts.scans * parts.height * parts.width) > most:
        raise ImageError(
            f"an image file has {parts.scans} scans of {parts.height} x {parts.width} pixels, {work:,} pixels of all "
            f"scans, at most {most:,} are decoded; save it again as PNG or baseline JPEG"
        )
    return parts


def _of_jpeg(data: bytes) -> Parts:
    """Up to the end of the picture; of several sizes the largest counts."""
    at, parts = 2, Parts()
    while parts.scans <= MOST_SCANS and parts.count <= MOST_PARTS and (found := _MARKER.search(data, at)):
        kind, at = found[1][0], found.end()
        if kind == _END:
            break
        parts.count += 1
        parts.scans += kind == _SCAN
        if kind in _FRAMES:
            height, width = (int.from_bytes(data[at + begin : at + begin + 2]) for begin in (3, 5))
            parts.height, parts.width = max(parts.height, height), max(parts.width, width)
        if kind != _START:
            at += max(int.from_bytes(data[at : at + 2]), 2)
    return parts


def _of_png(data: bytes) -> Parts:
    """Of several sizes the last counts, as it does for the decoder."""
    at, parts = 8, Parts()
    while at < len(data) and parts.count <= MOST_PARTS:
        kind = data[at + 4 : at + 8]
        parts.texts += kind in _TEXTS
        if kind == b"IHDR":
            parts.width, parts.height = (int.from_bytes(data[at + begin : at + begin + 4]) for begin in (8, 12))
        at += 12 + int.from_bytes(data[at : at + 4])
        parts.count += 1
    return parts


Pixels = npt.NDArray[np.uint8]

FORMATS = ("PNG", "JPEG")
INSTALL = "install it with: pip install 'edge-dflash[images]'"
_ACCEPTED = (
    "a path, bytes of a PNG or JPEG file, a data URL, an array or memoryview (height, width, 3) of uint8, or an image "
    "of Pillow"
)
_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8": "image/jpeg"}
_BAND = 1 << 18  # pixels that are converted at a time
_SHARED = threading.Lock()  # held while a caller's own image is loaded, which may be given to two requests
_ADDRESSES = ("http://", "https://", "ftp://", "file://")


@dataclass(frozen=True)
class ImageLimits:
    """What the images of a request may be."""

    file_bytes: int = 16 << 20  # of an encoded file
    pixels: int = 20_000_000  # of the decoded pictures together


DEFAULT_LIMITS = ImageLimits()


class PixelBudget:
    """Pixels that the images of a request may still have; several threads take of them."""

    def __init__(self, limits: ImageLimits) -> None:
        self._most = self._left = limits.pixels
        self._lock = threading.Lock()

    def take(self, height: int, width: int) -> None:
        """Raise ImageError for an image without pixels, and for one too many or too large."""
        if not height or not width:
            raise ImageError(f"an image has {height} x {width} pixels; give one with pixels")
        with self._lock:
            self._left -= height * width
            if self._left < 0:
                raise ImageError(
                    f"an image has {height} x {width} pixels; those of a request may have {self._most:,} together: "
                    "give fewer or smaller ones, or raise the limit"
                )


@dataclass(frozen=True)
class Opened:
    """An image of which the size is known, and nothing is decoded."""

    height: int
    width: int
    pixels: Callable[[], Pixels]  # decodes it, into memory that nobody else has; raises ImageError
    texts: int = 0  # that the decoder unpacks beside the pixels

    def nbytes(self, height: int = 0, width: int = 0) -> int:
        """Most memory that it takes until it is ``height`` x ``width`` pixels large."""
        return PIXEL_BYTES * max(self.height * self.width, height * width) + TEXT_BYTES * self.texts


def opened(source: object, limits: ImageLimits = DEFAULT_LIMITS) -> Opened:
    """What a caller calls an image; files are read here, once. Raises ImageError for what is visibly none."""
    match source:
        case np.ndarray():
            return _opened_array(source)
        case str() if source.startswith("data:"):
            return _opened_file(from_data_url(source, limits), limits)
        case str() if source.lower().startswith(_ADDRESSES):
            shown = source[:60]
            raise ImageError(f"image {shown!r} is an address; nothing is fetched: give {_ACCEPTED}")
        case str() | Path():
            return _opened_file(_read(Path(source), limits), limits)
        case memoryview() if (pixels := _pixels_of(source)) is not None:
            return _opened_array(pixels)
        case bytes() | bytearray() | memoryview():
            return _opened_file(_copied(source, limits), limits)
        case _ if (pillow := sys.modules.get("PIL.Image")) is not None and isinstance(source, pillow.Image):
            return Opened(source.height, source.width, lambda: _pixels(source, _SHARED))
        case _:
            raise ImageError(f"an image is a {type(source).__name__}; give {_ACCEPTED}")


def decode(source: object, limits: ImageLimits = DEFAULT_LIMITS) -> Pixels:
    """RGB pixels (height, width, 3) of an image. Raises ImageError for what is none, or too large."""
    image = opened(source, limits)
    PixelBudget(limits).take(image.height, image.width)
    return image.pixels()


def from_data_url(url: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """The bytes of a data URL (RFC 2397) in base64. Raises ImageError."""
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ImageError(f"image {url[:40]!r} is no data URL in base64; give data:image/png;base64,... or image/jpeg")
    if 3 * len(text) // 4 > limits.file_bytes + 2:
        raise _too_long(3 * len(text) // 4, limits)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data URL of an image is not base64 ({error}); encode the file again") from None


def data_url(source: object, limits: ImageLimits = DEFAULT_LIMITS) -> str:
    """An image as a data URL: files as they are, pixels as PNG. Raises ImageError for what is none."""
    if isinstance(source, str) and source.startswith("data:"):
        from_data_url(source, limits)
        return source
    if isinstance(source, str | Path) and not str(source).lower().startswith(_ADDRESSES):
        data = _read(Path(source), limits)
    elif isinstance(source, bytes | bytearray) or (isinstance(source, memoryview) and _pixels_of(source) is None):
        data = _copied(source, limits)
    else:
        data = _encoded(decode(source, limits))
    kind = next((kind for sign, kind in _SIGNATURES.items() if data.startswith(sign)), None)
    if kind is None:
        raise _unknown(len(data))
    if len(data) > limits.file_bytes:
        raise _too_long(len(data), limits)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _encoded(pixels: Pixels) -> bytes:
    """A PNG file."""
    file = BytesIO()
    _pillow().fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def reads_files() -> bool:
    """Whether image files can be read here: arrays always can."""
    return find_spec("PIL") is not None


def _pillow() -> Any:
    """Pillow's images. Raises ImageError without them."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ImageError(f"image files need Pillow; {INSTALL}") from None
    return Image


def _unknown(size: int) -> ImageError:
    return ImageError(f"an image of {size} bytes is no PNG or JPEG file; convert it to one of them")


def _too_long(size: int, limits: ImageLimits) -> ImageError:
    return ImageError(
        f"an image file has {size:,} bytes, at most {limits.file_bytes:,} are read; give a smaller file, or raise the "
        "limit"
    )


def _read(path: Path, limits: ImageLimits) -> bytes:
    """A regular file's bytes: nothing that blocks, nothing without an end."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ImageError(f"image {str(path)!r} is not a regular file; give the path of a PNG or JPEG file")
            if facts.st_size > limits.file_bytes:
                raise _too_long(facts.st_size, limits)
            found = file.read(limits.file_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ImageError(f"image {str(path)[:200]!r} cannot be read ({reason}); give the path of a file") from None
    if len(found) > limits.file_bytes:
        raise _too_long(len(found), limits)
    return found


def _copied(source: bytes | bytearray | memoryview, limits: ImageLimits) -> bytes:
    """The bytes of a file in a caller's memory."""
    with memoryview(source) as view:
        if view.nbytes > limits.file_bytes:
            raise _too_long(view.nbytes, limits)
        return bytes(view)


def _pixels_of(view: memoryview) -> npt.NDArray[Any] | None:
    """The array that a view of three axes is; None: the bytes of a file. Raises ImageError for one that is closed."""
    try:
        return np.asarray(view) if view.ndim == 3 else None
    except ValueError as error:  # released, or of a format that NumPy lacks
        raise ImageError(f"an image is a memoryview that cannot be read ({error}); give {_ACCEPTED}") from None


def _opened_file(data: bytes, limits: ImageLimits) -> Opened:
    """An image by the bytes of its file."""
    if len(data) > limits.file_bytes:
        raise _too_long(len(data), limits)
    pillow = _pillow()
    if not data.startswith(tuple(_SIGNATURES)):
        raise _unknown(len(data))
    parts = parts_of(data, limits.pixels)

    def pixels() -> Pixels:
        try:
            image = pillow.open(BytesIO(data), formats=FORMATS)
        except Exception as error:  # a decoder's errors have many types
            raise _damaged(error) from None
        if image.size != (parts.width, parts.height):
            raise _damaged(ValueError(f"it says to have {parts.height} x {parts.width} pixels, and others elsewhere"))
        return _pixels(image)

    return Opened(parts.height, parts.width, pixels, parts.texts)


def _pixels(image: Any, lock: AbstractContextManager[object] | None = None) -> Pixels:
    """Pixels of an image of Pillow, in bands: whole pictures of other forms are not made on the way."""
    try:
        from PIL import ImageOps

        with lock or nullcontext():
            image.load()
        image = ImageOps.exif_transpose(image)
        found = np.empty((image.height, image.width, 3), np.uint8)
        rows = max(1, _BAND // image.width)
        for top in range(0, image.height, rows):
            found[top : top + rows] = _rgb(image.crop((0, top, image.width, min(top + rows, image.height))))
        return found
    except Exception as error:
        raise _damaged(error) from None


def _rgb(image: Any) -> npt.NDArray[Any]:
    if not image.mode.startswith("I"):
        return np.asarray(image.convert("RGB"))
    return (np.asarray(image).astype(np.int64).clip(0, 65535) >> 8)[:, :, None]  # 16 bits


def _damaged(error: Exception) -> ImageError:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return ImageError(f"an image cannot be decoded ({reason}); it is damaged, or of a form that is not read")


def _opened_array(array: npt.NDArray[Any]) -> Opened:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ImageError(
            f"an image is an array {array.shape} of {array.dtype}; give (height, width, 3) of uint8, red first"
        )
    shape = array.shape

    def pixels() -> Pixels:
        copy = np.array(array, np.uint8, order="C")
        if copy.shape != shape:
            raise ImageError(f"an image was an array {shape} and is {copy.shape} now; leave it as it is meanwhile")
        return copy

    return Opened(shape[0], shape[1], pixels)
