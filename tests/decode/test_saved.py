"""Sessions as files: all comes back, what does not fit or is damaged is refused by name, a save is whole or nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import stat

import numpy as np
import pytest
from golden_pairs import ENGINE, NAMES, backend, golden, same_bits
from pictures_support import SPEC, ask, changed, given, mixed, noise, picture
from safetensors.numpy import load_file, save_file
from session_support import answer, state_of

from edge_dflash.decode import saved
from edge_dflash.decode.backend import Precision, Snapshot
from edge_dflash.decode.generation import collect
from edge_dflash.decode.options import Options
from edge_dflash.decode.saved import SessionState, adopt, load_session, save_session
from edge_dflash.decode.session import SessionManager
from edge_dflash.errors import BundleError, RequestError
from edge_dflash.pictures.pictured import Pictured, Placed

BF16 = Precision("bfloat16", "bfloat16")
SMALL = SessionState((3, 1, 4), Snapshot(2, {"s": np.arange(6, dtype=np.float32).reshape(2, 3)}), "bundle")

FRAME, WIDE = picture(0), picture(1)
SAID = mixed([3, 1], FRAME, [4], WIDE, FRAME, [1, 5])
SEEN = SessionState(
    (186, 9), Snapshot(1, {"s": np.zeros(2, np.int8)}), "bundle", pictures=(Placed(0, noise(1, (2, 2))),)
)


def talk(manager, tokens, new=8):
    session = manager.open()
    steps = list(answer(session, tokens, Options(max_new_tokens=new)))
    return session, [len(step.tokens) for step in steps]


def header_of(path):
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def forge(path, **changes):
    """Write the file again with other metadata, its length kept honest."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", [ENGINE, BF16])
def test_a_loaded_session_goes_on_with_the_same_tokens_and_accept_lengths(tmp_path, name, precision):
    prompt = golden(name)["p1.prompt"].tolist()
    managers = [SessionManager(backend(name, precision), "bundle") for _ in range(2)]
    session, _ = talk(managers[0], prompt)
    state = state_of(session)
    size = save_session(tmp_path / "robot.session", state)
    assert size == (tmp_path / "robot.session").stat().st_size
    loaded = load_session(tmp_path / "robot.session", "bundle")
    assert loaded.tokens == state.tokens
    assert same_bits(loaded.snapshot, state.snapshot)
    assert all(array.flags.owndata for array in loaded.snapshot.arrays.values())  # nothing of it lives in the file
    there = adopt(managers[1], loaded)
    results = []
    for s in (session, there):
        steps = list(answer(s, (*s.tokens, 7, 8), Options(max_new_tokens=14)))
        results.append(([step.tokens for step in steps], s.tokens))
    assert results[0] == results[1]
    assert same_bits(state_of(session).snapshot, state_of(there).snapshot)


def test_every_dtype_comes_back(tmp_path):
    kinds = (np.uint8, np.int8, np.int16, np.uint16, np.float16, np.int32, np.uint32, np.float32, np.int64, np.float64)
    arrays = {np.dtype(k).name: np.arange(12).astype(k).reshape(3, 4) for k in kinds}
    arrays |= {"empty": np.zeros((0, 2), np.float32), "scalar": np.array(2.5), "strided": np.arange(9)[::2]}
    save_session(tmp_path / "s", SessionState((1, 2), Snapshot(1, arrays), "bundle"))
    found = load_session(tmp_path / "s", "bundle").snapshot.arrays
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_a_session_without_a_state_can_be_saved(tmp_path):
    for tokens in ((), (5,), (5, 6)):
        save_session(tmp_path / "s", SessionState(tokens, None, "bundle"))
        assert load_session(tmp_path / "s", "bundle") == SessionState(tokens, None, "bundle")


def test_the_file_is_plain_safetensors_that_only_the_owner_reads(tmp_path):
    path = tmp_path / "s"
    save_session(path, SMALL)
    tensors = load_file(path)
    assert tensors["tokens"].tolist() == [3, 1, 4]
    assert tensors["state.s"].tobytes() == SMALL.snapshot.arrays["s"].tobytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert header_of(path)["__metadata__"]["version"] == "1"
    save_session(path, SEEN)
    assert header_of(path)["__metadata__"]["version"] == "2"


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"state.c has dtype complex64, a session file stores U8"):
        save_session(tmp_path / "s", SessionState((1, 2), Snapshot(1, {"c": np.zeros(2, np.complex64)}), "bundle"))
    assert list(tmp_path.iterdir()) == []


