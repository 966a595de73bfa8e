"""A session outside of any backend: taken out, saved as a file, loaded and adopted again.

The file is safetensors with the tokens (I32), the arrays of its snapshot, and what they belong to. Its ``__metadata__``
holds format, version, the bundle's fingerprint, the session's note if it has one, and a SHA-256 of the whole file in
which its own place holds zeros. It finds damage; it is no signature. Nothing is unpickled. Whether the arrays fit a
backend is found when they are restored. A session with pictures is of version 2: it has the patches of each different
picture, from which its state can be computed again, and in ``__metadata__`` where they stand; any other is of version
1. What a picture is called is computed from its patches, and never believed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge_dflash.common.files import replacing, sync_path
from edge_dflash.common.tables import decode, encode
from edge_dflash.decode.backend import Snapshot
from edge_dflash.decode.session import Session, SessionManager
from edge_dflash.errors import BundleError, CheckpointError, ContextError, RequestError, StorageError, short
from edge_dflash.model.specs import PatchSpec
from edge_dflash.pictures.pictured import Picture, Pictured, Placed, check_pictures
from edge_dflash.weights.formats import Array
from edge_dflash.weights.safetensors import DTYPES, Entry, TensorFiles, header_of

FORMAT = "edge-dflash-session"
VERSIONS = ("1", "2")  # of a session of text, and of one with pictures
_TOKENS, _STATE, _PICTURE = "tokens", "state.", "picture."
_NO_CHECKSUM = "0" * 64
_REMEDY = "; restore the file from a copy, or start a new session"
_KINDS = {np.dtype(DTYPES[kind]): kind for kind in ("U8", "I8", "U16", "I16", "F16", "U32", "I32", "F32", "I64", "F64")}


@dataclass(frozen=True)
class SessionState:
    """All of a session, outside of any backend."""

    tokens: tuple[int, ...]  # prompts and answers in order; the last has no K/V yet
    snapshot: Snapshot | None  # state after tokens[:-1]; None: computed when it is needed
    fingerprint: str  # of the bundle that the state belongs to
    note: str = ""  # what the session's owner wants to keep with it
    pictures: tuple[Placed, ...] = ()  # that stand among the tokens, in their order

    def __post_init__(self) -> None:
        """Raise RequestError when tokens and snapshot do not belong together."""
        if self.snapshot is not None and not 0 <= self.snapshot.length == len(self.tokens) - 1:
            raise RequestError(
                f"the session's snapshot holds {self.snapshot.length} tokens, wanted {len(self.tokens) - 1} "
                "(all of the session's but the last); start a new session"
            )
        wanted = Pictured(self.tokens, self.pictures).delta(len(self.tokens))
        if self.snapshot is not None and self.snapshot.delta != wanted:
            raise RequestError(
                f"the session's snapshot has delta {self.snapshot.delta}, its images make {wanted}; start a new session"
            )


@dataclass(frozen=True)
class _Shown:
    """Where the pictures of a session stand."""

    at: tuple[int, ...]  # index of each one's first row
    of: tuple[int, ...]  # which of the different pictures it is
    grids: tuple[tuple[int, int], ...]  # of the different pictures
    digests: tuple[str, ...]
    patches: PatchSpec

    @classmethod
    def of_session(cls, pictures: Sequence[Placed]) -> tuple[_Shown, list[Picture]]:
        """Of a session with pictures, and the different ones."""
        different = {placed.key: placed.picture for placed in pictures}
        number = {key: index for index, key in enumerate(different)}
        found = list(different.values())
        shown = cls(
            tuple(placed.at for placed in pictures),
            tuple(number[placed.key] for placed in pictures),
            tuple(one.grid for one in found),
            tuple(one.digest.hex() for one in found),
            found[0].spec,
        )
        return shown, found

    def placed(self, levels: Sequence[Array]) -> tuple[Placed, ...]:
        """Pictures with these patches. Raises ValueError for what no session has."""
        spec, found = self.patches, list[Picture]()
        for patches, grid, digest in zip(levels, self.grids, self.digests, strict=True):
            rows, columns = grid
            if patches.dtype != np.uint8 or patches.shape != (rows * columns, 3 * spec.patch**2):
                raise ValueError(f"patches of a grid {list(grid)} are {patches.dtype} {list(patches.shape)}")
            if min(rows, columns, spec.merge) < 1 or rows % spec.merge or columns % spec.merge:
                raise ValueError(f"a grid of {rows} x {columns} patches does not consist of blocks of {spec.merge}")
            patches.flags.writeable = False
            found.append(picture := Picture(patches, grid, spec))
            if picture.digest.hex() != digest:
                raise ValueError(f"digest {short(digest)} is not that of its patches, {picture.digest.hex()}")
        if {*self.of} != {*range(len(found))}:
            raise ValueError(f"pictures {sorted({*self.of})} of {len(found)} stand in it")
        return tuple(Placed(at, found[of]) for at, of in zip(self.at, self.of, strict=True))


def state_of(session: Session) -> Generator[None, None, SessionState]:
    """All of a session, to be saved. Yields between two chunks of what of its state has to be computed."""
    snapshot = yield from session.ensure_snapshot()
    return SessionState(session.tokens, snapshot, session.manager.bundle, pictures=session.pictures)


def adopt(manager: SessionManager, state: SessionState) -> Session:
    """A session with the tokens and state of ``state``.

    Raises BundleError when it belongs to another bundle or its pictures were cut for another, RequestError for an id
    outside the vocabulary and pictures that do not stand on their placeholders, ContextError when it is longer than the
    context. The arrays of its snapshot become read-only.
    """
    if state.fingerprint != manager.bundle:
        raise BundleError(
            f"the session's fingerprint is {state.fingerprint}, this bundle's is {manager.bundle}; "
            "open the bundle that the session was made with, or start a new session"
        )
    shape = manager.backend.shape
    for token in state.tokens:
        if not 0 <= token < shape.vocab_size:
            raise RequestError(f"the session has token id {token}, outside the vocabulary of {shape.vocab_size}")
    if len(state.tokens) > shape.max_context:
        raise ContextError(
            f"the session has {len(state.tokens)} tokens, the context holds {shape.max_context}; "
            "build the bundle with a longer context"
        )
    for number, placed in enumerate(state.pictures, 1):
        if (ours := shape.patches) is not None and (theirs := placed.picture.spec) != ours:
            name = next(one.name for one in fields(ours) if getattr(ours, one.name) != getattr(theirs, one.name))
            raise BundleError(
                f"image {number} of the session has {name} {short(getattr(theirs, name))}, those of this bundle "
                f"{getattr(ours, name)}; open the bundle that the session was made with, or start a new session"
            )
    check_pictures(Pictured(state.tokens, state.pictures), shape.image_token_id)
    snapshot = state.snapshot.frozen() if state.snapshot else None
    return Session(manager, state.tokens, snapshot, state.pictures, loaded=True)


def save_session(path: Path | str, state: SessionState) -> int:
    """Write a session durably and in one step: ``path`` holds the old file or the new one, whatever happens.

    Returns the bytes of the file, which only its owner may read. Raises StorageError when it cannot be written.
    """
    path = Path(path)
    if not path.name:
        raise RequestError(f"path is {str(path)!r}, which names no file; give the path of one")
    arrays: dict[str, Array] = {_TOKENS: np.array(state.tokens, dtype=np.int32)}
    if state.snapshot is not None:
        arrays |= {_STATE + name: array for name, array in state.snapshot.arrays.items()}
    shown = None
    if state.pictures:
        shown, different = _Shown.of_session(state.pictures)
        arrays |= {f"{_PICTURE}{index}": picture.levels for index, picture in enumerate(different)}
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))  # wide first keeps views aligned
    parts = [np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) for name in order]
    header = _header({name: arrays[name] for name in order}, state, shown)
    digest = hashlib.sha256(header)
    for part in parts:
        digest.update(part.data)
    header = header.replace(_NO_CHECKSUM.encode(), digest.hexdigest().encode(), 1)  # the note comes after it
    try:
        with _replacement(path) as file:
            file.write(header)
            for part in parts:
                file.write(part.data)
    except OSError as error:
        remedy = "what was there is as it was; check the disk and its permissions"
        raise StorageError.of(error, f"cannot write {path}", remedy) from None
    return len(header) + sum(part.size for part in parts)


def load_session(path: Path | str, fingerprint: str) -> SessionState:
    """Read what :func:`save_session` wrote, whole, into new arrays.

    Raises BundleError when it belongs to another bundle than ``fingerprint`` says, StorageError when the disk does not
    give it, RequestError when it is missing, of another format or version, or damaged anywhere.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileNotFoundError
        tensors = TensorFiles.open([path])
        with path.open("rb") as file:
            prefix = file.read(8)
            header = prefix + file.read(int.from_bytes(prefix, "little"))
            arrays = {name: _array(file, tensors.entry(name)) for name in tensors.names()}
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(f"no session file at {path}; give the path that a session was saved to") from None
    except CheckpointError as error:
        if isinstance(error.__context__, OSError):
            raise _unread(path, error.__context__) from None
        reason = str(error).partition("; download")[0]  # a checkpoint's remedy
        raise RequestError(f"no session file, or damaged: {reason}{_REMEDY}") from None
    except OSError as error:
        raise _unread(path, error) from None
    except ValueError as error:  # a path that no system has, a shape of no elements that no array has
        raise RequestError(f"no session file, or damaged: {short(str(path))} ({error}){_REMEDY}") from None
    metadata = _metadata(header)
    order = sorted(arrays, key=lambda name: tensors.entry(name).offset)
    _check(path, metadata, header, fingerprint, arrays, order)
    tokens, pictures = tuple(arrays.pop(_TOKENS).tolist()), _pictures(path, metadata, arrays)
    states = {name.removeprefix(_STATE): array for name, array in arrays.items() if name.startswith(_STATE)}
    delta = Pictured(tokens, pictures).delta(len(tokens))
    snapshot = Snapshot(len(tokens) - 1, states, delta) if states else None
    return SessionState(tokens, snapshot, fingerprint, metadata.get("note", ""), pictures)


