"""The parts of an image file, counted before a decoder is asked: its size, and what costs the decoder time or memory.

A scan of a progressive JPEG may be 16 bytes, and each goes through every block of the picture. A compressed text of a
PNG file may be a thousandth of what is made of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_dflash.errors import ImageError

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
