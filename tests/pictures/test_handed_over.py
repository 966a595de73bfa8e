"""What callers hand over: one private copy is read, and every kind of object is a picture or refused in one line."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from picture_files import GOLDEN, encoded, noise
from PIL import Image, ImageFile

from edge_dflash.errors import ImageError
from edge_dflash.pictures import decode as reading
from edge_dflash.pictures import picture as making
from edge_dflash.pictures.picture import picture_of

FRAME, OTHER = noise(75, 101), noise(75, 101, 1)
WANTED = picture_of(FRAME, GOLDEN)


def array():
    found = FRAME.copy()
    return found, lambda: found.__setitem__(..., OTHER)


def planes():
    """An array whose memory lies as a picture's planes do, which nothing later has to copy."""
    found = np.ascontiguousarray(FRAME.transpose(2, 0, 1)).transpose(1, 2, 0)
    return found, lambda: found.__setitem__(..., OTHER)


def view():
    found = bytearray(FRAME.tobytes())
    return memoryview(found).cast("B", FRAME.shape), lambda: found.__setitem__(slice(None), OTHER.tobytes())


def file_in_memory():
    found = bytearray(encoded(FRAME))
    return found, lambda: found.__setitem__(slice(40, 80), bytes(40))


def view_of_a_file():
    found = bytearray(encoded(FRAME))
    return memoryview(found), lambda: found.__setitem__(slice(40, 80), bytes(40))


def pillow():
    found = Image.fromarray(FRAME)
    return found, lambda: found.paste(Image.fromarray(OTHER))


@pytest.mark.parametrize("kind", [array, planes, view, file_in_memory, view_of_a_file, pillow])
@pytest.mark.parametrize("step", ["resize", "_patches"])
def test_a_frame_that_is_overwritten_while_it_is_read_has_the_name_of_what_was_read(kind, step, monkeypatch):
    """At each step of the way, after the copy."""
    source, overwrite = kind()
    original = getattr(making, step)

    def late(*given):
        overwrite()
        return original(*given)

    monkeypatch.setattr(making, step, late)
    found = picture_of(source, GOLDEN)
    assert np.array_equal(found.levels, WANTED.levels)
    assert found.digest == WANTED.digest
    assert not found.levels.flags.writeable


def test_a_name_is_that_of_all_that_is_read():
    """Whatever was torn on the way: equal names are equal patches."""
    torn = FRAME.copy()
    torn[40:] = OTHER[40:]
    found = [picture_of(one, GOLDEN) for one in (FRAME, torn, OTHER, FRAME.copy())]
    for one in found:
        for other in found:
            assert (one.digest == other.digest) == np.array_equal(one.levels, other.levels)
    flat = np.full((64, 96, 3), 7, np.uint8)
    assert picture_of(flat, GOLDEN).digest != picture_of(flat.transpose(1, 0, 2), GOLDEN).digest


def test_a_file_is_read_once(tmp_path, monkeypatch):
    file = tmp_path / "frame.png"
    file.write_bytes(encoded(FRAME))
    read = reading._read

    def replaced(path, limits):
        data = read(path, limits)
        file.write_bytes(encoded(OTHER))
        return data

    monkeypatch.setattr(reading, "_read", replaced)
    assert picture_of(file, GOLDEN).digest == WANTED.digest


def test_memory_of_every_layout_is_the_same_picture():
    wide = np.repeat(FRAME, 2, 1)
    turned = np.ascontiguousarray(FRAME[::-1, ::-1])
    frozen = FRAME.copy()
    frozen.flags.writeable = False
    for source in (
        np.asfortranarray(FRAME),
        wide[:, ::2],
        turned[::-1, ::-1],
        frozen,
        memoryview(FRAME),
        memoryview(np.asfortranarray(FRAME)),
        memoryview(turned[::-1, ::-1]),
        memoryview(frozen).toreadonly(),
        FRAME.view(np.ma.MaskedArray),
        memoryview(encoded(FRAME)),
        memoryview(bytearray(encoded(FRAME))),
    ):
        assert picture_of(source, GOLDEN).digest == WANTED.digest
        assert reading.data_url(source).startswith("data:image/png;base64,")


def released():
    found = memoryview(bytes(300)).cast("B", (10, 10, 3))
    found.release()
    return found


class Posing:
    """Has the methods of an image of Pillow, and is none."""

    def __getattr__(self, name):
        raise KeyError(name)

    convert = getexif = load = None
    width = height = -1


def closed():
    image = Image.open(base := __import__("io").BytesIO(encoded(FRAME)))
    base.close()
    return image


ODD = {
    "a view of two axes": lambda: memoryview(bytes(900)).cast("B", (30, 30)),
    "a view of no axes": lambda: memoryview(np.zeros((), np.uint8)),
    "a view of wide values": lambda: memoryview(np.zeros((10, 10, 3), np.uint16)),
    "a view of floats": lambda: memoryview(np.zeros((10, 10, 3), np.float32)),
    "a view of four channels": lambda: memoryview(np.zeros((10, 10, 4), np.uint8)),
    "a view of no pixels": lambda: memoryview(np.zeros((0, 10, 3), np.uint8)),
    "a view of too many pixels": lambda: memoryview(np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (9000, 9000, 3))),
    "a view that was released": released,
    "an array of no axes": lambda: np.array(7, np.uint8),
    "an array of objects": lambda: np.full((10, 10, 3), None),
    "a record": lambda: np.zeros((10, 10, 3), [("r", np.uint8)]),
    "texts": lambda: np.full((10, 10, 3), "a"),
    "dates": lambda: np.zeros((10, 10, 3), "M8[s]"),
    "a value of NumPy": lambda: np.uint8(3),
    "a poser": Posing,
    "a class": lambda: Posing,
    "an image that was closed": closed,
    "an image without pixels": lambda: Image.new("RGB", (0, 5)),
    "a set": set,
    "a generator": lambda: (i for i in range(3)),
    "bytes that are large": lambda: bytes(17 << 20),
    "a view that is large": lambda: memoryview(bytes(17 << 20)),
    "a lone surrogate": lambda: "\ud800.png",
    "a mapping": dict,
    "a tensor": lambda: torch.zeros(10, 10, 3, dtype=torch.uint8),
    "a buffer": lambda: __import__("array").array("B", encoded(FRAME)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_objects_are_refused_in_one_line(name):
    source = ODD[name]()
    for read in (lambda: picture_of(source, GOLDEN), lambda: reading.data_url(source)):
        with pytest.raises(ImageError) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


def test_an_array_that_changes_its_shape_is_refused():
    frame = FRAME.copy()
    image = reading.opened(frame)
    frame.resize((2000, 2000, 3), refcheck=False)
    with pytest.raises(ImageError, match=r"was an array \(75, 101, 3\) and is \(2000, 2000, 3\) now"):
        image.pixels()


def test_the_same_image_of_pillow_twice_at_the_same_time(tmp_path):
    file = tmp_path / "frame.png"
    file.write_bytes(encoded(noise(300, 400)))
    for _ in range(5):
        with Image.open(file) as image:
            found = making.pictures_of([image] * 8, GOLDEN)
        assert len({one.digest for one in found}) == 1


def test_files_are_decoded_at_the_same_time(monkeypatch):
    inside, load = threading.Barrier(2), ImageFile.ImageFile.load

    def together(image):
        if image.tile:
            inside.wait(20)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", together)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(reading.decode, [encoded(noise(300, 400))] * 2))
    assert (found[0] == found[1]).all()
