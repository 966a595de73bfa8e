"""Many connections that say little, take nothing or never end: everybody else is served, and memory is bounded."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from fakes import FakeBackend
from planner_support import Gate
from service_support import TEXT_SHAPE, Process, fake_service, live

from edge_dflash.serve.connection import _network, _Waits, bounded_connection

CROWD, CALLS = 200, 56
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
FLOODS = {
    "silent": b"",
    "headers": GET + b"x: ",
    "body": POST + b"content-length: 1000\r\n\r\n{",
    "endless body": POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
    "body of a GET": GET + b"content-length: 1000000000\r\n\r\n",
    "idle": GET + b"\r\n",
    "second headers": GET + b"\r\n" + GET,
    "unread": (GET.replace(b"/health", b"/openapi.json") + b"\r\n") * 30,
}


@pytest.fixture(scope="module")
def process(demo_bundle, tmp_path_factory):
    with Process(demo_bundle, tmp_path_factory.mktemp("floods"), tcp=True) as process:
        yield process


def connected(process, way):
    one = socket.socket(socket.AF_UNIX if way == "unix" else socket.AF_INET)
    one.settimeout(None if way == "unix" else 5)  # where a backlog is full a blocking connect waits, another one fails
    try:
        one.connect(str(process.socket) if way == "unix" else ("127.0.0.1", int(process.tcp.rpartition(":")[2])))
    except OSError:
        one.close()
        raise
    one.settimeout(5)
    return one


def served(process, way, calls=CALLS):
    """Of calls of /health, each over a connection of its own, those that are answered."""
    good = 0
    for _ in range(calls):
        with suppress(OSError), connected(process, way) as one:
            one.sendall(GET + b"connection: close\r\n\r\n")
            good += one.recv(65536).startswith(b"HTTP/1.1 200")
    return good


@pytest.mark.parametrize("way", ["unix", "tcp"])
@pytest.mark.parametrize("flood", FLOODS)
def test_a_crowd_shuts_nobody_out(process, flood, way):
    before = process.rss()
    with ExitStack() as crowd:
        for _ in range(CROWD):
            one = crowd.enter_context(connected(process, way))
            one.setblocking(False)
            with suppress(OSError):  # of one that made room already
                one.send(FLOODS[flood])
        assert served(process, way) == CALLS
        assert served(process, "tcp" if way == "unix" else "unix", 4) == 4
        assert process.rss() - before < 48 << 20


@pytest.mark.parametrize("way", ["unix", "tcp"])
@pytest.mark.parametrize("begin", [GET + b"x: ", POST + b"content-length: 1000\r\n\r\n"], ids=["headers", "body"])
def test_a_byte_at_a_time_shuts_nobody_out(process, way, begin):
    with ExitStack() as crowd:
        ones = [crowd.enter_context(connected(process, way)) for _ in range(CROWD)]
        for one in ones:
            with suppress(OSError):
                one.send(begin)
        good = 0
        for _ in range(4):
            for one in ones:
                with suppress(OSError):
                    one.send(b"x")
            good += served(process, way, CALLS // 4)
        assert good == CALLS


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_crowd_that_comes_again_and_again_shuts_nobody_out(process, way):
    over = threading.Event()

    def come_again():
        while not over.is_set():
            with ExitStack() as crowd, suppress(OSError):
                for _ in range(CROWD // 4):
                    crowd.enter_context(connected(process, way)).send(GET)

    threads = [threading.Thread(target=come_again) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        good = served(process, way, 12)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert good == 12


def test_the_oldest_in_its_headers_makes_room_and_is_told(process):
    with ExitStack() as crowd:
        first = crowd.enter_context(connected(process, "tcp"))
        first.send(GET)
        idle = crowd.enter_context(connected(process, "tcp"))
        idle.sendall(GET + b"\r\n")
        time.sleep(0.1)
        for _ in range(60):
            crowd.enter_context(connected(process, "tcp"))
        answer = first.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith(
            "48 of 64 connections are open from one user or address, which is its share, and this one waited"
        )
        while b"}" not in idle.recv(65536):
            pass
        idle.sendall(GET + b"\r\n")  # one that was served already stays as long as others are in their headers
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")


def test_nobody_makes_room_whose_turn_it_is_not(tmp_path):
    backend = Gate(FakeBackend(TEXT_SHAPE))
    service = fake_service(tmp_path, backend, limits={"connections": 4})
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}).encode()
    request = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    with live(service, tmp_path) as address, ExitStack() as crowd:

        def connect():
            one = crowd.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(10)
            one.connect(address.removeprefix("unix:"))
            return one

        working = [connect() for _ in range(3)]
        for one in working:
            one.sendall(request)
        assert backend.reached.wait(10)
        time.sleep(0.3)
        refused = connect().recv(65536)  # three of four are the share of one user
        assert refused.startswith(b"HTTP/1.1 503 ")
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as more:
                more.connect(address.removeprefix("unix:"))
        assert connect().recv(65536).startswith(b"HTTP/1.1 503 ")
        backend.open.set()
        for one in working:
            assert one.recv(65536).startswith(b"HTTP/1.1 200 ")
    service.close()


def test_a_client_that_left_an_answer_unread_is_let_go_after_the_connection_is_closed(tmp_path):
    """Its bytes lie below what a transport calls full, so nothing but time would end it."""
    service = fake_service(tmp_path, timeouts={"write": 0.5, "idle": 1.0})
    with live(service, tmp_path) as address, socket.socket(socket.AF_UNIX) as one:
        one.settimeout(10)
        one.connect(address.removeprefix("unix:"))
        one.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                one.send(GET + b"\r\n")
        time.sleep(3)
        one.setblocking(True)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            one.sendall(GET * 1000)
    service.close()


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1\r\nhost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"HTTP/1.1\r\nhost: localhost\r\ncontent-length: +5\r\n\r\n",
        b"HTTP/1.1\r\nhost: localhost\r\ncontent-length : 5\r\n\r\n",
        b"HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.0\r\nhost: localhost\r\nconnection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
@pytest.mark.parametrize("first", [b"", GET + b"\r\n"])
@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_request_with_two_ends_is_refused_and_ends_the_connection(process, head, first, way):
    smuggled = b"0\r\n\r\n" + GET.replace(b"/health", b"/metrics") + b"\r\n"
    with connected(process, way) as one:
        one.sendall(first + b"POST /v1/chat/completions " + head + smuggled)
        received = b""
        with suppress(ConnectionResetError):
            while chunk := one.recv(65536):
                received += chunk
    assert received.count(b"HTTP/1.1 200 ") == (1 if first else 0)
    assert received.count(b"HTTP/1.1 400 ") == 1
    assert received.rpartition(b"\r\n\r\n")[2].startswith(b'{"error"')
    assert b"edge_dflash_requests" not in received


def test_addresses_share_as_their_networks():
    assert _network(("10.0.0.1", 5)) == _network(("10.0.0.1", 6)) == _network(("::ffff:10.0.0.1", 7)) == "10.0.0.1"
    assert _network(("2001:db8::1", 5)) == _network(("2001:db8::ffff:2%eth0", 5)) == "2001:db8::/64"
    assert _network(("2001:db8:1::1", 5)) != _network(("2001:db8:2::1", 5))
    assert _network(None) == ""


class Crowd:
    """Connections that were accepted before, without a server: who they are of, and what each waits for."""

    def __init__(self, most, *others):
        kind = bounded_connection(most, 10, 20)
        self.made_room = []
        self.ones = [self._one(kind, *facts, at) for at, facts in enumerate(others)]

    def _one(self, kind, origin, waits, at):
        one = object.__new__(type("Waiting", (kind,), {"_waits": property(lambda one: waits)}))
        one._origin, one._since, one.server = origin, at, ("h", 1)
        one._make_room = lambda: self.made_room.append((origin, waits, one._full))
        return one

    def comes(self, origin, server=("h", 1)):
        """Whether one more of this origin has a place; ``server``: the address that it came to."""
        new = self._one(type(self.ones[0]).__bases__[0], origin, _Waits.UNKNOWN, len(self.ones))
        new.server = server
        new.connections = {*self.ones, new}
        self.refused = new
        return new._has_place()


def test_who_has_more_than_an_even_share_makes_room_first():
    reading = [(f"10.0.0.{2 + at % 2}", _Waits.READING) for at in range(63)]
    crowd = Crowd(64, ("honest", _Waits.BODY), *reading)
    assert crowd.comes("10.0.0.3")
    assert crowd.made_room == [("10.0.0.2", _Waits.READING, "64 connections are open, which is the limit")]
    busy = [("10.0.0.2", None)] * 40 + [("10.0.0.3", _Waits.READING)] * 23
    crowd = Crowd(64, ("honest", _Waits.BODY), *busy)
    assert crowd.comes("honest")
    assert crowd.made_room[0][0] == "10.0.0.3"  # of those that wait
    crowd = Crowd(4, ("a", _Waits.BODY), ("b", _Waits.READING), ("c", _Waits.HEADERS), ("d", _Waits.BODY))
    assert crowd.comes("e")
    assert crowd.made_room[0][0] == "c"  # nobody has more than others


def test_the_bound_that_was_reached_is_named():
    crowd = Crowd(64, *[("10.0.0.2", None)] * 48)
    assert not crowd.comes("10.0.0.2")
    assert crowd.refused._full == "48 of 64 connections are open from one user or address, which is its share"
    crowd = Crowd(64, *[(f"10.0.0.{at % 2}", None) for at in range(64)])
    assert not crowd.comes("10.0.0.2")
    assert crowd.refused._full == "64 connections are open, which is the limit"


def test_a_network_keeps_no_program_of_this_machine_out():
    """Connections of the Unix socket and of TCP are counted apart, also while none of them can make room."""
    crowd = Crowd(64, *[(f"10.0.0.{at % 2}", None) for at in range(64)])
    assert not crowd.comes("10.0.0.2")
    assert crowd.comes("uid-1000", server=("/run/edge-dflash.sock", None))
    assert crowd.comes("uid-1000", server=None)  # of an abstract one
    assert crowd.made_room == []