# what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [SMALL, SEEN], ids=["text", "pictures"])
def test_every_changed_byte_and_every_other_length_is_refused(tmp_path, state):
    path = tmp_path / "s"
    save_session(path, state)
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    places = range(len(data)) if state is SMALL else (*range(0, header, 3), *range(header, len(data), 97))
    for at in places:
        for flip in (1, 0x80):
            path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
            with pytest.raises((RequestError, BundleError), match=str(path)):
                load_session(path, "bundle")
        path.write_bytes(data[:at])
        with pytest.raises(RequestError, match=r"no session file, or damaged: .*; restore the file from a copy, or"):
            load_session(path, "bundle")
    path.write_bytes(data + b"\0")
    with pytest.raises(RequestError, match="1 bytes after"):
        load_session(path, "bundle")
    path.write_bytes(data)
    load_session(path, "bundle")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"format": "pt"}, RequestError, "format is 'pt', wanted 'edge-dflash-session'"),
        ({"version": "3"}, RequestError, "version is '3', this edge-dflash reads 1, 2; update edge-dflash"),
        ({"version": "0"}, RequestError, "version is '0', this edge-dflash reads 1, 2; start a new session"),
        ({"version": "x"}, RequestError, "version is 'x'"),
        ({"sha256": ""}, RequestError, "sha256 is "),
        ({"sha256": "1" * 64}, RequestError, "sha256 is 1111111111111111..., the content has"),
        ({"fingerprint": "other"}, RequestError, "sha256 is"),
    ],
)
def test_forged_metadata_is_refused(tmp_path, changes, error, text):
    path = tmp_path / "s"
    save_session(path, SMALL)
    forge(path, **changes)
    with pytest.raises(error, match=text):
        load_session(path, "bundle")


def test_another_bundle_is_refused(tmp_path):
    save_session(tmp_path / "s", SMALL)
    with pytest.raises(BundleError, match=r"fingerprint is 'bundle', this bundle's is 'other'; open the bundle that"):
        load_session(tmp_path / "s", "other")


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "s"
    with pytest.raises(RequestError, match="no session file at"):
        load_session(path, "bundle")
    with pytest.raises(RequestError, match="no session file at"):
        load_session(tmp_path, "bundle")
    save_file({"tokens": np.arange(3, dtype=np.int32)}, path)
    with pytest.raises(RequestError, match="format is None, wanted 'edge-dflash-session'; give the file of a session"):
        load_session(path, "bundle")
    path.write_bytes(b"\x80\x04cposix\nsystem\n")
    with pytest.raises(RequestError, match="no session file, or damaged"):
        load_session(path, "bundle")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    save_session(tmp_path / "s", SMALL)

    def refuse(paths):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("edge_dflash.decode.saved.TensorFiles.open", refuse)
    with pytest.raises(RequestError, match=r"cannot read .*/s: Permission denied; check its permissions"):
        load_session(tmp_path / "s", "bundle")


@pytest.mark.parametrize("name", ["weights", "tokens"])
def test_tensors_that_no_session_has_are_refused(tmp_path, monkeypatch, name):
    """A file whose checksum is right and whose content is not."""
    monkeypatch.setattr("edge_dflash.decode.saved._STATE", "" if name == "weights" else "state.")
    arrays = {"weights": np.zeros(3, np.int64)} if name == "weights" else {}
    state = SessionState((1, 2), Snapshot(1, arrays), "bundle")
    if name == "tokens":
        monkeypatch.setattr("edge_dflash.decode.saved._TOKENS", "state.tokens")
    save_session(tmp_path / "s", state)
    monkeypatch.undo()
    with pytest.raises(RequestError, match=f"tensor {name} is not as a session's"):
        load_session(tmp_path / "s", "bundle")


# atomic --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["fsync", "replace", "interrupt"])
def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "s"
    save_session(path, SMALL)

    def fail(*_):
        raise KeyboardInterrupt if step == "interrupt" else OSError(errno.ENOSPC, "No space left on device")

    target = "pathlib.Path.replace" if step == "replace" else "os.fsync"
    monkeypatch.setattr(target, fail)
    expected = KeyboardInterrupt if step == "interrupt" else RequestError
    text = None if step == "interrupt" else r"cannot write .*: No space left on device"
    with pytest.raises(expected, match=text):
        save_session(path, SessionState((9, 9), None, "bundle"))
    monkeypatch.undo()
    assert load_session(path, "bundle").tokens == SMALL.tokens
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


def test_what_a_kill_left_is_written_over(tmp_path):
    (tmp_path / "s.partial").write_bytes(b"x" * 100_000)
    save_session(tmp_path / "s", SMALL)
    assert load_session(tmp_path / "s", "bundle").tokens == SMALL.tokens
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


def test_two_savers_do_not_mix(tmp_path):
    with (tmp_path / "s.partial").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RequestError, match="is being written by another process; wait for it"):
            save_session(tmp_path / "s", SMALL)
    assert not (tmp_path / "s").exists()
    save_session(tmp_path / "s", SMALL)


