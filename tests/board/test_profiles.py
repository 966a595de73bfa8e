from pathlib import Path

import pytest
import yaml

from edge_dflash.board.profiles import BoardProfile, board_profiles, load_board, match_board, read_board
from edge_dflash.common.files import directory
from edge_dflash.errors import RecipeError


def test_the_shipped_boards_and_their_numbers():
    facts = {b.name: (b.sm, b.memory_bytes / 1e9, b.memory_bandwidth_bytes_per_s / 1e9) for b in board_profiles()}
    published = {
        "agx-thor": (110, 128, 273),
        "t4000": (110, 64, 273),
        "orin-agx-64": (87, 64, 204.8),
        "orin-nx-16": (87, 16, 102.4),
        "dgx-spark": (121, 128, 273),
    }
    assert {name: facts[name] for name in published} == published


def test_every_fact_names_its_source_and_jetsons_list_their_jetpacks():
    for board in board_profiles():
        assert board.notes
        assert all(note.source for note in board.notes)
        assert bool(board.jetpacks) == (board.name != "dgx-spark")
    thor = load_board("agx-thor")
    assert (thor.power_modes[0].id, thor.power_modes[0].name) == (0, "MAXN")
    assert {v.jetpack: v.tensorrt for v in thor.jetpacks} == {"7.0": "10.13.3", "7.1": "10.13.3", "7.2": "10.16.2"}


@pytest.mark.parametrize("name", ["agx-thor", "AGX-Thor", " thor ", "T5000", "jetson-agx-thor"])
def test_names_and_aliases_in_any_case(name):
    assert load_board(name).name == "agx-thor"


@pytest.mark.parametrize(
    ("model", "gigabytes", "name"),
    [
        ("NVIDIA Jetson AGX Thor Developer Kit", 131.9, "agx-thor"),
        ("NVIDIA Jetson AGX Thor Developer Kit", None, "agx-thor"),
        ("NVIDIA Jetson AGX Thor Developer Kit", 65.8, "t4000"),
        ("NVIDIA Jetson AGX Orin Developer Kit", 65.9, "orin-agx-64"),
        ("NVIDIA Jetson AGX Orin Developer Kit", 32.9, None),
        ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", 16.4, "orin-nx-16"),
        ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", 7.9, None),
        ("NVIDIA Jetson Orin Nano Developer Kit", 7.9, None),
        ("Raspberry Pi 5", 8.0, None),
    ],
)
def test_a_board_is_known_by_its_model_and_memory(model, gigabytes, name):
    found = match_board(model, None if gigabytes is None else int(gigabytes * 1e9))
    assert (found and found.name) == name


def test_milliseconds_is_bytes_over_bandwidth():
    assert load_board("thor").milliseconds(273_000_000) == pytest.approx(1.0)


def test_an_unknown_board_lists_the_accepted_ones():
    with pytest.raises(RecipeError, match=r"unknown board 'nano'; accepted: agx-thor .*dgx-spark .*orin-nx-16 .*t4000"):
        load_board("nano")


def _edited(tmp_path: Path, **changes: object) -> Path:
    document = yaml.safe_load((directory("jetson") / "agx-thor.yaml").read_text())
    document.update(changes)
    path = tmp_path / "board.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in document.items() if v != "remove"}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bandwith": 1}, "unknown key 'bandwith'; accepted keys are name, title"),
        ({"sm": "remove"}, "key 'sm' is missing"),
        ({"memory_bytes": -1}, "memory_bytes: found -1, wanted a positive integer"),
        ({"memory_bytes": True}, "memory_bytes: found True, wanted int"),
        ({"read_bandwidth_bytes_per_s": 273_000_000_001}, "found 273000000001, wanted at most the peak"),
        ({"read_bandwidth_bytes_per_s": 0}, "read_bandwidth_bytes_per_s: found 0, wanted a positive integer"),
        ({"gpu_clock_hz": 1.57e9}, "gpu_clock_hz: found 1570000000.0, wanted int"),
        ({"name": 5}, "name: found 5, wanted str"),
        ({"aliases": "thor"}, "aliases: found 'thor', wanted an array"),
        ({"power_modes": [{"id": 0, "name": "A", "watts": 1, "amps": 2}]}, r"power_modes\[0\]: unknown key 'amps'"),
        ({"power_modes": [{"id": "0", "name": "A", "watts": 1}]}, r"power_modes\[0\].id: found '0', wanted int"),
        ({"jetpacks": [7]}, r"jetpacks\[0\]: found 7, wanted an object"),
    ],
)
def test_a_malformed_profile_is_refused_by_key(tmp_path, changes, message):
    with pytest.raises(RecipeError, match=message) as caught:
        read_board(_edited(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert "board.yaml" in str(caught.value)


def test_an_unchanged_profile_reads_and_broken_yaml_is_refused(tmp_path):
    assert isinstance(read_board(_edited(tmp_path)), BoardProfile)
    broken = tmp_path / "x.yaml"
    broken.write_text("a: [1,\n b: }")
    with pytest.raises(RecipeError, match="not a readable YAML file") as caught:
        read_board(broken)
    assert "\n" not in str(caught.value)


def test_an_alias_used_twice_is_refused(tmp_path, monkeypatch):
    _edited(tmp_path, name="other")
    (tmp_path / "thor.yaml").write_text((directory("jetson") / "agx-thor.yaml").read_text())
    monkeypatch.setattr("edge_dflash.board.profiles.directory", lambda name: tmp_path)
    with pytest.raises(RecipeError, match=r"is used by .* and .*"):
        load_board("thor")
