"""The service in a throw-away root: what lies where after install, upgrade, rollback, removal and failures."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from cli_support import flip_byte, last_json
from golden_pairs import pair as golden_pair
from native_support import formats_of, write_native_bundle

from edge_dflash.bundle.reader import Bundle, read_manifest
from edge_dflash.common.files import directory
from edge_dflash.errors import BundleError, EdgeDflashError
from edge_dflash.install import host as hosts
from edge_dflash.install import releases
from edge_dflash.install.host import Host, InstallPaths, host_of
from edge_dflash.install.service import (
    InstallOptions,
    check_visible,
    find_program,
    install,
    memory_parts,
    next_step,
    remove,
    rollback,
)
from edge_dflash.model import pair_programs
from edge_dflash.runner.settings import OpenSettings
from edge_dflash.serve.config import ServeConfig, load_config

UNITS = [
    "etc/edge-dflash/config.toml",
    "etc/systemd/system/edge-dflash-finish.service",
    "etc/systemd/system/edge-dflash.service",
    "etc/systemd/system/edge-dflash.socket",
    "etc/systemd/system/multi-user.target.wants/edge-dflash.service",
    "etc/sysusers.d/edge-dflash.conf",
    "etc/tmpfiles.d/edge-dflash.conf",
]
TCP = "etc/systemd/system/edge-dflash.service.d/tcp.conf"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three bundles that differ, two of them for Thor."""
    folder = tmp_path_factory.mktemp("bundles")
    write_native_bundle(folder / "one", formats_of("fp8"), arch="sm110a")
    write_native_bundle(folder / "two", formats_of("nvfp4"), arch="sm110a")
    write_native_bundle(folder / "three", formats_of("fp8"), arch="sm87")
    return folder


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "venv" / "bin" / "edge-dflash"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def root(tmp_path):
    """A system with something of somebody else in it."""
    root = tmp_path / "root"
    for name in ("etc/systemd/system/other.service", "opt/other/file", "var/lib/other"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")
    return root


def files(root):
    """Every file and link below a root, with content or target."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


class Machine:
    """Records what it is told; the releases in ``broken`` do not become ready."""

    live = True

    def __init__(self, root, broken=()):
        self.told, self._root, self.broken = [], root, set(broken)

    def prepare(self):
        self.told.append("prepare")

    def reload(self):
        self.told.append("reload")

    def start(self, *, activated, restart):
        name = releases.current(InstallPaths(self._root)).rpartition("-")[0]
        self.told.append(("restart" if restart else "start", name, activated))
        return name not in self.broken

    def stop(self):
        self.told.append("stop")


@pytest.fixture
def machine(root, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("edge_dflash.install.service.check_visible", lambda program: None)
    return Machine(root)


def test_install_and_remove_leave_what_was_there(root, made, program):
    before = files(root)
    outcome = install(made / "one", root, program=program)
    after = files(root)
    base = f"opt/edge-dflash/releases/{outcome.release}"
    bundle = {f"{base}/one/{p.relative_to(made / 'one')}" for p in (made / "one").rglob("*") if p.is_file()}
    own = {*UNITS, "opt/edge-dflash/current", "opt/edge-dflash/history", f"{base}/no-plans"}
    assert after.keys() - before.keys() == own | bundle | {f"{base}/bundle", f"{base}/run"}
    assert before.items() <= after.items()
    assert (after[f"{base}/bundle"], after[f"{base}/run"]) == ("one", str(program))
    assert after["opt/edge-dflash/current"] == f"releases/{outcome.release}"
    assert after["etc/edge-dflash/config.toml"] == (directory("deploy") / "config.toml").read_bytes()
    assert (outcome.previous, outcome.releases, outcome.started) == (None, (outcome.release,), False)
    Bundle.open(root / "opt/edge-dflash/current/bundle")
    (root / "run/edge-dflash").mkdir(parents=True)
    gone = remove(root)
    assert not (root / "run/edge-dflash").exists()
    assert files(root) == before | {"etc/edge-dflash/config.toml": after["etc/edge-dflash/config.toml"]}
    assert str(root / "opt/edge-dflash/releases") in gone.removed
    assert str(root / "etc/edge-dflash") in remove(root, purge=True).removed
    assert files(root) == before
    assert not (root / "opt/edge-dflash").exists()
    assert remove(root, purge=True).removed == ()


def test_installing_again_changes_nothing(root, made, program):
    first = install(made / "one", root, program=program)
    before = {name: (root / name).lstat().st_mtime_ns for name in files(root)}
    again = install(made / "one", root, program=program)
    assert (again.release, again.written, again.removed) == (first.release, (), ())
    changed = {name for name, at in before.items() if (root / name).lstat().st_mtime_ns != at}
    assert changed <= {"opt/edge-dflash/history"}


def test_upgrade_and_rollback(root, made, program):
    one = install(made / "one", root, program=program).release
    two = install(made / "two", root, program=program)
    assert (two.previous, two.releases) == (one, (one, two.release))
    back = rollback(root)
    assert (back.release, back.previous) == (one, None)
    assert (root / "opt/edge-dflash/current/bundle").resolve().name == "one"
    with pytest.raises(EdgeDflashError, match="no release before the current one"):
        rollback(root)
    again = install(made / "two", root, program=program)  # what was rolled back from is there still
    assert (again.release, again.previous) == (two.release, one)
    three = install(made / "three", root, program=program)
    assert three.releases == (two.release, three.release)
    assert three.removed == (one,)
    assert not (root / "opt/edge-dflash/releases" / one).exists()
    rollback(root)
    other = install(made / "one", root, InstallOptions(keep=3), program=program)
    assert other.previous == two.release  # what was served, and not what it was rolled back from
    assert other.releases == (three.release, two.release, one)


def test_another_program_is_another_release(root, made, program, tmp_path):
    install(made / "one", root, program=program)
    newer = shutil.copytree(program.parent, tmp_path / "venv2") / "edge-dflash"
    outcome = install(made / "one", root, program=newer)
    assert len(outcome.releases) == 2
    assert (root / "opt/edge-dflash/current/run").readlink() == newer
    rollback(root)
    assert (root / "opt/edge-dflash/current/run").readlink() == program


def test_what_the_administrator_changed_stays(root, made, program):
    install(made / "one", root, program=program)
    (root / "etc/edge-dflash/config.toml").write_text("[engine]\nqueue = 2\n")
    mine = root / "etc/systemd/system/edge-dflash.service.d/mine.conf"
    mine.parent.mkdir()
    mine.write_text("[Service]\n")
    (root / "etc/systemd/system/edge-dflash.service").write_text("spoiled")
    outcome = install(made / "two", root, program=program)
    assert outcome.written == (str(root / "etc/systemd/system/edge-dflash.service"),)
    assert (root / "etc/edge-dflash/config.toml").read_text() == "[engine]\nqueue = 2\n"
    remove(root)
    assert mine.exists()


def test_options_hold_until_they_are_taken_back(root, made, program):
    wants = root / "etc/systemd/system/sockets.target.wants/edge-dflash.socket"
    install(made / "one", root, InstallOptions(tcp=True, activation=True), program=program)
    install(made / "one", root, program=program)
    assert (root / TCP).read_bytes() == (directory("deploy") / "tcp.conf").read_bytes()
    assert str(wants.readlink()) == "/etc/systemd/system/edge-dflash.socket"
    outcome = install(made / "one", root, InstallOptions(tcp=False, activation=False), program=program)
    assert set(outcome.written) == {str(root / TCP), str(wants)}
    assert not (root / TCP).exists()
    assert not wants.is_symlink()


def test_everybody_may_read_and_nobody_may_write(root, made, program):
    spoiled = shutil.copytree(made / "one", root / "source")
    for path in (spoiled, *spoiled.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o600)
    install(spoiled, root, program=program)
    for path in (root / "opt/edge-dflash").rglob("*"):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_plans_that_are_left_to_build_leave_the_release_unfinished(root, program, tmp_path, made, monkeypatch):
    install(made / "one", root, program=program)
    assert (root / "opt/edge-dflash/current/no-plans").exists()
    read = releases.read_manifest

    def with_plans(path):
        return type(read(path))(**{**vars(read(path)), "plans": "some"})

    monkeypatch.setattr(releases, "read_manifest", with_plans)
    install(made / "two", root, program=program)
    assert not (root / "opt/edge-dflash/current/no-plans").exists()


def release_of(root):
    return (root / "opt/edge-dflash/current").resolve()


def file_gone(bundle):
    max((bundle / "weights").iterdir(), key=lambda path: path.stat().st_size).unlink()


def linked(path):
    """Move a file or folder away, and let a link stand for it."""
    moved = path.rename(release_of_path(path) / "moved")
    path.symlink_to(moved)


def release_of_path(path):
    return next(parent for parent in path.parents if parent.name == "releases")


def links_wrong(bundle):
    for name in ("run", "bundle", "no-plans"):
        (bundle.parent / name).unlink()
    (bundle.parent / "run").symlink_to("/bin/false")


DAMAGES = {
    "flipped": flip_byte,
    "manifest gone": lambda bundle: (bundle / "manifest.json").unlink(),
    "manifest spoiled": lambda bundle: (bundle / "manifest.json").write_text("{}"),
    "file gone": file_gone,
    "file more": lambda bundle: (bundle / "weights" / "stray").write_text("x"),
    "file linked": lambda bundle: linked(next((bundle / "weights").iterdir())),
    "folder linked": lambda bundle: linked(bundle / "weights"),
    "links wrong": links_wrong,
    "gone": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_release_is_repaired(root, made, program, machine, damage):
    first = install(made / "one", root, program=program, host=machine)
    whole = files(root)
    DAMAGES[damage](release_of(root) / "one")
    again = install(made / "one", root, program=program, host=machine)
    releases.discard(root / "opt/edge-dflash/releases/moved")
    assert (again.release, again.previous, again.releases) == (first.release, None, first.releases)
    assert again.written
    assert all(str(release_of(root)) in path for path in again.written)
    assert files(root) == whole
    assert machine.told[-1] == ("restart", "one", False)
    assert install(made / "one", root, program=program, host=machine).written == ()
    assert machine.told[-1] == ("start", "one", False)


def test_what_was_built_in_a_sound_release_stays(root, made, program, monkeypatch):
    """A release whose bundle was finished has another manifest than its source; damaged, it is the source again."""
    from edge_dflash.bundle.manifest import Manifest, dump_manifest
    from edge_dflash.bundle.reader import read_manifest

    install(made / "one", root, program=program)
    bundle = release_of(root) / "one"
    finished = dump_manifest(type(m := read_manifest(bundle))(**{**vars(m), "created_by": "finished"}))
    (bundle / "manifest.json").write_bytes(finished)
    alone = Manifest.runs_without_engines.fget  # the trial may have made the engines what runs it
    monkeypatch.setattr(
        Manifest, "runs_without_engines", property(lambda self: self.created_by != "finished" and alone(self))
    )
    assert install(made / "one", root, program=program).written == ()
    assert (bundle / "manifest.json").read_bytes() == finished
    flip_byte(bundle)
    assert install(made / "one", root, program=program).written == (str(release_of(root)),)
    assert files(bundle) == files(made / "one")


def test_a_rollback_to_a_release_that_lacks_files_is_refused(root, made, program):
    install(made / "one", root, program=program)
    one = release_of(root)
    two = install(made / "two", root, program=program).release
    file_gone(one / "one")
    with pytest.raises(
        BundleError, match=r"the release one-\w+ cannot be served .*is missing.*; install its bundle again"
    ):
        rollback(root)
    assert releases.current(InstallPaths(root)) == two
    install(made / "one", root, program=program)
    assert rollback(root).release == two


def test_strange_files_among_releases_harm_nothing(root, made, program):
    install(made / "one", root, program=program)
    for name in ("notes.txt", ".incoming-file"):
        (root / "opt/edge-dflash/releases" / name).write_text("x")
    (root / "opt/edge-dflash/releases/link").symlink_to("nowhere")
    outcome = install(made / "two", root, program=program)
    assert outcome.release.startswith("two-")
    assert rollback(root).release.startswith("one-")
    assert (root / "opt/edge-dflash/releases/notes.txt").exists()
    assert not (root / "opt/edge-dflash/releases/.incoming-file").exists()
    remove(root)
    assert not (root / "opt/edge-dflash").exists()


def test_an_old_release_that_cannot_be_removed_is_no_failure(root, made, program, monkeypatch):
    install(made / "one", root, program=program)
    install(made / "two", root, program=program)
    real = os.unlink

    def refuse(path, *rest, **named):
        raise PermissionError(1, "Operation not permitted", path)

    with monkeypatch.context() as immutable:
        immutable.setattr(os, "unlink", lambda *a, **k: refuse(*a, **k) if k.get("dir_fd") else real(*a, **k))
        assert install(made / "three", root, program=program).release.startswith("three-")
    assert len(list((root / "opt/edge-dflash/releases").iterdir())) == 3
    install(made / "three", root, program=program)
    assert len(list((root / "opt/edge-dflash/releases").iterdir())) == 2


def test_a_change_waits_for_no_other_and_spoils_none(root, made, program, machine):
    install(made / "one", root, program=program)
    before = files(root)
    with releases.locked(InstallPaths(root)):
        for change in (rollback, remove):
            with pytest.raises(EdgeDflashError, match=r"another change of .* is under way"):
                change(root, host=machine)
    assert machine.told == []
    assert files(root) == before

    class Racing(Machine):
        def stop(self):
            with pytest.raises(EdgeDflashError, match=r"another change of .* is under way"):
                install(made / "two", root, program=program)
            super().stop()

    assert remove(root, host=Racing(root)).removed
    assert not (root / "opt/edge-dflash").exists()


def kill_at(count, change):
    """Run a change in a child that is killed at its ``count``-th change of the file system; whether it was."""
    pid = os.fork()
    if pid == 0:
        left = [count]
        watched = {"os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "open"}

        def hook(event, arguments):
            if event not in watched or (event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
                return
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            change()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def served(root):
    """Name of the release that is served, which is whole."""
    if not (root / "opt/edge-dflash/current").is_symlink():
        return None
    Bundle.open(root / "opt/edge-dflash/current/bundle")
    assert (root / "opt/edge-dflash/current/run").exists()
    return releases.current(InstallPaths(root))


@pytest.mark.parametrize(
    ("change", "stride"), [("install", 5), ("upgrade", 5), ("rollback", 1), ("repair", 1), ("remove", 1)]
)
def test_a_kill_at_any_step_leaves_a_whole_release_or_none_and_can_be_given_again(
    root, made, program, tmp_path, monkeypatch, change, stride
):
    """``stride``: of the steps, every so many are tried."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill does not show it
    one = None if change == "install" else install(made / "one", root, program=program).release
    if change == "rollback":
        install(made / "two", root, program=program)
    commands = {
        "install": lambda: install(made / "one", root, program=program),
        "upgrade": lambda: install(made / "two", root, InstallOptions(keep=1), program=program),
        "rollback": lambda: rollback(root),
        "repair": lambda: install(made / "one", root, program=program),
        "remove": lambda: remove(root, purge=True),
    }
    start, kills = shutil.copytree(root, tmp_path / "start", symlinks=True), 0
    for count in range(0, 400, stride):
        shutil.rmtree(root)
        shutil.copytree(start, root, symlinks=True)
        if change == "repair":
            flip_byte(release_of(root) / "one")
        killed = kill_at(count, commands[change])
        if change == "repair":
            assert (release_of(root).name, (release_of(root) / "run").readlink()) == (one, program)
        else:
            assert served(root) or change in ("install", "remove")
        if not killed:
            break
        kills += 1
        if change == "rollback" and releases.current(InstallPaths(root)) == one:
            continue
        commands[change]()
        if change == "remove":
            assert not (root / "opt/edge-dflash").exists()
            assert not (root / "etc/edge-dflash").exists()
            assert not [name for name in files(root) if "edge-dflash" in name]
        else:
            assert served(root).startswith("two" if change == "upgrade" else "one")
            assert not list((root / "opt/edge-dflash/releases").glob(".*"))
    assert not killed
    assert kills > (2 if change == "rollback" else 8)


def test_plans_that_nobody_will_build_are_told_before_the_copy(made, cli, root, program, monkeypatch):
    from edge_dflash.bundle.manifest import EngineFiles
    from edge_dflash.install import service

    read = service.read_manifest
    deferred = EngineFiles("tensorrt", None, ("plans/a", "plans/b"), ("plans/a", "plans/b"))

    def pending(backend, standby):
        return lambda path: type(m := read(path))(
            **{**vars(m), "plans": deferred, "backend": backend, "standby": standby}
        )

    assert service.left_to_build(made / "one") == ""
    monkeypatch.setattr(service, "read_manifest", pending("tensorrt", ()))
    assert "the service builds them before its first start" in service.left_to_build(made / "one")
    monkeypatch.setattr(service, "read_manifest", pending("native", ("tensorrt",)))
    _, _, err = cli("service", "install", made / "one", "--root", root, "--program", program)
    assert err.splitlines()[0] == (
        f"2 TensorRT plans of {made / 'one'} are not built, and the service will not build them: its native backend "
        f"runs the bundle without; to try both, give first: edge-dflash build --finish {made / 'one'}"
    )


def test_a_damaged_bundle_or_a_full_disk_changes_nothing(root, made, program, monkeypatch):
    before = files(root)
    bad = shutil.copytree(made / "two", root.parent / "bad")
    flip_byte(bad)
    with pytest.raises(BundleError, match=r"the copy of .*bad is not what it should be: .*sha256 of"):
        install(bad, root, program=program)
    with pytest.raises(BundleError, match="no bundle at"):
        install(root / "none", root, program=program)
    monkeypatch.setattr(releases.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(EdgeDflashError, match=r"0\.00 GB free, the bundle takes 0\.00; free some"):
        install(made / "two", root, program=program)
    assert files(root) == before


@pytest.mark.parametrize(
    ("name", "begins", "folder"),
    [
        ("bundle", "bundle-", "bundle"),
        ("run", "run-", "bundle"),
        ("no-plans", "no-plans-", "bundle"),
        (".incoming-a b\n", "incoming-a_b_-", "incoming-a_b_"),
        ("...", "bundle-", "bundle"),
        ("qwen3.6-27b", "qwen3.6-27b-", "qwen3.6-27b"),
    ],
)
def test_bundles_of_any_name(root, made, program, tmp_path, name, begins, folder):
    source = shutil.copytree(made / "one", tmp_path / "named" / name)
    for _ in range(2):
        outcome = install(source, root, program=program)
    assert outcome.release.startswith(begins)
    assert outcome.releases == (outcome.release,)
    assert (root / "opt/edge-dflash/current/bundle").resolve().name == folder
    assert (root / "opt/edge-dflash/current/run").readlink() == program


def test_the_machine_is_told(root, made, program, machine):
    assert install(made / "one", root, program=program, host=machine).started
    assert install(made / "one", root, program=program, host=machine).started
    install(made / "two", root, InstallOptions(start=False, activation=True), program=program, host=machine)
    rollback(root, host=machine)
    remove(root, host=machine)
    assert machine.told == [
        "prepare",
        ("restart", "one", False),
        "prepare",
        ("start", "one", False),
        "prepare",
        "reload",  # the unit has the bounds of the release before
        ("restart", "one", True),
        "stop",
        "reload",
    ]


def test_what_the_running_service_does_not_have_yet_restarts_it(root, made, program, machine, monkeypatch):
    def give(name, **options):
        del machine.told[:]
        install(made / name, root, InstallOptions(**options), program=program, host=machine)
        return machine.told

    give("one")
    give("two", start=False)
    assert give("two") == ["prepare", ("restart", "two", False)]
    assert give("two") == ["prepare", ("start", "two", False)]
    rollback(root, start=False, host=machine)
    assert give("one") == ["prepare", ("restart", "one", False)]
    with monkeypatch.context() as cut:
        cut.delattr(Machine, "prepare")
        with pytest.raises(AttributeError):
            give("two")
    assert give("two") == ["prepare", ("restart", "two", False)]
    assert not InstallPaths(root).unserved.exists()


def test_a_release_that_does_not_become_ready_is_taken_back(root, made, program, machine):
    machine.broken = {"two"}
    one = install(made / "one", root, program=program, host=machine).release
    with pytest.raises(EdgeDflashError, match=r"two-\w+ did not become ready; one-\w+ serves again; journalctl"):
        install(made / "two", root, program=program, host=machine)
    assert releases.current(InstallPaths(root)) == one
    assert machine.told[-3:] == [("restart", "two", False), "reload", ("restart", "one", False)]  # with its bounds
    three = install(made / "three", root, program=program, host=machine)
    assert three.previous == one


def test_a_first_release_that_does_not_become_ready_is_told(root, made, program, machine):
    machine.broken = {"one"}
    with pytest.raises(EdgeDflashError, match=r"one-\w+ is installed and did not become ready; journalctl"):
        install(made / "one", root, program=program, host=machine)
    machine.broken = {"two", "one"}
    with pytest.raises(EdgeDflashError, match="does not become ready either"):
        install(made / "two", root, program=program, host=machine)
    with pytest.raises(EdgeDflashError, match="no release before"):
        rollback(root, host=machine)


def test_only_root_changes_the_system(root, made, program, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for change in (lambda h: install(made / "one", root, program=program, host=h), lambda h: remove(root, host=h)):
        with pytest.raises(EdgeDflashError, match="run it with sudo, or give --root"):
            change(Machine(root))


def test_programs_that_the_service_cannot_see_are_refused(tmp_path):
    with pytest.raises(EdgeDflashError, match=r"lies below /home, .* python3 -m venv /opt/edge-dflash/venv"):
        check_visible(type(tmp_path)("/home/robot/venv/bin/edge-dflash"))
    with pytest.raises(EdgeDflashError, match="is no program; give the edge-dflash of a virtual environment"):
        find_program(tmp_path / "none")
    assert find_program(None).name == "edge-dflash"


def test_a_directory_tree_has_a_next_step_and_a_program_of_its_own(root, program, monkeypatch):
    warned, told = next_step(root, program)
    assert warned.startswith(f"warning: {program} is to serve, and is not what the machine that gets {root} has; make")
    assert told.startswith(f"next: copy what lies in {root} to / of the machine")
    assert next_step(type(root)("/"), program) == ()


def test_the_system_itself_is_told_through_systemd(monkeypatch):
    assert host_of(type(directory("deploy"))("/")).live
    assert not host_of(directory("deploy")).live
    told, failing = [], {"is-active"}

    def run(command, capture_output, check):
        told.append(" ".join(command))
        return subprocess.CompletedProcess(command, 1 if command[1] in failing else 0)

    monkeypatch.setattr(hosts.subprocess, "run", run)
    tree = Host(live=False)  # below which nothing runs
    tree.prepare()
    tree.stop()
    assert not tree.start(activated=True, restart=True)
    assert told == []
    system = Host(live=True)
    system.prepare()
    assert system.start(activated=True, restart=True)
    assert told == [
        "systemd-sysusers /etc/sysusers.d/edge-dflash.conf",
        "systemd-tmpfiles --create /etc/tmpfiles.d/edge-dflash.conf",
        "systemctl daemon-reload",
        "systemctl reset-failed edge-dflash.service",
        "systemctl is-active edge-dflash.socket",
        "systemctl stop edge-dflash.service",
        "systemctl start edge-dflash.socket",
        "systemctl restart edge-dflash.service",
    ]
    failing.clear()
    assert system.start(activated=True, restart=False)
    assert told[9:] == ["systemctl is-active edge-dflash.socket", "systemctl start edge-dflash.service"]
    assert system.start(activated=False, restart=True)
    assert told[-2:] == ["systemctl stop edge-dflash.socket", "systemctl restart edge-dflash.service"]
    failing |= {"start", "daemon-reload"}
    assert not system.start(activated=False, restart=False)
    with pytest.raises(EdgeDflashError, match="systemctl daemon-reload failed"):
        system.prepare()


def test_the_command_line(cli, refused, root, made, program):
    code, out, _ = cli("service", "install", made / "one", "--root", root, "--program", program, "--json")
    found = last_json(out)
    assert code == 0
    assert set(found) == {"release", "previous", "releases", "written", "removed", "started"}
    assert len(found["written"]) == len(UNITS)
    code, out, err = cli("service", "install", made / "two", "--root", root, "--program", program, "--tcp")
    assert (code, out.endswith(" is installed\n")) == (0, True)
    unit = root / "etc/systemd/system/edge-dflash.service"  # with the bounds of the other bundle
    wrote = [f"wrote {unit}", f"wrote {root / TCP}", f"a rollback goes to {found['release']}"]
    assert err.splitlines() == [*wrote, *next_step(root, program)]
    code, out, _ = cli("service", "rollback", "--root", root)
    assert out == f"{found['release']} is current again\n"
    assert refused("service", "rollback", "--root", root)[0] == 1
    assert cli("service", "remove", "--root", root, "--purge")[1] == "the service is removed\n"
    assert cli("service", "remove", "--root", root)[1] == "nothing was installed\n"
    assert refused("service", "install", root, "--root", root, "--program", program)[0] == 6


def bounds(root):
    text = (root / "etc/systemd/system/edge-dflash.service").read_text()
    return [int(re.search(rf"(?m)^{key}=(\d+)$", text)[1]) for key in ("MemoryHigh", "MemoryMax")]


def test_the_bounds_on_memory_are_those_of_the_release_that_is_served(root, made, program):
    install(made / "one", root, program=program)
    one = bounds(root)
    assert 3 << 30 < one[0] < one[1] == int(one[0] * 1.25)
    install(made / "two", root, program=program)
    assert bounds(root)[0] < one[0]  # FP8 weights are larger than NVFP4
    assert rollback(root).written == (str(root / "etc/systemd/system/edge-dflash.service"),)
    assert bounds(root) == one
    (root / "etc/edge-dflash/config.toml").write_text("[engine]\nlanes = 4\nprefix_mib = 1024\n")
    install(made / "one", root, program=program)
    assert bounds(root)[0] > one[0] + (512 << 20)
    (root / "etc/edge-dflash/config.toml").write_text("nonsense")
    install(made / "one", root, program=program)
    assert bounds(root) == one


@pytest.mark.parametrize(("gib", "holds"), [(128, True), (8, True), (5, True), (2, False)])
def test_a_leak_ends_the_service_before_it_ends_the_machine(root, made, program, gib, holds, caplog):
    config = root / "etc/edge-dflash/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[engine]\nqueue = 1024\n[limits]\nconnections = 1024\n")  # most of it never comes at once
    install(made / "one", root, program=program)
    free = bounds(root)
    (root / "proc").mkdir()
    lines = "MemAvailable: 1 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    (root / "proc/meminfo").write_text(f"MemTotal: {gib << 20} kB\n{lines}")
    install(made / "one", root, program=program)
    high, top = bounds(root)
    parts = memory_parts(read_manifest(made / "one"), load_config(config))
    needed = sum(parts[name] for name in ("the pair", "system prompts", "larger images", "program"))
    assert needed <= high <= top
    assert top == (min(free[1], (gib << 30) * 7 // 8) if holds else needed)
    assert ([high, top] == free) == (gib == 128)
    assert ("leaves less than 12.5 % to other programs; serve a smaller bundle" in caplog.text) == (not holds)


def test_bounds_count_what_a_pair_that_sees_may_take(made):
    pair = golden_pair("vision")
    seeing = replace(read_manifest(made / "one"), pair=pair, weights=dict.fromkeys(pair_programs(pair).weights, "bf16"))
    parts, fewer = (
        memory_parts(seeing, ServeConfig(engine=OpenSettings(image_pixels=n))) for n in (40_000_000, 20_000_000)
    )
    assert parts["larger images"] == 16 * 20_000_000
    assert fewer["larger images"] == 0
    assert parts["requests that wait"] - fewer["requests that wait"] == 16 * 3 * 20_000_000
    assert fewer["the pair"] > 16 * 20_000_000 + (256 << 20)
