"""Readers of sysfs against trees of documented paths: Thor, Orin, and machines that say little or nonsense."""

from __future__ import annotations

import json
import os
import time
from dataclasses import FrozenInstanceError

import board_support
import pytest
from board_support import hwmon, write

from edge_dflash.board import state as power
from edge_dflash.board.linux import (
    MemoryState,
    SetMode,
    drop_page_cache,
    numbered,
    read_int,
    read_memory,
    read_power_mode,
    read_release,
    read_text,
)
from edge_dflash.board.state import (
    BoardState,
    EnergyMeter,
    Rail,
    read_board_state,
    read_clocks,
    read_input,
    read_rails,
    read_temperatures,
    read_throttling,
)


@pytest.fixture
def thor(tmp_path):
    return board_support.thor(tmp_path)


@pytest.fixture
def orin(tmp_path):
    return board_support.orin(tmp_path)


def test_thor(thor):
    state = read_board_state(thor)
    assert (state.model, state.release) == ("NVIDIA Jetson AGX Thor Developer Kit", "38.4")
    assert state.power_mode == SetMode(1, "120W")
    assert [(rail.name, rail.sensor) for rail in state.rails] == [
        ("VDD_GPU", "ina3221"),
        ("VDD_CPU_SOC_MSS", "ina3221"),
        ("VIN_SYS_5V0", "ina3221"),
        ("VIN", "ina238"),
    ]
    assert [rail.watts for rail in state.rails] == pytest.approx([18.0, 6.48, 6.5, 39.9])
    assert (state.rails[0].volts, state.rails[0].amperes, state.rails[0].alarm) == (12.0, 1.5, False)
    assert read_input(thor) == state.rails[3]
    assert state.rails[3].alarm is None
    assert state.watts == pytest.approx(39.9)
    assert state.temperatures == {"cpu": 53.7, "soc012": 55.1, "tj": 55.1}
    assert state.hottest == 55.1
    assert state.throttling == {"cpu": False, "gpu": False}
    assert state.throttled is False
    assert state.over_current == {}
    assert state.memory == MemoryState(128_790_092 * 1024, 120_000_000 * 1024, 0, 0)


def test_clocks_of_thor(thor):
    clocks = {clock.name: clock for clock in read_clocks(thor)}
    assert list(clocks) == ["bwmgr", "gpu-gpc-0", "gpu-nvd-0", "policy0"]
    gpu, memory, cpu = clocks["gpu-gpc-0"], clocks["bwmgr"], clocks["policy0"]
    assert (gpu.part, gpu.hz, gpu.limit_hz, gpu.most_hz) == ("gpu", 1386000000, 1386000000, 1575000000)
    assert (gpu.capped, gpu.locked, gpu.governor) == (True, False, "nvhost_podgov")
    assert (memory.part, memory.hz, memory.limit_hz, memory.capped) == ("memory", 3200000000, 4266000000, None)
    assert (cpu.part, cpu.hz, cpu.capped) == ("cpu", 2601000000, False)


def test_orin(orin):
    state = read_board_state(orin)
    assert (state.model, state.release) == ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", "36.4.3")
    assert state.power_mode == SetMode(7, None)  # there is no table of modes to name it
    assert [rail.name for rail in state.rails] == ["VDD_IN", "VDD_CPU_GPU_CV"]  # NC is not connected
    assert state.watts == 19.0
    assert state.over_current == {"oc1": 0, "oc3": 37}
    assert state.throttling == {"gpu": True, "hot-surface": False}
    assert state.throttled is True
    assert state.temperatures == {"cpu": 47.4, "tj": 48.5}  # -256 is how a sensor says that it is off
    assert [(c.name, c.part, c.hz) for c in state.clocks] == [
        ("17000000.gpu", "gpu", 306000000),
        ("emc", "memory", 3199000000),
        ("policy0", "cpu", 729600000),
        ("policy4", "cpu", 729600000),
    ]
    assert [c.capped for c in state.clocks] == [False, False, False, True]


