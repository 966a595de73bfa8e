"""Options and arguments are checked at the call: by type, by range, by name, on the caller's thread."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from fakes import FakeBackend
from paths import ROOT
from service_support import fake_service, live

from edge_dflash.decode.accept import Relaxation
from edge_dflash.decode.options import Options
from edge_dflash.errors import RequestError, short
from edge_dflash.planner import Planner

NAN, INF = float("nan"), float("inf")
PROMPT = (3, 1, 4)
FLAG = (None, 1, "no", [])
REAL = (None, "1", True, [1.0])
BAD = {
    "schema": (5, [], b"{}"),
    "regex": (5, b"a", ["a"]),
    "grammar": (5, {}, 1.0),
    "whitespace": FLAG,
    "deadline": ("1", NAN, True, [1], 10**400),
    "max_new_tokens": (0, -1, 1.5, "8", True, NAN),
    "temperature": (*REAL, NAN, INF, -1, -1e-9),
    "top_k": (*REAL, -1, 1.5, NAN),
    "top_p": (*REAL, 0, 1.5, NAN, -1),
    "seed": (*REAL, -1, 2**64, 0.5),
    "stop": (None, 5, "", ["a", ""], [1], {"a": 1}, b"a", {"a"}),
    "raw": ("yes", 1),
    "thinking": FLAG,
    "relaxed": (None, "yes", 1, {"top_k": 3}),
    "tools": (5, "grasp", {"type": "function"}, [1], ["grasp"], [{"function": object()}]),
    "speculative": FLAG,
    "draft_confidence": (*REAL, -0.1, 1.1, NAN, INF),
    "tool_choice": (None, 5, {"type": "function"}, b"auto"),
    "prompt_logprobs": (0, "yes", None, NAN),
    "logprobs": (-1, 21, 1.5, True, "5", NAN, [1]),
    "priority": ("high", None, 1.5, True, -101, 101, NAN),
    "caller": (None, 5, [1], b"me"),
}
CASES = [(name, value) for name, values in BAD.items() for value in values]


@pytest.fixture(scope="module")
def planner():
    with Planner(FakeBackend(), None) as planner:
        yield planner


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    directory = tmp_path_factory.mktemp("remote")
    service = fake_service(directory)
    with live(service, directory) as url, Planner.connect(url) as planner:
        yield planner
    service.close()


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_bad_option_is_refused_at_the_call(planner, remote, name, value):
    for one in (planner, remote):
        with pytest.raises(RequestError, match=rf"(?s)^{name} is .*; give "):
            one.stream(PROMPT, **{name: value})


def test_every_option_has_bad_values():
    assert BAD.keys() == Options.__annotations__.keys()


def test_a_message_names_the_value_and_what_is_accepted(planner):
    with pytest.raises(RequestError, match=r"^priority is 'high'; give a whole number from -100 to 100$"):
        planner.plan(PROMPT, priority="high")
    with pytest.raises(RequestError, match=r"^stop is None; give a text, or several, none of them empty; leave stop"):
        planner.plan(PROMPT, stop=None)
    with pytest.raises(RequestError, match=r"^speculative is 'x{56}\.\.\.; give True or False$"):
        planner.plan(PROMPT, speculative="x" * 1000)


def test_the_documented_table_is_that_of_the_options():
    command = [sys.executable, str(ROOT / "docs" / "options_page.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_tokens", "did you mean max_new_tokens?"), ("temprature", "did you mean temperature?"), ("xyz", "known are")],
)
def test_an_unknown_option_is_refused_with_the_nearest(planner, remote, name, hint):
    for one in (planner, remote):
        with pytest.raises(RequestError, match=rf"^{name} is unknown; .*known are schema, regex") as error:
            one.stream(PROMPT, **{name: 3})
        assert hint in str(error.value)


def test_numbers_of_numpy_are_numbers(planner):
    options = Options(
        temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.5), seed=np.uint64(7),
        max_new_tokens=np.int32(4), deadline=np.float32(9), priority=np.int8(2), speculative=np.bool_(False),
    )  # fmt: skip
    assert [type(getattr(options, name)) for name in ("temperature", "top_k", "seed", "deadline")] == [
        float, int, int, float,
    ]  # fmt: skip
    assert options.speculative is False
    plain = planner.plan(PROMPT, temperature=0.5, top_k=3, top_p=0.5, seed=7, max_new_tokens=4)
    drawn = planner.plan(
        np.array(PROMPT), temperature=np.float32(0.5), top_k=np.int64(3), top_p=0.5, seed=np.uint64(7), max_new_tokens=4
    )
    assert drawn.tokens == plain.tokens


def test_lists_of_options_are_taken_once():
    texts = ["a", "b"]
    options = Options(stop=texts, tools=[{"type": "function"}])
    texts.append("")
    assert options.stops == ("a", "b")
    assert options.tools == ({"type": "function"},)


@pytest.mark.parametrize("task", [None, 5, 1.5, True, {1, 2}, iter([1]), object(), b"abc", {}, np.array(3)])
def test_a_task_of_another_kind_is_refused_at_the_call(planner, remote, task):
    for one in (planner, remote):
        with pytest.raises(RequestError, match=r"the task is of type .*; give text, a list of messages or token ids"):
            one.stream(task)


@pytest.mark.parametrize(
    "given",
    [
        {"close_token_ids": ()}, {"close_token_ids": 5}, {"close_token_ids": ("x",)}, {"top_k": 0},
        {"top_k": "3"}, {"top_k": True}, {"margin": NAN}, {"margin": -1}, {"margin": None}, {"margin": INF},
    ],
)  # fmt: skip
def test_a_bad_relaxation_is_refused(given):
    with pytest.raises(RequestError, match=r"relaxed acceptance "):
        Relaxation(**{"close_token_ids": (1,), **given})
    with pytest.raises(RequestError, match=r"give close_token_ids, or relaxed=True"):
        Relaxation()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue", 0), ("queue", "8"), ("queue", None), ("prefix_bytes", -1), ("prefix_bytes", 1.5), ("fallback", "no"),
        ("check_hashes", None), ("self_test", "on"), ("self_test", None), ("progress", 5), ("observer", object()),
    ],
)  # fmt: skip
def test_a_bad_argument_is_refused_before_anything_is_opened(name, value):
    with pytest.raises(RequestError, match=rf"^{name} is .*; give "):
        Planner.open("no bundle here", **{name: value})
    if name in ("queue", "prefix_bytes", "fallback", "observer"):
        with pytest.raises(RequestError, match=rf"^{name} is .*; give "):
            Planner(FakeBackend(), None, **{name: value})


@pytest.mark.parametrize("given", [{"stop_token_ids": None}, {"stop_token_ids": ["</s>"]}, {"bundle": None}])
def test_bad_arguments_of_a_planner(given):
    with pytest.raises(RequestError, match=rf"^{next(iter(given))} is .*; give "):
        Planner(FakeBackend(), None, **given)


def test_bad_arguments_of_sessions_and_paths(planner, remote):
    for one in (planner, remote):
        with pytest.raises(RequestError, match=r"^system is 5; give the text of a system prompt, or None"):
            one.session(system=5)
        with pytest.raises(RequestError, match=r"^session is 5; give one that session"):
            one.plan(PROMPT, session=5)
        with pytest.raises(RequestError, match=r"^path is 5; give"):
            one.load_session(5)
        with pytest.raises(RequestError, match=r"^thinking is 'no'; give True or False"):
            one.encode(PROMPT, thinking="no")
    with pytest.raises(RequestError, match=r"^path is None; give the path"):
        Planner.open(None)


@pytest.mark.parametrize(
    ("name", "value"), [("url", 5), ("model", 5), ("api_key", b"k"), ("timeout", "1"), ("timeout", 0)]
)
def test_bad_arguments_of_a_connection(name, value):
    given = {"url": "unix:/nowhere", name: value}
    with pytest.raises(RequestError, match=rf"^{name} is .*; give "):
        Planner.connect(**given)


def test_a_value_that_cannot_be_shown():
    class Odd:
        def __repr__(self):
            raise ValueError

    assert short(Odd()) == "a Odd"
    with pytest.raises(RequestError, match=r"^caller is a Odd; give a text"):
        Options(caller=Odd())
