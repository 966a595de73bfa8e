"""Memory of pictures in flight: what a pixel takes, who waits for whom, and what ends the waiting."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
from paths import ROOT
from picture_files import PUBLISHED, encoded, noise
from PIL import Image

from edge_dflash.errors import ImageError
from edge_dflash.pictures.gate import PIXEL_BYTES, Gate, in_flight
from edge_dflash.pictures.parts import MOST_WORK
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
