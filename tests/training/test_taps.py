"""Shards of taps: what they hold, what is made again, and what a training reads of them."""

import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from training_support import plan

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import RequestError
from edge_dflash.model import pair_programs
from edge_dflash.training import taps as module
from edge_dflash.training.taps import BatchReader, Order, Sample, Shards, reference_taps, tap_program, write_taps
from edge_dflash.weights.safetensors import TensorFiles


@pytest.fixture(scope="module")
def bundle(ids_bundle):
    return Bundle.open(ids_bundle)


def samples(bundle, count=7, seed=0):
    rng, size = np.random.default_rng(seed), bundle.pair.target.vocab_size
    lengths = rng.integers(12, 40, count)
    return [
        Sample(tuple(rng.integers(0, size, n).tolist()), int(n) // 2, heldout=i % 3 == 2) for i, n in enumerate(lengths)
    ]


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "SHARD_BYTES", 60_000)


class Counting:
    def __init__(self, inner):
        self.inner, self.calls = inner, []

    @contextmanager
    def __call__(self, bundle, *, last):
        taps = reference_taps(bundle, last=last)
        yield lambda ids: self.calls.append(tuple(ids)) or taps(ids)


def test_taps_are_those_of_the_prefill_pass(bundle):
    manifest, ids = bundle.manifest, list(range(3, 40))
    backend = ReferenceBackend(bundle.pair, bundle, manifest.precision, max_context=128)
    backend._weights.row_tile = None
    wanted = backend._interpreter.run(pair_programs(bundle.pair).prefill, ids, backend._lanes[0].memory)
    found = reference_taps(bundle, last=True)(ids)
    assert np.array_equal(found["taps"], wanted["taps"].bfloat16().view(torch.int16).numpy().view(np.uint16))
    last = torch.from_numpy(found["last"][-1].view(np.int16)).view(torch.bfloat16)
    assert torch.equal(last, wanted["hidden"][-1].bfloat16())
    program = tap_program(bundle.pair, last=False)
    assert not any(name.startswith("drafter.") for op in program.ops for name in op.weights)


def test_a_shard_that_is_missing_or_of_something_else_is_made_again_alone(bundle, tmp_path, small_shards):
    texts, seen = samples(bundle), []
    paths = write_taps(bundle, texts, tmp_path, progress=lambda *now: seen.append(now))
    assert len(paths) > 2
    assert seen[-1] == ("taps", sum(len(one.ids) for one in texts), sum(len(one.ids) for one in texts))
    kept, again = [path.read_bytes() for path in paths], Counting(bundle)
    assert write_taps(bundle, texts, tmp_path, opened=again) == paths
    assert again.calls == []
    paths[1].unlink()
    paths[2].write_bytes(kept[2][:-7])  # cut, as by a full disk
    write_taps(bundle, texts, tmp_path, opened=again)
    assert 0 < len(again.calls) < len(texts)
    assert [path.read_bytes() for path in paths] == kept
    again.calls.clear()
    changed = [*texts[:-1], Sample((*texts[-1].ids[:-1], 1), texts[-1].prompt, texts[-1].heldout)]
    other = write_taps(bundle, changed, tmp_path, opened=again)
    assert 0 < len(again.calls) < len(texts)
    assert other[:-1] == paths[:-1]
    assert set(tmp_path.glob("*.safetensors")) == set(other)  # what was made of other answers is gone


def test_a_flipped_bit_of_a_shard_is_said_and_the_shard_made_again(bundle, tmp_path, small_shards):
    texts, said = samples(bundle), []
    path, again = write_taps(bundle, texts, tmp_path)[1], Counting(bundle)
    kept, files = path.read_bytes(), TensorFiles.open([path])
    for name in files.names():  # taps, and which tokens they are of
        body = bytearray(kept)
        body[files.entry(name).offset + 1 - (name == "heldout")] ^= 1
        path.write_bytes(body)
        said.clear()
        write_taps(bundle, texts, tmp_path, say=said.append, opened=again)
        assert path.read_bytes() == kept
        assert re.fullmatch(rf"{path} is damaged: .* hash .*; its taps are made again", said[0]), name
    assert 0 < len(again.calls) < len(texts) * len(files.names())
    write_taps(bundle, texts, tmp_path, say=said.append, opened=again)
    assert len(said) == 1


def test_what_is_too_long_is_refused(bundle, tmp_path):
    with pytest.raises(RequestError, match=f"the bundle holds {bundle.manifest.max_context}"):
        write_taps(bundle, [Sample((1,) * (bundle.manifest.max_context + 1), 3)], tmp_path)


def test_a_batch_has_what_the_shards_hold(bundle, tmp_path, small_shards):
    texts = samples(bundle)
    found = Shards(write_taps(bundle, texts, tmp_path))
    assert found.heldout.tolist() == [i for i, one in enumerate(texts) if one.heldout]
    assert sorted([*found.training, *found.heldout]) == list(range(len(texts)))
    share = torch.tensor([[0.0, 0.999], [0.5, 0.2]])
    batch = found.batch([0, 4], share).to("cpu")
    taps = reference_taps(bundle, last=False)
    for row, index in enumerate((0, 4)):
        one = texts[index]
        assert batch.ids[row, : len(one.ids)].tolist() == list(one.ids)
        wanted = torch.from_numpy(taps(one.ids)["taps"].view(np.int16)).view(torch.bfloat16).float()
        assert torch.equal(batch.taps[row, : len(one.ids)], wanted)
        assert not batch.taps[row, len(one.ids) :].any()
        assert all(one.prompt <= anchor <= len(one.ids) - 2 for anchor in batch.anchors[row].tolist())
    assert batch.anchors[0, 0] == texts[0].prompt
    assert batch.anchors[0, 1] == len(texts[0].ids) - 2


def test_steps_read_the_same_whatever_came_before_and_every_sample_in_an_epoch():
    lengths = np.random.default_rng(0).integers(10, 400, 96)
    first, second = Order(lengths, 8, seed=3), Order(lengths, 8, seed=3)
    steps = [first.step(i) for i in range(30)]
    for i in (29, 3, 17, 0):
        assert np.array_equal(second.step(i), steps[i])
        assert torch.equal(first.share(i, 5), second.share(i, 5))
    assert sorted(np.concatenate(steps[:12]).tolist()) == list(range(96))
    assert not np.array_equal(steps[0], Order(lengths, 8, seed=4).step(0))
    spread = [np.ptp(lengths[step]) for step in steps]
    assert np.mean(spread) < np.ptp(lengths) / 3
    few = Order(np.arange(10), 4, seed=3)  # two are left out of an epoch: others each time, not the longest
    assert set(np.concatenate([few.step(i) for i in range(40)]).tolist()) == set(range(10))
    with pytest.raises(RequestError, match="two tokens"):
        Order(np.zeros(0, np.int64), 8, seed=0)


def test_batches_are_the_same_read_ahead_or_not(bundle, tmp_path, small_shards):
    found, run = Shards(write_taps(bundle, samples(bundle), tmp_path)), plan(sequences=2, anchors=3, seed=5)
    one = BatchReader(found, run)
    asked = (0, 1, 2, 7, 8, 3)  # in order, as after a checkpoint, and back
    ahead = [one.batch(number) for number in asked]
    one.close()
    for number, batch in zip(asked, ahead, strict=True):
        fresh = BatchReader(found, run)
        for name, value in vars(fresh.batch(number)).items():
            assert value is None or torch.equal(value, getattr(batch, name))
        fresh.close()
    assert not torch.equal(ahead[0].anchors, ahead[1].anchors)
