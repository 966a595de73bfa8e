"""The table of what a caller gets, on a bundle of the reference backend: every column, and what an empty one says."""

from __future__ import annotations

import bench_public
import pytest

from edge_dflash.bench.workload import Workload

WORK = Workload(context=64, tokens=8, prefill=())
DECODE = {"tokens_per_second": 500.0, "accept_length": 5.0, "cycles": 10, "ms": 10.0}


def test_every_column_is_measured(demo_bundle):
    (row,) = bench_public.bundle_rows(demo_bundle, WORK)
    for column in ("raw", "planner", "schema", "service"):
        assert row[column]["cycles"] >= 4, row[column]  # of four prompts
        assert row[column]["ms"] > 0
    assert row["service"]["accept_length"] == pytest.approx(row["planner"]["accept_length"])


def test_columns_without_their_packages_say_which_are_missing(ids_bundle, monkeypatch):
    monkeypatch.setattr(bench_public, "find_spec", lambda name: None)
    (row,) = bench_public.bundle_rows(ids_bundle, WORK)
    assert row["schema"] == "no llguidance"
    assert row["service"] == "no starlette, uvicorn, prometheus_client, httpx2"
    assert row["planner"]["ms"] > 0
    assert "no starlette, uvicorn, prometheus_client, httpx2" in bench_public.table([row])


def test_the_table_compares_each_column_with_the_one_below_it():
    row = {"pair": "qwen3-8b, random weights", "weights": "bf16", "raw": DECODE, "planner": {**DECODE, "ms": 10.1}}
    row |= {"schema": {**DECODE, "ms": 10.605}, "service": {**DECODE, "ms": 20.2}}
    shown = bench_public.table([row, {"pair": "other", "error": "out of memory"}])
    for words in (
        "qwen3-8b, bf16",
        "10.000, 500",
        "10.100 +1.0%, 500",
        "10.605 +5.0%",
        "20.200 +100.0%",
        "out of memory",
    ):
        assert words in shown
