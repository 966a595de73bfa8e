"""What the doctor looks at, gathered once, and what its checks add up to; judging the facts needs no machine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from edge_dflash.backends.cuda.compile import kernels_digest
from edge_dflash.backends.cuda.support import DeviceFacts, device_facts
from edge_dflash.backends.tensorrt.flavours import TENSORRT, TENSORRT_RTX
from edge_dflash.board.linux import drop_page_cache
from edge_dflash.board.profiles import BoardProfile, JetPackVersion, load_board, match_board
from edge_dflash.board.state import BoardState, read_board_state
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.bundle.reader import Bundle, check_files, read_manifest
from edge_dflash.checks.inspect import inspect_manifest
from edge_dflash.errors import BackendError, EdgeDflashError

SERVICE = "edge-dflash.service"
INSTALLED = Path("opt/edge-dflash/current/bundle")
_NODES = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "nvmap", "nvhost-ctrl-gpu", "nvgpu/*/ctrl")
_DISTRIBUTIONS = {TENSORRT.module: ("tensorrt", "tensorrt-cu13"), TENSORRT_RTX.module: ("tensorrt-rtx",)}
_LIBRARIES = ("usr/lib/aarch64-linux-gnu", "usr/lib/x86_64-linux-gnu")
_PROPERTIES = ("LoadState", "ActiveState", "SubState", "Result", "NRestarts", "StatusText")

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What a check found. ``remedy`` is empty only where there is nothing to do."""

    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """A finding under its code. The fields are its JSON form."""

    code: str
    status: Status
    found: str
    remedy: str
    name: str  # what the code is about


def ok(found: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", found)


def warn(found: str, remedy: str) -> Finding:
    """It works, or may; worse than it could."""
    return Finding("warn", found, remedy)


def fail(found: str, remedy: str) -> Finding:
    """The bundle cannot be served, or the service does not run as it should."""
    return Finding("fail", found, remedy)


@dataclass(frozen=True)
class BundleFacts:
    """A bundle that was given, or the installed one."""

    path: Path
    manifest: Manifest | None  # None: see error
    error: str | None  # of the manifest or the files
    needs_bytes: int | None  # weights, states and scratch of the loaded pair
    hashed: bool  # the files were compared with their hashes


@dataclass(frozen=True)
class Facts:
    """What was found. None and empty: not found here."""

    board: BoardState = field(default_factory=BoardState)
    profile: BoardProfile | None = None
    device: DeviceFacts | None = None
    device_error: str = ""  # why there is no device
    tensorrt: Mapping[str, str] = field(default_factory=dict)  # version by flavour: tensorrt, tensorrt_rtx
    kernels: str = ""  # digest of the kernels of this version
    disk_free: int | None = None  # bytes where bundles and sessions are kept
    service: Mapping[str, str] | None = None  # properties of systemd; None: no systemd
    nodes: Mapping[str, bool] = field(default_factory=dict)  # device nodes of the GPU: may this user open them?
    bundle: BundleFacts | None = None

    @property
    def manifest(self) -> Manifest | None:
        """The bundle's, if it can be read."""
        return self.bundle.manifest if self.bundle else None

    @property
    def jetpack(self) -> JetPackVersion | None:
        """The JetPack of the running release: 38.2.1 is of JetPack 7.0 as 38.2 is."""
        if (release := self.board.release) is None or self.profile is None:
            return None
        return next((v for v in self.profile.jetpacks if is_release(release, v.jetson_linux)), None)


def is_release(found: str, wanted: str) -> bool:
    """Whether version ``found`` is ``wanted`` or one of its patches: 10.13.3.9 is of 10.13.3."""
    return f"{found}.".startswith(f"{wanted}.")


def gather(bundle: Path | None = None, *, hashes: bool = False, root: Path = Path("/")) -> Facts:
    """Look at the machine. Raises nothing for what is missing.

    ``bundle`` None takes the installed one. ``hashes`` reads all of its files.
    """
    board = read_board_state(root)
    profile = match_board(board.model, board.memory.total if board.memory else None) if board.model else None
    try:
        device, error = device_facts(), ""
    except BackendError as reason:
        device, error = None, str(reason)
    if bundle is None and (root / INSTALLED).is_dir():
        bundle = root / INSTALLED
    return Facts(
        board,
        profile,
        device,
        error,
        tensorrt_versions(root),
        kernels_digest(),
        _disk_free(root),
        _service(),
        _nodes(root),
        None if bundle is None else look_at(bundle, profile, hashes=hashes),
    )


def look_at(path: Path, profile: BoardProfile | None, *, hashes: bool) -> BundleFacts:
    """Read a bundle's manifest and compare its files; the first that is wrong ends it."""
    try:
        manifest = read_manifest(path)
    except EdgeDflashError as error:
        return BundleFacts(path, None, str(error), None, False)
    needs = inspect_manifest(manifest, board=profile or load_board("agx-thor")).total_bytes
    try:
        check_files(path, manifest)
        if hashes:
            Bundle.open(path)
            drop_page_cache(path)
    except (EdgeDflashError, OSError) as error:
        return BundleFacts(path, manifest, str(error), needs, False)
    return BundleFacts(path, manifest, None, needs, hashes)


def tensorrt_versions(root: Path) -> dict[str, str]:
    """Versions of what Python would import, by module, or of JetPack's library; nothing is loaded."""
    found: dict[str, str] = {}
    for module, names in _DISTRIBUTIONS.items():
        for name in names:
            with suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(module, importlib.metadata.version(name))
    libraries = [path.name for folder in _LIBRARIES for path in (root / folder).glob("libnvinfer.so.*")]
    parts = [m.groups() for name in libraries if (m := re.fullmatch(r"libnvinfer\.so\.(\d+)\.(\d+)\.(\d+)", name))]
    if parts:
        found.setdefault(TENSORRT.module, ".".join(map(str, max(tuple(map(int, version)) for version in parts))))
    return found


def parse_properties(text: str) -> dict[str, str]:
    """``Key=value`` lines of ``systemctl show``."""
    return {key: value for key, equals, value in (line.partition("=") for line in text.splitlines()) if equals}


def _service() -> dict[str, str] | None:
    command = ["systemctl", "show", SERVICE, f"--property={','.join(_PROPERTIES)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_properties(done.stdout)


def _disk_free(root: Path) -> int | None:
    for folder in ("opt/edge-dflash/releases", "opt", ""):
        if (root / folder).is_dir():
            return shutil.disk_usage(root / folder).free
    return None


def _nodes(root: Path) -> dict[str, bool]:
    found = sorted(path for pattern in _NODES for path in (root / "dev").glob(pattern))
    return {f"/{path.relative_to(root)}": os.access(path, os.R_OK | os.W_OK) for path in found}


def healthy(checks: Sequence[Check]) -> bool:
    """Whether none failed."""
    return all(check.status != "fail" for check in checks)


def report(checks: Sequence[Check], facts: Facts) -> dict[str, Any]:
    """The one object of ``--json``."""
    return {
        "ok": healthy(checks),
        "counts": {status: sum(check.status == status for check in checks) for status in get_args(Status)},
        "checks": [asdict(check) for check in checks],
        "bundle": None if facts.bundle is None else str(facts.bundle.path),
        "profile": None if facts.profile is None else facts.profile.name,
        "board": facts.board.to_json(),
    }
