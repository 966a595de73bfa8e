"""What callers hand over as an image -> RGB pixels, bounded in bytes, pixels and so in time.

Files are PNG or JPEG, read by Pillow. Orientation by EXIF is applied, then transparency is dropped and greys and
palettes become RGB, as transformers' image loading does; 16 bits a channel keep their upper 8. Of an animated file the
first frame counts.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import threading
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import ImageError
from edge_dflash.pictures.parts import check_parts

Pixels = npt.NDArray[np.uint8]

FORMATS = ("PNG", "JPEG")
_ACCEPTED = (
    "a path, bytes of a PNG or JPEG file, a data URL, an array (height, width, 3) of uint8, or an image of Pillow"
)
_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8": "image/jpeg"}
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


def decode(source: object, limits: ImageLimits = DEFAULT_LIMITS, left: PixelBudget | None = None) -> Pixels:
    """RGB pixels (height, width, 3) of what a caller calls an image; ``left``: what others of the request left.

    Raises ImageError for what is no image, or too large.
    """
    left = left or PixelBudget(limits)
    match source:
        case np.ndarray():
            return _checked_array(source, left)
        case str() if source.startswith("data:"):
            return _decode_file(from_data_url(source, limits), limits, left)
        case str() if source.lower().startswith(_ADDRESSES):
            shown = source[:60]
            raise ImageError(f"image {shown!r} is an address; nothing is fetched: give {_ACCEPTED}")
        case str() | Path():
            return _decode_file(_read(Path(source), limits), limits, left)
        case bytes() | bytearray() | memoryview():
            return _decode_file(bytes(source), limits, left)
        case _ if hasattr(source, "convert") and hasattr(source, "getexif"):
            return _pixels(source, left)
        case _:
            raise ImageError(f"an image is a {type(source).__name__}; give {_ACCEPTED}")


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
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
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
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise _no_pillow() from None
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _no_pillow() -> ImageError:
    return ImageError("image files need Pillow; install it with: pip install 'edge-dflash[images]'")


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


def _decode_file(data: bytes, limits: ImageLimits, left: PixelBudget) -> Pixels:
    """Pixels of a file's bytes."""
    if len(data) > limits.file_bytes:
        raise _too_long(len(data), limits)
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise _no_pillow() from None
    check_parts(data)
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise _unknown(len(data)) from None
    except Exception as error:  # a decoder's errors have many types
        raise _damaged(error) from None
    return _pixels(image, left)


def _pixels(image: Any, left: PixelBudget) -> Pixels:
    """Pixels of an opened image, of which so far its size is known."""
    left.take(image.height, image.width)
    try:
        from PIL import ImageOps

        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits
            wide = np.asarray(image).astype(np.int64).clip(0, 65535) >> 8
            return np.repeat(wide.astype(np.uint8)[:, :, None], 3, axis=2)
        return np.array(image.convert("RGB"))
    except Exception as error:
        raise _damaged(error) from None


def _damaged(error: Exception) -> ImageError:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return ImageError(f"an image cannot be decoded ({reason}); it is damaged, or of a form that is not read")


def _checked_array(array: npt.NDArray[Any], left: PixelBudget) -> Pixels:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ImageError(
            f"an image is an array {array.shape} of {array.dtype}; give (height, width, 3) of uint8, red first"
        )
    left.take(array.shape[0], array.shape[1])
    return np.ascontiguousarray(array)
