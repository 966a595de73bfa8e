"""Pictures: sizes, levels and patches as the published processor's, the same bytes however they come."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from golden_pairs import golden
from paths import ROOT
from picture_files import GOLDEN, PUBLISHED, encoded, noise
from PIL import Image

from edge_dflash.errors import ImageError
from edge_dflash.pictures.picture import picture_of, pictures_of, resize, target_size

FOLDER = ROOT / "tests" / "golden" / "vision-tiny"


@pytest.mark.parametrize("number", range(3))
def test_patches_are_those_of_the_published_processor(number):
    found = picture_of(FOLDER / f"img{number}.png", GOLDEN)
    assert np.array_equal(found.values(), golden("vision")[f"img{number}.pixel_values"])
    assert (1, *found.grid) == tuple(golden("vision")[f"img{number}.grid_thw"])
    assert found.tokens == found.grid[0] * found.grid[1] // 4


@pytest.mark.parametrize(
    ("size", "spec", "wanted"),
    [
        ((600, 800), PUBLISHED, (608, 800)),
        ((480, 640), PUBLISHED, (480, 640)),
        ((336, 336), PUBLISHED, (320, 320)),  # 10.5 blocks: ties to even, and below
        ((368, 368), PUBLISHED, (384, 384)),  # 11.5 blocks
        ((272, 304), PUBLISHED, (256, 320)),  # 8.5 and 9.5
        ((9, 7), GOLDEN, (96, 64)),
        ((75, 101), GOLDEN, (64, 96)),
        ((33, 226), GOLDEN, (32, 224)),
        ((1, 1), PUBLISHED, (256, 256)),
        ((1, 200), PUBLISHED, (32, 3648)),
        ((200, 1), PUBLISHED, (3648, 32)),
        ((5000, 4000), PUBLISHED, (4576, 3648)),
        ((8192, 2048), PUBLISHED, (8192, 2048)),  # as many pixels as there may be
        ((300, 300), GOLDEN, (256, 256)),
    ],
)
def test_sizes_are_multiples_within_bounds(size, spec, wanted):
    assert target_size(*size, spec) == wanted


def test_a_picture_is_not_200_times_as_long_as_it_is_wide():
    with pytest.raises(ImageError, match="200 times"):
        target_size(1, 201, PUBLISHED)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((3, 1080, 1920), (256, 448)),
        ((1, 2160, 900), (480, 160)),
        ((3, 90, 70), (96, 64)),
        ((1, 3000, 64), (32, 64)),
        ((3, 64, 70), (64, 64)),
        ((1, 11, 114), (9, 11)),
    ],
)
def test_levels_are_torchs_at_any_ratio(shape, size):
    """Of which torchvision's are made."""
    planes = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    wanted = torch.nn.functional.interpolate(torch.from_numpy(planes)[None], size=size, mode="bicubic", antialias=True)
    found = resize(planes, size)
    assert np.array_equal(found, wanted[0].numpy())
    assert found.flags.c_contiguous  # patches are views of it


def test_patches_of_a_block_are_neighbours():
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[..., 0] = np.arange(64)[:, None]
    pixels[..., 1] = np.arange(96)
    found = picture_of(pixels, GOLDEN)
    corners = [(int(row[0]), int(row[256])) for row in found.levels]
    assert corners[:8] == [(0, 0), (0, 16), (16, 0), (16, 16), (0, 32), (0, 48), (16, 32), (16, 48)]
    assert corners[12] == (32, 0)


@pytest.mark.parametrize("size", [(64, 70), (70, 64), (480, 848), (200, 1)])
def test_frames_of_any_size_become_patches(size):
    assert len(picture_of(noise(*size), GOLDEN).levels) == np.prod(target_size(*size, GOLDEN)) // GOLDEN.patch**2


def test_the_same_picture_is_the_same_however_it_comes(tmp_path):
    pixels = noise(75, 101)
    file = tmp_path / "frame.png"
    file.write_bytes(encoded(pixels))
    url = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    sources = [pixels, file, str(file), file.read_bytes(), bytearray(file.read_bytes()), url, Image.fromarray(pixels)]
    first, *others = pictures_of(sources, GOLDEN)
    for other in others:
        assert (other.digest, other.grid) == (first.digest, first.grid)
        assert np.array_equal(other.levels, first.levels)


def test_threads_change_no_byte():
    frames = [noise(60 + 7 * i, 80, i) for i in range(9)]
    for alone, together in zip([picture_of(f, GOLDEN) for f in frames], pictures_of(frames, GOLDEN), strict=True):
        assert "digest" in vars(together)  # made by its thread
        assert np.array_equal(alone.levels, together.levels)
        assert alone.digest == together.digest


@pytest.mark.parametrize("turned", [1, 3, 6, 8])
def test_orientation_is_applied(turned):
    pixels, image = noise(40, 60), None
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = turned
    found = picture_of(encoded(image, exif=exif.tobytes()), GOLDEN)
    wanted = {1: pixels, 3: np.rot90(pixels, 2), 6: np.rot90(pixels, -1), 8: np.rot90(pixels)}[turned]
    assert found.digest == picture_of(np.ascontiguousarray(wanted), GOLDEN).digest


def test_forms_of_png_become_rgb():
    pixels = noise(40, 40)
    clear = np.dstack([pixels, noise(40, 40, 1)[..., 0]])
    assert picture_of(encoded(Image.fromarray(clear)), GOLDEN).digest == picture_of(pixels, GOLDEN).digest
    grey = picture_of(encoded(Image.fromarray(pixels[..., 0])), GOLDEN)
    assert grey.digest == picture_of(np.repeat(pixels[..., :1], 3, 2), GOLDEN).digest
    deep = pixels[..., 0].astype(np.uint16) << 8 | 7
    assert picture_of(encoded(Image.fromarray(deep)), GOLDEN).digest == grey.digest
    palette = Image.fromarray(pixels).quantize(16)
    assert picture_of(encoded(palette), GOLDEN).digest == picture_of(np.array(palette.convert("RGB")), GOLDEN).digest


def test_of_an_animated_file_the_first_frame_counts():
    frames = [Image.fromarray(noise(40, 40, seed)) for seed in range(3)]
    file = encoded(frames[0], save_all=True, append_images=frames[1:])
    assert picture_of(file, GOLDEN).digest == picture_of(np.array(frames[0]), GOLDEN).digest


def test_jpeg_is_read_and_cmyk_with_it():
    pixels = noise(48, 64)
    assert picture_of(encoded(pixels, "JPEG"), GOLDEN).grid == (4, 4)
    assert picture_of(encoded(Image.fromarray(pixels).convert("CMYK"), "JPEG"), GOLDEN).grid == (4, 4)
