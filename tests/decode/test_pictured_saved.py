"""Sessions with pictures as files: all comes back, older files load, what does not fit is refused by name."""

import json

import numpy as np
import pytest
from golden_pairs import ENGINE, backend, same_bits
from pictures_support import SPEC, ask, changed, given, mixed, noise, picture
from session_support import state_of

from edge_dflash.decode import saved
from edge_dflash.decode.backend import Snapshot
from edge_dflash.decode.loop import collect
from edge_dflash.decode.options import Options
from edge_dflash.decode.pictured import Pictured, Placed
from edge_dflash.decode.saved import SessionState, load_session, save_session
from edge_dflash.decode.session import SessionManager
from edge_dflash.errors import BundleError, RequestError

FRAME, WIDE = picture(0), picture(1)
SAID = mixed([3, 1], FRAME, [4], WIDE, FRAME, [1, 5])
SMALL = SessionState((186, 9), Snapshot(1, {"s": np.zeros(2, np.int8)}), "b", pictures=(Placed(0, noise(1, (2, 2))),))


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
        there = manager().adopt(form)
        found.append((tokens(there, going_on(there, [7, 8])), state_of(there).snapshot))
    assert [one for one, _ in found] == [wanted, wanted]
    assert all(same_bits(one, state_of(session).snapshot) for _, one in found)


def test_another_picture_misses_the_loaded_state(tmp_path):
    first = manager()
    session = first.open()
    tokens(session, mixed([3, 1], FRAME, [4]))
    save_session(tmp_path / "s", state_of(session))
    for frame, reused in ((FRAME, len(session.tokens) - 1), (changed(FRAME), 0)):
        there = manager().adopt(load_session(tmp_path / "s", "bundle"))
        tokens(there, Pictured((*there.tokens, 7), (Placed(2, frame),)))
        assert there.reuse.tokens == reused


def test_a_session_of_text_is_a_file_of_version_1_and_one_with_pictures_of_version_2(tmp_path):
    for state, version in ((SessionState((1, 2), None, "b"), "1"), (SMALL, "2")):
        save_session(tmp_path / "s", state)
        assert header(tmp_path / "s")["__metadata__"]["version"] == version
        assert load_session(tmp_path / "s", "b").tokens == state.tokens


def header(path):
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_damage_anywhere_is_refused(tmp_path):
    path = tmp_path / "s"
    save_session(path, SMALL)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    for at in (*range(0, end, 3), *range(end, len(data), 97), len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises((RequestError, BundleError), match=str(path)):
            load_session(path, "b")
    for size in (end - 1, end, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(RequestError, match="no session file, or damaged"):
            load_session(path, "b")


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
    save_session(tmp_path / "s", SMALL)
    monkeypatch.undo()
    with pytest.raises(RequestError, match=rf"s: its pictures are not as a session's: .*{text}.*; restore the file"):
        load_session(tmp_path / "s", "b")


def test_pictures_that_do_not_stand_on_their_placeholders_are_refused(tmp_path):
    there = manager()
    for at, ids in ((1, (186, 9, 9)), (0, (9, 9, 9))):
        state = SessionState(ids, None, "bundle", pictures=(Placed(at, noise(1, (2, 2))),))
        save_session(tmp_path / "s", state)
        with pytest.raises(RequestError, match=f"image 1 has 1 rows from token {at} on"):
            there.adopt(load_session(tmp_path / "s", "bundle"))
    blind = SessionManager(backend("qwen3_5"), "bundle")
    with pytest.raises(RequestError, match="no vision tower"):
        blind.adopt(SessionState((186, 9), None, "bundle", pictures=SMALL.pictures))


def test_a_picture_of_other_patches_is_no_matter_of_the_file(tmp_path):
    odd = given(np.zeros((8, 768)), (2, 4))
    save_session(tmp_path / "s", SessionState((186, 186, 1), None, "b", pictures=(Placed(0, odd),)))
    (one,) = load_session(tmp_path / "s", "b").pictures
    assert (one.picture.grid, one.picture.tokens, one.picture.spec) == ((2, 4), 2, SPEC)
