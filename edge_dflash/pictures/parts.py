"""The parts of an image file, counted before a decoder is asked: many small ones cost it hours.

A scan of a progressive JPEG may be 16 bytes, and each goes through every block of the picture.
"""

from __future__ import annotations

import re

from edge_dflash.errors import ImageError

MOST_SCANS = 64  # of a JPEG file; encoders write 1 to about 16
MOST_PARTS = 65_536  # segments of a JPEG file, chunks of a PNG file
# Markers that decoders act upon, in compressed data too: no escape, no restart, nothing reserved.
_MARKER = re.compile(rb"\xff([\xc0-\xc7\xc9-\xcf\xd8-\xdd\xe0-\xef\xfe])")
_START, _END, _SCAN = 0xD8, 0xD9, 0xDA


def check_parts(data: bytes) -> None:
    """Raise ImageError for a PNG or JPEG file of more parts than any encoder writes."""
    scans, parts = _of_jpeg(data) if data.startswith(b"\xff\xd8") else (0, _of_png(data))
    if scans > MOST_SCANS or parts > MOST_PARTS:
        kind, most = ("scans", MOST_SCANS) if scans > MOST_SCANS else ("parts", MOST_PARTS)
        raise ImageError(f"an image file has more than {most:,} {kind}; save it again as PNG or baseline JPEG")


def _of_jpeg(data: bytes) -> tuple[int, int]:
    """Scans and segments up to the end of the picture; counting stops behind the limits."""
    at, scans, parts = 2, 0, 0
    while scans <= MOST_SCANS and parts <= MOST_PARTS and (found := _MARKER.search(data, at)):
        kind, at = found[1][0], found.end()
        if kind == _END:
            break
        parts += 1
        scans += kind == _SCAN
        if kind != _START:
            at += max(int.from_bytes(data[at : at + 2]), 2)
    return scans, parts


def _of_png(data: bytes) -> int:
    """Chunks; counting stops behind the limit."""
    at, parts = 8, 0
    while at < len(data) and parts <= MOST_PARTS:
        at += 12 + int.from_bytes(data[at : at + 4])
        parts += 1
    return parts
