"""The directory beside the output in which a build collects its files until all of them are there.

``OUTPUT.building/journal.jsonl`` has a header line (inputs of the build, how to resume it) and one line for each
finished file; ``OUTPUT.building/bundle/`` becomes OUTPUT by one rename at the end. A file gets its name only when all
its bytes are on the disk, and its journal line only after that, so a kill at any moment loses the file in progress and
nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from edge_dflash.bundle.manifest import MANIFEST, FileEntry
from edge_dflash.bundle.parts import (
    JOURNAL,
    JOURNAL_SCHEMA,
    Advance,
    Piece,
    building_path,
    hash_file,
    read_journal,
    uncounted,
    write_file,
)
from edge_dflash.common.files import replacing, sync_path
from edge_dflash.errors import BuildError

PREVIOUS = "previous"  # the output that is being replaced


def check_free(output: Path, *, force: bool) -> None:
    """Raise BuildError unless a bundle may be put at ``output``: it is free, or a bundle that ``force`` gives up."""
    if not output.exists() and not output.is_symlink():
        return
    if not output.is_dir() or output.is_symlink():
        raise BuildError(f"--output {output} exists and is no directory; choose another name")
    if not any(output.iterdir()):
        return
    if not force:
        raise BuildError(f"--output {output} exists; remove it, choose another, or replace it with --force")
    if not (output / MANIFEST).is_file():
        raise BuildError(f"--output {output} holds no bundle, so --force does not replace it; choose another directory")


def check_space(output: Path, size: int, made: str = "*", why: str = "") -> None:
    """Compare bytes of a bundle with the free space of the disk it goes to, less what an earlier run left there.

    ``made``: which files of the earlier run are among them; ``why``: what is to be said of the size.
    """
    staging = building_path(output) / "bundle"
    done = sum(path.stat().st_size for path in staging.rglob(made) if path.is_file()) if staging.is_dir() else 0
    place = next(parent for parent in output.absolute().parents if parent.exists())
    free, needed = shutil.disk_usage(place).free, max(0, size - done)
    if free < needed:
        raise BuildError(
            f"the bundle needs {needed / 1e6:,.1f} MB more{why} in {place}, which has {free / 1e6:,.1f} MB free; "
            "free some space or choose another --output"
        )


def recover(output: Path) -> None:
    """Put the output back that a kill between the two renames of :meth:`WorkDir.finish` left in ``OUTPUT.building``.

    Raises BuildError when another process is about to do that.
    """
    header = read_journal(building_path(output) / JOURNAL)[0]
    if header is not None and not output.exists() and (building_path(output) / PREVIOUS).is_dir():
        with WorkDir(output, header["fingerprint"], header["resume"], force=True):
            pass


class WorkDir:
    """An open, locked working directory. Use as a context manager; leaving it keeps what was finished."""

    def __init__(self, output: Path, fingerprint: Mapping[str, str], resume: str, *, force: bool = False) -> None:
        """Take up the build that was begun with the same fingerprint, or begin a new one.

        ``force`` allows :meth:`finish` to replace a bundle that is at the output by then.
        Raises BuildError when another process builds the same output, or a foreign directory is in the way.
        """
        self.output = output
        self.root = building_path(output)
        self.staging = self.root / "bundle"
        self._previous = self.root / PREVIOUS
        self._force = force
        self.warnings: list[str] = []
        self._entries: dict[str, FileEntry] = {}
        self._logging = Lock()
        if self.root.is_dir() and any(self.root.iterdir()) and not (self.root / JOURNAL).is_file():
            raise BuildError(f"{self.root} exists and is not a build directory; move it away")
        self.root.mkdir(parents=True, exist_ok=True)
        self._journal = (self.root / JOURNAL).open("ab")
        try:
            self._lock()
            self._restore_previous()
            self._take_up(fingerprint, resume)
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> WorkDir:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    @property
    def finished(self) -> Mapping[str, FileEntry]:
        """Files of an earlier run, not yet checked, and of this one."""
        return self._entries

    def reuse(self, name: str, advance: Advance = uncounted) -> FileEntry | None:
        """Entry of a file that an earlier run finished and that still has its hash; None: write it."""
        entry, path = self._entries.get(name), self.staging / name
        if entry is None or path.is_symlink() or not path.is_file() or path.stat().st_size != entry.size:
            return None
        return entry if hash_file(path, advance) == entry else None

    def add(self, name: str, pieces: Iterable[Piece], advance: Advance = uncounted) -> FileEntry:
        """Entry of the file ``name``: as an earlier run finished it, or written from ``pieces``, made only then.

        Threads may make different files at the same time.
        """
        if (entry := self.reuse(name, advance)) is not None:
            return entry
        path = self.staging / name
        partial = path.with_name(path.name + ".partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, partial):
            entry = write_file(partial, pieces, advance)
        return self._keep(name, entry)

    def link(self, name: str, source: Path, entry: FileEntry) -> FileEntry:
        """Let ``source`` be the file ``name``: the same file where the disk can link, else a copy."""
        path = self.staging / name
        if name in self._entries and path.is_file() and path.samefile(source):
            return entry
        if self.reuse(name) is not None:
            return entry
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            os.link(source, path)
        except OSError:
            partial = path.with_name(path.name + ".partial")
            with replacing(path, partial):
                shutil.copyfile(source, partial)
        return self._keep(name, entry)

    def _keep(self, name: str, entry: FileEntry) -> FileEntry:
        sync_path((self.staging / name).parent)
        self._log({"file": name, "sha256": entry.sha256, "size": entry.size})
        self._entries[name] = entry
        return entry

    def finish(self, manifest: bytes, *dropped: str) -> None:
        """Write the manifest, remove files that only the build needs, and rename the whole to the output.

        Raises BuildError when that is in the way by now.
        """
        check_free(self.output, force=self._force)
        for name in dropped:
            (self.staging / name).unlink(missing_ok=True)
        write_file(self.staging / MANIFEST, [manifest])
        for path in (*(p for p in self.staging.rglob("*") if p.is_dir()), self.staging):
            sync_path(path)
        if self.output.exists():
            self.output.rename(self._previous)
        self.staging.rename(self.output)
        sync_path(self.output.parent)
        shutil.rmtree(self.root)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = (self.root / JOURNAL).stat().st_ino == os.fstat(self._journal.fileno()).st_ino
        except (BlockingIOError, FileNotFoundError):
            same = False
        if not same:
            raise BuildError(f"another process is building {self.output}; wait for it or choose another --output")

    def _restore_previous(self) -> None:
        """A kill between the two renames of :meth:`finish` left the old output here."""
        if self._previous.exists():
            if self.output.exists():
                shutil.rmtree(self._previous)
            else:
                self._previous.rename(self.output)

    def _take_up(self, fingerprint: Mapping[str, str], resume: str) -> None:
        header, entries, whole = read_journal(self.root / JOURNAL)
        old = header["fingerprint"] if header else {}
        if header and old == fingerprint:
            self._entries = entries
            self._journal.truncate(whole)  # drops a line that a kill cut short
        else:
            if header:
                keys = [key for key in {**old, **fingerprint} if old.get(key) != fingerprint.get(key)]
                what = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
                self.warnings.append(f"the unfinished build in {self.root} had other inputs ({what}); starting over")
            shutil.rmtree(self.staging, ignore_errors=True)
            self._journal.truncate(0)
            self._log({"schema": JOURNAL_SCHEMA, "resume": resume, "fingerprint": dict(fingerprint)})
        self.staging.mkdir(exist_ok=True)
        for path in [p for p in self.staging.rglob("*") if p.is_symlink() or not p.is_dir()]:
            if path.relative_to(self.staging).as_posix() not in self._entries:
                path.unlink()

    def _log(self, record: dict[str, Any]) -> None:
        with self._logging:
            self._journal.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())
