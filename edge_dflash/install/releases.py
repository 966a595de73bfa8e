"""Releases: a copied bundle with the program that serves it. Added whole or not at all, switched by one rename.

A bundle and its program belong together (kernels, plans), so both are rolled back together. Knows nothing of units.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_dflash.builder.journal import sync_path
from edge_dflash.bundle.manifest import MANIFEST, Manifest
from edge_dflash.bundle.reader import check_files, read_manifest
from edge_dflash.errors import BundleError, EdgeDflashError
from edge_dflash.install import copies
from edge_dflash.install.layout import Layout

_INCOMING = ".incoming-"
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
            free = os.path.samestat(os.fstat(descriptor), layout.releases.stat())  # not removed meanwhile
        except (BlockingIOError, FileNotFoundError):
            free = False
        if not free:
            raise EdgeDflashError(f"another change of {layout.base} is under way; wait for its end")
        yield
    finally:
        os.close(descriptor)


def add(layout: Layout, bundle: Path, program: Path) -> tuple[str, list[str]]:
    """Copy ``bundle`` into a release that ``program`` serves; its name. One that is there is checked, and repaired.

    Files that another release holds are linked to instead of copied. Returns also what was repaired. Raises BundleError
    when the bundle, or its copy, is damaged, EdgeDflashError when the disk is too small.
    """
    bundle = bundle.resolve()
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    digest = hashlib.sha256((bundle / MANIFEST).read_bytes() + os.fsencode(program)).hexdigest()
    folder = re.sub(r"[^\w.-]", "_", bundle.name).lstrip(".-") or "bundle"
    name = f"{folder}-{digest[:_DIGITS]}"
    folder = "bundle" if folder in _OWN else folder
    for leftover in layout.releases.glob(f"{_INCOMING}*"):
        copies.discard(leftover)
    release, incoming = layout.releases / name, layout.releases / (_INCOMING + name)
    if release.is_dir():
        repaired = copies.repair(bundle, release / folder, manifest, _bundles(layout))
        return name, [*repaired, *_complete(release, folder, program, manifest)]
    copies.discard(release)
    try:
        copies.copy(bundle, incoming / folder, manifest, _bundles(layout))
        _complete(incoming, folder, program, manifest)
        incoming.chmod(0o755)
        incoming.rename(release)
        sync_path(layout.releases)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    return name, []


def _complete(release: Path, folder: str, program: Path, manifest: Manifest) -> list[str]:
    """Bring what lies beside a release's bundle to what it should be; paths of what was changed."""
    changed = []
    for name, target in (("bundle", Path(folder)), ("run", program)):
        link = release / name
        if name != folder and not (link.is_symlink() and link.readlink() == target):
            copies.discard(link)
            link.symlink_to(target)
            changed.append(str(link))
    mark = release / "no-plans"
    if manifest.runs_without_plans != mark.is_file():
        copies.discard(mark)
        if manifest.runs_without_plans:
            mark.touch()
        changed.append(str(mark))
    return changed


def current(layout: Layout) -> str | None:
    """Name of the release that is served."""
    return layout.current.readlink().name if layout.current.is_symlink() else None


def history(layout: Layout) -> list[str]:
    """Names of the releases that are there, the newest last."""
    with suppress(FileNotFoundError):
        return [name for name in layout.history.read_text().split() if (layout.releases / name).is_dir()]
    return []


def check(layout: Layout, name: str) -> None:
    """Raise BundleError for a release that lacks files; their content is compared when it is served."""
    bundle = (layout.releases / name / "bundle").resolve()
    try:
        check_files(bundle, read_manifest(bundle))
    except BundleError as error:
        raise BundleError(f"the release {name} cannot be served ({error}); install its bundle again") from None


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
    strange = {path.name for path in layout.releases.iterdir() if path.is_dir()} - set(names) - {served}
    for name in (*gone, *sorted(strange)):
        shutil.rmtree(layout.releases / name, ignore_errors=True)  # what stays is strange to the next change
    return gone


def _bundles(layout: Layout) -> list[Path]:
    """The bundles of all releases."""
    return [(layout.releases / name / "bundle").resolve() for name in history(layout)]


def _write_history(layout: Layout, names: list[str]) -> None:
    fresh = layout.history.with_name(".history")
    fresh.write_text("".join(f"{name}\n" for name in names))
    fresh.chmod(0o644)
    sync_path(fresh)
    fresh.replace(layout.history)
