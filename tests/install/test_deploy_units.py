"""The unit files: what they must say, read everywhere, and judged by systemd itself where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest
from native_support import formats_of, write_native_bundle

from edge_dflash.checks.doctor import INSTALLED, SERVICE
from edge_dflash.common.files import directory
from edge_dflash.install.host import FILES, UNIT
from edge_dflash.install.service import InstallOptions, install
from edge_dflash.serve.config import ServeConfig, load_config

DEPLOY = directory("deploy")
ANALYZE = shutil.which("systemd-analyze")
MOST_EXPOSURE = 2.5
UNITS = ("edge-dflash.service", "edge-dflash.socket", "edge-dflash-finish.service")


def settings(name):
    """Every value of every key of a unit file, by section."""
    found, section = defaultdict(lambda: defaultdict(list)), None
    for number, line in enumerate((DEPLOY / name).read_text().splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            continue
        key, equals, value = line.partition("=")
        assert section, (name, number)
        assert equals, (name, number)
        found[section][key].append(value)
    return found


@pytest.fixture
def service():
    return settings("edge-dflash.service")


def test_every_file_of_deploy_is_installed_somewhere():
    placed = {*FILES.values(), "config.toml", "tcp.conf"}
    others = {path.name for path in DEPLOY.iterdir() if path.suffix in (".service", ".socket", ".conf", ".toml")}
    assert others == placed
    assert UNIT == SERVICE


def test_no_key_is_given_twice_but_those_that_add_up():
    lists = {"After", "DeviceAllow", "SystemCallFilter", "ConditionPathExists"}
    for name in UNITS:
        for section, keys in settings(name).items():
            assert {key for key, values in keys.items() if len(values) > 1} <= lists, (name, section)


def test_the_protocol_with_systemd(service):
    unit, run = service["Unit"], service["Service"]
    assert run["Type"] == ["notify"]
    assert run["NotifyAccess"] == ["main"]
    assert run["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert run["WatchdogSec"] == ["120"]
    assert run["Restart"] == ["on-failure"]
    assert unit["StartLimitBurst"] == ["4"]
    assert run["LimitCORE"] == ["0"]
    assert int(run["OOMScoreAdjust"][0]) > 0
    assert unit["Requires"] == ["edge-dflash-finish.service"]
    assert "edge-dflash-finish.service" in unit["After"][0].split()
    assert service["Install"]["WantedBy"] == ["multi-user.target"]


def test_a_stop_lasts_longer_than_the_service_drains(service):
    assert int(service["Service"]["TimeoutStopSec"][0]) >= 2 * ServeConfig().timeouts.drain


def test_the_paths_are_those_of_the_configuration(service):
    config = load_config(DEPLOY / "config.toml").service
    start = service["Service"]["ExecStart"][0].split()
    assert start == ["/opt/edge-dflash/current/run", "serve", "--config", "/etc/edge-dflash/config.toml"]
    assert config.bundle == f"/{INSTALLED}"
    assert Path(config.state_dir).is_relative_to(f"/var/lib/{service['Service']['StateDirectory'][0]}")
    assert Path(config.socket).is_relative_to(f"/run/{service['Service']['RuntimeDirectory'][0]}")
    socket = settings("edge-dflash.socket")["Socket"]
    assert socket["ListenStream"] == [config.socket]
    assert socket["SocketMode"] == [config.socket_mode]
    finish = settings("edge-dflash-finish.service")
    assert finish["Service"]["ExecStart"][0] == f"/opt/edge-dflash/current/run build --finish {config.bundle}"


@pytest.mark.parametrize("name", ["edge-dflash.service", "edge-dflash-finish.service"])
def test_hardening(name):
    run = settings(name)["Service"]
    yes = ["NoNewPrivileges", "PrivateTmp", "PrivateNetwork", "LockPersonality"]
    yes += map(
        "Protect".__add__,
        ["Home", "KernelTunables", "KernelModules", "KernelLogs", "ControlGroups", "Clock", "Hostname"],
    )
    for key in (*yes, "RestrictSUIDSGID", "RestrictRealtime", "RestrictNamespaces"):
        assert run[key] == ["yes"], key
    assert run["ProtectSystem"] == ["strict"]
    assert run["CapabilityBoundingSet"] == [""]
    assert run["RestrictAddressFamilies"] == ["AF_UNIX"]
    assert run["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert run["SystemCallArchitectures"] == ["native"]


def test_the_service_has_its_own_user_and_the_gpu_of_both_boards(service):
    run = service["Service"]
    assert (run["User"], run["Group"], run["DevicePolicy"]) == (["edge-dflash"], ["edge-dflash"], ["closed"])
    nodes = dict(value.split() for value in run["DeviceAllow"])
    assert set(nodes.values()) == {"rw"}
    for node in ("/dev/nvmap", "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvhost-ctrl-gpu", "/dev/nvgpu/igpu0/ctrl"):
        assert node in nodes
    assert not {"/dev/mem", "char-*", "block-*", "/dev/kmsg"} & nodes.keys()
    users = (DEPLOY / "sysusers.conf").read_text()
    assert "m edge-dflash video" in users
    assert "m edge-dflash render" in users


def test_tcp_is_a_drop_in_that_opens_the_network_and_nothing_else():
    changed = settings("tcp.conf")["Service"]
    assert changed["PrivateNetwork"] == ["no"]
    assert changed["RestrictAddressFamilies"] == ["AF_UNIX AF_INET AF_INET6"]
    assert set(changed) == {"PrivateNetwork", "RestrictAddressFamilies", "IPAddressAllow"}


def ask(*command):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)


def test_systemd_finds_nothing_to_say(tmp_path):
    """An installed tree, with systemd's own units beside it."""
    if ANALYZE is None or not Path("/lib/systemd/system").is_dir():
        return  # the tests above read the same files
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    root = tmp_path / "root"
    write_native_bundle(tmp_path / "bundle", formats_of("fp8"), arch="sm110a")
    install(tmp_path / "bundle", root, InstallOptions(tcp=True, activation=True), program=program)
    shutil.copytree("/lib/systemd/system", root / "lib/systemd/system", symlinks=True)
    run = root / "opt/edge-dflash/current/run"
    for path in (run, root / "usr/bin/touch", root / "bin/kill"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        shutil.copy(program, path)
    for unit in UNITS:
        said = ask(ANALYZE, f"--root={root}", "verify", "--man=no", "--recursive-errors=no", unit)
        assert (said.returncode, said.stdout + said.stderr) == (0, "")
    run.unlink()
    said = ask(ANALYZE, f"--root={root}", "verify", "--man=no", "--recursive-errors=no", UNIT)
    assert "is not executable" in said.stderr  # so verify did look


@pytest.mark.parametrize("name", ["edge-dflash.service", "edge-dflash-finish.service"])
def test_exposure_is_small(name, tmp_path):
    if ANALYZE is None:
        return  # test_hardening reads the same files
    security = (ANALYZE, "security", "--offline=true", "--no-pager", "--threshold")
    assert ask(*security, int(10 * MOST_EXPOSURE), DEPLOY / name).returncode == 0
    text = (DEPLOY / name).read_text()
    open_unit = tmp_path / name
    open_unit.write_text(
        "\n".join(line for line in text.splitlines() if not line.startswith(("Protect", "Restrict", "Capa")))
    )
    assert ask(*security, int(10 * MOST_EXPOSURE), open_unit).returncode != 0


def test_a_setting_that_a_file_or_a_page_names_is_one():
    """Also in comments: what a file calls a setting is one."""
    config = ServeConfig()
    known = {section.name: {key.name for key in fields(getattr(config, section.name))} for section in fields(config)}
    sections, named = "|".join(known), []
    for path in DEPLOY.iterdir():
        named += re.findall(r"\b([a-z_]+)\.([a-z_]+) in config\.toml", path.read_text())
        named += re.findall(rf"\b({sections})\.([a-z_]+)\b(?!\()", path.read_text()) if path.suffix == ".conf" else []
    for page in ("service.md", "thor.md", "troubleshooting.md"):
        named += re.findall(rf"`({sections})\.([a-z_]+)", (DEPLOY.parent / "docs" / page).read_text())
    assert len(named) > 20
    assert [(section, key) for section, key in named if key not in known.get(section, ())] == []


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda path: path.name)
def test_every_shipped_file_loads(path):
    if path.suffix == ".toml":
        assert load_config(path) == ServeConfig()
    elif path.suffix == ".json":
        assert json.loads(path.read_text())["panels"]
    elif path.suffix in (".service", ".socket") or path.name == "tcp.conf":
        assert all(settings(path.name).values())
        for line in path.read_text().splitlines():
            assert not line or line.startswith(("#", "[")) or re.fullmatch(r"[A-Z][A-Za-z]+=.*", line), line
    elif path.suffix == ".conf":  # of sysusers.d and tmpfiles.d
        kinds = {"sysusers.conf": "ugmr", "tmpfiles.conf": "dDvfL"}[path.name]
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert lines
        assert all(line.split()[0][0] in kinds for line in lines), lines
    else:
        assert path.name == "Containerfile"
        assert path.read_text().count("\nFROM ") == 2
