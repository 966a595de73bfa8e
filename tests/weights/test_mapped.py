import mmap
import re
from pathlib import Path

import numpy as np

from edge_dflash.weights.safetensors import forget_pages


def resident(path):
    """Bytes of the file that are mapped into this process and in memory."""
    text = Path("/proc/self/smaps").read_text()
    entries = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss:\s+(\d+) kB", text)
    return sum(map(int, entries)) * 1024


def test_pages_of_a_view_are_dropped_and_read_again(tmp_path):
    path = tmp_path / "file"
    values = np.arange(1 << 20, dtype=np.uint32)
    path.write_bytes(values.tobytes())
    mapped = np.memmap(path, np.uint8, mode="r")
    view = np.asarray(mapped).view(np.uint32).reshape(1024, 1024)
    assert int(view.sum(dtype=np.uint64)) == int(values.sum(dtype=np.uint64))
    assert resident(path) == values.nbytes
    forget_pages(view[:1, 3:900])  # less than a page
    assert resident(path) == values.nbytes
    forget_pages(view[256:512])
    assert 0 < resident(path) <= values.nbytes - (1 << 20)  # a huge page is dropped as a whole
    forget_pages(view)
    assert resident(path) == 0
    assert (view == values.reshape(1024, 1024)).all()


def test_a_map_that_starts_inside_the_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    mapped = np.memmap(path, np.uint8, mode="r", offset=mmap.PAGESIZE + 16)
    assert int(mapped.sum(dtype=np.int64)) > 0
    forget_pages(np.asarray(mapped))
    assert mapped[0] == 16
    assert resident(path) <= 2 * mmap.PAGESIZE


def test_arrays_that_are_not_mapped_are_left_alone():
    array = np.ones((64, 4096))
    forget_pages(array[1:])
    forget_pages(array.T)
    assert array.all()
