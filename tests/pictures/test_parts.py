"""Files of many small parts, on which a decoder would spend hours."""

from __future__ import annotations

import struct
import time
import zlib

import numpy as np
import pytest
from picture_files import GOLDEN, encoded, noise

from edge_dflash.errors import ImageError
from edge_dflash.pictures.decode import MOST_PARTS, MOST_SCANS, parts_of
from edge_dflash.pictures.picture import picture_of

SCAN, END = b"\xff\xda", b"\xff\xd9"
PROGRESSIVE = encoded(np.full((64, 64, 3), 128, np.uint8), "JPEG", progressive=True)
LAST = PROGRESSIVE[PROGRESSIVE.rindex(SCAN) : -2]  # a scan
PNG = encoded(noise(40, 60))
CHUNK = struct.pack(">I", 0) + b"prIv" + struct.pack(">I", zlib.crc32(b"prIv"))


def scans(count, between=b""):
    """A progressive file with that many scans."""
    return PROGRESSIVE[:-2] + (between + LAST) * (count - PROGRESSIVE.count(SCAN)) + END


def test_a_file_may_have_the_most_scans_and_none_more():
    assert picture_of(scans(MOST_SCANS), GOLDEN).digest == picture_of(PROGRESSIVE, GOLDEN).digest
    with pytest.raises(ImageError, match="more than 64 scans; save it again"):
        picture_of(scans(MOST_SCANS + 1), GOLDEN)


def test_a_million_scans_are_refused_at_once():
    file, began = scans(1_000_000), time.process_time()
    with pytest.raises(ImageError, match="scans"):
        picture_of(file, GOLDEN)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("between", [b"\xff\xff", b"\xff\x00", b"\xff\xd0", b"\xff\x01", b"\xff\x02\xff\xf0", b"junk"])
def test_scans_do_not_hide_behind_what_decoders_skip(between):
    with pytest.raises(ImageError, match="scans"):
        parts_of(scans(MOST_SCANS + 1, between))


def test_what_looks_like_scans_within_a_segment_or_behind_the_end_is_none():
    comment = b"\xff\xfe" + struct.pack(">H", 2 + 200 * len(SCAN)) + SCAN * 200
    file = PROGRESSIVE[:2] + comment + PROGRESSIVE[2:] + SCAN * 200
    assert picture_of(file, GOLDEN).digest == picture_of(PROGRESSIVE, GOLDEN).digest


@pytest.mark.parametrize(
    "file",
    [PROGRESSIVE[:2] + b"\xff\xfe\x00\x02" * MOST_PARTS + PROGRESSIVE[2:], PNG[:33] + CHUNK * MOST_PARTS + PNG[33:]],
    ids=["jpeg", "png"],
)
def test_files_of_very_many_parts_are_refused(file):
    with pytest.raises(ImageError, match="more than 65,536 parts"):
        picture_of(file, GOLDEN)
