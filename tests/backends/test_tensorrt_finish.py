"""``build --finish``: on the board only, all or nothing, and nothing where nothing is left to do."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from builder_support import digests
from bundle_support import random_weights as weights_of
from bundle_support import write_bundle
from tensorrt_build_support import config, fake, fake_tools, install, on

from edge_dflash.builder import finish as finish_module
from edge_dflash.builder import journal
from edge_dflash.builder.finish import finish
from edge_dflash.builder.write import build
from edge_dflash.bundle.manifest import MANIFEST, dump_manifest
from edge_dflash.bundle.parts import building_path
from edge_dflash.bundle.reader import Bundle, read_manifest
from edge_dflash.errors import BackendError, BuildError, BundleError

__all__ = ["fake"]
JETPACK = "10.13.3.9"


@pytest.fixture(scope="module")
def deferred(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        fake_tools(patch)
        return build(config(tmp_path_factory.mktemp("finish") / "out", arch="sm110")).bundle


@pytest.fixture
def bundle(deferred, tmp_path):
    return shutil.copytree(deferred, tmp_path / "bundle")


@pytest.fixture
def board(fake, monkeypatch):
    on(monkeypatch, 110)
    install(monkeypatch, JETPACK)
    return fake


def test_a_deferred_bundle_is_finished_on_its_board(board, bundle):
    before, weights = read_manifest(bundle), (bundle / "weights").iterdir()
    inodes = {file.name: file.stat().st_ino for file in weights}
    seen = []
    result = finish(bundle, lambda *step: seen.append(step))
    after = Bundle.open(bundle).manifest
    assert (result.bundle, result.plans, result.deferred) == (bundle, before.plans.names, ())
    assert (after.plans.version, after.plans.deferred) == (JETPACK, ())
    assert after.tools["tensorrt"] == JETPACK
    assert {name for name in after.files if name not in before.files} == set(before.plans.names)
    assert {file.name: file.stat().st_ino for file in (bundle / "weights").iterdir()} == inodes  # linked, not copied
    assert not building_path(bundle).exists()
    assert result.bytes == sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["checking", "plans"]


def test_what_is_finished_is_left_as_it_is(board, bundle):
    finish(bundle)
    found, made = digests(bundle), len(board.made)
    assert finish(bundle).plans == read_manifest(bundle).plans.names
    assert (digests(bundle), len(board.made)) == (found, made)


def test_a_bundle_without_plans_lacks_nothing(fake, tmp_path):
    write_bundle(tmp_path / "cpu", weights_of())
    found = digests(tmp_path / "cpu")
    assert finish(tmp_path / "cpu").plans == ()
    assert digests(tmp_path / "cpu") == found


def test_another_tensorrt_gets_plans_of_its_own(board, bundle, monkeypatch):
    finish(bundle)
    board.made.clear()
    install(monkeypatch, "10.16.2.10")
    finish(bundle)
    assert Bundle.open(bundle).manifest.plans.version == "10.16.2.10"
    assert len(board.made) == len(read_manifest(bundle).plans.names)


@pytest.mark.parametrize(
    ("sm", "found"), [(None, "here is none (no NVIDIA driver was found"), (90, "this one is SM 90")]
)
def test_another_machine_is_refused_by_name(board, bundle, monkeypatch, sm, found, refused):
    on(monkeypatch, sm)
    before = digests(bundle)
    code, line = refused("build", "--finish", bundle)
    assert code == 7
    assert f"{bundle}: its plans are built on a device of SM 110" in line
    assert found in line
    assert f"run there: edge-dflash build --finish {bundle}" in line
    assert digests(bundle) == before


@pytest.mark.parametrize(
    ("version", "words"),
    [(None, "TensorRT is not installed: on a Jetson"), ("10.7.0.23", "10.7.0.23, plans need 10.8")],
)
def test_a_board_without_a_fit_tensorrt_is_told(board, bundle, monkeypatch, version, words):
    install(monkeypatch, version)
    with pytest.raises(BackendError, match=words):
        finish(bundle)
    assert board.made == []


def test_a_bundle_that_this_version_will_not_run_gets_no_plans(board, bundle, monkeypatch):
    monkeypatch.setattr(finish_module, "kernels_digest", lambda: "0" * 16)
    with pytest.raises(BuildError, match=r"this version launches 0{16}; build it again with .* --arch sm110"):
        finish(bundle)
    assert board.made == []


def test_an_interrupted_finish_resumes_and_the_bundle_stays_deferred(board, bundle):
    before = digests(bundle)

    def interrupt(stage, done, total):
        if stage == "plans" and done > 0.4 * total:
            raise KeyboardInterrupt

    with pytest.raises(BuildError, match=f"resume with: edge-dflash build --finish {bundle}"):
        finish(bundle, interrupt)
    assert digests(bundle) == before
    assert board.made
    finish(bundle)
    names = read_manifest(bundle).plans.names
    assert sorted(f"plans/{key}.plan" for key in board.made) == sorted(names)


def test_plans_of_an_interrupted_finish_are_not_mixed_with_those_of_another_tensorrt(board, bundle, monkeypatch):
    board.fail = "target-008"
    with pytest.raises(BuildError):
        finish(bundle)
    board.fail, board.made = "", []
    install(monkeypatch, "10.16.2.10")
    warnings = finish(bundle).warnings
    assert len(board.made) == len(read_manifest(bundle).plans.names)
    assert any("had other inputs (tensorrt)" in warning for warning in warnings)


def test_a_refused_plan_leaves_the_bundle_deferred(board, bundle):
    before = digests(bundle)
    board.fail = "head"
    with pytest.raises(BuildError, match="plan head for sm110"):
        finish(bundle)
    assert digests(bundle) == before


def test_damaged_weights_are_not_built_in(board, bundle):
    file = next((bundle / "weights").iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match="sha256 of weights/"):
        finish(bundle)
    assert board.made == []


def test_a_finish_that_was_killed_between_its_two_renames_is_put_right_by_the_next(board, bundle, monkeypatch):
    rename = Path.rename

    def killed(path, target):
        if target == bundle:
            raise SystemExit
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(SystemExit):
        finish(bundle)
    assert not bundle.exists()
    monkeypatch.setattr(Path, "rename", rename)
    made = len(board.made)
    finish(bundle)
    assert Bundle.open(bundle).manifest.plans.deferred == ()
    assert len(board.made) == made
    assert not building_path(bundle).exists()


def test_where_the_disk_cannot_link_files_are_copied(board, bundle, monkeypatch):
    def no_links(source, path):
        raise OSError(1, "no links here")

    monkeypatch.setattr(journal.os, "link", no_links)
    before = read_manifest(bundle)
    finish(bundle)
    after = Bundle.open(bundle).manifest
    assert before.files.items() <= after.files.items()


def test_a_link_to_the_bundle_stays_a_link(board, bundle, tmp_path):
    (tmp_path / "current").symlink_to(bundle)
    finish(tmp_path / "current")
    assert (tmp_path / "current").is_symlink()
    assert Bundle.open(bundle).manifest.plans.deferred == ()


def test_a_full_disk_is_told_before_any_plan(board, bundle, monkeypatch):
    monkeypatch.setattr(journal.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(BuildError, match=r"needs .* MB more in .* has 0\.0 MB free"):
        finish(bundle)
    assert board.made == []


def test_a_disk_that_fills_up_keeps_the_plans_that_are_finished(board, bundle):
    before = digests(bundle)

    def fill(stage, done, total):
        if stage == "plans" and done > 0.4 * total:
            raise OSError(errno.ENOSPC, "No space left on device", "plans/target-003.plan")

    words = (
        r"No space left on device \(plans/target-003.plan\); correct it and resume with: edge-dflash build --finish "
    )
    with pytest.raises(BuildError, match=words):
        finish(bundle, fill)
    assert digests(bundle) == before
    made = len(board.made)
    finish(bundle)
    assert 0 < made < len(board.made) == len(read_manifest(bundle).plans.names)


def test_plans_of_another_cut_are_refused(board, bundle):
    manifest = read_manifest(bundle)
    plans = replace(manifest.plans, names=manifest.plans.names[1:], deferred=manifest.plans.names[1:])
    (bundle / MANIFEST).write_bytes(dump_manifest(replace(manifest, plans=plans)))
    with pytest.raises(BuildError, match="names other plans than this version makes; build the bundle again"):
        finish(bundle)
    assert board.made == []


def test_finish_goes_alone(refused, bundle, cli, fake):
    code, line = refused("build", "--finish", bundle, "--target", "x")
    assert code == 8
    assert "--finish BUNDLE goes alone" in line


def test_the_commands_words(board, bundle, cli):
    code, out, _ = cli("build", "--finish", bundle)
    assert code == 0
    assert "14 TensorRT plans" in out
