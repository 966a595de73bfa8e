"""Prompts, answers and their taps on the disk, and the batches that a training reads of them.

A shard is a safetensors file: ids and taps of several sequences end to end, and where each begins. It is whole or not
there at all, and says what it was made of and the hash of what it holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file

from edge_dflash.bundle.parts import hash_file
from edge_dflash.errors import CheckpointError, RequestError
from edge_dflash.training.losses import Batch
from edge_dflash.training.workdir import TrainingRun
from edge_dflash.weights.safetensors import TensorFiles

SUM = "sha256"  # name of a tensor: the hash of the others of its file
_SUMS = "sha256.json"  # of the files of a folder


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise RequestError where what is done inside cannot write: torch and safetensors raise other errors."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"cannot write {path}: {said}; make room on the disk, or see to its rights") from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A place to write; what lies there at the end is then ``path``, whole and on the disk. Raises RequestError."""
    half = path.with_suffix(".part")
    with writing(path):
        try:
            yield half
            with half.open("rb") as file:
                os.fsync(file.fileno())
            half.replace(path)
        except BaseException:
            half.unlink(missing_ok=True)
            raise


def tensors_sum(tensors: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """The hash of some tensors: their names, shapes and bytes. A file holds it as the tensor :data:`SUM`."""
    found = sha256()
    for name in sorted(tensors):
        found.update(f"{name}{list(tensors[name].shape)}".encode())
        found.update(np.ascontiguousarray(tensors[name]).data.cast("B"))
    return np.frombuffer(found.digest(), np.uint8)


def read_whole(path: Path) -> TensorFiles:
    """A file of tensors that are what was written, or of an older version: without a hash.

    Raises CheckpointError where they are not.
    """
    files = TensorFiles.open([path])
    tensors = {name: files.array(name)[1] for name in files.names() if name != SUM}
    if SUM in files and files.array(SUM)[1].tobytes() != tensors_sum(tensors).tobytes():
        raise CheckpointError(f"{path} is damaged: its tensors do not have the hash that they were written with")
    return files


def write_sums(folder: Path) -> None:
    """Leave the hashes of the files of a folder in it."""
    (folder / _SUMS).write_text(json.dumps(_sums(folder)), encoding="utf-8")


def damaged_file(folder: Path) -> Path | None:
    """The first file of a folder that is not what :func:`write_sums` saw; None: all are, or it saw none."""
    if not (folder / _SUMS).exists():
        return None
    try:
        wanted = json.loads((folder / _SUMS).read_bytes())
    except (ValueError, RecursionError):
        wanted = None
    if not isinstance(wanted, dict):
        return folder / _SUMS
    found = _sums(folder)
    return next((folder / name for name in {**wanted, **found} if found.get(name) != wanted.get(name)), None)


def _sums(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path).sha256 for path in sorted(folder.iterdir()) if path.name != _SUMS}


SHARD_BYTES = 256 << 20  # of a shard, about
_POOL = 32  # batches that are sorted by length together, so that little is padding
_DIGEST = "digest"


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's answer."""

    ids: tuple[int, ...]
    prompt: int  # ids of the prompt
    heldout: bool = False


