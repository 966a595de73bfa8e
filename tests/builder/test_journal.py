import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_dflash.builder.journal import WorkDir
from edge_dflash.bundle.manifest import FileEntry
from edge_dflash.bundle.parts import JOURNAL, building_path, resume_command
from edge_dflash.errors import BuildError

SAME = {"recipe": "a", "tools": "1"}


def test_files_appear_together_and_nothing_else_stays(tmp_path):
    with WorkDir(tmp_path / "out", SAME, "resume me") as work:
        work.add("weights/a", [b"a"])
        work.add("b", [b"b", b"b"])
        assert not (tmp_path / "out").exists()
        work.finish(b"{}")
    assert {p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == {
        "weights/a": b"a",
        "b": b"bb",
        "manifest.json": b"{}",
    }


def test_finished_files_are_taken_up_and_others_dropped(tmp_path):
    with WorkDir(tmp_path / "out", SAME, "resume me") as work:
        entries = [work.add(name, [name.encode()]) for name in ("a", "b", "c", "d")]
    stage = building_path(tmp_path / "out") / "bundle"
    (stage / "b").write_bytes(b"x")  # same size, other content
    (stage / "c").unlink()
    (stage / "e").write_bytes(b"not journalled")
    (stage / "f").symlink_to("a")
    with WorkDir(tmp_path / "out", SAME, "resume me") as work:
        assert [work.reuse(name) for name in "abcdef"] == [entries[0], None, None, entries[3], None, None]
        assert not (stage / "e").exists()
        assert not (stage / "f").is_symlink()
        assert work.warnings == []


def test_threads_make_files_at_the_same_time(tmp_path):
    names = [f"plans/{number}" for number in range(200)]
    with WorkDir(tmp_path / "out", SAME, "resume me") as work, ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda name: work.add(name, [name.encode()]), names))
    with WorkDir(tmp_path / "out", SAME, "resume me") as work:
        assert [work.reuse(name) for name in names] == entries


def test_a_torn_journal_line_is_dropped(tmp_path):
    with WorkDir(tmp_path / "out", SAME, "resume me") as work:
        entry = work.add("a", [b"a"])
        work.add("b", [b"b"])
    journal = building_path(tmp_path / "out") / JOURNAL
    whole = journal.read_bytes()
    for cut in range(whole.rindex(b'{"file":"b"'), len(whole)):
        journal.write_bytes(whole[:cut])
        with WorkDir(tmp_path / "out", SAME, "resume me") as work:
            assert work.reuse("a") == entry
            assert work.reuse("b") is None
    assert [json.loads(line).get("file") for line in journal.read_bytes().splitlines()] == [None, "a"]


def test_other_inputs_start_over_with_a_warning(tmp_path):
    with WorkDir(tmp_path / "out", SAME, "resume me") as work:
        work.add("a", [b"a"])
    with WorkDir(tmp_path / "out", {**SAME, "recipe": "b"}, "resume me") as work:
        assert "had other inputs (recipe); starting over" in work.warnings[0]
        assert work.reuse("a") is None
        assert list(work.staging.iterdir()) == []


def test_a_failed_write_leaves_no_file(tmp_path):
    def pieces():
        yield b"half"
        raise OSError(28, "No space left on device")

    with WorkDir(tmp_path / "out", SAME, "resume me") as work:
        with pytest.raises(OSError, match="No space"):
            work.add("a", pieces())
        assert list(work.staging.iterdir()) == []


def test_a_failed_copy_leaves_no_file(tmp_path, monkeypatch):
    def refuse(source, path):
        raise OSError(1, "Operation not permitted")

    def fill(source, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr("shutil.copyfile", fill)
    with WorkDir(tmp_path / "out", SAME, "resume me") as work:
        with pytest.raises(OSError, match="No space"):
            work.link("a", tmp_path / "there", FileEntry("0" * 64, 4))
        assert list(work.staging.iterdir()) == []


def test_two_builds_of_one_output_exclude_each_other(tmp_path):
    with WorkDir(tmp_path / "out", SAME, "x"), pytest.raises(BuildError, match="another process is building"):
        WorkDir(tmp_path / "out", SAME, "x")


def test_a_foreign_directory_is_left_alone(tmp_path):
    foreign = building_path(tmp_path / "out")
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    with pytest.raises(BuildError, match="is not a build directory"):
        WorkDir(tmp_path / "out", SAME, "x")
    assert (foreign / "thesis.tex").read_text() == "mine"


def test_a_kill_between_the_renames_of_a_replacement_restores_the_old_output(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_text("old")
    with WorkDir(out, SAME, "x") as work:
        work.add("new", [b"new"])
        out.rename(work.root / "previous")  # as finish() does first
    with WorkDir(out, SAME, "x", force=True) as work:
        assert (out / "manifest.json").read_text() == "old"
        assert work.reuse("new") is not None
        work.finish(b"{}")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["manifest.json", "new", "out"]


def test_the_resume_command_is_found_from_every_side(tmp_path):
    out = tmp_path / "out"
    assert resume_command(out) is None
    with WorkDir(out, SAME, "edge-dflash build ..."):
        pass
    for path in (out, building_path(out), building_path(out) / "bundle"):
        assert resume_command(path) == "edge-dflash build ..."
    assert resume_command(building_path(out) / "other") is None


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_at_the_output_during_a_build_is_not_deleted(tmp_path, force):
    with WorkDir(tmp_path / "out", SAME, "resume me", force=force) as work:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("precious")
        with pytest.raises(BuildError, match="holds no bundle" if force else "exists; remove it"):
            work.finish(b"{}")
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_a_path_without_a_name_has_no_resume_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resume_command(Path()) is None
