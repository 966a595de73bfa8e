"""The directory beside the output in which a build collects its files until all of them are there.

``OUTPUT.building/journal.jsonl`` has a header line (inputs of the build, how to resume it) and one line for each
finished file; ``OUTPUT.building/bundle/`` becomes OUTPUT by one rename at the end. A file gets its name only when all
its bytes are on the disk, and its journal line only after that, so a kill at any moment loses the file in progress and
nothing else. Knows nothing of what the files hold.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from edge_dflash.bundle.manifest import MANIFEST, FileEntry
from edge_dflash.bundle.parts import Advance, DurableFile, hash_file
from edge_dflash.common.files import LARGE, read_bytes
from edge_dflash.errors import BuildError

JOURNAL = "journal.jsonl"
PREVIOUS = "previous"  # the output that is being replaced
_JOURNAL_SCHEMA = 1


def building_path(output: Path) -> Path:
    """Where the build of ``output`` works."""
    return output.with_name(output.name + ".building")


def resume_command(path: Path) -> str | None:
    """The command that resumes the build of the bundle ``path``, or of which ``path`` is a working directory."""
    for root in (path, path.parent, building_path(path)):
        if root != path.parent or path.name == "bundle":
            header = _read_journal(root / JOURNAL)[0]
            if header is not None:
                return str(header["resume"])
    return None


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


def recover(output: Path) -> None:
    """Put the output back that a kill between the two renames of :meth:`WorkDir.finish` left in ``OUTPUT.building``.

    Raises BuildError when another process is about to do that.
    """
    header = _read_journal(building_path(output) / JOURNAL)[0]
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

    def reuse(self, name: str, advance: Advance) -> FileEntry | None:
        """Entry of a file that an earlier run finished and that still has its hash; None: write it."""
        entry, path = self._entries.get(name), self.staging / name
        if entry is None or path.is_symlink() or not path.is_file() or path.stat().st_size != entry.size:
            return None
        return entry if hash_file(path, advance) == entry else None

    def add(self, name: str, write: Callable[[Path], FileEntry]) -> FileEntry:
        """Make the file ``name``: ``write`` fills the path it is given and returns the entry.

        Threads may make different files at the same time.
        """
        path = self.staging / name
        partial = path.with_name(path.name + ".partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            entry = write(partial)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        partial.replace(path)
        sync_path(path.parent)
        self._log({"file": name, "sha256": entry.sha256, "size": entry.size})
        self._entries[name] = entry
        return entry

    def finish(self, manifest: bytes) -> None:
        """Write the manifest and rename the whole to the output. Raises BuildError when that is in the way by now."""
        check_free(self.output, force=self._force)
        with DurableFile(self.staging / MANIFEST, lambda _: None) as file:
            file.write(manifest)
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
        header, entries, whole = _read_journal(self.root / JOURNAL)
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
            self._log({"schema": _JOURNAL_SCHEMA, "resume": resume, "fingerprint": dict(fingerprint)})
        self.staging.mkdir(exist_ok=True)
        for path in [p for p in self.staging.rglob("*") if p.is_symlink() or not p.is_dir()]:
            if path.relative_to(self.staging).as_posix() not in self._entries:
                path.unlink()

    def _log(self, record: dict[str, Any]) -> None:
        with self._logging:
            self._journal.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())


def _read_journal(path: Path) -> tuple[dict[str, Any] | None, dict[str, FileEntry], int]:
    """Header, entries and length in bytes of the part before the first line that is not whole."""
    header: dict[str, Any] | None = None
    entries: dict[str, FileEntry] = {}
    whole = 0
    try:
        lines = read_bytes(path, LARGE).split(b"\n")[:-1]
    except OSError:
        lines = []
    for line in lines:
        try:
            record = json.loads(line)
            if header is not None:
                entries[record["file"]] = FileEntry(record["sha256"], record["size"])
            elif record["schema"] == _JOURNAL_SCHEMA and isinstance(record["fingerprint"], dict):
                header = {"resume": record["resume"], "fingerprint": record["fingerprint"]}
            else:
                break
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        whole += len(line) + 1
    return header, entries, whole


def sync_path(path: Path) -> None:
    """Bring a file, or a directory's names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
