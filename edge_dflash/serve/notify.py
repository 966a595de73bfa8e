"""What a service and systemd say to each other: READY, RELOADING, STATUS, WATCHDOG, STOPPING; sockets and timeouts.

The protocols are sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3) of systemd. They are made of environment
variables, the only ones that edge-dflash reads; without them (not started by systemd) everything here does nothing.
When the watchdog is fed is decided by :class:`~edge_dflash.serve.metrics.Pulse`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

FIRST_LISTEN_FD = 3  # SD_LISTEN_FDS_START


class SystemdNotifier:
    """Sends the states of a service to the socket of its manager. Used from any thread.

    Neither blocks nor raises: a message that cannot be sent at once is lost.
    """

    def __init__(self, address: str | None = None, watchdog_seconds: float | None = None) -> None:
        """Talk to ``address``, a path or ``@`` and an abstract name; None: to nobody."""
        self.watchdog_seconds = watchdog_seconds  # how often the manager wants to hear of us; None: it does not
        self._address = address if address and address[0] in "/@" else None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, pid: int | None = None) -> SystemdNotifier:
        """The notifier that NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID describe; damaged values are ignored."""
        microseconds = _number(environ.get("WATCHDOG_USEC"))
        meant = _number(environ.get("WATCHDOG_PID")) in (None, os.getpid() if pid is None else pid)
        return cls(environ.get("NOTIFY_SOCKET"), microseconds / 1e6 if microseconds and meant else None)

    @property
    def enabled(self) -> bool:
        """Whether a manager listens."""
        return self._address is not None

    def ready(self) -> None:
        """The service answers requests from now on."""
        self._send("READY=1")

    def reloading(self) -> None:
        """A reload begins; READY=1 ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send("STATUS=" + " ".join(text.split()))

    def watchdog(self) -> None:
        """The engine works, or has nothing to do."""
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """The service ends; no new requests are taken."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        name = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel:
                channel.sendto(message.encode(), name)
        except OSError:
            pass  # a manager that went away must not take the planner with it


def listen_sockets(
    environ: Mapping[str, str] = os.environ, pid: int | None = None, first: int = FIRST_LISTEN_FD
) -> tuple[socket.socket, ...]:
    """Listening sockets that systemd passed to this process by LISTEN_FDS and LISTEN_PID, in their order; or none."""
    count = _number(environ.get("LISTEN_FDS"))
    if not count or _number(environ.get("LISTEN_PID")) != (os.getpid() if pid is None else pid):
        return ()
    for number in range(first, first + count):
        os.set_inheritable(number, False)
    return tuple(socket.socket(fileno=number) for number in range(first, first + count))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None