def test_no_link_is_followed_when_writing(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "s.partial").symlink_to(tmp_path / "victim")
    with pytest.raises(RequestError, match="cannot write"):
        save_session(tmp_path / "s", SMALL)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"cannot write .*nowhere/s: No such file or directory"):
        save_session(tmp_path / "nowhere" / "s", SMALL)
    (tmp_path / "d").mkdir()
    with pytest.raises(RequestError, match=r"cannot write .*: Is a directory"):
        save_session(tmp_path / "d", SMALL)
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]


# pictures -------------------------------------------------------------------------------------------------------------


def manager():
    return SessionManager(backend("vision", ENGINE, prefill_chunk=7), "bundle")


def tokens(session, said, new=6):
    return collect(list(ask(session, said, Options(max_new_tokens=new)))).tokens


def going_on(session, *parts):
    return Pictured((*session.tokens, *mixed(*parts).ids), session.pictures)


def test_a_loaded_session_goes_on_and_its_state_can_be_computed_again(tmp_path):
    first, path = manager(), tmp_path / "robot.session"
    session = first.open()
    tokens(session, SAID)
    state = state_of(session)
    assert save_session(path, state) == path.stat().st_size
    loaded = load_session(path, "bundle")
    assert loaded.tokens == state.tokens
    assert [(one.at, one.key) for one in loaded.pictures] == [(one.at, one.key) for one in state.pictures]
    for one, other in zip(loaded.pictures, state.pictures, strict=True):
        assert np.array_equal(one.picture.values(), other.picture.values())
    assert loaded.pictures[0].picture is loaded.pictures[2].picture  # stored once
    assert loaded.snapshot.delta == state.snapshot.delta != 0
    assert same_bits(loaded.snapshot, state.snapshot)
    wanted, found = tokens(session, going_on(session, [7, 8])), []
    for form in (loaded, SessionState(loaded.tokens, None, "bundle", pictures=loaded.pictures)):
        there = adopt(manager(), form)
        found.append((tokens(there, going_on(there, [7, 8])), state_of(there).snapshot))
    assert [one for one, _ in found] == [wanted, wanted]
    assert all(same_bits(one, state_of(session).snapshot) for _, one in found)


def test_another_picture_misses_the_loaded_state(tmp_path):
    first = manager()
    session = first.open()
    tokens(session, mixed([3, 1], FRAME, [4]))
    save_session(tmp_path / "s", state_of(session))
    for frame, reused in ((FRAME, len(session.tokens) - 1), (changed(FRAME), 0)):
        there = adopt(manager(), load_session(tmp_path / "s", "bundle"))
        tokens(there, Pictured((*there.tokens, 7), (Placed(2, frame),)))
        assert there.reuse.tokens == reused


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"at": (0, 1)}, "zip"),
        ({"of": (1,)}, r"pictures \[1\] of 1 stand in it"),
        ({"grids": ((2, 4),)}, r"patches of a grid \[2, 4\] are uint8 \[4, 768\]"),
        ({"grids": ((1, 4),)}, "a grid of 1 x 4 patches does not consist of blocks of 2"),
        ({"digests": ("no",)}, "digest 'no' is not that of its patches"),
        ({"digests": ()}, "zip"),
        ({"patches": 7}, "an object"),
        (None, "pictures"),
    ],
)
def test_a_right_checksum_around_what_no_session_has_is_refused(tmp_path, monkeypatch, changes, text):
    def encode(shown):
        table = {name: getattr(shown, name) for name in ("at", "of", "grids", "digests")}
        return table | {"patches": vars(SPEC)} | changes

    monkeypatch.setattr(saved, "encode", encode if changes is not None else lambda shown: {})
    save_session(tmp_path / "s", SEEN)
    monkeypatch.undo()
    with pytest.raises(RequestError, match=rf"s: its pictures are not as a session's: .*{text}.*; restore the file"):
        load_session(tmp_path / "s", "bundle")


def test_pictures_that_do_not_stand_on_their_placeholders_are_refused(tmp_path):
    there = manager()
    for at, ids in ((1, (186, 9, 9)), (0, (9, 9, 9))):
        state = SessionState(ids, None, "bundle", pictures=(Placed(at, noise(1, (2, 2))),))
        save_session(tmp_path / "s", state)
        with pytest.raises(RequestError, match=f"image 1 has 1 rows from token {at} on"):
            adopt(there, load_session(tmp_path / "s", "bundle"))
    blind = SessionManager(backend("qwen3_5"), "bundle")
    with pytest.raises(RequestError, match="no vision tower"):
        adopt(blind, SessionState((186, 9), None, "bundle", pictures=SEEN.pictures))


def test_a_picture_of_other_patches_is_no_matter_of_the_file(tmp_path):
    odd = given(np.zeros((8, 768)), (2, 4))
    save_session(tmp_path / "s", SessionState((186, 186, 1), None, "bundle", pictures=(Placed(0, odd),)))
    (one,) = load_session(tmp_path / "s", "bundle").pictures
    assert (one.picture.grid, one.picture.tokens, one.picture.spec) == ((2, 4), 2, SPEC)
