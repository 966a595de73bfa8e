"""Tasks as token ids in memory, made on many processes, and the order in which training reads them. No torch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from calib.demo.corpus import heldout_keys, tasks
from calib.demo.tokenizer import Sample, encode_tasks

LONGEST = 448  # ids of a prompt and its answer; the few longer tasks are left out
_PORTION = 1000  # tasks made by a process at a time
_POOL = 32  # batches sorted together by length, so that little is padding


@dataclass(frozen=True)
class Dataset:
    """Samples end to end: sample i is ids[offsets[i] : offsets[i + 1]], the first prompts[i] of them its prompt."""

    ids: npt.NDArray[np.uint16]
    offsets: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.prompts)

    def sample(self, index: int) -> Sample:
        """One sample as tuples."""
        whole = tuple(self.ids[self.offsets[index] : self.offsets[index + 1]].tolist())
        prompt = int(self.prompts[index])
        return Sample(whole[:prompt], whole[prompt:])

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Ids of each sample."""
        return np.diff(self.offsets)


def pack(samples: Sequence[Sample]) -> Dataset:
    """Samples as a dataset."""
    whole = [np.array(s.prompt + s.answer, dtype=np.uint16) for s in samples]
    offsets = np.concatenate(([0], np.cumsum([len(w) for w in whole]))).astype(np.int64)
    return Dataset(np.concatenate(whole), offsets, np.array([len(s.prompt) for s in samples], dtype=np.int64))


def join(parts: Sequence[Dataset]) -> Dataset:
    """Datasets one after the other."""
    lengths = np.concatenate([part.lengths for part in parts])
    return Dataset(
        np.concatenate([part.ids for part in parts]),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        np.concatenate([part.prompts for part in parts]),
    )


def training_set(tokenizer: Tokenizer, count: int, *, start: int = 0, workers: int = 0) -> Dataset:
    """Training tasks ``start`` .. ``start + count - 1`` without held-out ones; ``workers`` processes, 0: this one."""
    portions = [(at, min(_PORTION, start + count - at)) for at in range(start, start + count, _PORTION)]
    if not workers:
        _prepare(tokenizer.to_str())
        return join([_portion(portion) for portion in portions])
    with multiprocessing.get_context("spawn").Pool(workers, _prepare, (tokenizer.to_str(),)) as pool:
        return join(list(pool.imap(_portion, portions)))


_worker: dict[str, object] = {}  # what each process needs for every portion


def _prepare(tokenizer: str) -> None:
    _worker.update(tokenizer=Tokenizer.from_str(tokenizer), exclude=heldout_keys())


def _portion(portion: tuple[int, int]) -> Dataset:
    tokenizer, exclude = _worker["tokenizer"], _worker["exclude"]
    assert isinstance(tokenizer, Tokenizer)
    assert isinstance(exclude, frozenset)
    return pack(encode_tasks(tokenizer, list(tasks("train", *portion, exclude=exclude)), LONGEST))


def batches(dataset: Dataset, size: int, steps: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Indices of ``steps`` batches: every epoch shuffled anew, samples of like length together."""
    rng = np.random.default_rng(seed)
    lengths = dataset.lengths
    made = 0
    while True:
        order = rng.permutation(len(dataset))
        for start in range(0, len(order), size * _POOL):
            pool = order[start : start + size * _POOL]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            cut = [pool[at : at + size] for at in range(0, len(pool), size)]
            for which in rng.permutation(len(cut)):
                if len(cut[which]) < size and len(dataset) >= size:
                    continue
                yield cut[which]
                made += 1
                if made == steps:
                    return
