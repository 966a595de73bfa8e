"""The arithmetic of few_multiprocessors.py: clusters by GPC, GPCs by clusters, and the slower of two times."""

import pytest
from forecast import BOARDS, CONVERTED, Board, Kind, clusters_held, joined, picked, summary, table


@pytest.mark.parametrize(
    ("layout", "blocks", "per_sm", "most"),
    [
        ((8, 8, 4), 8, 1, 2),
        ((8, 6, 6), 8, 1, 1),
        ((6, 6), 8, 1, 0),
        ((6, 6), 8, 2, 2),
        ((8, 8, 4), 2, 1, 10),
        ((7, 5), 2, 1, 5),
    ],
)
def test_no_cluster_spans_two_gpcs(layout, blocks, per_sm, most):
    assert clusters_held(layout, blocks, per_sm) == most


def test_gpcs_are_what_clusters_connect():
    assert joined([[0, 1], [4, 5], [2, 3], [1, 2], [5, 4]]) == [[0, 1, 2, 3], [4, 5]]


def test_a_layout_takes_the_largest_gpcs():
    gpcs = [[0, 1], [5, 4, 2, 3], [6, 7, 8]]
    assert picked(gpcs, (2, 3)) == [2, 3, 4, 6, 7]
    with pytest.raises(ValueError, match="has 3 multiprocessors, 4 are needed"):
        picked(gpcs, (4, 4))
    with pytest.raises(ValueError, match="3 GPCs were found, 4 are needed"):
        picked(gpcs, (1, 1, 1, 1))


def test_each_kind_counts_as_the_slower_of_compute_and_memory():
    board = Board("slow", 110, 1.0, 100e9, ((4,),))
    kinds = [Kind("bound by memory", 2, 10**9, 1e-3), Kind("bound by compute", 3, 10**6, 1e-3)]
    found = summary(kinds, board, 2.0)
    assert found["compute_ms"] == pytest.approx(2 * 2 + 3 * 2)
    assert found["memory_ms"] == pytest.approx(2 * 10 + 3 * 0.01)
    assert found["forecast_ms"] == pytest.approx(2 * 10 + 3 * 2)
    assert found["converted_ms"] == found["forecast_ms"]
    assert table(kinds, board, 2.0).splitlines()[-1].split() == ["all", "10.00", "20.03", "26.00", "26.00"]


@pytest.mark.parametrize(("sm", "factor"), [(110, CONVERTED), (121, CONVERTED), (87, 1.0), (90, 1.0), (100, 1.0)])
def test_nvfp4_by_conversions_counts_where_the_board_has_them(sm, factor):
    board = Board("a board", sm, 1.0, 100e9, ((4,),))
    kinds = [Kind("linear", 1, 10**6, 1e-3, nvfp4=True), Kind("bound by memory", 1, 10**9, 1e-3, nvfp4=True)]
    found = summary([*kinds, Kind("state", 1, 0, 1e-3)], board, 1.0)
    assert found["forecast_ms"] == pytest.approx(1 + 10 + 1)
    assert found["converted_ms"] == pytest.approx(factor + 10 + 1)


def test_boards_have_the_multiprocessors_of_their_data_sheets():
    counts = {board.name: {sum(layout) for layout in board.layouts} for board in BOARDS}
    assert counts == {"T5000": {20}, "T4000": {12}, "AGX Orin 64GB": {16}}
