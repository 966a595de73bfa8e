"""Releases: a copied bundle with the program that serves it. Added whole or not at all, switched by one rename.

A bundle and its program belong together (kernels, plans), so both are rolled back together. Knows nothing of units.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_dflash.build.workdir import sync_path
from edge_dflash.bundle.manifest import MANIFEST, Manifest
from edge_dflash.bundle.reader import Bundle, check_files, read_manifest
from edge_dflash.errors import BundleError, EdgeDflashError
from edge_dflash.install.layout import Layout
from edge_dflash.telemetry.memory import drop_page_cache

_INCOMING = ".incoming-"
_SPARE = 64 << 20  # bytes of disk beside a copy
_OWN = ("bundle", "run", "no-plans")  # names inside of a release
_DIGITS = 12  # digits of a release's name that tell it from others


@contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """Hold the installation for one change. Raises EdgeDflashError while another holds it."""
    layout.releases.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(layout.releases, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EdgeDflashError(f"another change of {layout.base} is under way; wait for its end") from None
        yield
    finally:
        os.close(descriptor)


def add(layout: Layout, bundle: Path, program: Path) -> str:
    """Copy ``bundle`` into a release that ``program`` serves; its name. Nothing is done when there is one already.

    Files that another release holds are linked to instead of copied. Raises BundleError when the bundle, or its copy,
    is damaged, EdgeDflashError when the disk is too small.
    """
    bundle = bundle.resolve()
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    digest = hashlib.sha256((bundle / MANIFEST).read_bytes() + os.fsencode(program)).hexdigest()
    folder = re.sub(r"[^\w.-]", "_", bundle.name).lstrip(".-") or "bundle"
    name = f"{folder}-{digest[:_DIGITS]}"
    for leftover in layout.releases.glob(f"{_INCOMING}*"):
        shutil.rmtree(leftover)
    if (layout.releases / name).is_dir():
        return name
    incoming = layout.releases / (_INCOMING + name)
    try:
        folder = "bundle" if folder in _OWN else folder
        _copy(layout, bundle, incoming / folder, manifest)
        if folder != "bundle":
            (incoming / "bundle").symlink_to(folder)
        (incoming / "run").symlink_to(program)
        if manifest.runs_without_plans:
            (incoming / "no-plans").touch()
        incoming.chmod(0o755)
        incoming.rename(layout.releases / name)
        sync_path(layout.releases)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    return name


def current(layout: Layout) -> str | None:
    """Name of the release that is served."""
    return layout.current.readlink().name if layout.current.is_symlink() else None


def history(layout: Layout) -> list[str]:
    """Names of the releases that are there, the newest last."""
    with suppress(FileNotFoundError):
        return [name for name in layout.history.read_text().split() if (layout.releases / name).is_dir()]
    return []


def switch(layout: Layout, name: str) -> None:
    """Serve another release from the next start on; never is there none."""
    fresh = layout.current.with_name(".current")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(Path("releases") / name)
    fresh.replace(layout.current)
    sync_path(layout.base)


def record(layout: Layout, name: str) -> None:
    """Note that ``name`` is the newest, directly after the one that is served: that is where a rollback goes."""
    served = current(layout)
    names = [known for known in history(layout) if known not in (name, served)]
    _write_history(layout, [*names, *([served] if served not in (None, name) else []), name])


def previous(layout: Layout) -> str | None:
    """The release before the one that is served."""
    names, served = history(layout), current(layout)
    at = names.index(served) if served in names else len(names)
    return names[at - 1] if at > 0 else None


def prune(layout: Layout, keep: int) -> list[str]:
    """Remove all but the newest ``keep`` releases; never the one that is served. Names of those that went."""
    names, served = history(layout), current(layout)
    gone = [name for name in names[:-keep] if name != served]
    _write_history(layout, [name for name in names if name not in gone])
    strange = {path.name for path in layout.releases.iterdir()} - set(names) - {served}
    for name in (*gone, *sorted(strange)):
        shutil.rmtree(layout.releases / name)
    return gone


def _write_history(layout: Layout, names: list[str]) -> None:
    fresh = layout.history.with_name(".history")
    fresh.write_text("".join(f"{name}\n" for name in names))
    fresh.chmod(0o644)
    fresh.replace(layout.history)


def _copy(layout: Layout, source: Path, target: Path, manifest: Manifest) -> None:
    held = _held(layout)
    missing = sum(entry.size for entry in manifest.files.values() if (entry.sha256, entry.size) not in held)
    if (free := shutil.disk_usage(layout.releases).free) < missing + _SPARE:
        raise EdgeDflashError(
            f"{layout.releases} has {free / 1e9:.2f} GB free, the bundle takes {missing / 1e9:.2f}; "
            "free some, or remove old releases by installing with --keep 1"
        )
    target.mkdir(parents=True)
    for name in (*manifest.files, MANIFEST):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        entry = manifest.files.get(name)
        known = held.get((entry.sha256, entry.size)) if entry else None
        if known is not None:
            os.link(known, file)
            continue
        shutil.copyfile(source / name, file)
        file.chmod(0o644)
        sync_path(file)
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
        sync_path(folder)
    try:
        Bundle.open(target)
    except BundleError as error:
        raise BundleError(f"the copy of {source} is not what it should be: {error}") from None
    drop_page_cache(source)
    drop_page_cache(target)


def _held(layout: Layout) -> Mapping[tuple[str, int], Path]:
    """Files of the releases by hash and size."""
    found: dict[tuple[str, int], Path] = {}
    for name in history(layout):
        folder = layout.releases / name / "bundle"
        with suppress(EdgeDflashError, OSError):
            found |= {(e.sha256, e.size): folder / file for file, e in read_manifest(folder.resolve()).files.items()}
    return {key: path for key, path in found.items() if path.is_file()}
