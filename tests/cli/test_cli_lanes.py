"""Lanes on the command line: build, inspect, verify, bench."""

from __future__ import annotations

from cli_support import last_json

from edge_dflash.checks import mixes


def test_verify_compares_mixes_of_several_lanes(cli, ids_bundle, monkeypatch):
    monkeypatch.setattr(mixes, "MIXES", 2)
    asked = ("verify", ids_bundle, "--lanes", 2, "--count", 1, "--max-new-tokens", 6, "--json")
    code, out, _ = cli(*asked)
    found = last_json(out)
    assert (code, found["ok"]) == (0, True)
    assert (found["mixes"]["lanes"], found["mixes"]["mixes"], found["mixes"]["differences"]) == (2, 2, [])
    assert found["mixes"]["joint_cycles"] > 0


def test_a_bundle_of_one_lane_is_inspected_with_others(cli, ids_bundle):
    code, out, _ = cli("inspect", ids_bundle, "--board", "agx-thor", "--lanes", 4)
    assert code == 0
    assert "Joint cycles at" in out
    assert "4 counted above" in out
    assert last_json(cli("inspect", ids_bundle, "--json")[1])["lanes"]["lanes"] == 1


def test_more_lanes_than_there_can_be_are_not_timed(cli):
    code, _, err = cli("bench", "--synthetic", "qwen3-8b", "--lanes", "1,9")
    assert code != 0
    assert "--lanes names 9; there are 1 to 8 lanes" in err
