"""The dashboard asks for what the service counts, and leaves nothing out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fakes import FakeBackend
from planner_support import Slow
from service_support import TEXT_SHAPE

from edge_dflash.board.linux import MemoryState
from edge_dflash.board.state import BoardState, Rail
from edge_dflash.serve.metrics import BOARD, Metrics

DASHBOARD = json.loads((Path(__file__).resolve().parents[2] / "deploy" / "grafana.json").read_text())
BOARD_STATE = BoardState(
    rails=(Rail("VIN", "ina238", 31.5, 19.0, 1.66, False), Rail("NC", "ina3221", None, None, None, None)),
    temperatures={"tj": 61.5},
    throttling={"gpu": True},
    memory=MemoryState(128, 64, 0, 0),
)


def families():
    """Names of the metrics, with what each is called in a query, and its labels."""
    found = {}
    for family in Metrics(BoardState).registry.collect():
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found[family.name] = {family.name + end for end in ends}
    return found


def expressions():
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_query_names_metrics_that_exist():
    known = set().union(*families().values())
    for expression in expressions():
        names = re.findall(r"edge_dflash_\w+", expression)
        assert names
        assert set(names) <= known, expression


def test_every_metric_is_shown():
    asked = " ".join(expressions())
    for name, series in families().items():
        assert any(re.search(rf"\b{one}\b", asked) for one in series), name


def test_labels_that_legends_and_sums_name_exist():
    labels = {"le", "kind", "account", "outcome", "endpoint", "position", "state", "instance", "rows"} | {
        row[1] for row in BOARD
    }
    text = json.dumps(DASHBOARD)
    named = set(re.findall(r"\{\{(\w+)\}\}", text))
    for group in re.findall(r"by \(([^)]*)\)", text):
        named |= set(group.split(", "))
    assert named <= labels


def test_the_board_is_asked_at_each_scrape():
    text = Metrics(lambda: BOARD_STATE).text().decode()
    for line in (
        'edge_dflash_board_power_watts{rail="VIN"} 31.5',
        'edge_dflash_board_temperature_celsius{zone="tj"} 61.5',
        'edge_dflash_board_throttled{part="gpu"} 1.0',
        'edge_dflash_board_memory_available_bytes{kind="available"} 64.0',
    ):
        assert line in text
    assert "NC" not in text  # it did not say
    assert "edge_dflash_board_power_watts{" not in Metrics(BoardState).text().decode()


def test_joules_of_a_plan_are_told_and_counted_where_the_board_says_its_power(start):
    service, client = start(Slow(FakeBackend(TEXT_SHAPE), 0.03))
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 12}
    assert "board" not in client.post("/v1/chat/completions", json=body).json()["edge_dflash"]
    assert "edge_dflash_plan_joules_count" not in client.get("/metrics").text  # not 0: unknown
    service.power._read = lambda: Rail("VIN", "ina238", 40.0, None, None, None)
    found = client.post("/v1/chat/completions", json=body).json()["edge_dflash"]
    seconds = found["timings"]["total_seconds"] - found["timings"]["queue_seconds"]
    assert found["board"]["joules"] == pytest.approx(40.0 * seconds, rel=0.05)
    assert 'edge_dflash_plan_joules_count{rail="VIN"} 1.0' in client.get("/metrics").text
