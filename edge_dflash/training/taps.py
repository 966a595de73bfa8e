"""Taps of a bundle's target over prompts and answers: made, kept on the disk, and read in batches.

They are made by the backend that will run the drafter, the native one on its GPU, the reference otherwise, from the
bundle's weights as they are, quantized. A shard is a safetensors file: ids and taps of several sequences end to end,
and where each begins. It is whole or not there at all, so that a run that was killed goes on where it stood, and its
name says what it was made of. The hashes that files had when they were written lie next to them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file

from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.bundle.manifest import fingerprint
from edge_dflash.bundle.parts import hash_file
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.files import replacing
from edge_dflash.common.progress import Progress, unheard
from edge_dflash.errors import RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import RmsNorm, SelectRows, StateOp
from edge_dflash.model.program import Program
from edge_dflash.model.specs import DrafterSpec, PairSpec
from edge_dflash.training.drafter import drafter_spec
from edge_dflash.training.losses import Batch
from edge_dflash.training.settings import TrainingRun
from edge_dflash.training.workdir import read_object, write_object
from edge_dflash.weights.safetensors import TensorFiles

Bits = npt.NDArray[np.uint16]
Rows = dict[str, Bits]
"""Of one sequence: "taps" [rows, n * H], and perhaps "last" [rows, H], what the target's head reads."""
Taps = Callable[[Sequence[int]], Rows]
"""Runs the target over a whole sequence of token ids."""
STAGE, CHECKING = "taps", "checking taps"
SHARD_BYTES = 256 << 20  # of a shard, about
_POOL = 32  # batches that are sorted by length together, so that little is padding
SUMS = "sha256.json"  # hashes of the files of a folder


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
    with writing(path), replacing(path, half):
        yield half
        with half.open("rb") as file:
            os.fsync(file.fileno())


def seal(folder: Path, files: Mapping[str, Path]) -> None:
    """Add files of a folder, by the names that they have or will have there, to its hashes."""
    sums = read_object(folder / SUMS)
    write_object(folder / SUMS, sums | {name: hash_file(path).sha256 for name, path in files.items()})


def damaged_file(folder: Path) -> Path | None:
    """The first file of a folder that is not what was sealed; None: all are."""
    wanted = read_object(folder / SUMS)
    damaged = (folder / name for name, wanted_sum in wanted.items() if not is_whole(folder / name, wanted_sum))
    return next(damaged, None if wanted else folder / SUMS)


def is_whole(path: Path, wanted: str | None) -> bool:
    """Whether a file is there and has the hash that it was written with."""
    return path.is_file() and hash_file(path).sha256 == wanted


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's answer."""

    ids: tuple[int, ...]
    prompt: int  # ids of the prompt
    heldout: bool = False


def shard_path(folder: Path, index: int, samples: Sequence[Sample], *what: str) -> Path:
    """Where a shard of these samples lies."""
    digest = sha256("\n".join(what).encode())
    for one in samples:
        digest.update(np.array([len(one.ids), one.prompt, one.heldout, *one.ids], np.int64).tobytes())
    return folder / f"{index:05}-{digest.hexdigest()[:32]}.safetensors"


def write_shard(path: Path, samples: Sequence[Sample], rows: Mapping[str, list[npt.NDArray[np.uint16]]]) -> None:
    """Write a shard whole or not at all: ``rows`` by name ("taps", "last") for each sample. Raises RequestError."""
    tensors: dict[str, npt.NDArray[Any]] = {
        "ids": np.concatenate([np.array(one.ids, np.int32) for one in samples]),
        "lengths": np.array([len(one.ids) for one in samples], np.int64),
        "prompts": np.array([one.prompt for one in samples], np.int64),
        "heldout": np.array([one.heldout for one in samples], np.uint8),
        **{name: np.concatenate(parts) for name, parts in rows.items()},
    }
    with whole_file(path) as half:
        save_file(tensors, str(half))
        seal(path.parent, {path.name: half})


def tap_rows(drafter: DrafterSpec) -> int:
    """Rows of the target's width that are kept of a token: its taps, and what the head reads where DSpark learns it."""
    return len(drafter.target_layer_ids) + drafter.anchor_drafts


def shard_bytes(pair: PairSpec, tokens: int) -> int:
    """Bytes on the disk of ``tokens``: an id (4 bytes) and BF16 rows."""
    return tokens * (4 + tap_rows(drafter_spec(pair)) * pair.target.hidden_size * 2)