def test_what_belongs_beside_a_measurement(thor, tmp_path_factory):
    brief = read_board_state(thor).brief()
    assert brief == {
        "power_mode": "120W",
        "watts": pytest.approx(39.9),
        "celsius": 55.1,
        "gpu_mhz": 1386.0,
        "memory_mhz": 3200.0,
        "cpu_mhz": 2601.0,
        "throttled": False,
        "available_bytes": 120_000_000 * 1024,
    }
    other = read_board_state(board_support.orin(tmp_path_factory.mktemp("orin"))).brief()
    assert (other["power_mode"], other["over_current_events"], other["throttled"]) == ("7", 37, True)


def test_json_holds_what_is_known_and_nothing_else(thor, tmp_path_factory):
    state = read_board_state(thor)
    found = json.loads(json.dumps(state.to_json(), allow_nan=False))
    assert found["throttled"] is False
    assert found["rails"][3]["watts"] == pytest.approx(39.9)
    assert "over_current" not in found
    nothing = read_board_state(tmp_path_factory.mktemp("empty"))
    assert nothing == BoardState()
    assert (nothing.to_json(), nothing.brief(), nothing.watts, nothing.throttled) == ({}, {}, None, None)
    with pytest.raises(FrozenInstanceError):
        state.model = "another"


def test_this_machine_can_be_read():
    assert read_board_state().memory.total > 0


def test_a_board_without_an_input_rail_has_no_total(tmp_path):
    """AGX Orin: the rails do not cover the board and are not added up."""
    rails = [("VDD_GPU_SOC", 12000, 1000), ("VDD_CPU_CV", 12000, 500), ("VIN_SYS_5V0", 5000, 700)]
    state = read_board_state(write(tmp_path, board_support.ina3221(0, rails)))
    assert len(state.rails) == 3
    assert state.watts is None


def test_sensors_that_do_not_answer_are_absent(thor):
    rail = thor / "sys/class/hwmon/hwmon0"
    (rail / "curr1_input").unlink()
    (rail / "in2_input").write_text("\n")
    (rail / "in3_label").unlink()
    board_support.not_now(rail / "curr1_input")
    power = thor / "sys/class/hwmon/hwmon10/power1_input"
    power.unlink()
    board_support.not_now(power)
    state = read_board_state(thor)
    assert [(r.name, r.watts, r.volts, r.amperes) for r in state.rails] == [
        ("VDD_GPU", None, 12.0, None),
        ("VDD_CPU_SOC_MSS", None, None, 0.54),
        ("VIN", None, 19.0, 2.1),  # volts and amperes are known, the power that the chip measured is not
    ]
    assert state.watts is None
    assert "watts" not in state.brief()


def test_a_clock_that_does_not_answer_leaves_the_other(thor):
    gpu = thor / "sys/class/devfreq/gpu-gpc-0/cur_freq"
    gpu.unlink()
    board_support.not_now(gpu)
    state = read_board_state(thor)
    assert state.clocks[1].hz is None
    assert state.clock("gpu").name == "gpu-nvd-0"


@pytest.mark.parametrize("text", ["", "garbage", "12.5", "1e9", "9" * 40, "\xff\xfe", "12 34x"])
def test_nonsense_is_not_a_number(tmp_path, text):
    (tmp_path / "file").write_bytes(text.encode("latin-1"))
    assert read_int(tmp_path / "file") == (12 if text.startswith("12 ") else None)


def test_units_and_signs_are_read(tmp_path):
    write(tmp_path, {"limit": "32760 ma", "cold": "-5000"})
    assert (read_int(tmp_path / "limit"), read_int(tmp_path / "cold")) == (32760, -5000)


def test_a_directory_in_the_place_of_a_file_is_absent(tmp_path):
    assert read_text(tmp_path) is None
    assert numbered(tmp_path / "no", "hwmon") == []


def test_devices_are_read_in_the_order_of_their_numbers(tmp_path):
    write(tmp_path, hwmon(10, "a", {}) | hwmon(9, "b", {}) | {"sys/class/hwmon/hwmonx/name": "c"})
    assert [path.name for path in numbered(tmp_path / "sys/class/hwmon", "hwmon")] == ["hwmon9", "hwmon10"]


def test_other_chips_are_no_rails(tmp_path):
    assert read_rails(write(tmp_path, hwmon(0, "tmp451", {"in1_label": "VDD_IN", "in1_input": 1}))) == ()


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("# R39 (release), REVISION: 2.0, GCID: 1", "39.2"),
        ("# R38 (release), REVISION: 2.1, GCID: 1", "38.2.1"),
        ("R38", None),
        ("# R38 (release)", None),
    ],
)
def test_releases(tmp_path, text, release):
    assert read_release(write(tmp_path, {"etc/nv_tegra_release": text})) == release


