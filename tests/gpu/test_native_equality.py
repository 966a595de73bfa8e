"""Layers of full size with random weights: speculation at every accept length, and lanes, leave plain decoding's bits.

Plain decoding verifies one row at a time. Speculation is forced through every accept length: ``right`` true drafts,
then wrong ones. Logits of every committed row, KV bytes, recurrent state and tokens are compared.
"""

from dataclasses import replace
from functools import cache

import pytest
from golden_pairs import same_bits
from native_backend_support import ENGINE, device_cubin, native, prompt
from test_native_lanes import PAIRS, Mix

from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.bench.random_pair import RandomWeights, synthetic_pair

pytestmark = pytest.mark.gpu

NEW = 33  # tokens of a run
LAYERS = {  # of published pairs; taps
    "qwen3.6-27b": (8, (0, 2, 4, 5, 6)),
    "qwen3.6-35b-a3b": (10, (0, 1, 2, 3, 4, 5, 6, 7)),
    "qwen3-8b": (6, (0, 1, 2, 3, 4)),
}


@cache
def full_size(name, lanes=1):
    """The first layers of a published pair at full width; a small vocabulary."""
    (layers, taps), pair = LAYERS[name], synthetic_pair(name)
    target = replace(pair.target, layer_types=pair.target.layer_types[:layers], vocab_size=8192)
    drafter = replace(
        pair.drafter, num_target_layers=layers, target_layer_ids=taps, vocab_size=8192, mask_token_id=8191
    )
    pair = replace(pair, target=target, drafter=drafter)
    weights = RandomWeights(pair, "nvfp4", device_cubin)
    sizes = {"max_context": 512, "prefill_chunk": 128, "lanes": lanes}
    return NativeBackend(pair, weights, ENGINE, cubin=device_cubin, **sizes)


def plain(backend, ids):
    """Tokens, the bytes of the logits of each, and the state, one verified row at a time."""
    backend.reset()
    rows = backend.prefill(ids)
    tokens, logits = rows.argmax(), [rows.logits()[0].tobytes()]
    while len(tokens) < NEW:
        rows = backend.verify(tokens[-1:])
        tokens += rows.argmax()
        logits.append(rows.logits()[0].tobytes())
        backend.commit(1)
        backend.flush()
    return tokens, logits, backend.snapshot()


def check_forced(backend, ids, right, wanted):
    """A run with ``right`` true drafts a cycle is plain decoding's."""
    tokens, logits, state = wanted
    size, vocabulary = backend.shape.block_size, backend.shape.vocab_size
    backend.reset()
    backend.prefill(ids)
    done = 1  # tokens known; the last one is the anchor
    while done < NEW:
        true = tokens[done : done + right]
        wrong = [(t + 1) % vocabulary for t in (tokens[done + right :] + [0] * size)[: size - 1 - right]]
        found = backend.verify([tokens[done - 1], *true, *wrong][:size])
        count = min(len(true) + 1, NEW - done)
        assert [row.tobytes() for row in found.logits()[:count]] == logits[done : done + count], right
        assert found.argmax()[:count] == tokens[done : done + count]
        backend.commit(count)
        done += count
    assert same_bits(backend.snapshot(), state), right


@pytest.mark.parametrize("name", LAYERS)
def test_full_size_layers_are_bit_equal_at_every_accept_length(name):
    backend = full_size(name)
    ids = [t % backend.shape.vocab_size for t in prompt("hybrid", 40, seed=40)]
    wanted = plain(backend, ids)
    for right in range(backend.shape.block_size):
        check_forced(backend, ids, right, wanted)


def test_a_difference_would_be_seen():
    backend, ids = native("demo", "nvfp4"), prompt("demo", 5, seed=5)
    wanted = plain(backend, ids)
    with pytest.raises(AssertionError):
        check_forced(backend, [*ids[:-1], ids[-1] + 1], 3, wanted)


@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3.6-35b-a3b"])
def test_mixes_of_lanes_at_full_size_have_the_bits_that_each_request_has_alone(name, monkeypatch):
    monkeypatch.setitem(PAIRS, name, (full_size, name))
    joint = 0
    for seed in range(4):
        mix = Mix(name, seed)
        mix.run()
        joint += mix.joint_cycles
    assert joint > 0
