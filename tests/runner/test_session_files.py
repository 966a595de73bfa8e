"""Saved sessions whose fields were changed by somebody who knows the format: each loads right, or is refused by name.

The checksum is right again after every change: it finds damage, and is no signature.
"""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from picture_files import noise
from pictures_support import seeing, shown, sighted

from edge_dflash.errors import BundleError, EdgeDflashError, RequestError

FRAME, OTHER = noise(40, 60), noise(40, 60, 1)
OPTIONS = {"max_new_tokens": 4, "temperature": 1.5, "seed": 3}
DRAWN = {"max_new_tokens": 8, "temperature": 4.0, "seed": 5}
HUGE = 10**6
VALUES = [None, True, -1, 0, 1, 2**31, 10**30, 10**400, 0.5, "", "1", "\ud800", "x" * 5000, [], [[]], {}, {"a": 1}]


@pytest.fixture(scope="module")
def backend():
    return sighted(max_context=400, lanes=2)


@pytest.fixture(scope="module")
def planner(backend, tmp_path_factory):
    with seeing(backend, tmp_path_factory.mktemp("planner")) as made:
        yield made


@pytest.fixture(scope="module")
def files(planner, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, said in (("text", ["Look.", "Go on."]), ("pictures", [shown(FRAME, "Go"), shown(OTHER, "And now?")])):
        with planner.session("You plan.") as session:
            for one in said:
                session.plan(one, **OPTIONS)
            session.save(folder / name)
    return {name: (folder / name).read_bytes() for name in ("text", "pictures")}


class File:
    """A session's file taken apart; written, its lengths, offsets and checksum are right."""

    def __init__(self, data):
        end = 8 + int.from_bytes(data[:8], "little")
        self.header = json.loads(data[8:end])
        self.metadata = self.header.pop("__metadata__")
        self.data = {
            name: data[end + entry["data_offsets"][0] : end + entry["data_offsets"][1]]
            for name, entry in self.header.items()
        }
        self.note = json.loads(self.metadata["note"])
        self.pictures = json.loads(self.metadata.get("pictures", "null"))

    def write(self, path, whole=None):
        metadata = {**self.metadata, "note": json.dumps(self.note)} if self.note is not ... else self.metadata
        if self.pictures is not None:
            metadata = {**metadata, "pictures": json.dumps(self.pictures)}
        header, end = {"__metadata__": {**metadata, "sha256": "0" * 64}}, 0
        for name, entry in self.header.items():
            data = self.data[name]
            header[name] = {**entry, "data_offsets": [end, end + len(data)]}
            end += len(data)
        text = json.dumps(header).encode()
        if whole is not None:
            text = whole(text)
        content = len(text).to_bytes(8, "little") + text
        digest = hashlib.sha256(content + b"".join(self.data[name] for name in self.header)).hexdigest()
        path.write_bytes(content.replace(b"0" * 64, digest.encode(), 1) + b"".join(self.data[n] for n in self.header))


def leaves(value, path=()):
    """Places of everything in a JSON value, the value itself included."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))


def put(value, path, new):
    """The value with another one at a place; ``...``: without it."""
    if not path:
        return new
    value = deepcopy(value)
    at = value
    for key in path[:-1]:
        at = at[key]
    if new is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return value


def mutations(data):
    """(what, File) for every field of a file and every value."""
    for part in ("metadata", "note", "pictures", "header"):
        whole = getattr(File(data), part)
        if whole is None:
            continue
        for path in leaves(whole):
            for new in ([...] if path else []) + VALUES:
                file = File(data)
                changed = put(whole, path, new)
                if part == "metadata" and (not isinstance(changed, dict) or path[:1] in (("note",), ("pictures",))):
                    file.note, file.pictures = ..., None
                if part in ("header", "metadata") and not isinstance(changed, dict):
                    continue
                setattr(file, part, changed)
                if part == "header" and set(changed) != set(whole):
                    continue
                if part == "header" and any(not isinstance(entry, dict) for entry in changed.values()):
                    continue
                yield f"{part} {path} {new!r:.40}", file


def outcome(planner, path, *, turn=True):
    """Whether a load succeeds, with its next turn; an error that is none of ours goes through."""
    with suppress(EdgeDflashError), planner.load_session(path) as session:
        if turn:
            session.plan("Go on.", **OPTIONS)
        return True
    return False


@pytest.mark.parametrize("name", ["text", "pictures"])
def test_every_field_of_a_file_may_be_anything(planner, files, tmp_path, name):
    path, loaded = tmp_path / "s", []
    for what, file in random.Random(0).sample(list(mutations(files[name])), 1500):
        try:
            file.write(path)
        except (UnicodeEncodeError, TypeError):
            continue
        try:
            if outcome(planner, path, turn=len(loaded) % 40 == 0):
                loaded.append(what)
        except Exception as error:
            pytest.fail(f"{what}: {error!r}")
    assert 100 < len(loaded) < 1000
    assert planner.failure is None


@pytest.mark.parametrize("form", ["[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900, "{", "\\", '"\\ud800"', "7"])
@pytest.mark.parametrize("part", ["note", "pictures"])
def test_texts_inside_a_file_may_be_anything(planner, files, tmp_path, part, form):
    file = File(files["pictures"])
    file.metadata |= {"note": json.dumps(file.note), "pictures": json.dumps(file.pictures), part: form}
    file.note, file.pictures = ..., None
    file.write(tmp_path / "s")
    with pytest.raises(RequestError):
        planner.load_session(tmp_path / "s")


def test_a_note_that_is_nested_deeply_is_refused_here_and_not_in_a_later_turn(planner, files, tmp_path):
    for depth in (150, 400, 800):
        file = File(files["text"])
        deep = json.loads("[" * depth + "]" * depth)
        file.note["messages"][1]["tool_calls"] = deep
        file.write(tmp_path / "s")
        outcome(planner, tmp_path / "s")


@pytest.mark.parametrize(
    ("field", "value"),
    [("temporal", HUGE), ("std", [0.0, 0.0, 0.0]), ("mean", [0.1, 0.5, 0.5]), ("max_pixels", 10**12), ("merge", 1)],
)
def test_a_file_brings_no_settings_of_its_own(planner, files, tmp_path, field, value):
    file = File(files["pictures"])
    file.pictures["patches"][field] = value
    file.write(tmp_path / "s")
    with pytest.raises((BundleError, RequestError), match=rf"has {field}|not as a session's"):
        planner.load_session(tmp_path / "s")


def test_another_picture_under_a_known_name_is_refused_and_poisons_nothing(backend, files, tmp_path):
    file = File(files["pictures"])
    file.data["picture.0"], file.data["picture.1"] = file.data["picture.1"], file.data["picture.0"]
    file.write(tmp_path / "s")
    with seeing(backend, tmp_path / "a") as planner:
        with pytest.raises(RequestError, match=r"digest '[0-9a-f]{32}' is not that of its patches"):
            planner.load_session(tmp_path / "s")
        found = [planner.plan(shown(one, "Go"), **DRAWN).tokens for one in (FRAME, OTHER)]
    with seeing(backend, tmp_path / "b") as planner:
        assert [planner.plan(shown(one, "Go"), **DRAWN).tokens for one in (FRAME, OTHER)] == found
        assert found[0] != found[1]


def test_names_of_other_pictures_in_its_messages_are_refused(planner, files, tmp_path):
    file = File(files["pictures"])
    file.note["messages"][1]["content"][0]["image"] = "picture:" + "0" * 32
    file.write(tmp_path / "s")
    with pytest.raises(RequestError, match=r"holds no conversation of a planner; .* is none of its images"):
        planner.load_session(tmp_path / "s")


CALL = {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "calls",
    [[1], "x", 7, {"a": 1}, [None], [[CALL]], [{"id": "i", "function": 3}], [{}], [CALL, {**CALL, "id": 7}],
     *([{**CALL, "id": wrong}] for wrong in (["u"], {"u": 1}, 7, False)),
     [{**CALL, "function": {"name": "f", "arguments": "["}}]],
)  # fmt: skip
def test_calls_that_nobody_made_are_refused_when_the_file_is_loaded(planner, files, tmp_path, calls):
    file = File(files["text"])
    assert file.note["messages"][2]["role"] == "assistant"
    file.note["messages"][2]["tool_calls"] = calls
    file.write(tmp_path / "s")
    with pytest.raises(RequestError, match=r"holds no conversation of a planner; .* message 2 "):
        planner.load_session(tmp_path / "s")


@pytest.mark.parametrize("calls", [None, [], [CALL], [{**CALL, "id": None}], [{"name": "f", "arguments": {}}]])
def test_calls_that_templates_take_are_loaded(planner, files, tmp_path, calls):
    file = File(files["text"])
    file.note["messages"][2]["tool_calls"] = calls
    file.write(tmp_path / "s")
    assert outcome(planner, tmp_path / "s")


def noisy(file, seed=0):
    """The file with another state under the same tokens."""
    rng = np.random.default_rng(seed)
    for name in [name for name in file.data if name.startswith("state.") and name.endswith((".k", ".v"))]:
        file.data[name] = rng.integers(0, 60, len(file.data[name]), np.uint8).tobytes()


def test_a_state_from_a_file_is_never_shared(backend, tmp_path):
    """A prompt that goes on from a forged state keeps its prefix for nobody else."""
    system = [{"role": "system", "content": "You plan for a robot."}]
    asked = [*system, {"role": "user", "content": "Where is it?"}]
    with seeing(backend, tmp_path / "alone") as planner:
        wanted = planner.plan(asked, **OPTIONS).tokens
        ids = planner.encode(asked)
        with planner.session() as session:
            session.plan(ids[:12], **{**OPTIONS, "max_new_tokens": 1})
            session.save(tmp_path / "s")
    file = File((tmp_path / "s").read_bytes())
    tokens = np.array(ids[:12], np.int32)
    file.header["tokens"]["shape"], file.data["tokens"] = [len(tokens)], tokens.tobytes()
    for name in [name for name in file.data if name.endswith((".k", ".v"))]:
        rows, *rest = file.header[name]["shape"]
        size = len(file.data[name]) // rows
        file.header[name]["shape"], file.data[name] = [11, *rest], file.data[name][: 11 * size]
    noisy(file)
    file.note["messages"] = []
    file.write(tmp_path / "s")
    with seeing(backend, tmp_path / "poisoned") as planner:
        with planner.load_session(tmp_path / "s") as session:
            session._known = replace(session._known, messages=system, tools="others")  # all of it is encoded again
            plan = session.plan([{"role": "user", "content": "Where is it?"}], **OPTIONS)
            assert plan.reused_tokens == 11
        assert planner.prefixes.entries == 0
        assert planner.plan(asked, **OPTIONS).tokens == wanted


def test_a_state_that_does_not_fit_costs_nobody_else_a_lane(planner, files, tmp_path):
    file = File(files["text"])
    name = next(name for name in file.header if name.endswith(".k"))
    file.header[name]["dtype"] = "I32"
    file.write(tmp_path / "s")
    with planner.session() as other:
        other.plan("Hello.", **OPTIONS)
        held = len(other.tokens) - 1
        loaded = planner.load_session(tmp_path / "s")
        with pytest.raises(EdgeDflashError, match="this pair stores"):
            loaded.plan("Go on.", **OPTIONS)
        assert other.plan("Go on.", **OPTIONS).reused_tokens == held
        assert planner._engine.manager.lanes.of(other._state) is not None
        assert loaded.plan("Go on.", **OPTIONS).tokens
