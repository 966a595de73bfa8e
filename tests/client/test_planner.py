"""``Planner.connect``: the same interface over a socket, and what other servers cannot do."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import threading
import time

import pytest
from fakes import FakeBackend
from planner_support import Gate, Slow
from service_support import TEXT_SHAPE, fake_service, live
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from edge_dflash import Planner, PlannerSession, Relaxation, RemotePlanner, RemoteSession
from edge_dflash.client.connection import parse_url
from edge_dflash.errors import ContextError, QueueFullError, RequestError, ServiceError

TASK = "go to the hall"


@pytest.fixture
def remote(service, tmp_path):
    with live(service, tmp_path) as url, Planner.connect(url) as planner:
        yield planner


def names(kind):
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


def test_the_interface_is_the_planners():
    assert names(Planner) - {"open", "connect"} <= names(RemotePlanner)
    assert names(PlannerSession) <= names(RemoteSession)
    for mine, theirs in ((Planner, RemotePlanner), (PlannerSession, RemoteSession)):
        for name in [
            "plan",
            "stream",
            "aplan",
            "astream",
            "encode",
            "session",
            "load_session",
            "save",
            "fork",
            "close",
        ]:
            if hasattr(mine, name):
                given, wanted = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (theirs, mine))
                assert given == wanted, name


def test_plans_are_those_of_the_open_planner(service, remote):
    for options in (
        {"max_new_tokens": 20},
        {"max_new_tokens": 20, "temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 9},
        {"regex": "[ab]{4}", "speculative": False},
        {"max_new_tokens": 9, "draft_confidence": 0.5},
        {"schema": {"enum": ["left", "right"]}, "whitespace": True},
        {"grammar": 'start: "go" | "wait"', "priority": 3, "caller": "arm"},
        {"max_new_tokens": 30, "stop": ["e", "\n"]},
        {"max_new_tokens": 9, "deadline": 30.0},
    ):
        here, there = service.planner.plan(TASK, **options), remote.plan(TASK, **options)
        for name in [
            "object",
            "text",
            "thinking",
            "tokens",
            "finish_reason",
            "prompt_tokens",
            "accept_lengths",
            "drafting",
        ]:
            assert getattr(here, name) == getattr(there, name), (name, options)
        assert there.timings.total_seconds > 0


def test_ids_and_messages_are_tasks_too(service, remote):
    ids = service.planner.encode(TASK)
    assert remote.encode(TASK) == ids
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TASK}]
    for task in (ids, messages):
        assert remote.plan(task, max_new_tokens=8).tokens == service.planner.plan(task, max_new_tokens=8).tokens
    assert remote.shape == service.planner.shape
    assert remote.stop_token_ids == service.planner.stop_token_ids
    assert remote.fingerprint == service.planner.fingerprint
    assert remote.waiting == 0


def test_tools_need_messages_whose_template_describes_them(remote):
    with pytest.raises(RequestError, match="tools are given with token ids; give messages"):
        remote.plan((1, 2), tools=[{"type": "function", "function": {"name": "go"}}])


def test_raw_text_is_asked_for_by_name(service, remote):
    for raw in (False, True):
        assert remote.encode("<|start|>go", raw=raw) == service.planner.encode("<|start|>go", raw=raw)
        options = {"raw": raw, "max_new_tokens": 8}
        plan, theirs = remote.plan("<|start|>go", **options), service.planner.plan("<|start|>go", **options)
        assert (plan.tokens, plan.prompt_tokens) == (theirs.tokens, theirs.prompt_tokens)
    with pytest.raises(RequestError, match="raw is given with messages"):
        remote.plan([{"role": "user", "content": "go"}], raw=True)


def test_increments_join_to_the_plan(remote):
    with remote.stream(TASK, max_new_tokens=20) as stream:
        parts = list(stream)
    assert "".join(part.text for part in parts) == stream.plan.text
    assert tuple(token for part in parts for token in part.tokens) == stream.plan.tokens
    assert len(parts) > 3

    async def both():
        return await asyncio.gather(remote.aplan(TASK, max_new_tokens=4), remote.aplan("wait", max_new_tokens=5))

    assert [len(plan.tokens) for plan in asyncio.run(both())] == [4, 5]


def test_cancelling_ends_it_on_the_server_too(tmp_path):
    service = fake_service(tmp_path, Slow(FakeBackend(TEXT_SHAPE, right=lambda position: 0), 0.05))
    with live(service, tmp_path) as url, Planner.connect(url) as remote:
        stream = remote.stream(TASK, max_new_tokens=200)
        next(stream)
        stream.cancel()
        plan = stream.result(5)
        assert plan.finish_reason == "cancelled"
        assert 1 <= len(plan.tokens) < 10
        assert plan.accept_lengths == (1,) * (len(plan.tokens) - 1)
        until = time.monotonic() + 60
        while service.observer.jobs and time.monotonic() < until:
            time.sleep(0.01)
        assert service.observer.jobs == 0
        assert remote.plan(TASK, max_new_tokens=3).finish_reason == "length"
    service.close()


def test_deadlines_are_the_servers(tmp_path):
    service = fake_service(tmp_path, Slow(FakeBackend(TEXT_SHAPE, right=lambda position: 0), 0.02))
    with live(service, tmp_path) as url, Planner.connect(url) as remote:
        plan = remote.plan(TASK, deadline=1.0)  # to its end it would take ten times as long
        assert plan.finish_reason == "deadline"
        assert 2 < len(plan.tokens) < 50
        assert remote.plan(TASK, deadline=0.0).tokens == ()
    service.close()


def test_errors_come_at_the_call_with_their_class(tmp_path):
    backend = Gate(FakeBackend(TEXT_SHAPE))
    service = fake_service(tmp_path, backend, queue=1)
    with live(service, tmp_path) as url, Planner.connect(url) as remote:
        with pytest.raises(RequestError, match="the task is empty"):
            remote.stream(" ")
        with pytest.raises(ContextError, match="usable context"):
            remote.stream(TASK, max_new_tokens=5000)
        with pytest.raises(RequestError, match="a Relaxation"):
            remote.stream(TASK, relaxed=Relaxation((5,)))
        first = remote.stream(TASK, max_new_tokens=2)
        assert backend.reached.wait(60)
        second = remote.stream(TASK, max_new_tokens=2)
        with pytest.raises(QueueFullError):
            remote.stream(TASK, max_new_tokens=2)
        assert remote.waiting == 1
        backend.open.set()
        assert first.plan.tokens == second.plan.tokens
        for name in ("backend", "tokenizer", "prefixes", "pictures", "self_test", "drafting"):
            with pytest.raises(RequestError, match=name):
                getattr(remote, name)
    service.close()


def test_a_first_turn_that_comes_to_nothing_keeps_the_system_prompt(service, remote):
    here = service.planner.session("Be brief.")
    expected = here.plan("two", max_new_tokens=4).tokens
    cut, refused = remote.session("Be brief."), remote.session("Be brief.")
    assert cut.plan("one", max_new_tokens=4, deadline=0.0).tokens == ()
    with pytest.raises(RequestError):
        refused.plan("one", regex="(")
    assert cut.messages == ({"role": "system", "content": "Be brief."},)
    for there in (cut, refused):
        assert there.plan("two", max_new_tokens=4).tokens == expected
        assert there.messages == here.messages
        there.close()
    assert remote._connection.call("GET", "/v1/edge_dflash/sessions")["data"] == []


def test_sessions_go_on_fork_and_are_saved_on_the_server(service, remote):
    here, there = service.planner.session("Be brief."), remote.session("Be brief.")
    for turn in ("first", "second"):
        mine, theirs = here.plan(turn, max_new_tokens=10), there.plan(turn, max_new_tokens=10)
        assert theirs.tokens == mine.tokens
    assert theirs.reused_tokens == mine.reused_tokens > 20
    assert there.tokens == here.tokens
    assert there.messages == here.messages
    fork = there.fork()
    assert fork.tokens == there.tokens
    assert fork.plan("third", max_new_tokens=6).tokens == here.plan("third", max_new_tokens=6).tokens
    assert there.save("hall.session") > 100
    there.plan("more", max_new_tokens=6)
    assert there.save("hall.session") > 100  # its own, as a file in Python
    with pytest.raises(RequestError, match=r"session 'hall.session' exists; give a new name, or delete it"):
        fork.save("hall.session")
    restored = remote.load_session("hall.session")
    assert restored.tokens == there.tokens
    restored.plan("and more", max_new_tokens=6)
    assert restored.save("hall.session") > 100
    with pytest.raises(RequestError, match=r"session 'hall.session' exists"):
        there.save("hall.session")  # which went on meanwhile
    for name in ("../x", "/tmp/x", "a b", ""):
        with pytest.raises(RequestError):
            there.save(name)
    with pytest.raises(RequestError, match="no session"):
        remote.load_session("none")
    with remote.session() as new:
        assert new.tokens == ()
        with pytest.raises(RequestError, match="no turn yet, there is nothing to save"):
            new.save("new")
    for session in (there, fork, restored):
        session.close()
    left = remote._connection.call("GET", "/v1/edge_dflash/sessions")["data"]
    assert [(entry["id"], entry["open"]) for entry in left] == [("hall.session", False)]
    with pytest.raises(RequestError, match="closed"):
        there.plan("more")


def test_a_cancelled_turn_lets_its_successor_in(tmp_path):
    service = fake_service(tmp_path, Slow(FakeBackend(TEXT_SHAPE, right=lambda position: 0), 0.05))
    with live(service, tmp_path) as url, Planner.connect(url) as remote:
        session = remote.session()
        stream = session.stream("one", max_new_tokens=100)
        with pytest.raises(RequestError, match="still running"):
            session.stream("two")
        next(stream)
        stream.close()
        assert session.plan("two", max_new_tokens=3).finish_reason == "length"
        stream = session.stream("three", max_new_tokens=100)
        next(stream)
        stream.cancel()
        session.close()  # nothing of it stays there
        assert remote._connection.call("GET", "/v1/edge_dflash/sessions")["data"] == []
    service.close()


def test_closing_ends_what_runs(tmp_path):
    service = fake_service(tmp_path, Slow(FakeBackend(TEXT_SHAPE, right=lambda position: 0), 0.05))
    with live(service, tmp_path) as url:
        remote = Planner.connect(url)
        stream = remote.stream(TASK, max_new_tokens=100)
        next(stream)
        closing = threading.Thread(target=remote.close)
        closing.start()
        assert stream.result(10).finish_reason == "cancelled"
        closing.join(10)
        with pytest.raises(RequestError, match="closed"):
            remote.plan(TASK)
    service.close()


def test_keys_are_sent_and_wrong_ones_named(service, tmp_path):
    key = "k" * 24
    with live(service, tmp_path, key, tcp=True) as url:
        with Planner.connect(url + "/v1", api_key=key, model="fake") as remote:
            assert remote.plan(TASK, max_new_tokens=2).finish_reason == "length"
        with pytest.raises(ServiceError, match="API key"):
            Planner.connect(url)
        with pytest.raises(ServiceError, match="no model 'other'"):
            Planner.connect(url, api_key=key, model="other")


def test_addresses(tmp_path):
    assert parse_url("unix:/run/x.sock") == ("/run/x.sock", "http://edge-dflash")
    assert parse_url("unix:///run/x.sock")[0] == "/run/x.sock"
    assert parse_url("http+unix://%2Frun%2Fx.sock/v1") == ("/run/x.sock", "http://edge-dflash")
    assert parse_url("https://host:1/api/v1/") == (None, "https://host:1/api")
    for bad in ("http://[::1", "http://host:abc", "", "host:80", "unix:", "ftp://host", "http://", "http://host/?x=1"):
        with pytest.raises(ServiceError, match="no address"):
            parse_url(bad)
    with pytest.raises(ServiceError, match="cannot be reached"):
        Planner.connect(f"unix:{tmp_path / 'nobody.sock'}")


# What is no service, and one that is broken ---------------------------------------------------------------------------


class Other:
    """A server that lists ``card`` and streams ``chunks``, whatever it is asked."""

    def __init__(self, chunks, **card):
        self.chunks = chunks
        self.card = {"id": "big", "object": "model", "owned_by": "edge-dflash", "edge_dflash": {"chat": True}, **card}
        self.slow = 0.0
        routes = [Route("/v1/models", self.models), Route("/v1/chat/completions", self.answer, methods=["POST"])]
        self.app = Starlette(routes=routes)

    async def models(self, request):
        return JSONResponse({"data": [self.card] if self.card["id"] else []})

    async def answer(self, request):
        async def lines():
            for chunk in self.chunks:
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
                await asyncio.sleep(self.slow)
            yield "data: [DONE]\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")


def delta(reason=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def end(reason="stop", **extra):
    return {**delta(reason), "edge_dflash": {"finish_reason": reason, **extra}}


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ({"owned_by": "acme"}, "is no service of edge-dflash; other OpenAI APIs are reached with the package openai"),
        ({"id": ""}, "is no service of edge-dflash"),
        ({"edge_dflash": None}, "has not loaded its bundle; connect again when /ready answers 200"),
    ],
    ids=str,
)
def test_what_is_no_service_or_is_not_ready_is_said(tmp_path, card, message):
    with live(Other([], **card).app, tmp_path) as url, pytest.raises(ServiceError, match=message):
        Planner.connect(url)


GOING = delta(content="Going")


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        (
            [GOING, {**delta("stop"), "edge_dflash": {"finish_reason": "stop", "prompt_tokens": "many"}}],
            "cannot be read",
        ),
        ([GOING, {**delta("stop"), "edge_dflash": ["no object"]}], "cannot be read"),
        ([GOING, end(timings={"hours": 1})], "cannot be read"),
        ([GOING, delta(tool_calls=[7])], "cannot be read"),
        ([GOING, delta(tool_calls=[{"index": "first"}])], "cannot be read"),
        ([{"choices": [{"delta": {"tool_calls": 5}}]}], "cannot be read"),
        ([GOING], "ended before"),
        ([{"error": {"message": "out of memory"}}], "out of memory"),
        (["nonsense"], "no chunk"),
        ([end("content_filter")], "content_filter"),
    ],
    ids=str,
)
def test_broken_answers_are_errors_of_the_service_and_end_the_request(tmp_path, chunks, error):
    with live(Other(chunks).app, tmp_path) as url, Planner.connect(url) as remote:
        session = remote.session()
        stream = session.stream(TASK)
        with pytest.raises(ServiceError, match=error):
            stream._ticket.result(10)
        assert not session.busy


def test_line_breaks_of_unicode_are_text(tmp_path):
    text = "a\u2028b\x85c\x0bd\u00e9\U0001f916"
    other = Other([delta(content=text), end()])
    with live(other.app, tmp_path) as url, Planner.connect(url) as remote:
        assert remote.plan(TASK).text == text


def test_a_planner_that_is_dropped_leaves_no_thread(service, tmp_path):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "edge-dflash remote"]

    with live(service, tmp_path) as url:
        remote = Planner.connect(url)
        assert remote.plan(TASK, max_new_tokens=2).text is not None
        assert len(threads()) == 1
        del remote
        gc.collect()
        for thread in threads():
            thread.join(60)
        assert threads() == []


def test_a_service_that_misses_a_deadline_is_left(tmp_path):
    other = Other([*[delta(content=str(i)) for i in range(200)], end()])
    other.slow = 0.05
    with live(other.app, tmp_path) as url, Planner.connect(url) as remote:
        plan = remote.plan(TASK, deadline=0.4)
        assert plan.finish_reason == "deadline"
        assert plan.text.startswith("012")