def tap_program(pair: PairSpec, *, last: bool) -> Program:
    """The part of the prefill pass that makes the taps and, if wanted, every row of what the head reads."""
    program = pair_programs(pair).prefill
    ops = [op for op in program.ops if not (isinstance(op, StateOp) and op.state.startswith("drafter."))]
    outputs = {"taps": program.outputs["taps"]}
    if last:
        select = next(op for op in ops if isinstance(op, SelectRows))
        norm = next(op for op in ops if isinstance(op, RmsNorm) and op.inputs == (select.output,))
        ops.append(replace(norm, inputs=select.inputs, output="last"))
        outputs["last"] = "last"
    needed, kept = set(outputs.values()), []
    for op in reversed(ops):
        if op.output in needed:
            kept.append(op)
            needed.update(op.inputs)
    return replace(program, ops=tuple(reversed(kept)), outputs=outputs)


def reference_taps(bundle: Bundle, *, last: bool) -> Taps:
    """In torch on the CPU."""
    program, precision = tap_program(bundle.pair, last=last), bundle.manifest.precision
    interpreter = Interpreter(TorchWeights(bundle, row_tile=None), precision)
    known = pair_programs(bundle.pair).prefill.states
    states = {name: state for name, state in known.items() if not name.startswith("drafter.")}

    def rows(ids: Sequence[int]) -> Rows:
        found = interpreter.run(program, ids, Memory.allocate(states, len(ids), precision, bundle.kv_scale))
        return {name: rows.bfloat16().view(torch.int16).numpy().view(np.uint16) for name, rows in found.items()}

    return rows


@contextmanager
def open_taps(bundle: Bundle, *, last: bool) -> Iterator[Taps]:
    """By the bundle's own backend. Raises BackendError where that cannot run here."""
    if not bundle.manifest.on_device:
        yield reference_taps(bundle, last=last)
        return
    from edge_dflash.backends.cuda.taps import NativeTapper  # needs CUDA's bindings

    with closing(NativeTapper(bundle, last=last)) as native:
        yield native.rows


def write_taps(
    bundle: Bundle,
    samples: Sequence[Sample],
    folder: Path,
    *,
    progress: Progress = unheard,
    say: Callable[[str], None] = lambda line: None,
    opened: Callable[..., AbstractContextManager[Taps]] = open_taps,
) -> list[Path]:
    """Write the shards of ``samples`` that are missing in ``folder``, and remove others; where they lie.

    A damaged shard is said, and made again. Raises RequestError for a sample that does not fit the context.
    """
    most, last = bundle.manifest.max_context, drafter_spec(bundle.pair).anchor_drafts
    if (longest := max((len(one.ids) for one in samples), default=0)) > most:
        raise RequestError(f"a prompt and its answer have {longest} tokens, the bundle holds {most}")
    folder.mkdir(parents=True, exist_ok=True)
    of = fingerprint(bundle.manifest), str(last)
    parts = {shard_path(folder, i, part, *of): part for i, part in enumerate(_parts(samples, bundle.pair))}
    for path in set(folder.glob("*.safetensors")) - parts.keys():  # of other answers, or another target
        path.unlink()
    missing, sums = list[Path](), read_object(folder / SUMS)
    for i, path in enumerate(parts):
        progress(CHECKING, i, len(parts))
        if path.exists():
            if is_whole(path, sums.get(path.name)):
                continue
            say(f"{path} is damaged: it does not have the hash that it was written with; its taps are made again")
        missing.append(path)
    made, total = 0, sum(len(one.ids) for path in missing for one in parts[path])
    progress(STAGE, 0, total)
    if not missing:
        return list(parts)
    with opened(bundle, last=last) as taps:
        for path in missing:
            rows: dict[str, list[Bits]] = {}
            for one in parts[path]:
                for name, found in taps(one.ids).items():
                    rows.setdefault(name, []).append(found)
                made += len(one.ids)
                progress(STAGE, made, total)
            write_shard(path, parts[path], rows)
    return list(parts)


def _parts(samples: Sequence[Sample], pair: PairSpec) -> list[list[Sample]]:
    """The samples of each shard."""
    most, parts, size = max(1, SHARD_BYTES // shard_bytes(pair, 1)), list[list[Sample]](), 0
    for one in samples:
        if not parts or size + len(one.ids) > most:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += len(one.ids)
    return parts


class Shards:
    """The samples of some files. Taps stay on the disk until a batch asks for them."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raise CheckpointError for a shard that is missing or damaged."""
        self._files = [TensorFiles.open([path]) for path in files]
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
        found = (self._ahead.pop(number, None) or self._thread.submit(self._read, number)).result()
        self._ahead = {number + 1: self._thread.submit(self._read, number + 1)}
        return found

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, number: int) -> Batch:
        indices = self._shards.training[self._order.step(number)]
        return self._shards.batch(indices.tolist(), self._order.share(number, self._anchors), pinned=self._pinned)
