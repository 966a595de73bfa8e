"""An engine bundle: the directory that a build makes and a runtime opens. Refuses a mismatch and says which field.

Opening reads manifest.json, compares every file with its size and SHA-256, and maps the weight files. Nothing in a
bundle is unpickled or executed here. No torch, no device.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import TypeAlias

import numpy as np

from edge_dflash.board.archs import find_arch
from edge_dflash.bundle.manifest import MANIFEST, QUALITY, FileEntry, Manifest, parse_manifest
from edge_dflash.bundle.parts import Part, bundle_parts, from_tensors, hash_file, repacked_of, resume_command
from edge_dflash.common.files import LARGE, read_bytes
from edge_dflash.errors import BackendError, BundleError, CheckpointError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import FORMATS, TIED, Array, Weight
from edge_dflash.weights.layout import Repacked
from edge_dflash.weights.safetensors import TensorFiles, forget_pages
from edge_dflash.weights.stacks import Stack, unpack_weight

Progress: TypeAlias = Callable[[int, int], None]  # (bytes done, bytes in all)
Stacks: TypeAlias = dict[str, tuple[Stack, Repacked]]  # by key
MAX_MANIFEST = LARGE  # bytes; a larger file is no manifest


class Bundle:
    """An open bundle: a :class:`~edge_dflash.weights.formats.WeightStore` over mapped files, its path and manifest."""

    def __init__(self, path: Path, manifest: Manifest, weights: Mapping[str, Weight], stacks: Stacks) -> None:
        self.path = path
        self.manifest = manifest
        self._weights = weights
        self._stacks = stacks
        self._stack_of = {name: (key, i) for key, (stack, _) in stacks.items() for i, name in enumerate(stack.names)}
        self._hashed = False  # whether all files were compared with their hashes

    @classmethod
    def open(cls, path: Path | str, check_hashes: bool = True, progress: Progress | None = None) -> Bundle:
        """Open and check the bundle at ``path``.

        ``check_hashes`` False skips the SHA-256 of the files (sizes, names and tensors are always checked).
        ``progress`` is called from several threads, one at a time. Raises BundleError naming field, found and wanted.
        """
        path = Path(path)
        manifest = read_manifest(path)
        check_files(path, manifest)
        if check_hashes:
            _check_hashes(path, manifest, progress or (lambda done, total: None))
        bundle = cls(path, manifest, *_map_weights(path, manifest))
        bundle._hashed = check_hashes
        return bundle

    @classmethod
    def staged(cls, path: Path, manifest: Manifest) -> Bundle:
        """A bundle whose weight files a build just wrote to ``path``, and whose manifest is not there yet."""
        return cls(path, manifest, *_map_weights(path, manifest))

    def release(self) -> None:
        """Forget the pages of the mapped weights that were read."""
        for held in (*self._weights.values(), *(packed for _, packed in self._stacks.values())):
            for array in vars(held).values():
                if isinstance(array, np.ndarray):
                    forget_pages(array)

    @property
    def pair(self) -> PairSpec:
        """Target and drafter."""
        return self.manifest.pair

    def get(self, name: str) -> Weight:
        """Return a weight; its arrays are read-only. Raises KeyError for an unknown name.

        They are views of the mapped file, but for stacked linears, which are turned back: the same codes, in new
        memory. Several threads may ask.
        """
        if name in self._weights:
            return self._weights[name]
        key, index = self._stack_of[name]
        return _read_only(unpack_weight(*self._stacks[key], index))

    def repacked(self, stack: Stack) -> Repacked:
        """A stack as the native kernels read it: views of the mapped file. Raises BundleError for another name."""
        found, packed = self._stacks.get(stack.key, (None, None))
        if found != stack or packed is None:
            held = "no stack of this name" if found is None else f"{len(found.names)} matrices, {found.layout}"
            raise BundleError(
                f"{self.path}: stack {stack.key} is wanted as {stack.layout}, the bundle has {held}; build it again"
            )
        return packed

    def cubin(self, unit: str) -> bytes:
        """Kernels of a compilation unit. Raises BundleError when the bundle has none, or not as it was built."""
        name = f"kernels/{unit}.cubin"
        entry = self._entry(name)
        with _readable(self.path / name):
            data = read_bytes(self.path / name, LARGE)
        _same(self.path, name, hashlib.sha256(data).hexdigest(), entry)
        return data

    def plan(self, name: str) -> Path:
        """File of a TensorRT engine, with the bytes that were built. Raises BundleError like :meth:`cubin`."""
        entry, path = self._entry(name), self.path / name
        if not self._hashed:
            with _readable(path):
                _same(self.path, name, hash_file(path).sha256, entry)
        return path

    def _entry(self, name: str) -> FileEntry:
        if (entry := self.manifest.files.get(name)) is None:
            raise BundleError(
                f"{self.path}: {name} is missing; this version of edge-dflash runs it, build the bundle again"
            )
        return entry

    def kv_scale(self, state: str) -> tuple[float, float]:
        """FP8 scales (k, v) of a KV state; (1.0, 1.0) when the bundle has none for it."""
        return self.manifest.kv_scales.get(state, (1.0, 1.0))

    def require(self, *, backend: str, archs: Collection[str]) -> None:
        """Raise BundleError unless the bundle has ``backend`` and the bundle was built for one of ``archs``."""
        held, arch = self.manifest.backends, self.manifest.arch
        for field, found, wanted, fits in (
            ("backend", ",".join(held), (backend,), backend in held),
            ("arch", arch, archs, find_arch(arch) in map(find_arch, archs)),
        ):
            if not fits:
                raise BundleError(
                    f"{self.path}: {field} is {found!r}, wanted {' or '.join(map(repr, wanted))} here; "
                    f"build again with --{field} {next(iter(wanted))}"
                )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise BundleError where what is done inside cannot read."""
    try:
        yield
    except OSError as error:
        raise BundleError(f"cannot read {error.filename or path}: {error.strerror}; check its permissions") from None


