"""systemd's protocols against real sockets: a manager that listens, a watchdog that counts, sockets that are passed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from fakes import FakeBackend
from service_support import TEXT_SHAPE, fake_service

from edge_dflash.serve import service as serve_service
from edge_dflash.serve.metrics import Pulse
from edge_dflash.serve.server import listen_sockets
from edge_dflash.serve.service import SystemdNotifier

PERIOD = 1.0  # seconds of the watchdog in these tests, and of patience with a busy machine
WINDOW = 0.4  # seconds for which it is looked at
LOOK = 0.05  # seconds between two looks at the engine


class Manager:
    """The receiving end of NOTIFY_SOCKET."""

    def __init__(self, address):
        self.address, self.statuses = address, False
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(30)

    def message(self):
        return self.socket.recv(4096).decode()

    def expired(self, seconds, patience):
        """Whether ``seconds`` pass without WATCHDOG=1 within ``patience`` seconds, as systemd would judge."""
        until = time.monotonic() + patience
        self.socket.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            while time.monotonic() < until:
                message = self.message()
                assert message == "WATCHDOG=1" or (self.statuses and message.startswith("STATUS="))
            return False
        return True


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    name = str(tmp_path / "notify")
    made = Manager(name if request.param == "path" else "@" + name)
    yield made
    made.socket.close()


def test_states_arrive_as_systemd_reads_them(manager):
    notifier = SystemdNotifier(manager.address)
    for call, message in (
        (lambda: notifier.status("loading\nREADY=1  weights"), "STATUS=loading READY=1 weights"),
        (lambda: notifier.say("READY=1"), "READY=1"),
    ):
        call()
        assert manager.message() == message


def test_without_a_manager_nothing_happens():
    for address in (None, "", "vsock:2:1", "relative"):
        notifier = SystemdNotifier(address)
        assert notifier._address is None
        notifier.say("READY=1")


def test_a_manager_that_went_away_stops_nothing(tmp_path):
    gone = Manager(str(tmp_path / "notify"))
    gone.socket.close()
    SystemdNotifier(gone.address).say("READY=1")
    SystemdNotifier(str(tmp_path / "never")).say("READY=1")


class Service:
    """Feeds the watchdog by the engine's progress in a thread, as the server's loop does; an engine that may hang."""

    def __init__(self, notifier):
        self.pulse, self.hung = Pulse(), threading.Event()
        self._notifier, self._ended = notifier, threading.Event()
        self._loop = threading.Thread(target=self._feed)

    def __enter__(self):
        self._loop.start()
        return self

    def __exit__(self, *error):
        self.hung.set()
        self._ended.set()
        self._loop.join()

    def _feed(self):
        while not self._ended.wait(LOOK):
            if self.pulse.feeds(waiting=0):
                self._notifier.say("WATCHDOG=1")

    def decode(self, seconds):
        """A request that commits something every 5 ms until it is through or the engine hangs in the middle."""
        until = time.monotonic() + seconds
        self.pulse.note(1)
        while time.monotonic() < until:
            if self.hung.is_set():
                return  # as good as hung: neither another step nor an end
            self.pulse.note()
            time.sleep(0.005)
        self.pulse.note(-1)


def test_an_idle_engine_is_fed_and_so_is_one_that_decodes(manager):
    with Service(SystemdNotifier(manager.address)) as service:
        assert not manager.expired(PERIOD, WINDOW)
        worker = threading.Thread(target=service.decode, args=(WINDOW,))
        worker.start()
        assert not manager.expired(PERIOD, 2 * WINDOW)
        worker.join()


def test_a_hung_engine_is_caught(manager):
    with Service(SystemdNotifier(manager.address)) as service:
        worker = threading.Thread(target=service.decode, args=(60,))
        worker.start()
        assert not manager.expired(PERIOD, WINDOW)
        service.hung.set()
        worker.join()
        assert manager.expired(PERIOD, 10 * PERIOD)


class StuckBackend(FakeBackend):
    """Never comes back from a pass once it is told to hang, as an engine in a driver that lost its device."""

    def __init__(self):
        super().__init__(TEXT_SHAPE, right=lambda position: 1)
        self.hang, self.stuck, self.freed = threading.Event(), threading.Event(), threading.Event()

    def verify(self, tokens, lane=0, parents=None):
        time.sleep(0.01)
        if self.hang.is_set():
            self.stuck.set()
            self.freed.wait(60)
        return super().verify(tokens, lane)


def test_a_service_whose_engine_hangs_in_a_request_is_caught(manager, tmp_path, monkeypatch):
    monkeypatch.setattr(serve_service, "TICK", LOOK)
    backend = StuckBackend()
    service = fake_service(tmp_path, backend)
    service.notifier = SystemdNotifier(manager.address)

    ended = threading.Event()

    async def watched():
        watch = asyncio.create_task(service.watch())
        while not ended.is_set():
            await asyncio.sleep(LOOK)
        watch.cancel()

    loop = threading.Thread(target=asyncio.run, args=(watched(),))
    loop.start()
    manager.statuses = True
    try:
        assert not manager.expired(PERIOD, WINDOW)  # nothing to do
        stream = service.planner.stream((1, 2, 3), max_new_tokens=400)
        assert not manager.expired(PERIOD, WINDOW)  # at work
        backend.hang.set()
        assert backend.stuck.wait(60)
        assert manager.expired(PERIOD, 10 * PERIOD)
    finally:
        backend.freed.set()
        ended.set()
        loop.join()
        stream.cancel()
        service.planner.close()
        service.threads.shutdown()


def test_sockets_of_activation_are_taken_over(tmp_path):
    """As systemd does it: the listening sockets lie at descriptor 3 and up when the program starts."""
    path = tmp_path / "api.sock"
    start = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.execv(sys.executable, [*sys.argv[2:]])"
    program = (
        "import os; os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "from edge_dflash.serve.server import listen_sockets\n"
        "(api,) = listen_sockets()\n"
        "assert not os.get_inheritable(3)\n"
        "connection, _ = api.accept()\n"
        "connection.sendall(api.getsockname().encode())\n"
    )
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, "-c", start, str(listening.fileno()), sys.executable, "-c", program],
            pass_fds=[listening.fileno()],
            env={**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "api"},
        )
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(path))
            assert client.recv(200).decode() == str(path)
        assert process.wait(60) == 0


def test_sockets_of_another_process_are_left_alone():
    for environ in ({}, {"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_PID": "8"}, {"LISTEN_FDS": "x"}):
        assert listen_sockets(environ, pid=7) == ()
