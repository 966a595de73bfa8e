"""Rotary tables of lanes whose tokens have positions on three axes, on memory that is an array."""

from __future__ import annotations

import numpy as np
import pytest
from native_support import FakeGpu

from edge_dflash.backends.cuda.memory import Allocator
from edge_dflash.backends.cuda.rotary import RotaryTables, axes_of, rope_table
from edge_dflash.backends.cuda.tower import Eyes
from edge_dflash.model.specs import RopeSpec
from edge_dflash.pictures.pictured import Sight

SIGHTED = RopeSpec(10000.0, 64, mrope_section=(11, 11, 10))
ROWS, LANES = 40, 3


class Memory(FakeGpu):
    """What RotaryTables asks of a Gpu."""

    def copy(self, source, target, rows, pitch, nbytes):
        assert rows == 1
        assert min(source.nbytes, target.nbytes) >= nbytes
        self.write(target, self.bytes_of(source)[:nbytes])

    def table(self, pointer):
        return self.bytes_of(pointer).view(np.float32)


@pytest.fixture
def memory():
    return Memory()


def made(memory, rope=SIGHTED):
    tables = RotaryTables(rope, ROWS, LANES, Allocator(memory))
    for lane in range(LANES):
        tables.shift(memory, lane, 0, 0)
    return tables


def test_pairs_take_turns_among_the_axes():
    axes = axes_of(SIGHTED)
    assert [int((axes == axis).sum()) for axis in range(3)] == [11, 11, 10]
    assert axes[:6].tolist() == [0, 1, 2, 0, 1, 2]
    assert axes[30:].tolist() == [0, 1]
    assert not axes_of(RopeSpec(10000.0, 64)).any()


def test_a_target_of_text_has_one_table_for_all_lanes(memory):
    tables = made(memory, RopeSpec(10000.0, 64))
    assert tables.rows == 0
    tables.place(memory, 1, 0, np.zeros((3, 4), np.int32))
    tables.shift(memory, 1, 2, -2)
    for pointer, wanted in zip((tables.cosine, tables.sine), rope_table(SIGHTED, ROWS), strict=True):
        assert np.array_equal(memory.table(pointer).reshape(wanted.shape), wanted)


def test_each_token_of_an_image_turns_by_its_own_positions_and_others_lanes_stay(memory):
    tables, host = made(memory), rope_table(SIGHTED, ROWS)
    positions = np.array([[4, 4, 4, 4], [4, 4, 5, 5], [4, 5, 4, 5]], np.int32)
    tables.place(memory, 1, 4, positions)
    tables.shift(memory, 1, 8, -2)
    axes = axes_of(SIGHTED)
    for pointer, table in zip((tables.cosine, tables.sine), host, strict=True):
        found = memory.table(pointer).reshape(LANES, ROWS, 32)
        assert np.array_equal(found[0], table)
        assert np.array_equal(found[2], table)
        assert np.array_equal(found[1, :4], table[:4])
        assert np.array_equal(found[1, 8:], table[6 : ROWS - 2])
        for row in range(4):
            wanted = [table[positions[axes[pair], row], pair] for pair in range(32)]
            assert np.array_equal(found[1, 4 + row], wanted)


def test_a_lane_that_is_used_again_starts_at_its_indices(memory):
    tables, (cosine, _) = made(memory), rope_table(SIGHTED, ROWS)
    tables.place(memory, 2, 0, np.zeros((3, 5), np.int32))
    tables.shift(memory, 2, 5, -4)
    tables.shift(memory, 2, 0, 0)
    assert np.array_equal(memory.table(tables.cosine).reshape(LANES, ROWS, 32)[2], cosine)


def test_a_chunk_that_ends_inside_the_first_image_keeps_its_positions(memory):
    """Behind it the delta is still 0, as before the image."""
    tables, host = made(memory), rope_table(SIGHTED, ROWS)
    eyes = Eyes(memory, object(), [tables], None, 0)
    positions = np.array([[0, 1, 2, 2, 2, 2], [0, 1, 2, 2, 3, 3], [0, 1, 2, 3, 2, 3]], np.int32)
    eyes.place(1, 0, Sight(positions[:, :5], 0, ()))
    eyes.place(1, 5, Sight(positions[:, 5:], -2, ()))
    axes = axes_of(SIGHTED)
    for pointer, table in zip((tables.cosine, tables.sine), host, strict=True):
        found = memory.table(pointer).reshape(LANES, ROWS, 32)[1]
        for row in range(6):
            assert np.array_equal(found[row], [table[positions[axes[pair], row], pair] for pair in range(32)])
        assert np.array_equal(found[6:], table[4 : ROWS - 2])
