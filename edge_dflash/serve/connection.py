"""One connection, bounded: how many there are, how long headers may take, and how long an answer lies unread.

uvicorn bounds the bytes of headers and the time between requests; the rest is here. Where the connections are full, one
that waits for its client makes room for the next: so nobody keeps others out by opening many and saying little.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from edge_dflash.serve.errors import Refusal, dump
from edge_dflash.serve.limits import peer

_READ = 65536  # bytes taken at a time: h11 is Python, and what it makes of a MB at once keeps everybody waiting
_LINGER = 1.0  # seconds in which the rest of what is refused is thrown away: closing at once would undo the answer
_CHUNKS, _CHUNK_BYTES = 512, 64  # a body may come in so many chunks, and in one more for each so many bytes
_LINES = 256  # of a request's headers
_BLANK = re.compile(rb"\n\r?\n")


class _Waits(IntEnum):
    """What of its client a connection waits for. Those of the lowest make room first."""

    NOTHING = 0  # it is being closed
    HEADERS = 1
    REQUEST = 2  # the next one
    BODY = 3
    READING = 4
    UNKNOWN = 5  # it was accepted a moment ago, and what it may have sent is not read yet


def bounded_connection(most: int, header_seconds: float, write_seconds: float) -> type[H11Protocol]:
    """The protocol of a connection: at most ``most`` at a time, headers within ``header_seconds``.

    At most three quarters are those of one user of the Unix socket, or of one address. One whose client takes nothing
    for ``write_seconds`` is cut, whatever it was sent.
    Connections of the Unix socket and of TCP are counted apart: a network must not keep this machine's programs out.
    """
    bounds = {"most": most, "header_seconds": header_seconds, "write_seconds": write_seconds}
    return type("Bounded", (_Bounded,), bounds)


class _Bounded(H11Protocol, asyncio.BufferedProtocol):
    """A connection with the bounds that :func:`bounded_connection` sets."""

    most: int
    header_seconds: float
    write_seconds: float
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _refused = False
    _unheard = True  # nothing was read from it yet
    _ended = False  # it makes room, and counts no more
    _origin = ""  # the user or the address at its other end
    _full = ""  # which bound was reached when it was refused a place, or made room
    _since = 0.0  # when it began to wait for what it waits for
    _head = b""  # the last bytes of headers that go on
    _lines = 0  # of them so far

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._buffer = bytearray(_READ)
        self.conn = _Connection(h11.SERVER, self.config.h11_max_incomplete_event_size or _READ)
        self._wire = transport
        transport.set_write_buffer_limits(0)  # what is not taken at once is bounded in time, also of one that closes
        super().connection_made(cast(asyncio.Transport, _Gently(transport, self._close)))
        account = peer(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "peer": account}
        self._origin = account if _local(self) else _network(self.client)
        if self._has_place():
            self._arm()
            self.loop.call_soon(self.loop.call_soon, self._heard)  # between the two the loop reads what is there
        else:
            self._ended = True
            self._refuse(Refusal(self._full, status=503, retry_after=1))

    def _has_place(self) -> bool:
        """Whether it may stay. If need be one that waits for its client makes room: of who has most, the oldest.

        While somebody has more than an even share, it is one of who has most, whatever the others wait for.
        """
        others = [one for one in self.connections if one is not self and isinstance(one, _Bounded)]
        others = [one for one in others if _local(one) == _local(self) and not one._ended]
        share, full = max(1, self.most * 3 // 4), f"{self.most} connections are open, which is the limit"
        if len(own := [one for one in others if one._origin == self._origin]) >= share:
            others, full = (
                own,
                f"{share} of {self.most} connections are open from one user or address, which is its share",
            )
        elif len(others) < self.most:
            return True
        crowds = Counter(one._origin for one in others)
        even = self.most // len({*crowds, self._origin})
        over = Counter({origin: size for origin, size in crowds.items() if size > even})
        waiting = [(-over[one._origin], waits, -crowds[one._origin], one._since, id(one), one)
                   for one in others if (waits := one._waits) is not None]  # fmt: skip
        chosen = min(waiting)[-1] if waiting else self
        chosen._full = full
        if chosen is not self:
            chosen._make_room()
        return chosen is not self

    @property
    def _waits(self) -> _Waits | None:
        """What of its client it waits for; None: it is the service's turn."""
        if self._refused or self._wire.is_closing():
            return _Waits.NOTHING
        if self._unread is not None:
            return _Waits.READING
        if self._unheard:
            return _Waits.UNKNOWN
        if self.cycle is None or self.cycle.response_complete:
            return _Waits.REQUEST if self._timer is None else _Waits.HEADERS
        return _Waits.BODY if self.cycle.more_body else None

    def _make_room(self) -> None:
        """End it now, for another one; told if that can be."""
        if self._unread is None and not self._refused:
            self._refuse(Refusal(f"{self._full}, and this one waited for its client", status=503, retry_after=1))
        self._ended = True
        if self._wire.get_write_buffer_size() or not self._wire.is_closing():
            self._wire.abort()

    def _heard(self) -> None:
        self._unheard = False

    def _arm(self) -> None:
        """The headers begin."""
        self._since = self.loop.time()
        self._timer = self.loop.call_later(self.header_seconds, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._since = self.loop.time()
        self._unread = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        before, idle = self.cycle, self.cycle is None or self.cycle.response_complete
        if idle and self._timer is None:
            self._arm()
        if self.conn.their_state is h11.IDLE and self._many_lines(data):
            self._refuse(Refusal(f"there are more than {_LINES} headers; send fewer", status=431), linger=True)
            return
        super().data_received(data)
        if self.cycle is not before:  # all headers are there
            self._stop()
            self._since = self.loop.time()
            self._head, self._lines = b"", 0

    def _many_lines(self, data: bytes) -> bool:
        """Whether the headers have too many lines, for h11 takes its time with each."""
        lines = _BLANK.split(self._head + data, maxsplit=1)[0].count(b"\n")
        self._lines += lines - self._head.count(b"\n")
        self._head = data[-3:]
        return self._lines > _LINES

    def send_400_response(self, msg: str) -> None:
        if isinstance(self.conn, _Connection) and self.conn.crumbled:
            why = f"the body comes in {self.conn.chunks} tiny chunks; send larger ones"
        else:
            why = "this is no HTTP request, its headers are too long, or they say two ends of its body"
        self._refuse(Refusal(why), linger=True)

    def _taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(Refusal(f"the headers did not end within {self.header_seconds:g} s", status=408))

    def _refuse(self, refused: Refusal, *, linger: bool = False) -> None:
        """Answer without a request, and close; ``linger``: when the client has, or after a while."""
        self._refused = True
        self._stop()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = dump(refused.body)
            head = (
                f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}\r\ncontent-type: application/json\r\n"
            )
            head += "".join(f"{name}: {value}\r\n" for name, value in refused.headers.items())
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode("ascii") + body)
        if not linger:
            self._wire.close()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._linger()

    def _close(self) -> None:
        """What uvicorn does behind an answer that ends the connection."""
        if self.conn.their_state is h11.SEND_BODY:
            self._linger()
        elif not self._refused:
            self._wire.close()

    def _linger(self) -> None:
        """Close when the client has, or after a while: what it still sends is thrown away."""
        self._refused = True
        if self._wire.is_closing() or not self._wire.can_write_eof():
            self._wire.close()
            return
        self._wire.write_eof()
        self._wire.resume_reading()
        self.loop.call_later(_LINGER, self._wire.close)


class _Gently:
    """A transport whose closing is left to the connection."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Connection(h11.Connection):
    """h11's state of a connection, which refuses a body in too many chunks."""

    chunks = 0
    _bytes = 0
    crumbled = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self.chunks += event.chunk_start
            self._bytes += len(event.data)
            if self.chunks > _CHUNKS + self._bytes // _CHUNK_BYTES:
                self.crumbled = True
                raise h11.RemoteProtocolError("too many chunks")
        elif isinstance(event, h11.Request):
            self.chunks = self._bytes = 0
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("nobody can tell where the body ends")  # RFC 9112 6.1
        return event


def _local(connection: object) -> bool:
    """Whether a connection is one of a Unix socket, whose address has no port (an abstract one has no address)."""
    address = getattr(connection, "server", None)
    return address is None or address[1] is None


def _network(client: tuple[str, int] | None) -> str:
    """Whose share of the connections over TCP one has: an IPv4 address, or the network of an IPv6 host."""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0] if client is not None else "")
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address.packed[:8] + bytes(8), 64)))
    return str(getattr(address, "ipv4_mapped", None) or address)
