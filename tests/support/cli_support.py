"""What the tests of the command line share besides fixtures."""

from __future__ import annotations

import json

PAIR = ("qwen3_5-tiny", "qwen3_5-tiny-dflash")


def last_json(out):
    """The object of the last line; with --json it is the only line."""
    assert len(out.splitlines()) == 1
    return json.loads(out)


def flip_byte(bundle):
    file = max((path for path in bundle.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
