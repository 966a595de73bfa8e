"""Memory of pictures in flight: what a pixel takes, who waits for whom, and what ends the waiting."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import time
import zlib

import numpy as np
import pytest
from paths import ROOT
from picture_files import PUBLISHED, encoded, noise
from PIL import Image

from edge_dflash.errors import ImageError
from edge_dflash.pictures import decode as reading
from edge_dflash.pictures.decode import MOST_WORK, PIXEL_BYTES, Gate, in_flight, parts_of
from edge_dflash.pictures.picture import picture_of, pictures_of

SIDE = 2400  # of large pictures: 5.8 million pixels
PEAK = """
import sys
from pathlib import Path
sys.path.insert(0, {support!r})
from picture_files import PUBLISHED, encoded, noise
from edge_dflash.pictures.picture import picture_of

def memory(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

for name in sys.argv[1:]:
    source = Path(name).read_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = memory("VmRSS")
    picture_of(source, PUBLISHED)
    print(memory("VmHWM") - before)
"""


def wide(mode):
    """A large image of a mode, whose file is small."""
    if mode == "I;16":
        return Image.new("I;16", (SIDE, SIDE), 700)
    return Image.fromarray(np.tile(noise(40, 60), (SIDE // 40, SIDE // 60, 1))).convert(mode)


FORMS = {
    "1 bit": ("1", "PNG", {}),
    "grey": ("L", "PNG", {}),
    "colour": ("RGB", "PNG", {}),
    "clear": ("RGBA", "PNG", {}),
    "16 bits": ("I;16", "PNG", {}),
    "jpeg": ("RGB", "JPEG", {}),
    "jpeg in scans": ("RGB", "JPEG", {"progressive": True, "subsampling": 0}),
    "jpeg of four inks": ("CMYK", "JPEG", {"progressive": True}),
}


def test_a_pixel_takes_no_more_than_is_counted(tmp_path):
    exif, files = Image.Exif(), {}
    for turned in (1, 6):
        exif[0x0112] = turned
        for name, (mode, form, options) in FORMS.items():
            files[name, turned] = tmp_path / f"{name} {turned}"
            files[name, turned].write_bytes(encoded(wide(mode), form, exif=exif.tobytes(), **options))
    script = PEAK.format(support=str(ROOT / "tests" / "support"))
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, files.values())], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    taken = {name: int(line) / SIDE**2 for name, line in zip(files, done.stdout.split(), strict=True)}
    assert max(taken.values()) < PIXEL_BYTES, taken


def test_callers_are_let_in_in_their_order_and_never_above_the_budget():
    gate, begun, most, lock = Gate(100), [], [0], threading.Lock()

    def read(name, size, go):
        with gate.hold(size):
            with lock:
                begun.append(name)
                most[0] = max(most[0], gate.held)
            assert go.wait(30)

    first, rest = threading.Event(), threading.Event()
    threads = [threading.Thread(target=read, args=("first", 60, first))]
    threads[0].start()
    while not gate.held:
        time.sleep(0.001)
    for name, size in (("large", 70), ("small", 10), ("huge", 10_000)):
        waiting = len(gate._waiting)
        threads.append(threading.Thread(target=read, args=(name, size, rest)))
        threads[-1].start()
        while len(gate._waiting) == waiting:
            time.sleep(0.001)
    assert begun == ["first"]  # the small one does not pass the large one
    first.set()
    rest.set()
    for thread in threads:
        thread.join(30)
    assert begun == ["first", "large", "small", "huge"]
    assert most[0] <= gate.budget
    assert gate.held == 0


class Enough(Exception):
    pass


def test_what_a_check_raises_ends_the_waiting_and_holds_nothing_up():
    gate, asked = Gate(100), []

    def check():
        asked.append(gate.held)
        if len(asked) == 3:
            raise Enough

    with gate.hold(60):
        with pytest.raises(Enough), gate.hold(60, check):
            pass
        with gate.hold(40):
            assert gate.held == 100
    assert asked == [60] * 3
    assert gate.held == 0


def test_memory_is_given_back_however_reading_ends():
    gate, broken = Gate(in_flight(1 << 20)), encoded(noise(40, 60))[:-200]
    for _ in range(3):
        with pytest.raises(ImageError, match="cannot be decoded"):
            pictures_of([noise(40, 60), broken], PUBLISHED, gate=gate)
        assert gate.held == 0
    assert pictures_of([noise(40, 60)], PUBLISHED, gate=gate)


def text_bomb():
    """A small picture with compressed texts of a megabyte each."""
    file = encoded(noise(40, 60))
    data = b"k\0\0" + zlib.compress(bytes(1 << 20))
    chunk = struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))
    return file[:33] + chunk * 12 + file[33:]


def test_texts_beside_the_pixels_are_counted():
    held = []

    class Watched(Gate):
        def hold(self, size, check=None):
            held.append(size)
            return super().hold(size)

    pictures_of([text_bomb()], PUBLISHED, gate=Watched(in_flight(20_000_000)))
    assert held[0] > 12 * (4 << 20)


def progressive(scans, side):
    """A progressive JPEG with that many scans, of which the last ones are small."""
    file = encoded(np.full((side, side, 3), 128, np.uint8), "JPEG", progressive=True)
    last = file[file.rindex(b"\xff\xda") : -2]
    return file[:-2] + last * (scans - file.count(b"\xff\xda")) + b"\xff\xd9"


def test_scans_times_pixels_are_bounded_before_they_are_decoded():
    side = 2200
    picture_of(progressive(20, 640), PUBLISHED)
    assert 60 * side**2 > MOST_WORK
    with pytest.raises(ImageError, match=r"60 scans of 2200 x 2200 pixels, 290,400,000 pixels of all scans, at most"):
        picture_of(progressive(60, side), PUBLISHED)


def test_a_picture_of_all_the_pixels_that_are_allowed_may_have_the_scans_of_any_encoder():
    file = progressive(13, 640)
    size = struct.pack(">HH", 640, 640)
    assert file.count(size) == 1
    huge = file.replace(size, struct.pack(">HH", 8000, 10000))  # says so, and is never decoded
    parts = parts_of(huge, 80_000_000)
    assert (parts.scans, parts.height * parts.width) == (13, 80_000_000)
    assert reading.opened(huge, reading.ImageLimits(pixels=80_000_000)).width == 10000
    with pytest.raises(ImageError, match="at most 268,435,456 are decoded"):
        reading.opened(huge)
    with pytest.raises(ImageError, match="at most 1,040,000,000 are decoded"):
        parts_of(progressive(20, 640).replace(size, struct.pack(">HH", 8000, 10000)), 80_000_000)


def test_a_size_that_is_said_twice_is_no_size():
    file = encoded(noise(40, 60))
    twice = file[:33] + file[8:33].replace(struct.pack(">II", 60, 40), struct.pack(">II", 4, 4)) + file[33:]
    with pytest.raises(ImageError, match="cannot be decoded"):
        picture_of(twice, PUBLISHED)
