"""Releases: a copied bundle with the program that serves it. Added whole or not at all, switched by one rename.

A bundle and its program belong together (kernels, engines), so both are rolled back together. A release takes its name
when all of it is on the disk; one that was damaged is copied again, whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from edge_dflash.board.linux import drop_page_cache
from edge_dflash.builder.journal import recover
from edge_dflash.bundle.manifest import MANIFEST, Manifest
from edge_dflash.bundle.reader import Bundle, check_files, read_manifest
from edge_dflash.common import files
from edge_dflash.errors import BundleError, EdgeDflashError
from edge_dflash.install.host import InstallPaths

_INCOMING = ".incoming-"
_OWN = ("bundle", "run", "no-plans")  # names inside of a release
_DIGITS = 12  # digits of a release's name that tell it from others
_SPARE = 64 << 20  # bytes of disk beside a copy


@contextmanager
def locked(layout: InstallPaths) -> Iterator[None]:
    """Hold the installation for one change. Raises EdgeDflashError while another holds it."""
    layout.releases.mkdir(mode=0o755, parents=True, exist_ok=True)
    with ExitStack() as lock:
        try:
            lock.enter_context(files.locked(layout.releases))
        except (BlockingIOError, FileNotFoundError):
            raise EdgeDflashError(f"another change of {layout.base} is under way; wait for its end") from None
        yield


def add(layout: InstallPaths, bundle: Path, program: Path) -> tuple[str, list[str]]:
    """Copy ``bundle`` into a release that ``program`` serves; its name. One that is there is checked.

    Returns also the path of a damaged release that was replaced. Raises BundleError when the bundle, or its copy, is
    damaged, EdgeDflashError when the disk is too small.
    """
    bundle = bundle.resolve()
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    digest = hashlib.sha256((bundle / MANIFEST).read_bytes() + os.fsencode(program)).hexdigest()
    folder = re.sub(r"[^\w.-]", "_", bundle.name).lstrip(".-") or "bundle"
    name = f"{folder}-{digest[:_DIGITS]}"
    folder = "bundle" if folder in _OWN else folder
    for leftover in layout.releases.glob(f"{_INCOMING}*"):
        discard(leftover)
    release, incoming = layout.releases / name, layout.releases / (_INCOMING + name)
    if _sound(release, folder, program, manifest):
        return name, []
    try:
        _copy(bundle, incoming / folder, manifest)
        if folder != "bundle":
            (incoming / "bundle").symlink_to(folder)
        (incoming / "run").symlink_to(program)
        if manifest.runs_without_engines:
            (incoming / "no-plans").touch()
        incoming.chmod(0o755)
        replaced = os.path.lexists(release)
        if replaced:
            _exchange(incoming, release)
        else:
            incoming.rename(release)
        files.sync_path(layout.releases)
        discard(incoming)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    return name, [str(release)] if replaced else []


def _exchange(one: Path, other: Path) -> None:
    """Let two directories exchange their names at once, so that there always is one of each. Raises OSError."""
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE: renameat2(2) of Linux
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


def _sound(release: Path, folder: str, program: Path, manifest: Manifest) -> bool:
    """Whether a release is there and what it was when it was added from ``manifest``, or finished since."""
    if not (release / folder).parent.is_dir():
        return False
    recover(release / folder)  # of a kill while it was finished
    try:
        Bundle.open(release / folder)
    except BundleError:
        return False
    links = {release / "run": program} | ({} if folder == "bundle" else {release / "bundle": Path(folder)})
    return (
        all(link.is_symlink() and link.readlink() == target for link, target in links.items())
        and (release / "no-plans").is_file() == manifest.runs_without_engines
    )


def current(layout: InstallPaths) -> str | None:
    """Name of the release that is served."""
    return layout.current.readlink().name if layout.current.is_symlink() else None


def history(layout: InstallPaths) -> list[str]:
    """Names of the releases that are there, the newest last."""
    with suppress(FileNotFoundError):
        return [name for name in layout.history.read_text().split() if (layout.releases / name).is_dir()]
    return []


def check(layout: InstallPaths, name: str) -> None:
    """Raise BundleError for a release that lacks files; their content is compared when it is served."""
    bundle = (layout.releases / name / "bundle").resolve()
    try:
        check_files(bundle, read_manifest(bundle))
    except BundleError as error:
        raise BundleError(f"the release {name} cannot be served ({error}); install its bundle again") from None


def switch(layout: InstallPaths, name: str) -> None:
    """Serve another release from the next start on; never is there none."""
    fresh = layout.current.with_name(".current")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(Path("releases") / name)
    fresh.replace(layout.current)
    files.sync_path(layout.base)


def record(layout: InstallPaths, name: str) -> None:
    """Note that ``name`` is the newest, directly after the one that is served: that is where a rollback goes."""
    served = current(layout)
    names = [known for known in history(layout) if known not in (name, served)]
    _write_history(layout, [*names, *([served] if served not in (None, name) else []), name])


def previous(layout: InstallPaths) -> str | None:
    """The release before the one that is served."""
    names, served = history(layout), current(layout)
    at = names.index(served) if served in names else len(names)
    return names[at - 1] if at > 0 else None


def prune(layout: InstallPaths, keep: int) -> list[str]:
    """Remove all but the newest ``keep`` releases; never the one that is served. Names of those that went."""
    names, served = history(layout), current(layout)
    gone = [name for name in names[:-keep] if name != served]
    _write_history(layout, [name for name in names if name not in gone])
    strange = {path.name for path in layout.releases.iterdir() if path.is_dir()} - set(names) - {served}
    for name in (*gone, *sorted(strange)):
        shutil.rmtree(layout.releases / name, ignore_errors=True)  # what stays is strange to the next change
    return gone


def _write_history(layout: InstallPaths, names: list[str]) -> None:
    fresh = layout.history.with_name(".history")
    fresh.write_text("".join(f"{name}\n" for name in names))
    fresh.chmod(0o644)
    files.sync_path(fresh)
    fresh.replace(layout.history)


def _copy(source: Path, target: Path, manifest: Manifest) -> None:
    """Copy a bundle, which everybody may read, to the disk.

    Raises BundleError when source or copy is damaged, EdgeDflashError when the disk is too small.
    """
    missing = sum(entry.size for entry in manifest.files.values())
    folder = target.parent.parent
    if (free := shutil.disk_usage(folder).free) < missing + _SPARE:
        raise EdgeDflashError(
            f"{folder} has {free / 1e9:.2f} GB free, the bundle takes {missing / 1e9:.2f}; "
            "free some, or remove old releases by installing with --keep 1"
        )
    target.mkdir(parents=True)
    for name in (*manifest.files, MANIFEST):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, file)
        file.chmod(0o644)
        files.sync_path(file)
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
        files.sync_path(folder)
    try:
        Bundle.open(target)
    except BundleError as error:
        raise BundleError(f"the copy of {source} is not what it should be: {error}") from None
    drop_page_cache(source)
    drop_page_cache(target)


def discard(path: Path) -> bool:
    """Remove a file, a link or a directory; whether it was there."""
    if not os.path.lexists(path):
        return False
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    return True
