"""When the watchdog is fed, what a stop does, and what a service says of itself meanwhile."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
from fakes import FakeBackend
from planner_support import Gate, Slow
from service_support import TEXT_SHAPE, client_of, fake_service, until

from edge_dflash.board.state import BoardState, EnergyMeter
from edge_dflash.decode.loop import Step
from edge_dflash.serve import service as service_module
from edge_dflash.serve.metrics import Metrics, Watcher
from edge_dflash.serve.server import listen_sockets
from edge_dflash.serve.service import SystemdNotifier

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
STEP = Step((1,), None, 0.0, 0.0)


class Recorder(SystemdNotifier):
    def __init__(self):
        super().__init__()
        self.said = []

    def say(self, message):
        self.said.append(message.partition("\n")[0].removesuffix("=1").removeprefix("STATUS="))

    def fed(self):
        return self.said.count("WATCHDOG")


@pytest.mark.parametrize("kind", ["", "@"], ids=["path", "abstract"])
def test_states_arrive_as_systemd_reads_them(tmp_path, kind):
    address = kind + str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(30)
        manager.bind(address.replace("@", "\0"))
        notifier = SystemdNotifier(address)
        for call, said, message in (
            (notifier.status, "loading\nREADY=1  weights", "STATUS=loading READY=1 weights"),
            (notifier.say, "READY=1", "READY=1"),
        ):
            call(said)
            assert manager.recv(4096).decode() == message
    for nobody in (address, str(tmp_path / "never"), None, "", "vsock:2:1", "relative"):  # nobody listens
        SystemdNotifier(nobody).say("READY=1")


def test_sockets_of_another_process_are_left_alone():
    for environ in ({}, {"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_PID": "8"}, {"LISTEN_FDS": "x"}):
        assert listen_sockets(environ, pid=7) == ()


def test_an_idle_engine_feeds_and_a_hung_one_does_not():
    now = [0.0]
    watcher = Watcher(Metrics(BoardState), EnergyMeter(lambda: None), lambda: now[0])
    assert watcher.feeds(0)
    assert watcher.feeds(0)  # idle: every time
    assert not watcher.feeds(1)  # a request waits and nothing takes it
    watcher.started()
    assert watcher.feeds(0)
    assert not watcher.feeds(0)  # it runs and does not get on
    now[0] = 7.0
    assert watcher.stalled_seconds(0) == 7.0
    watcher.step(STEP)
    assert watcher.feeds(3)
    assert not watcher.feeds(3)
    watcher.ended()
    assert watcher.feeds(0)
    assert watcher.feeds(0)
    now[0] = 20.0
    assert watcher.stalled_seconds(0) == 0.0
    assert watcher.stalled_seconds(1) == 13.0
    assert watcher.feeds(0)
    now[0] = 21.0
    assert watcher.stalled_seconds(1) == 1.0  # of work; before there was none


def test_work_on_a_session_that_hangs_does_not_feed(tmp_path):
    service, begun, go_on = fake_service(tmp_path), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: service.planner._engine.call(lambda: begun.set() or go_on.wait(60)))
    thread.start()
    assert begun.wait(60)
    assert service.observer.jobs
    service.observer.feeds(0)
    assert not service.observer.feeds(0)
    go_on.set()
    thread.join()
    assert service.observer.feeds(0)
    service.close()


@pytest.fixture
def fast_ticks(monkeypatch):
    monkeypatch.setattr(service_module, "TICK", 0.02)


async def watched(service, seconds, meanwhile=None):
    watching = asyncio.create_task(service.watch())
    if meanwhile is not None:
        await asyncio.to_thread(meanwhile)
    await asyncio.sleep(seconds)
    watching.cancel()


@pytest.mark.usefixtures("fast_ticks")
def test_the_watchdog_goes_hungry_with_a_hung_engine_only(start):
    backend = Gate(FakeBackend(TEXT_SHAPE))
    service, client = start(backend, timeouts={"stall": 0.1})
    notifier = service.notifier = Recorder()
    asyncio.run(watched(service, 0.2))
    assert notifier.fed() >= 3  # idle
    stream = service.planner.stream(HELLO, max_new_tokens=2)
    assert backend.reached.wait(60)
    asyncio.run(watched(service, 0.1))
    fed = notifier.fed()
    asyncio.run(watched(service, 0.2))
    assert notifier.fed() == fed  # hung
    reply = client.get("/health")
    assert reply.status_code == 503
    assert reply.json()["status"] == "hung"
    backend.open.set()
    assert stream.plan.finish_reason == "length"
    assert client.get("/health").status_code == 200
    asyncio.run(watched(service, 0.1))
    assert notifier.fed() > fed


@pytest.mark.usefixtures("fast_ticks")
def test_slow_cycles_feed_it(tmp_path):
    service = fake_service(tmp_path, Slow(FakeBackend(TEXT_SHAPE, right=lambda position: 0), 0.05))
    notifier = service.notifier = Recorder()
    asyncio.run(watched(service, 0.0, lambda: service.planner.plan(HELLO, max_new_tokens=12)))
    assert notifier.fed() >= 8
    assert any(said == "serving fake: 1 running, 0 waiting" for said in notifier.said)
    service.close()


def ask(client, replies, **body):
    replies.append(client.post(CHAT, json={"messages": HELLO, **body}))


def draining(tmp_path, drain, **options):
    """Stop a service while a request of 20 slow cycles runs; returns its reply and the notifier."""
    slow = Slow(FakeBackend(TEXT_SHAPE, right=lambda position: 0), 0.03)
    service = fake_service(tmp_path, slow, timeouts={"drain": drain})
    notifier = service.notifier = Recorder()
    replies = []
    with client_of(service) as client:
        thread = threading.Thread(target=ask, args=(client, replies), kwargs={"max_tokens": 20, **options})
        thread.start()
        until(lambda: service.observer.jobs)
        stopping = threading.Thread(target=client.portal.call, args=(service.drain,))
        stopping.start()
        until(lambda: service.state == "draining")
        assert client.post(CHAT, json={"messages": HELLO}).status_code == 503
        thread.join()
        stopping.join()
    service.close()
    return replies[0], notifier


def test_a_stop_cuts_what_takes_too_long_and_saves_its_session(tmp_path):
    reply, _ = draining(tmp_path, 0.1, edge_dflash={"session": "hall"})
    body = reply.json()
    assert body["edge_dflash"]["finish_reason"] == "cancelled"
    assert 1 <= body["usage"]["completion_tokens"] < 20
    assert [path.name for path in (tmp_path / "state" / "sessions").iterdir()] == ["hall.session"]


def test_a_stop_lets_a_request_that_is_being_prepared_run(tmp_path, monkeypatch):
    service, began, go, replies = fake_service(tmp_path), threading.Event(), threading.Event(), []
    monkeypatch.setattr("edge_dflash.serve.service.PREPARE", 60.0)
    streams = service.planner.streams

    def slowly(*task, **options):
        began.set()
        assert go.wait(60)
        return streams(*task, **options)

    monkeypatch.setattr(service.planner, "streams", slowly)
    with client_of(service) as client:
        thread = threading.Thread(target=ask, args=(client, replies), kwargs={"max_tokens": 4})
        thread.start()
        assert began.wait(60)
        stopping = threading.Thread(target=client.portal.call, args=(service.drain,))
        stopping.start()
        until(lambda: service.state == "draining")
        time.sleep(0.1)  # it looks again and again
        go.set()
        thread.join()
        stopping.join()
    service.close()
    assert replies[0].json()["usage"]["completion_tokens"] == 4


def test_a_reload_saves_sessions_also_the_one_whose_turn_runs(tmp_path, start):
    slow = Slow(FakeBackend(TEXT_SHAPE, right=lambda position: 0), 0.03)
    service, client = start(slow)
    notifier = service.notifier = Recorder()
    replies = []
    ask(client, replies, max_tokens=2, edge_dflash={"session": "hall"})
    options = {"max_tokens": 20, "edge_dflash": {"session": "kitchen"}}
    thread = threading.Thread(target=ask, args=(client, replies), kwargs=options)
    thread.start()
    until(lambda: service.observer.jobs)
    client.portal.call(service.reload)
    thread.join()
    until(lambda: len(list((tmp_path / "state" / "sessions").iterdir())) == 2)
    assert [reply.status_code for reply in replies] == [200, 200]
    assert sorted(path.name for path in (tmp_path / "state" / "sessions").iterdir()) == [
        "hall.session",
        "kitchen.session",
    ]
    assert [said for said in notifier.said if said.isupper()] == ["RELOADING", "READY"]