def _same(path: Path, name: str, found: str, entry: FileEntry) -> None:
    if found != entry.sha256:
        raise BundleError(
            f"{path}: sha256 of {name} is {found[:16]}..., wanted {entry.sha256[:16]}...; "
            "the file is damaged, copy or build the bundle again"
        )


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the bundle at ``path`` without looking at other files. Raises BundleError."""
    file = path / MANIFEST
    if not file.exists() and (command := resume_command(path)):
        raise BundleError(f"{path} is an unfinished build, not a bundle; finish it with: {command}")
    if not path.is_dir():
        raise BundleError(f"no bundle at {path}: wanted the directory that 'edge-dflash build --output' made")
    if file.is_symlink() or not file.is_file():
        raise BundleError(f"{path} has no {MANIFEST}; wanted the directory that 'edge-dflash build --output' made")
    try:
        return parse_manifest(read_bytes(file, MAX_MANIFEST), str(file))
    except OSError as error:
        remedy = "it is no manifest" if error.errno == errno.EFBIG else "check its permissions"
        raise BundleError(f"cannot read {file}: {error.strerror}; {remedy}") from None


def check_files(path: Path, manifest: Manifest) -> None:
    """Refuse missing, extra, linked, special and wrongly sized files. Raises BundleError."""
    found: dict[str, int] = {}
    pending = [path]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                name = Path(entry.path).relative_to(path).as_posix()
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    kind = "a symbolic link" if entry.is_symlink() else stat.filemode(entry.stat().st_mode)
                    raise BundleError(f"{path}: {name} is {kind}, wanted a regular file; copy the bundle again")
                else:
                    found[name] = entry.stat(follow_symlinks=False).st_size
    if missing := sorted(manifest.files.keys() - found.keys()):
        raise BundleError(f"{path}: file {missing[0]} is missing ({len(missing)} in all); copy or build it again")
    if extra := sorted(found.keys() - manifest.files.keys() - {MANIFEST, QUALITY}):
        raise BundleError(f"{path}: file {extra[0]} is not in the manifest ({len(extra)} in all); remove it")
    for name, wanted in manifest.files.items():
        if found[name] != wanted.size:
            raise BundleError(
                f"{path}: size of {name} is {found[name]} bytes, wanted {wanted.size}; copy or build the bundle again"
            )


def _check_hashes(path: Path, manifest: Manifest, progress: Progress) -> None:
    """Hash all files, several at a time (hashlib releases the interpreter lock); largest first."""
    lock, stopped, done, total = Lock(), Event(), 0, manifest.size

    def advance(count: int) -> None:
        nonlocal done
        if stopped.is_set():
            raise CancelledError
        with lock:
            done += count
            progress(done, total)

    progress(done, total)
    names = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
    with _readable(path), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            for name, entry in zip(names, pool.map(lambda name: hash_file(path / name, advance), names), strict=True):
                _same(path, name, entry.sha256, manifest.files[name])
        finally:
            stopped.set()  # threads still hashing stop at their next chunk


def _map_weights(path: Path, manifest: Manifest) -> tuple[dict[str, Weight], Stacks]:
    """Every weight the models need, checked against its shape and its format in the manifest."""
    programs = pair_programs(manifest.pair)
    try:
        parts = bundle_parts(programs, manifest.weights, stacked=manifest.stacked)
    except BackendError as error:
        raise BundleError(f"{path}: {error}; build the bundle again") from None
    stored = {name for name in manifest.files if name.startswith("weights/")}
    if stored != parts.keys():
        odd = sorted(stored ^ parts.keys())[0]
        raise BundleError(f"{path}: weight file {odd} is {'unknown' if odd in stored else 'missing'}; build it again")
    weights: dict[str, Weight] = {}
    stacks: Stacks = {}
    for name, part in sorted(parts.items()):
        groups = _tensors(path / name, part)
        try:
            stacks.update({stack.key: (stack, repacked_of(stack, groups[stack.key])) for stack in part.stacks})
            for one in part.names:
                spec, form = programs.weights[one], manifest.weights[one]
                if spec.kind != "linear" and FORMATS[form].quantized:
                    raise ValueError(f"{one} is stored as {form}; only linear weights may be quantized")
                weights[one] = from_tensors(one, groups[one], spec.shape, form)
        except ValueError as error:
            raise BundleError(f"{path / name}: {error}; build the bundle again") from None
    if manifest.weights["target.lm_head"] == TIED:
        weights["target.lm_head"] = weights["target.embed_tokens"]
    return weights, stacks


def _tensors(file: Path, part: Part) -> dict[str, dict[str, tuple[str, Array]]]:
    """Tensors of a file by the weight or stack that they belong to."""
    try:
        tensors = TensorFiles.open([file])
    except CheckpointError as error:
        raise BundleError(f"{error} (weight file of a bundle)") from None
    groups: dict[str, dict[str, tuple[str, Array]]] = {
        name: {} for name in (*part.names, *(s.key for s in part.stacks))
    }
    for tensor in tensors.names():
        name = tensor.rpartition(".")[0]
        if name not in groups:
            raise BundleError(f"{file}: tensor {tensor} belongs to no weight of the models")
        groups[name][tensor] = tensors.array(tensor)
    return groups


def _read_only(weight: Weight) -> Weight:
    for value in vars(weight).values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return weight