def _pictures(path: Path, metadata: Mapping[str, str], arrays: Mapping[str, Array]) -> tuple[Placed, ...]:
    """Pictures of a file whose checksum is right. Raises RequestError for what no session has."""
    levels = {name: array for name, array in arrays.items() if name.startswith(_PICTURE)}
    if metadata["version"] == VERSIONS[0] and not levels:
        return ()
    try:
        shown = decode(_Shown, json.loads(metadata["pictures"]), "pictures")
        return shown.placed([levels.pop(f"{_PICTURE}{index}") for index in range(len(levels))])
    except (KeyError, ValueError, RecursionError, BundleError) as error:
        raise RequestError(f"{path}: its pictures are not as a session's: {error}{_REMEDY}") from None


def _unread(path: Path, error: OSError) -> StorageError:
    return StorageError.of(error, f"cannot read {path}", "check its permissions and the disk")


def _header(arrays: Mapping[str, Array], state: SessionState, shown: _Shown | None) -> bytes:
    """Length prefix and header of a file with these arrays, in their order, and zeros for the checksum."""
    version = VERSIONS[0 if shown is None else 1]
    metadata = {"format": FORMAT, "version": version, "fingerprint": state.fingerprint, "sha256": _NO_CHECKSUM}
    if shown is not None:
        metadata["pictures"] = json.dumps(encode(shown))
    if state.note:
        metadata["note"] = state.note
    for name, array in arrays.items():
        if array.dtype not in _KINDS:
            raise RequestError(f"{name} has dtype {array.dtype}, a session file stores {', '.join(_KINDS.values())}")
    kinds = ((name, _KINDS[array.dtype], array.shape) for name, array in arrays.items())
    return header_of(kinds, metadata)


