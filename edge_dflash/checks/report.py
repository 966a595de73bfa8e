"""What an owner of a board sends to prove a bundle, or to report a fault: one JSON file with all that was found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_dflash.bundle.manifest import Manifest, Plans
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.checks.doctor import examine
from edge_dflash.checks.doctor import report as doctor_report
from edge_dflash.checks.doctor_facts import gather
from edge_dflash.checks.machine import describe
from edge_dflash.common.tables import encode
from edge_dflash.errors import RequestError


def check_report(file: Path) -> None:
    """Raise RequestError, before any work, unless a report can be written to ``file``."""
    if file.is_dir() or not file.parent.is_dir():
        raise RequestError(f"--report {file} is no file in a directory that exists; give another name")


def write_report(file: Path, bundle: Path, found: Mapping[str, Any], bench: Mapping[str, Any] | None) -> None:
    """Write what ``verify`` found, the doctor's checks, the benchmark (None: it was not run) and what ran it.

    Raises OSError.
    """
    facts = gather(bundle)
    text = {
        "what": "Report of edge-dflash verify",
        "ok": found["ok"],
        "machine": describe(),
        "bundle": _bundle(bundle, read_manifest(bundle)),
        "verify": found,
        "bench": bench,
        "doctor": doctor_report(examine(facts), facts),
    }
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(json.dumps(text, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    fresh.replace(file)


def _plans(plans: Plans | None) -> dict[str, Any] | None:
    if plans is None:
        return None
    return {"flavour": plans.flavour, "version": plans.version, "count": len(plans.names)}


def _bundle(path: Path, manifest: Manifest) -> dict[str, Any]:
    """What identifies a bundle, without its thousands of names."""
    return {
        "path": str(path),
        "created_by": manifest.created_by,
        "backend": manifest.backend,
        "backends": list(manifest.backends),
        "trial": None if manifest.trial is None else encode(manifest.trial),
        "arch": manifest.arch,
        "architecture": manifest.pair.target.architecture,
        "recipe": manifest.recipe,
        "precision": encode(manifest.precision),
        "weights": manifest.weight_summary,
        "block_size": manifest.block_size,
        "max_context": manifest.max_context,
        "prefill_chunk": manifest.prefill_chunk,
        "bytes": manifest.size,
        "tools": dict(manifest.tools),
        "plans": _plans(manifest.plans),
    }