@pytest.mark.parametrize("text", ["", "pmode:", "pmode:x", "mode:0001"])
def test_a_damaged_power_mode_is_none(tmp_path, text):
    assert read_power_mode(write(tmp_path, {"var/lib/nvpmodel/status": text})) is None


def test_the_mode_has_its_name_from_the_table_and_not_from_a_comment(tmp_path):
    files = {"var/lib/nvpmodel/status": "pmode:0009", "etc/nvpmodel.conf": board_support.NVPMODEL}
    assert read_power_mode(write(tmp_path, files)) == SetMode(9, None)


def test_meminfo_without_a_line_is_none(tmp_path):
    lacking = "MemTotal: 1 kB\nMemAvailable: x kB\nSwapTotal: 0 kB\nSwapFree: 0 kB"
    assert read_memory(write(tmp_path, {"proc/meminfo": lacking})) is None
    whole = board_support.MEMINFO.format(total=4, available=2, swap=3, swap_free=1)
    assert read_memory(write(tmp_path, {"proc/meminfo": whole})).swap_used == 2048


def test_thermal_without_names_is_empty(tmp_path):
    write(tmp_path, {"sys/class/thermal/thermal_zone0/temp": 5, "sys/class/thermal/cooling_device0/type": "x-alert"})
    assert (read_temperatures(tmp_path), read_throttling(tmp_path)) == ({}, {})


def test_page_cache_is_dropped_for_files_only(tmp_path):
    write(tmp_path, {"weights/a": "x" * 9999, "manifest.json": "{}"})
    os.mkfifo(tmp_path / "pipe")  # must not block
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert drop_page_cache(tmp_path) == 10000 + 3


def test_energy_is_the_integral_of_what_was_sampled():
    read, ticks = iter([10.0, 20.0, 20.0, 10.0]), iter([0.0, 0.5, 1.0, 1.5])
    meter = EnergyMeter(lambda: Rail("VIN", "ina238", next(read), None, None, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(power.time, "perf_counter", lambda: next(ticks))
        for _ in range(4):
            meter._sample()
    assert meter.rail == "VIN"
    assert meter.joules(0.0, 1.5) == pytest.approx(7.5 + 10.0 + 7.5)
    assert meter.joules(0.25, 1.0) == pytest.approx(0.25 * 17.5 + 10.0)
    assert meter.joules(1.0, 2.0) == pytest.approx(7.5 + 5.0)  # held for a while after the last sample
    assert meter.joules(1.4, 3.0) is None
    assert meter.joules(5.0, 6.0) is None
    assert meter.joules(1.0, 1.0) is None


def test_energy_is_unknown_across_a_gap_and_without_a_rail():
    ticks = iter([0.0, 0.5, 3.0])
    meter = EnergyMeter(lambda: Rail("VIN", "ina238", 10.0, None, None, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(power.time, "perf_counter", lambda: next(ticks))
        for _ in range(3):
            meter._sample()
    assert meter.joules(0.0, 3.0) is None
    assert meter.joules(0.0, 0.5) == pytest.approx(5.0)
    for rail in (None, Rail("VIN", "ina238", None, None, None, None)):
        unknown = EnergyMeter(lambda rail=rail: rail)
        unknown._sample()
        assert unknown.joules(0.0, 1e9) is None
        assert unknown.rail is None


def test_energy_is_sampled_only_between_begin_and_end():
    calls = []
    meter = EnergyMeter(lambda: calls.append(1) or Rail("VIN", "ina238", 10.0, None, None, None), period=0.01)

    def sampled(count):
        until = time.monotonic() + 60
        while len(calls) < count and time.monotonic() < until:
            time.sleep(0.01)
        return len(calls) >= count

    began = time.perf_counter()
    meter.begin()
    assert sampled(3)
    meter.end()
    ended = time.perf_counter()
    assert meter.joules(began, ended) == pytest.approx(10.0 * (ended - began), rel=1e-6)
    time.sleep(0.1)  # one may be under way
    seen = len(calls)
    time.sleep(0.1)
    assert len(calls) == seen
    meter.begin()
    assert sampled(seen + 2)
    meter.end()
