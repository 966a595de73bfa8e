"""Results files: one JSON object whose ``runs`` grow by one with every benchmark that is recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_dflash.errors import RequestError


def check_record(file: Path) -> list[Any]:
    """The runs in ``file`` so far; none when it does not exist. Raises RequestError for another kind of file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file.parent.is_dir():
            return []
        raise RequestError(f"{file.parent} is no directory; make it first or give another --record") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{file} cannot be read as JSON ({error}); give another --record") from None
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise RequestError(f"{file} holds no object with a list of runs; give another --record")
    return list(found["runs"])


def append(file: Path, result: Mapping[str, Any]) -> None:
    """Add a result. Raises RequestError as :func:`check_record`."""
    runs = [*check_record(file), result]
    lines = ",\n".join("  " + json.dumps(run, allow_nan=False) for run in runs)
    text = '{\n "what": "Runs of edge-dflash bench, oldest first, one a line",\n "runs": [\n' + lines + "\n ]\n}\n"
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)
