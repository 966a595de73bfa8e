"""The doctor's judgement of made-up facts and trees, one case or more for every code and status."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import board_support
import pytest
import typer
from cli_support import flip_byte, last_json
from native_support import formats_of, write_native_bundle

import edge_dflash.cli
from edge_dflash.backends.cuda.compile import kernels_digest
from edge_dflash.backends.cuda.support import DeviceFacts
from edge_dflash.board.linux import MemoryState
from edge_dflash.board.profiles import load_board
from edge_dflash.board.state import BoardState, read_board_state
from edge_dflash.bundle.manifest import EngineFiles
from edge_dflash.checks import doctor as gathering
from edge_dflash.checks.doctor import (
    CODES,
    BundleFacts,
    Facts,
    examine,
    gather,
    healthy,
    look_at,
    parse_properties,
    report,
    tensorrt_versions,
)
from edge_dflash.common.files import directory

THOR = DeviceFacts("NVIDIA Thor", 110, (13, 0), True)
RUNNING = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "NRestarts": "0"}


@pytest.fixture(scope="module")
def healthy_thor(tmp_path_factory):
    """A Thor in its fastest mode with a bundle that was built for it."""
    folder = tmp_path_factory.mktemp("thor")
    root = board_support.thor(folder / "root", mode="0000")
    board_support.write(root, board_support.devfreq("gpu-gpc-0", 5, 1, 1575000000, [306000000, 1575000000]))
    write_native_bundle(folder / "b", formats_of("fp8"), arch="sm110a", tools={"kernels": kernels_digest()})
    profile = load_board("thor")
    return Facts(
        board=read_board_state(root),
        profile=profile,
        device=THOR,
        tensorrt={"tensorrt": "10.13.3.9"},
        kernels=kernels_digest(),
        torch=True,
        disk_free=10**11,
        service=RUNNING,
        nodes={"/dev/nvmap": True},
        bundle=look_at(folder / "b", profile, hashes=True),
    )


@pytest.fixture
def thor(healthy_thor):
    return healthy_thor


def one(facts, code):
    (found,) = [check for check in examine(facts) if check.code == code]
    return found


def test_a_healthy_thor_passes_every_code(thor):
    checks = examine(thor)
    assert [check.code for check in checks] == list(CODES)
    assert [(c.code, c.status, c.remedy) for c in checks] == [(code, "ok", "") for code in CODES]
    assert healthy(checks)
    assert one(thor, "D002").found == "Jetson Linux 38.4, JetPack 7.1"
    assert one(thor, "D006").found == "MAXN"
    assert one(thor, "D007").found == "gpu 0 MHz of 1575; memory 3200 MHz of 4266"
    assert one(thor, "D008").found == "55 degrees, 39.9 W"


def changed(**fields):
    return lambda facts: replace(facts, **fields)


def board(**fields):
    return lambda facts: replace(facts, board=replace(facts.board, **fields))


def state(**fields):
    return lambda facts: replace(facts, service={**RUNNING, **fields})


def manifest(**fields):
    return lambda facts: replace(facts, bundle=replace(facts.bundle, manifest=replace(facts.bundle.manifest, **fields)))


def old_driver(facts):
    return replace(facts, device=replace(THOR, cuda=(12, 6)))


def lack(facts):
    return replace(facts, board=replace(facts.board, memory=MemoryState(10**10, 10**6, 0, 0)))


SHORT = {"tensorrt": {"tensorrt": "10.13.3"}}  # as the file name of JetPack's library has it
CASES = [
    ("D001", "warn", board(model="NVIDIA Jetson Nova"), "add one to jetson/", {"profile": None}),
    ("D001", "warn", board(model=None), "flash Jetson Linux", {"profile": None}),
    ("D002", "warn", board(release="37.1"), "38.2 (JetPack 7.0), 38.4 (JetPack 7.1), 39.2 (JetPack 7.2)", {}),
    ("D002", "warn", board(release=None), "nvidia-l4t-core", {}),
    ("D002", "ok", board(release="38.2.1"), "", {}),
    ("D003", "fail", changed(device=None, device_error="no driver was found; install the driver"), "install the", {}),
    ("D003", "warn", changed(device=None, device_error="none; install it", bundle=None), "install it", {}),
    ("D003", "fail", changed(device=replace(THOR, cuda=(12, 6))), "flash JetPack 7", {}),
    ("D003", "warn", changed(device=replace(THOR, cuda=(12, 6)), bundle=None), "flash JetPack 7", {}),
    ("D003", "fail", lambda facts: old_driver(manifest(backend="tensorrt")(facts)), "flash JetPack 7", {}),
    ("D003", "ok", manifest(backend="reference", arch="cpu"), "", {"device": None, "device_error": "none; install it"}),
    ("D004", "ok", manifest(backend="reference", arch="cpu"), "", {"device": None}),
    ("D004", "warn", changed(device=None), "D003", {}),
    ("D004", "warn", changed(device=replace(THOR, sm=75)), "there are kernels for sm87, sm89", {}),
    ("D004", "warn", changed(device=replace(THOR, sm=87)), "the profile agx-thor says SM 110", {}),
    ("D005", "ok", changed(tensorrt={}), "", {}),
    ("D005", "warn", changed(tensorrt={"tensorrt": "10.16.1.11"}), "JetPack's own", {}),
    ("D006", "warn", lambda facts: mode(facts, 1, "120W"), "sudo nvpmodel -m 0 (MAXN)", {}),
    ("D006", "warn", board(power_mode=None), "nvpmodel -q", {}),
    ("D007", "warn", lambda facts: capped(facts), "the hardware can do gpu 1575 MHz", {}),
    ("D007", "ok", board(clocks=()), "", {}),
    ("D008", "warn", board(throttling={"gpu": True, "cpu": False}), "cool the board", {}),
    ("D008", "warn", board(over_current={"oc1": 0, "oc3": 4}), "use the supply", {}),
    ("D008", "ok", board(temperatures={}, rails=()), "", {}),
    ("D009", "fail", lack, "close other programs", {"service": {**RUNNING, "ActiveState": "inactive"}}),
    ("D009", "ok", lack, "", {}),
    ("D009", "ok", lack, "", {"service": None, "device": replace(THOR, integrated=False)}),
    (
        "D009",
        "fail",
        lambda f: replace(lack(f), bundle=replace(f.bundle, needs_bytes=10**11)),
        "smaller",
        {"service": None},
    ),
    ("D009", "warn", board(memory=None), "/proc", {}),
    ("D010", "warn", board(memory=MemoryState(10**10, 9 * 10**9, 10**10, 10**9)), "memory ran short", {}),
    ("D010", "ok", board(memory=MemoryState(10**10, 9 * 10**9, 10**10, 10**10 - 10**8)), "", {}),
    ("D011", "fail", changed(disk_free=10**6), "apt clean", {}),
    ("D011", "warn", lambda f: manifest(files=big(f))(replace(f, disk_free=2 * 10**9)), "--keep 1", {}),
    ("D011", "ok", changed(disk_free=None), "", {}),
    ("D012", "warn", changed(service=None), "edge-dflash serve --config", {}),
    ("D012", "warn", state(LoadState="not-found", ActiveState="inactive"), "sudo edge-dflash service install", {}),
    ("D012", "warn", state(ActiveState="inactive", SubState="dead"), "systemctl enable --now", {}),
    ("D012", "warn", state(NRestarts="3"), "journalctl -b -u edge-dflash", {}),
    ("D012", "fail", state(ActiveState="failed", Result="watchdog", StatusText="self-test"), "reset-failed", {}),
    ("D013", "warn", changed(nodes={"/dev/nvmap": False, "/dev/nvidia0": True}), "usermod -aG video,render", {}),
    ("D013", "fail", changed(nodes={}), "nvidia-jetpack", {}),
    ("D013", "ok", changed(nodes={}, profile=None), "", {}),
    ("D015", "fail", changed(device=replace(THOR, sm=87)), "--backend native --arch sm87", {}),
    ("D015", "fail", changed(device=replace(THOR, sm=75)), "--backend reference --arch cpu", {}),
    ("D015", "fail", changed(device=None), "--backend reference --arch cpu", {}),
    ("D015", "ok", manifest(backend="reference", arch="cpu"), "", {}),
    ("D015", "fail", manifest(backend="reference", arch="cpu"), "edge-dflash[build]", {"torch": False}),
    ("D016", "fail", changed(kernels="another"), "--backend native --arch sm110a", {}),
    ("D016", "ok", manifest(tools={}), "", {}),
    (
        "D005",
        "fail",
        manifest(plans=EngineFiles("tensorrt", "10.13.3.9", ("plans/a",), ())),
        "JetPack ships",
        {"tensorrt": {}},
    ),
    ("D005", "fail", manifest(plans=EngineFiles("tensorrt_rtx", "1.7", ("plans/a",), ())), "pip install", {}),
    ("D005", "ok", manifest(plans=EngineFiles("tensorrt", "10.13.3.9", ("plans/a",), ())), "", {}),
    ("D017", "ok", manifest(plans=EngineFiles("tensorrt", "10.13.3.9", ("plans/a",), ())), "", {}),
    ("D017", "ok", manifest(plans=EngineFiles("tensorrt", "10.13.3.9", ("plans/a",), ())), "", SHORT),
    ("D017", "fail", manifest(plans=EngineFiles("tensorrt", "10.16.2.10", ("plans/a",), ())), "build --finish", {}),
    ("D017", "fail", manifest(plans=EngineFiles("tensorrt", None, ("plans/a",), ("plans/a",))), "build --finish", {}),
    ("D017", "fail", manifest(plans=EngineFiles("tensorrt", "10.13.3.9", ("plans/a",), ())), "D005", {"tensorrt": {}}),
]


def mode(facts, number, name):
    mode = type(facts.board.power_mode)(number, name)
    return replace(facts, board=replace(facts.board, power_mode=mode))


def capped(facts):
    first, *rest = (c for c in facts.board.clocks if c.part == "gpu")
    return replace(facts, board=replace(facts.board, clocks=(replace(first, limit_hz=10**9), *rest)))


def big(facts):
    name, entry = next(iter(facts.bundle.manifest.files.items()))
    return {name: replace(entry, size=3 * 10**9)}


@pytest.mark.parametrize(("code", "status", "change", "remedy", "more"), CASES)
def test_every_code_has_its_statuses(thor, code, status, change, remedy, more):
    found = one(change(replace(thor, **more)), code)
    assert (found.status, found.remedy if not remedy else "") == (status, "")
    assert remedy in found.remedy
    assert bool(found.remedy) == (status != "ok")
    assert "\n" not in found.found + found.remedy


def test_what_is_wrong_with_files_is_said(thor, tmp_path):
    shutil.copytree(thor.bundle.path, tmp_path / "b")
    flip_byte(tmp_path / "b")
    assert look_at(tmp_path / "b", None, hashes=False).error is None
    spoiled = look_at(tmp_path / "b", None, hashes=True)
    found = one(replace(thor, bundle=spoiled), "D014")
    assert found.status == "fail"
    assert "sha256 of" in found.found
    assert not healthy(examine(replace(thor, bundle=spoiled)))
    (tmp_path / "b" / "extra").write_text("")
    assert "not in the manifest" in look_at(tmp_path / "b", None, hashes=False).error


def test_no_bundle_at_a_path(thor, tmp_path):
    facts = replace(thor, bundle=look_at(tmp_path / "none", None, hashes=False))
    assert one(facts, "D014").status == "fail"
    assert [check.code for check in examine(facts)][-1] == "D014"  # no manifest, nothing more to judge


def test_the_installed_bundle_is_looked_at_when_none_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(gathering, "_service", lambda: None)
    root = board_support.orin(tmp_path)
    write_native_bundle(root / gathering.INSTALLED, formats_of("fp8"), arch="sm87")
    (root / "dev").mkdir()
    (root / "dev" / "nvmap").touch()
    (root / "usr/lib/aarch64-linux-gnu").mkdir(parents=True)
    for name in ("libnvinfer.so.10", "libnvinfer.so.10.3.0", "libnvinfer.so.8.6.2"):
        (root / "usr/lib/aarch64-linux-gnu" / name).touch()
    found = gather(root=root)
    assert found.bundle.manifest.arch == "sm87"
    assert found.profile.name == "orin-nx-16"
    assert found.nodes == {"/dev/nvmap": True}
    assert found.tensorrt["tensorrt"] == tensorrt_versions(root)["tensorrt"] == "10.3.0"
    assert one(found, "D002").found == "Jetson Linux 36.4.3, JetPack 6.2"
    assert one(found, "D008").found.startswith("throttled: gpu")


def test_properties_of_systemctl():
    text = "LoadState=loaded\nStatusText=a=b\n\nResult=\n"
    assert parse_properties(text) == {"LoadState": "loaded", "StatusText": "a=b", "Result": ""}


def test_any_machine_can_be_examined(cli):
    code, out, _ = cli("doctor", "--json")
    found = last_json(out)
    assert set(found) == {"ok", "counts", "checks", "bundle", "profile", "board"}
    assert [check["code"] for check in found["checks"]][:13] == list(CODES)[:13]
    assert (code, found["ok"]) == ((0, True) if not found["counts"]["fail"] else (1, False))
    assert sum(found["counts"].values()) == len(found["checks"])
    for check in found["checks"]:
        assert set(check) == {"code", "name", "status", "found", "remedy"}
        assert check["name"] == CODES[check["code"]]


def test_for_people(cli, ids_bundle):
    code, out, _ = cli("doctor", ids_bundle, "--hash")
    assert code == 0
    assert re.search(r"D014 +ok +bundle files +\d+ files, 0\.00 GB, hashes compared", out)
    assert re.search(r"D015 +ok +bundle architecture +built for reference on cpu", out)


def test_a_failed_check_is_the_exit_code(cli, tmp_path):
    code, out, _ = cli("doctor", tmp_path / "[none]", "--json")
    assert code == 1
    assert last_json(out)["checks"][-1]["status"] == "fail"
    code, out, _ = cli("doctor", tmp_path / "[none]")
    assert code == 1
    assert "[none]" in out.replace("\n", "")  # brackets are not taken for markup


def test_the_report_is_json_of_a_board(thor):
    found = json.loads(json.dumps(report(examine(thor), thor), allow_nan=False))
    assert (found["ok"], found["counts"]) == (True, {"ok": 17, "warn": 0, "fail": 0})
    assert found["board"]["release"] == "38.4"


def test_nothing_at_all_is_no_failure():
    assert healthy(examine(Facts()))
    broken = BundleFacts("b", None, "gone", None, False)
    assert not healthy(examine(Facts(bundle=broken)))
    assert Facts().board == BoardState()


DOCS = directory("deploy").parent / "docs"
TROUBLES = (DOCS / "troubleshooting.md").read_text()
THOR_PAGE = (DOCS / "thor.md").read_text()
COMMANDS = [
    shlex.split(line.strip().removeprefix("sudo "), comments=True)[1:]
    for text in (TROUBLES, THOR_PAGE)
    for body in re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for line in body.splitlines()
    if line.strip().removeprefix("sudo ").startswith("edge-dflash ")
]


def test_every_code_has_a_section_in_order_and_no_other_has():
    assert re.findall(r"^## (D\d+) (.+)$", TROUBLES, flags=re.MULTILINE) == list(CODES.items())


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_commands_parse(argv):
    command = typer.main.get_command(edge_dflash.cli.app).commands[argv[0]]
    if argv[0] == "service":
        argv = argv[1:]
        command = command.commands[argv[0]]
    command.make_context(argv[0], list(argv[1:]))


def test_paths_of_links_exist():
    for text in (TROUBLES, THOR_PAGE):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (DOCS / target).exists(), target


def test_paths_are_those_of_the_units():
    unit = (directory("deploy") / "edge-dflash.service").read_text()
    for path in ("/etc/edge-dflash/config.toml", "/opt/edge-dflash"):
        assert path in THOR_PAGE
        assert path in unit
    socket = (directory("deploy") / "edge-dflash.socket").read_text()
    for path in set(re.findall(r"--unix-socket (\S+)", THOR_PAGE)):
        assert f"ListenStream={path}\n" in socket


def test_figures_are_those_of_the_unit():
    unit = dict(
        line.split("=", 1)
        for line in Path(directory("deploy") / "edge-dflash.service").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    assert f"`WatchdogSec` ({unit['WatchdogSec']} s)" in THOR_PAGE
    assert f"after {unit['RestartSec']} s" in THOR_PAGE
    assert f"OOMScoreAdjust={unit['OOMScoreAdjust']}" in THOR_PAGE
    assert (unit["StartLimitBurst"], unit["StartLimitIntervalSec"]) == ("4", "15min")
    assert "four times in 15 minutes" in THOR_PAGE