def parts_of(samples: Sequence[Sample], row_bytes: int) -> list[list[Sample]]:
    """The samples of each shard, by bytes of a token."""
    most, parts, size = max(1, SHARD_BYTES // row_bytes), list[list[Sample]](), 0
    for one in samples:
        if not parts or size + len(one.ids) > most:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += len(one.ids)
    return parts


def digest_of(samples: Sequence[Sample], *what: str) -> str:
    """What a shard of these samples was made of."""
    digest = sha256("\n".join(what).encode())
    for one in samples:
        digest.update(np.array([len(one.ids), one.prompt, one.heldout, *one.ids], np.int64).tobytes())
    return digest.hexdigest()


def shard_path(folder: Path, index: int) -> Path:
    """Where a shard lies."""
    return folder / f"{index:05}.safetensors"


def shard_done(path: Path, digest: str) -> bool:
    """Whether a shard was made of this. Raises CheckpointError where it is damaged."""
    if not path.exists():
        return False
    file = read_whole(path)
    return _DIGEST in file and file.array(_DIGEST)[1].tobytes().hex() == digest


def write_shard(
    path: Path, samples: Sequence[Sample], rows: dict[str, list[npt.NDArray[np.uint16]]], digest: str
) -> None:
    """Write a shard whole or not at all: ``rows`` by name ("taps", "last") for each sample. Raises RequestError."""
    tensors: dict[str, npt.NDArray[Any]] = {
        _DIGEST: np.frombuffer(bytes.fromhex(digest), np.uint8),
        "ids": np.concatenate([np.array(one.ids, np.int32) for one in samples]),
        "lengths": np.array([len(one.ids) for one in samples], np.int64),
        "prompts": np.array([one.prompt for one in samples], np.int64),
        "heldout": np.array([one.heldout for one in samples], np.uint8),
        **{name: np.concatenate(parts) for name, parts in rows.items()},
    }
    with whole_file(path) as half:
        save_file({**tensors, SUM: tensors_sum(tensors)}, str(half))


class Shards:
    """All shards of a folder. Taps stay on the disk until a batch asks for them."""

    def __init__(self, folder: Path, count: int) -> None:
        """Raise CheckpointError for a shard that is missing or damaged."""
        self.folder = folder
        self._files = [TensorFiles.open([shard_path(folder, index)]) for index in range(count)]
        lengths, prompts, heldout = (
            np.concatenate([file.array(name)[1] for file in self._files]) for name in ("lengths", "prompts", "heldout")
        )
        self.lengths, self.prompts = lengths, prompts
        self._places = [  # of each sample: shard, first row, rows
            (index, int(stop - length), int(length))
            for index, own in enumerate(file.array("lengths")[1] for file in self._files)
            for length, stop in zip(own, np.cumsum(own), strict=True)
        ]
        has_drafts = lengths - prompts >= 2  # an anchor and a draft
        self.training = np.flatnonzero((heldout == 0) & has_drafts)
        self.heldout = np.flatnonzero((heldout != 0) & has_drafts)

    def rows(self, name: str, index: int) -> npt.NDArray[Any]:
        """Rows of a tensor that belong to a sample: "ids", "taps", or "last" where that is kept."""
        shard, start, length = self._places[index]
        return self._files[shard].array(name)[1][start : start + length]

    def batch(self, indices: Sequence[int], share: torch.Tensor, *, pinned: bool = False) -> Batch:
        """Some samples, with anchors in their answers where ``share`` [B, A] of 0 .. 1 says, never at the end.

        Of the host, taps in BF16; ``pinned``: in memory that a GPU copies from meanwhile.
        """
        lengths = torch.from_numpy(self.lengths[indices])
        prompts = torch.from_numpy(self.prompts[indices])
        longest = int(lengths.max())
        ids = torch.zeros(len(indices), longest, dtype=torch.long)
        for row, index in enumerate(indices):
            ids[row, : int(lengths[row])] = torch.from_numpy(self.rows("ids", index).astype(np.int64))
        anchors = prompts[:, None] + (share * (lengths - 1 - prompts)[:, None]).long()
        taps = self._padded("taps", indices, longest, pinned=pinned)
        last = self._padded("last", indices, longest, pinned=pinned) if "last" in self._files[0] else None
        return Batch(ids, lengths, anchors, taps, last)

    def _padded(self, name: str, indices: Sequence[int], longest: int, *, pinned: bool) -> torch.Tensor:
        """[B, longest, columns] in BF16, zeros behind the end."""
        columns = self.rows(name, indices[0]).shape[1]
        whole = torch.empty(len(indices), longest, columns, dtype=torch.int16, pin_memory=pinned)
        bits = whole.numpy()  # filled by NumPy: torch would wake all its threads
        for row, index in enumerate(indices):
            bits[row, : self.lengths[index]] = self.rows(name, index).view(np.int16)
            bits[row, self.lengths[index] :] = 0
        return whole.view(torch.bfloat16)


class Order:
    """Which samples each step reads: the same for a seed, however often a run was interrupted."""

    def __init__(self, lengths: npt.NDArray[np.int64], batch: int, seed: int) -> None:
        """``lengths`` of the samples that are trained on. Raise RequestError without one."""
        if not len(lengths):
            raise RequestError("no answer of the training split has two tokens; give more or longer tasks")
        self._lengths, self._batch, self._seed = lengths, min(batch, len(lengths)), seed
        self._epoch, self._batches = -1, list[npt.NDArray[np.int64]]()  # the last one that was asked for

    def step(self, number: int) -> npt.NDArray[np.int64]:
        """Indices of step ``number``, from 0; those of an epoch's steps are all different."""
        epoch, at = divmod(number, len(self._lengths) // self._batch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(np.random.default_rng([self._seed, epoch]))
        return self._batches[at]

    def share(self, number: int, blocks: int) -> torch.Tensor:
        """Where the anchors of step ``number`` stand, [batch, blocks] in 0 .. 1."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        return torch.rand(self._batch, blocks, generator=generator)

    def _shuffled(self, rng: np.random.Generator) -> list[npt.NDArray[np.int64]]:
        """Batches of an epoch, each of samples that are about as long; the last samples of an epoch are left out."""
        count, batch, made = len(self._lengths), self._batch, list[npt.NDArray[np.int64]]()
        order = rng.permutation(count)[: count // batch * batch]  # now: behind the sort it were the longest
        for first in range(0, len(order), batch * _POOL):
            pool = order[first : first + batch * _POOL]
            pool = pool[np.argsort(self._lengths[pool], kind="stable")]
            made += [pool[i : i + batch] for i in range(0, len(pool), batch)]
        return [made[i] for i in rng.permutation(len(made))]


class BatchReader:
    """The batches of a training by number from 0; each is read while the one before it is learnt from."""

    def __init__(self, shards: Shards, run: TrainingRun, *, pinned: bool = False) -> None:
        """Raise RequestError without a sample to train on."""
        self._order = Order(shards.lengths[shards.training], run.sequences, run.seed)
        self._shards, self._anchors, self._pinned = shards, run.anchors, pinned
        self._thread = ThreadPoolExecutor(1)
        self._ahead: dict[int, Future[Batch]] = {}

    def batch(self, number: int) -> Batch:
        """See :meth:`Shards.batch`. Raises OSError where the disk fails."""
        waited = self._ahead.pop(number, None) or self._thread.submit(self._read, number)
        found = waited.result()
        self._ahead = {number + 1: self._thread.submit(self._read, number + 1)}
        return found

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, number: int) -> Batch:
        indices = self._shards.training[self._order.step(number)]
        return self._shards.batch(indices.tolist(), self._order.share(number, self._anchors), pinned=self._pinned)
