"""Releases: a copied bundle with the program that serves it. Added whole or not at all, switched by one rename.

A bundle and its program belong together (kernels, engines), so both are rolled back together. Copies are checked,
linked to what other releases hold, and repaired when they were damaged. Every file takes its name when all of it is on
the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_dflash.board.linux import drop_page_cache
from edge_dflash.builder.journal import sync_path
from edge_dflash.bundle.manifest import MANIFEST, FileEntry, Manifest
from edge_dflash.bundle.parts import hash_file
from edge_dflash.bundle.reader import Bundle, check_files, read_manifest
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


def add(layout: InstallPaths, bundle: Path, program: Path) -> tuple[str, list[str]]:
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
        discard(leftover)
    release, incoming = layout.releases / name, layout.releases / (_INCOMING + name)
    if release.is_dir():
        repaired = _repair(bundle, release / folder, manifest, _bundles(layout))
        return name, [*repaired, *_complete(release, folder, program, manifest)]
    discard(release)
    try:
        _copy(bundle, incoming / folder, manifest, _bundles(layout))
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
            discard(link)
            link.symlink_to(target)
            changed.append(str(link))
    mark = release / "no-plans"
    if manifest.runs_without_engines != mark.is_file():
        discard(mark)
        if manifest.runs_without_engines:
            mark.touch()
        changed.append(str(mark))
    return changed


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
    sync_path(layout.base)


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


def _bundles(layout: InstallPaths) -> list[Path]:
    """The bundles of all releases."""
    return [(layout.releases / name / "bundle").resolve() for name in history(layout)]


def _write_history(layout: InstallPaths, names: list[str]) -> None:
    fresh = layout.history.with_name(".history")
    fresh.write_text("".join(f"{name}\n" for name in names))
    fresh.chmod(0o644)
    sync_path(fresh)
    fresh.replace(layout.history)


def _copy(source: Path, target: Path, manifest: Manifest, others: Sequence[Path]) -> None:
    """Copy a bundle. Files that the bundles ``others`` hold are links to theirs, unless they are damaged there.

    Raises BundleError when the source is damaged, EdgeDflashError when the disk is too small.
    """
    held: dict[tuple[str, int], Path] = {}  # files by hash and size
    for folder in others:
        with suppress(EdgeDflashError, OSError):
            held |= {(e.sha256, e.size): folder / name for name, e in read_manifest(folder).files.items()}
    held = {key: path for key, path in held.items() if path.is_file()}
    try:
        _write(source, target, manifest, held)
    except BundleError:
        if not any((entry.sha256, entry.size) in held for entry in manifest.files.values()):
            raise
        shutil.rmtree(target)
        _write(source, target, manifest, {})
    drop_page_cache(source)
    drop_page_cache(target)


def _repair(source: Path, target: Path, manifest: Manifest, others: Sequence[Path]) -> list[str]:
    """Bring a copy of ``source`` back to what it was; paths of the files that were damaged, missing or too many.

    Engines that were built in the copy stay where they are sound. Other bundles that share a damaged file get the good
    one. Raises as :func:`_copy`.
    """
    try:
        Bundle.open(target)
        return []
    except BundleError:
        wanted = _repairable(target, manifest)
    if target.is_symlink() or not target.is_dir():
        discard(target)
    files = [path for path in target.rglob("*") if path.is_symlink() or not path.is_dir()]
    strange = [path for path in files if path.relative_to(target).as_posix() not in {*wanted.files, MANIFEST}]
    for path in strange:
        path.unlink()
    damaged = [name for name, entry in wanted.files.items() if not _sound(target / name, entry)]
    _check_space(target.parent, sum(wanted.files[name].size for name in damaged))
    for name in damaged:
        files = [target / name, *(other / name for other in others if other != target)]
        sharing = [file for file in files if file.exists() and files[0].exists() and file.samefile(files[0])]
        _replace(source / name, target / name, _copy_file)
        for file in sharing[1:]:
            _replace(target / name, file, os.link)
    if wanted is manifest:
        _replace(source / MANIFEST, target / MANIFEST, _copy_file)
        damaged.append(MANIFEST)
    _check(source, target)
    return [*(str(target / name) for name in damaged), *map(str, strange)]


def discard(path: Path) -> bool:
    """Remove a file, a link or a directory; whether it was there."""
    if not os.path.lexists(path):
        return False
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    return True


def _repairable(target: Path, manifest: Manifest) -> Manifest:
    """What a copy is to be: what it says itself, unless something is damaged that its source does not have."""
    try:
        own = read_manifest(target)
    except BundleError:
        return manifest
    damaged = (name for name, entry in own.files.items() if not _sound(target / name, entry))
    return own if all(manifest.files.get(name) == own.files[name] for name in damaged) else manifest


def _sound(file: Path, entry: FileEntry) -> bool:
    try:
        return not file.is_symlink() and hash_file(file) == entry
    except OSError:
        return False


def _replace(source: Path, file: Path, copied: Callable[[Path, Path], object]) -> None:
    """Let ``source``, copied or linked, take the name of ``file``."""
    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.fresh")
    fresh.unlink(missing_ok=True)
    copied(source, fresh)
    discard(file)
    fresh.replace(file)
    sync_path(file.parent)


def _write(source: Path, target: Path, manifest: Manifest, held: Mapping[tuple[str, int], Path]) -> None:
    _check_space(target.parent.parent, sum(e.size for e in manifest.files.values() if (e.sha256, e.size) not in held))
    target.mkdir(parents=True)
    for name in (*manifest.files, MANIFEST):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        entry = manifest.files.get(name)
        known = held.get((entry.sha256, entry.size)) if entry else None
        if known is not None:
            os.link(known, file)
        else:
            _copy_file(source / name, file)
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
        sync_path(folder)
    _check(source, target)


def _copy_file(source: Path, file: Path) -> None:
    """Copy a file, which everybody may read, to the disk."""
    shutil.copyfile(source, file)
    file.chmod(0o644)
    sync_path(file)


def _check_space(folder: Path, missing: int) -> None:
    """Raise EdgeDflashError unless the disk takes so many bytes more."""
    if (free := shutil.disk_usage(folder).free) < missing + _SPARE:
        raise EdgeDflashError(
            f"{folder} has {free / 1e9:.2f} GB free, the bundle takes {missing / 1e9:.2f}; "
            "free some, or remove old releases by installing with --keep 1"
        )


def _check(source: Path, target: Path) -> None:
    """Raise BundleError unless a copy is whole."""
    try:
        Bundle.open(target)
    except BundleError as error:
        raise BundleError(f"the copy of {source} is not what it should be: {error}") from None
