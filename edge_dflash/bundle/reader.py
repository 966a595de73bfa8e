"""An engine bundle: the directory that a build makes and a runtime opens. Refuses a mismatch and says which field.

Opening reads manifest.json, compares every file with its size and SHA-256, and maps the weight files. Nothing in a
bundle is unpickled or executed here. Knows nothing of torch, checkpoints or backends.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock
from typing import TypeAlias

from edge_dflash.build.workdir import resume_command
from edge_dflash.bundle.manifest import MANIFEST, Manifest, parse_manifest
from edge_dflash.bundle.parts import from_tensors, hash_file, part_of, weight_format
from edge_dflash.checkpoint.files import TensorFiles
from edge_dflash.checkpoint.specs import PairSpec
from edge_dflash.checkpoint.weights import Array, Weight
from edge_dflash.errors import BundleError, CheckpointError
from edge_dflash.graph.program import WeightSpec
from edge_dflash.models import pair_programs

Progress: TypeAlias = Callable[[int, int], None]  # (bytes done, bytes in all)
MAX_MANIFEST = 64 << 20  # bytes; a larger file is no manifest


class Bundle:
    """An open bundle: a :class:`~edge_dflash.checkpoint.weights.WeightStore` over mapped files, and its manifest."""

    def __init__(self, path: Path, manifest: Manifest, weights: Mapping[str, Weight]) -> None:
        self._path = path
        self._manifest = manifest
        self._weights = weights

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
        return cls(path, manifest, _map_weights(path, manifest))

    @classmethod
    def staged(cls, path: Path, manifest: Manifest) -> Bundle:
        """A bundle whose weight files a build just wrote to ``path``, and whose manifest is not there yet."""
        return cls(path, manifest, _map_weights(path, manifest))

    @property
    def path(self) -> Path:
        """Directory of the bundle."""
        return self._path

    @property
    def manifest(self) -> Manifest:
        """What the bundle says about itself."""
        return self._manifest

    @property
    def pair(self) -> PairSpec:
        """Target and drafter."""
        return self._manifest.pair

    def get(self, name: str) -> Weight:
        """Return a weight whose arrays are read-only views of the mapped file. Raises KeyError for an unknown name."""
        return self._weights[name]

    def kv_scale(self, state: str) -> tuple[float, float]:
        """FP8 scales (k, v) of a KV state; (1.0, 1.0) when the bundle has none for it."""
        return self._manifest.kv_scales.get(state, (1.0, 1.0))

    def require(self, *, backend: str, archs: Collection[str]) -> None:
        """Raise BundleError unless the bundle was built for ``backend`` and one of ``archs``."""
        for field, found, wanted in (
            ("backend", self._manifest.backend, (backend,)),
            ("arch", self._manifest.arch, archs),
        ):
            if found not in wanted:
                raise BundleError(
                    f"{self._path}: {field} is {found!r}, wanted {' or '.join(map(repr, wanted))} here; "
                    f"build again with --{field} {next(iter(wanted))}"
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
        if (size := file.stat().st_size) > MAX_MANIFEST:
            raise BundleError(f"{file} has {size} bytes, wanted at most {MAX_MANIFEST}; it is no manifest")
        return parse_manifest(file.read_bytes(), str(file))
    except OSError as error:
        raise BundleError(f"cannot read {file}: {error.strerror}; check its permissions") from None


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
    if extra := sorted(found.keys() - manifest.files.keys() - {MANIFEST}):
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

    names = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            for name, entry in zip(names, pool.map(lambda name: hash_file(path / name, advance), names), strict=True):
                if entry.sha256 != (wanted := manifest.files[name].sha256):
                    raise BundleError(
                        f"{path}: sha256 of {name} is {entry.sha256[:16]}..., wanted {wanted[:16]}...; "
                        "the file is damaged, copy or build the bundle again"
                    )
        except OSError as error:
            raise BundleError(f"cannot read {error.filename}: {error.strerror}; check its permissions") from None
        finally:
            stopped.set()  # threads still hashing stop at their next chunk


def _map_weights(path: Path, manifest: Manifest) -> dict[str, Weight]:
    """Every weight the models need, checked against its shape and its format in the manifest."""
    expected = pair_programs(manifest.pair).weights
    parts = sorted({part_of(name) for name, form in manifest.weights.items() if form != "tied"})
    stored = {name for name in manifest.files if name.startswith("weights/")}
    if stored != set(parts):
        odd = sorted(stored ^ set(parts))[0]
        raise BundleError(f"{path}: weight file {odd} is {'unknown' if odd in stored else 'missing'}; build it again")
    weights: dict[str, Weight] = {}
    for part in parts:
        wanted = {n: s for n, s in expected.items() if part_of(n) == part and manifest.weights[n] != "tied"}
        weights.update(_map_part(path / part, wanted, manifest))
    if manifest.weights["target.lm_head"] == "tied":
        weights["target.lm_head"] = weights["target.embed_tokens"]
    return weights


def _map_part(file: Path, wanted: Mapping[str, WeightSpec], manifest: Manifest) -> dict[str, Weight]:
    try:
        tensors = TensorFiles.open([file])
    except CheckpointError as error:
        raise BundleError(f"{error} (weight file of a bundle)") from None
    groups: dict[str, dict[str, tuple[str, Array]]] = {name: {} for name in wanted}
    for tensor in tensors.names():
        name = tensor.rpartition(".")[0]
        if name not in groups:
            raise BundleError(f"{file}: tensor {tensor} belongs to no weight of the models")
        groups[name][tensor] = tensors.array(tensor)
    weights: dict[str, Weight] = {}
    for name, spec in wanted.items():
        try:
            weight = from_tensors(name, groups[name], spec.shape)
        except ValueError as error:
            raise BundleError(f"{file}: {error}; build the bundle again") from None
        if (found := weight_format(weight)) != manifest.weights[name]:
            raise BundleError(f"{file}: {name} is stored as {found}, the manifest says {manifest.weights[name]}")
        if spec.kind != "linear" and found not in ("bf16", "f32"):
            raise BundleError(f"{file}: {name} is stored as {found}; only linear weights may be quantized")
        weights[name] = weight
    return weights