def _array(file: BufferedReader, entry: Entry) -> Array:
    """A tensor of a file: read, not mapped, so that a disk that fails gives an error and no signal."""
    array = np.zeros(entry.shape, DTYPES[entry.dtype])
    file.seek(entry.offset)
    file.readinto(array.reshape(-1).view(np.uint8).data)  # of a short one the checksum is wrong
    return array


def _metadata(header: bytes) -> Mapping[str, str]:
    """The ``__metadata__`` of a file's header; empty for what is no texts by name."""
    try:
        found = json.loads(header[8:])["__metadata__"]
        return found if all(isinstance(value, str) for value in found.values()) else {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _check(
    path: Path,
    found: Mapping[str, str],
    header: bytes,
    fingerprint: str,
    arrays: Mapping[str, Array],
    order: Sequence[str],
) -> None:
    """Refuse what was not written by :func:`save_session` for this bundle. ``order`` is that of the data."""
    if (form := found.get("format")) != FORMAT:
        raise RequestError(f"{path}: format is {short(form)}, wanted {FORMAT!r}; give the file of a session")
    if (version := found.get("version", "")) not in VERSIONS:
        newer = re.fullmatch("[0-9]{1,9}", version) and int(version) > 0
        remedy = "update edge-dflash" if newer else "start a new session"
        reads = ", ".join(VERSIONS)
        raise RequestError(f"{path}: version is {short(version)}, this edge-dflash reads {reads}; {remedy}")
    checksum = found.get("sha256", "")
    whole = re.fullmatch("[0-9a-f]{64}", checksum)
    digest = hashlib.sha256(header.replace(checksum.encode(), _NO_CHECKSUM.encode(), 1) if whole else b"")
    for name in order:
        digest.update(arrays[name].reshape(-1).view(np.uint8).data)
    if (content := digest.hexdigest()) != checksum:
        raise RequestError(f"{path}: sha256 is {checksum[:16]}..., the content has {content[:16]}...{_REMEDY}")
    if found.get("fingerprint") != fingerprint:
        raise BundleError(
            f"{path}: fingerprint is {short(found.get('fingerprint'))}, this bundle's is {fingerprint!r}; "
            "open the bundle that the session was made with, or start a new session"
        )
    odd = [name for name in arrays if name != _TOKENS and not name.startswith((_STATE, _PICTURE))]
    tokens = arrays.get(_TOKENS)
    if odd or tokens is None or tokens.dtype != np.int32 or tokens.ndim != 1 or (tokens < 0).any():
        what = odd[0] if odd else _TOKENS
        raise RequestError(
            f"{path}: tensor {what} is not as a session's; wanted tokens (I32, 1 axis), state.* and picture.*"
        )


def partial_of(path: Path) -> Path:
    """Where a session is written before it takes the name ``path``."""
    return path.with_name(path.name + ".partial")


@contextmanager
def _replacement(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name ``path`` when all of it is on the disk, and leaves nothing when it fails.

    It is written as ``path.partial``, under a lock: what a kill leaves there is overwritten by the next save.
    """
    partial = partial_of(path)
    with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(file.fileno()).st_ino == partial.stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise RequestError(f"{path} is being written by another process; wait for it, or choose another name")
        file.truncate(0)
        with replacing(path, partial):
            yield file
            file.flush()
            os.fsync(file.fileno())
    sync_path(path.parent)
