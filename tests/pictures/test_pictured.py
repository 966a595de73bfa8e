from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from golden_pairs import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures_support import IMAGE, changed, mixed, noise, picture, prompt

from edge_dflash.errors import RequestError
from edge_dflash.pictures.pictured import Picture, Placed, check_pictures

RUNS = range(4)
GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda grid: (2 * grid[0], 2 * grid[1]))
PARTS = st.lists(st.lists(st.integers(0, 9), max_size=6) | st.builds(noise, st.integers(0, 3), GRIDS), min_size=1)


@pytest.mark.parametrize("run", RUNS)
def test_positions_and_delta_are_those_of_the_golden_run(run):
    found, said = golden("vision"), prompt(run)
    assert np.array_equal(said.positions(0, len(said.ids)), found[f"p{run}.position_ids"])
    assert said.delta(len(said.ids)) == found[f"p{run}.rope_delta"][0]
    assert [said.ids[i] == IMAGE for i in range(len(said.ids))] == found[f"p{run}.mm_token_type_ids"].astype(
        bool
    ).tolist()


def slow_positions(parts):
    """Token by token, as vision.md says it; the delta behind each token."""
    columns, deltas, p = [], [], 0
    for part in parts:
        if isinstance(part, Picture):
            height, width = part.grid[0] // 2, part.grid[1] // 2
            before = p - len(columns)
            columns += [(p, p + row, p + column) for row in range(height) for column in range(width)]
            p += max(height, width)
            deltas += [before] * (part.tokens - 1) + [p - len(columns)]
        else:
            for _ in part:
                columns.append((p, p, p))
                p += 1
                deltas.append(p - len(columns))
    return np.array(columns, np.int32).reshape(-1, 3).T, deltas


@settings(max_examples=60)
@given(PARTS, st.data())
def test_positions_of_any_part_are_those_of_the_whole(parts, data):
    said, (positions, deltas) = mixed(*parts), slow_positions(parts)
    first = data.draw(st.integers(0, len(said.ids)))
    stop = data.draw(st.integers(first, len(said.ids)))
    assert np.array_equal(said.positions(first, stop), positions[:, first:stop])
    assert [said.delta(n + 1) for n in range(len(said.ids))] == deltas
    assert all(delta <= 0 for delta in deltas)  # no position is beyond the context
    assert said.positions(first, stop).dtype == np.int32


@settings(max_examples=60)
@given(PARTS, st.data())
def test_the_sight_of_a_chunk_has_each_row_of_a_picture_once(parts, data):
    said, rows = mixed(*parts), []
    cuts = sorted({0, len(said.ids), *data.draw(st.lists(st.integers(0, len(said.ids))))})
    for first, stop in pairwise(cuts):
        sight = said.sight(first, stop, lambda placed: placed)
        assert (sight is None) == (IMAGE not in said.ids[first:stop])
        if sight is not None:
            assert sight.delta == said.delta(stop)
            assert np.array_equal(sight.positions, said.positions(first, stop))
            rows += [(first + one.row + i, one.seen.at + one.first + i) for one in sight.rows for i in range(one.count)]
    assert rows == [(at, at) for at, token in enumerate(said.ids) if token == IMAGE]


def test_identities_tell_pictures_from_texts_and_from_each_other():
    one = picture(0)
    turned = replace(one, grid=one.grid[::-1])
    said = {name: mixed([1], image, [2]).identities for name, image in (("a", one), ("b", changed(one)), ("c", turned))}
    assert len({*said.values()}) == 3
    for identities in said.values():
        assert [number < 0 for number in identities] == [False] + [True] * one.tokens + [False]
        assert all(-(1 << 63) <= number < 1 << 63 for number in identities)
        assert len({*identities[1:-1]}) == 2  # both halves of the hash
    assert mixed([1], picture(0), [2]).identities == said["a"]
    twice = mixed(one, one)
    assert twice.identities[:6] == twice.identities[6:] == said["a"][1:-1]


@pytest.mark.parametrize(
    ("changes", "token", "text"),
    [
        ({}, None, r"the prompt has images \(2\), and this target has no vision tower"),
        ({}, IMAGE + 1, "image 1 has 6 rows from token 1 on"),
        ({"pictures": (Placed(0, picture(0)),)}, IMAGE, "image 1 has 6 rows from token 0 on"),
        ({"pictures": (Placed(1, picture(0)), Placed(4, picture(0)))}, IMAGE, "image 2 has 6 rows from token 4 on"),
        ({"pictures": (Placed(8, picture(0)), Placed(1, picture(0)))}, IMAGE, "image 2 has 6 rows from token 1 on"),
        ({"pictures": (Placed(9, picture(0)),)}, IMAGE, "image 1 has 6 rows from token 9 on"),
        ({"pictures": (Placed(-6, picture(0)),)}, IMAGE, "image 1 has 6 rows from token -6 on"),
    ],
)
def test_pictures_stand_on_their_placeholders(changes, token, text):
    said = mixed([1], picture(0), [2], picture(0))
    check_pictures(said, IMAGE)
    with pytest.raises(RequestError, match=text):
        check_pictures(replace(said, **changes), token)
