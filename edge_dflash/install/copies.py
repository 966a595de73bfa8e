"""Copies of bundles: checked, linked to what other releases hold, and repaired when they were damaged.

Every file takes its name when all of it is on the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from edge_dflash.board.linux import drop_page_cache
from edge_dflash.builder.journal import sync_path
from edge_dflash.bundle.manifest import MANIFEST, FileEntry, Manifest
from edge_dflash.bundle.parts import hash_file
from edge_dflash.bundle.reader import Bundle, read_manifest
from edge_dflash.errors import BundleError, EdgeDflashError

_SPARE = 64 << 20  # bytes of disk beside a copy
_Held: TypeAlias = Mapping[tuple[str, int], Path]  # files by hash and size


def copy(source: Path, target: Path, manifest: Manifest, others: Sequence[Path]) -> None:
    """Copy a bundle. Files that the bundles ``others`` hold are links to theirs, unless they are damaged there.

    Raises BundleError when the source is damaged, EdgeDflashError when the disk is too small.
    """
    held = _held(others)
    try:
        _write(source, target, manifest, held)
    except BundleError:
        if not any((entry.sha256, entry.size) in held for entry in manifest.files.values()):
            raise
        shutil.rmtree(target)
        _write(source, target, manifest, {})
    drop_page_cache(source)
    drop_page_cache(target)


def repair(source: Path, target: Path, manifest: Manifest, others: Sequence[Path]) -> list[str]:
    """Bring a copy of ``source`` back to what it was; paths of the files that were damaged, missing or too many.

    Plans that were built in the copy stay where they are sound. Other bundles that share a damaged file get the good
    one. Raises as :func:`copy`.
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
        sharing = [other / name for other in others if other != target and _same(other / name, target / name)]
        _replace(source / name, target / name, _copy_file)
        for file in sharing:
            _replace(target / name, file, os.link)
    if wanted is manifest:
        _replace(source / MANIFEST, target / MANIFEST, _copy_file)
        damaged.append(MANIFEST)
    _check(source, target)
    return [*(str(target / name) for name in damaged), *map(str, strange)]


def discard(path: Path) -> None:
    """Remove a file, a link or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
        return not file.is_symlink() and hash_file(file, lambda count: None) == entry
    except OSError:
        return False


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
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


def _write(source: Path, target: Path, manifest: Manifest, held: _Held) -> None:
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


def _held(bundles: Sequence[Path]) -> _Held:
    found: dict[tuple[str, int], Path] = {}
    for folder in bundles:
        with suppress(EdgeDflashError, OSError):
            found |= {(e.sha256, e.size): folder / name for name, e in read_manifest(folder).files.items()}
    return {key: path for key, path in found.items() if path.is_file()}
