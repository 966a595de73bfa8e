"""Results files: one JSON object whose ``runs`` grow by one with every benchmark that is recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_dflash.errors import RequestError

_WHAT = "Runs of edge-dflash bench, oldest first, one a line"


def check_record(file: Path) -> None:
    """Raise RequestError unless results can be added to ``file``, which need not exist."""
    _read(file)


def append(file: Path, result: Mapping[str, Any]) -> None:
    """Add a result; what else the file says stays. Raises RequestError as :func:`check_record`."""
    found = _read(file)
    runs = ",\n".join("  " + json.dumps(run, allow_nan=False) for run in (*found.pop("runs"), result))
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in found.items())
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(f'{{\n{head} "runs": [\n{runs}\n ]\n}}\n', encoding="utf-8")
    fresh.replace(file)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file.parent.is_dir():
            return {"what": _WHAT, "runs": []}
        raise RequestError(f"{file.parent} is no directory; make it first or give another --record") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{file} cannot be read as JSON ({error}); give another --record") from None
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise RequestError(f"{file} holds no object with a list of runs; give another --record")
    return found
