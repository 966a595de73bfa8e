from __future__ import annotations

import threading

import numpy as np
import pytest
from fakes import FakeBackend
from hypothesis import given
from hypothesis import strategies as st
from pictures_support import noise

from edge_dflash.decode.backend import Snapshot
from edge_dflash.decode.gaze import SeenStats, SeenStore
from edge_dflash.decode.store import PrefixStore
from edge_dflash.pictures.pictured import Placed

TOKEN = 8  # bytes of a token in a key


def snapshot(length, nbytes=100):
    return Snapshot(length, {"a": np.zeros(nbytes // 2, np.uint8), "b": np.zeros((nbytes - nbytes // 2,), np.int8)})


def test_the_longest_stored_prefix_is_found():
    store = PrefixStore(1 << 20)
    kept = {n: snapshot(n) for n in (1, 3, 6)}
    for n, entry in kept.items():
        assert store.put(range(n), entry)
    assert store.longest(range(9)) is kept[6]
    assert store.longest(range(6)) is kept[6]  # a prefix may be all of it
    assert store.longest(range(5)) is kept[3]
    assert store.longest((0, 1, 2, 9, 4, 5)) is kept[3]
    assert store.longest((0, 1, 9)) is kept[1]
    assert store.longest((256,)) is None  # no prefix, although its first byte is that of a stored token
    assert store.longest(()) is None
    assert store.longest(range(9), longer_than=6) is None
    stats = store.stats
    assert (stats.hits, stats.misses, stats.tokens) == (5, 2, 6 + 6 + 3 + 3 + 1)
    assert (stats.entries, stats.bytes) == (3, 300 + 10 * TOKEN)
    assert range(3) in store
    assert range(2) not in store


def test_the_least_recently_used_goes_first():
    store = PrefixStore(3 * (100 + TOKEN))
    for token in (1, 2, 3):
        store.put((token,), snapshot(1))
    assert store.longest((1, 7))
    store.put((4,), snapshot(1))
    assert [(token,) in store for token in (1, 2, 3, 4)] == [True, False, True, True]
    assert store.stats.evicted == 1
    store.put((3,), snapshot(1))  # stored again: the newest, and counted once
    store.put((5,), snapshot(1))
    assert [(token,) in store for token in (1, 3, 4, 5)] == [False, True, True, True]
    assert store.stats.bytes == 3 * (100 + TOKEN)


def test_what_is_larger_than_the_budget_is_refused_and_drops_nothing():
    store = PrefixStore(200)
    assert store.put((1,), snapshot(1))
    assert not store.put((2,), snapshot(1, 200))
    assert (1,) in store
    assert (store.stats.refused, store.stats.evicted) == (1, 0)
    assert not PrefixStore(0).put((1,), Snapshot(1, {}))


@pytest.mark.parametrize(("tokens", "length"), [((1, 2), 1), ((1,), 2), ((), 0)])
def test_a_snapshot_of_other_tokens_is_a_mistake(tokens, length):
    with pytest.raises(ValueError, match=f"snapshot of {length} tokens cannot stand for a prefix of {len(tokens)}"):
        PrefixStore(1000).put(tokens, snapshot(length))
    with pytest.raises(ValueError, match="-1 bytes"):
        PrefixStore(-1)


@given(
    st.integers(0, 600),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, 300))),
)
def test_a_store_is_a_bounded_dictionary_with_prefix_lookup(budget, ops):
    """Against a model: a list of (tokens, bytes), least recently used first."""
    store, model = PrefixStore(budget), []
    for is_put, tokens, nbytes in ops:
        tokens = tuple(tokens)
        if is_put:
            size = nbytes + TOKEN * len(tokens)
            assert store.put(tokens, snapshot(len(tokens), nbytes)) == (size <= budget)
            if size <= budget:
                model = [entry for entry in model if entry[0] != tokens]
                while sum(s for _, s in model) + size > budget:
                    model.pop(0)
                model.append((tokens, size))
        else:
            found = [entry for entry in model if tokens[: len(entry[0])] == entry[0]]
            best = max(found, key=lambda entry: len(entry[0]), default=None)
            got = store.longest(tokens)
            assert (got.length if got else None) == (len(best[0]) if best else None)
            if best:
                model.remove(best)
                model.append(best)
        assert store.stats.bytes == sum(s for _, s in model) <= budget
        assert store.stats.entries == len(model)


def test_threads_may_share_it():
    store, wrong, over = PrefixStore(2000), [], []

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(300):
            tokens = random.integers(0, 3, random.integers(1, 6)).tolist()
            if random.random() < 0.5:
                store.put(tokens, Snapshot(len(tokens), {"tokens": np.array(tokens), "pad": np.zeros(100, np.uint8)}))
            elif (found := store.longest(tokens)) is not None:
                wrong.extend([tokens] * (found.arrays["tokens"].tolist() != tokens[: found.length]))
            over.extend([1] * (store.stats.bytes > 2000))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, over) == ([], [])
    assert store.stats.hits > 100


def test_the_least_recently_seen_picture_goes_first():
    frames, eyes, store = [Placed(0, noise(seed)) for seed in range(4)], FakeBackend(), SeenStore(3000)
    for placed in frames[:3]:
        assert store.get(placed) is None
        store.make(placed, eyes)
    assert store.get(Placed(9, frames[0].picture)) is not None  # wherever it stands
    store.make(frames[3], eyes)
    assert [one in store for one in frames] == [True, False, True, True]
    assert store.stats == SeenStats(entries=3, bytes=3000, budget=3000, hits=1, misses=4, evicted=1)
    small = SeenStore(999)
    small.make(frames[0], eyes)
    assert (small.stats.entries, small.stats.misses, frames[0] in small) == (0, 1, False)
    with pytest.raises(ValueError, match="-1 bytes"):
        SeenStore(-1)
