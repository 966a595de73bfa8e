"""What is no picture: refused by name, in bounded time and memory."""

from __future__ import annotations

import base64
import os
import resource
import struct
import time
import zlib
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_files import GOLDEN, encoded, noise
from PIL import Image

from edge_dflash.errors import ImageError
from edge_dflash.pictures.decode import ImageLimits
from edge_dflash.pictures.picture import picture_of, pictures_of

PNG, JPEG = encoded(noise(40, 60)), encoded(noise(40, 60), "JPEG")


def png(*chunks):
    """A PNG file of these chunks with right checksums."""
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, data in chunks:
        parts.append(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
    return b"".join(parts)


def head(width, height, depth=8, colour=2):
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)


def form(name):
    file = BytesIO()
    Image.fromarray(noise(40, 60)).save(file, name)
    return file.getvalue()


def url(data, kind="image/png"):
    return f"data:{kind};base64," + base64.b64encode(data).decode()


ENDS = (b"IEND", b"")
BROKEN = {
    "empty": b"",
    "text": b"a picture of a kettle",
    "only a signature": b"\x89PNG\r\n\x1a\n",
    "png cut in its header": PNG[:20],
    "png cut in its pixels": PNG[: len(PNG) // 2],
    "png with a wrong checksum": PNG[:60] + bytes([PNG[60] ^ 255]) + PNG[61:],
    "png of no pixels": png(head(0, 0), (b"IDAT", zlib.compress(b"")), ENDS),
    "png of no rows": png(head(10, 0), (b"IDAT", zlib.compress(b"")), ENDS),
    "png without pixels": png(head(10, 10), ENDS),
    "png of 4 gigapixels": png(head(65535, 65535), (b"IDAT", zlib.compress(b"\0" * 100)), ENDS),
    "png wider than any number": png(head(2**31 - 1, 2**31 - 1), ENDS),
    "png that says 100 megapixels": png(head(10000, 10000), (b"IDAT", zlib.compress(b"\0" * 1000)), ENDS),
    "png with an odd depth": png(head(4, 4, depth=3), (b"IDAT", zlib.compress(b"\0" * 100)), ENDS),
    "png with pixels that are not compressed": png(head(4, 4), (b"IDAT", b"no zlib"), ENDS),
    "png with a bomb of text": png(head(4, 4), (b"zTXt", b"k\0\0" + zlib.compress(b"\0" * (80 << 20))), ENDS),
    "jpeg cut in its header": JPEG[:10],
    "jpeg cut in its pixels": JPEG[: len(JPEG) // 2],
    "jpeg without tables": JPEG[:2] + JPEG[-400:],
    "jpeg that says 65500 x 65500": JPEG.replace(struct.pack(">HH", 40, 60), struct.pack(">HH", 65500, 65500), 1),
    "gif": form("GIF"),
    "bmp": form("BMP"),
    "tiff": form("TIFF"),
    "webp": form("WEBP"),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "an address": "https://example.org/frame.png",
    "a file address": "file:///etc/passwd",
    "another address": "HTTP://169.254.169.254/latest",
    "a data url without base64": "data:image/png,abc",
    "a data url of nonsense": "data:image/png;base64,@@@@",
    "a data url of nothing": "data:image/png;base64,",
    "a data url of text": url(b"hello"),
    "a path to nothing": "/no/such/frame.png",
    "a folder": "/tmp",
    "a device without an end": "/dev/zero",
    "the standard input": "/dev/stdin",
    "a path with a zero": "frame\0.png",
    "a long path": "a" * 5000,
    "None": None,
    "a number": 7,
    "a list": [[1, 2, 3]],
    "floats": np.zeros((40, 40, 3), np.float32),
    "not a number": np.full((40, 40, 3), np.nan),
    "wide integers": np.zeros((40, 40, 3), np.int64),
    "channels first": np.zeros((3, 40, 40), np.uint8),
    "one channel": np.zeros((40, 40), np.uint8),
    "four channels": np.zeros((40, 40, 4), np.uint8),
    "no pixels": np.zeros((0, 40, 3), np.uint8),
    "a strip": np.zeros((1, 400, 3), np.uint8),
    "too many pixels": np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (10000, 10000, 3)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_picture_is_refused_by_name(name):
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ImageError) as caught:
        picture_of(BROKEN[name], GOLDEN)
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ImageError, match="not a regular file"):
        picture_of(tmp_path / "pipe.png", GOLDEN)


def test_links_that_lead_nowhere_are_refused(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    with pytest.raises(ImageError, match="cannot be read"):
        picture_of(tmp_path / "a.png", GOLDEN)


def test_limits_are_the_callers(tmp_path):
    file = tmp_path / "frame.png"
    file.write_bytes(PNG)
    for source in (file, PNG, url(PNG)):
        with pytest.raises(ImageError, match="at most 1,000 are read"):
            picture_of(source, GOLDEN, ImageLimits(file_bytes=1000))
    with pytest.raises(ImageError, match="may have 2,399 together"):
        picture_of(PNG, GOLDEN, ImageLimits(pixels=2399))
    assert picture_of(PNG, GOLDEN, ImageLimits(len(PNG), 2400)).tokens


def test_the_images_of_a_request_share_the_limit():
    frames, limits = [noise(40, 60, seed) for seed in range(5)], ImageLimits(pixels=5 * 2400 - 1)
    with pytest.raises(ImageError, match="may have 11,999 together"):
        pictures_of(frames, GOLDEN, limits)
    assert len(pictures_of(frames[:4], GOLDEN, limits)) == 4
    assert len(pictures_of(frames[:4], GOLDEN, limits)) == 4  # of another request


def test_orientation_that_is_nonsense_is_no_error():
    exif = Image.Exif()
    exif[0x0112] = 99
    file = BytesIO()
    Image.fromarray(noise(40, 60)).save(file, "PNG", exif=exif.tobytes())
    assert picture_of(file.getvalue(), GOLDEN).digest == picture_of(noise(40, 60), GOLDEN).digest


@settings(max_examples=150)
@given(st.sampled_from([PNG, JPEG]), st.data())
def test_damaged_files_are_pictures_or_refused(file, data):
    broken = bytearray(file)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(broken) - 1))
        broken[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(broken)))
    with suppress(ImageError):
        assert picture_of(bytes(broken[:cut]), GOLDEN, ImageLimits(pixels=1_000_000)).tokens
