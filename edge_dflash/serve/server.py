"""The process: sockets, signals, connections. Starts a service on uvicorn, and stops it when asked."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeAlias

import uvicorn

from edge_dflash.board.state import BoardState, EnergyMeter
from edge_dflash.common.progress import IN_BYTES, Progress
from edge_dflash.errors import EdgeDflashError, ServiceError
from edge_dflash.serve.app import make_app
from edge_dflash.serve.config import ServeConfig, is_loopback
from edge_dflash.serve.connection import bounded_connection
from edge_dflash.serve.limits import Keys, read_keys
from edge_dflash.serve.service import Board, Service, SystemdNotifier
from edge_dflash.serve.state_dir import held

log = logging.getLogger("edge_dflash.serve")
Showing: TypeAlias = Callable[[str], AbstractContextManager[Progress]]  # shows the progress of what is named
_BACKLOG = 1024  # connections that wait to be accepted; a Unix socket refuses those beyond
_ACCEPTED = 4  # connections that are accepted before open ones are read: a crowd must not push them out unread
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
LARGE = 4 << 20  # bytes
FIRST_LISTEN_FD = 3  # SD_LISTEN_FDS_START


@contextmanager
def logged(what: str) -> Iterator[Progress]:
    """Progress as lines of the log: one when ``what`` begins, one for each of its stages."""
    log.info("%s", what)
    begun: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in begun:
            begun.add(stage)
            log.info("%s%s", stage, f", {total / 1e6:,.1f} MB" if stage in IN_BYTES else "")

    yield report


def return_large_blocks() -> None:
    """Blocks of LARGE bytes and more go back to the system when they are freed, whatever thread had them.

    glibc else raises that bound to 32 MB by itself, and keeps what is below for each of many threads: half a gigabyte
    after twenty large pictures. For a process that is ours alone; other C libraries are left as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE)


def run(
    config: ServeConfig,
    notifier: SystemdNotifier | None = None,
    board: Board = BoardState,
    inherited: Sequence[socket.socket] = (),
    power: EnergyMeter | None = None,
    showing: Showing = logged,
) -> None:
    """Serve until a signal stops it. ``inherited`` are sockets that listen already, in place of those of ``config``.

    ``board`` and ``power`` are asked for the board's state and energy; ``showing`` shows how far loading is.

    Raises ConfigError for a key file that cannot be used, ServiceError when it cannot listen or another server has
    the state directory, and what Planner.open raises.
    """
    keys = read_keys(config.service.api_key_file) if config.service.api_key_file else {}
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(listening(config, inherited))
        stack.enter_context(held(Path(config.service.state_dir)))
        asyncio.run(_main(Service(config, notifier, board, power), keys, sockets, stack.close, showing))


@contextmanager
def listening(config: ServeConfig, inherited: Sequence[socket.socket]) -> Iterator[list[socket.socket]]:
    """The sockets of a service; its Unix socket is removed in the end."""
    service, path = config.service, Path(config.service.socket)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in inherited]
        if not sockets and service.socket:
            sockets.append(stack.enter_context(_unix(path, config.socket_mode)))
            stack.callback(partial(_remove, path, path.stat().st_ino))
        if service.tcp and not any(one.family != socket.AF_UNIX for one in sockets):
            sockets.append(stack.enter_context(_tcp(*config.tcp_address)))
        for one in sockets:
            name = one.getsockname()
            if one.family != socket.AF_UNIX and not service.api_key_file and not is_loopback(str(name[0])):
                raise ServiceError(f"{name[0]} can be reached by others and there is no api_key_file; give one")
            one.setblocking(False)
        yield sockets


@contextmanager
def _bound(family: int, where: object, another: str) -> Iterator[socket.socket]:
    """A socket to be bound in the block, closed if that fails. Raises ServiceError for what the system refuses."""
    with contextlib.ExitStack() as failed:
        try:
            one = failed.enter_context(socket.socket(family, socket.SOCK_STREAM))
            yield one
            one.listen(_BACKLOG)
        except OSError as error:
            raise ServiceError(f"cannot listen on {where}: {error.strerror or error}; {another}") from None
        failed.pop_all()


def _unix(path: Path, mode: int) -> socket.socket:
    """Bind the path, in place of a socket that nobody listens on any more."""
    another = "give another service.socket or --socket"
    with _bound(socket.AF_UNIX, path, another) as one:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise ServiceError(f"{path} is there and is no socket; {another}")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise ServiceError(f"another service listens on {path}; stop it, or {another}")
            path.unlink()
        before = os.umask(0o177)  # nobody gets in before the mode is set
        try:
            one.bind(str(path))
        finally:
            os.umask(before)
        path.chmod(mode)
    return one


def _tcp(host: str, port: int) -> socket.socket:
    where, another = f"{host}:{port}", "give another service.tcp or --tcp"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServiceError(f"cannot listen on {where}: {error.strerror or error}; {another}") from None
    with _bound(family, where, another) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
    return one


def listen_sockets(
    environ: Mapping[str, str] = os.environ, pid: int | None = None, first: int = FIRST_LISTEN_FD
) -> tuple[socket.socket, ...]:
    """Listening sockets that systemd passed to this process, in their order; or none. See sd_listen_fds(3).

    LISTEN_FDS and LISTEN_PID say so, which with NOTIFY_SOCKET and JOURNAL_STREAM are the only variables that
    edge-dflash reads.
    """
    count, meant = (int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
                    for text in (environ.get("LISTEN_FDS", ""), environ.get("LISTEN_PID", "")))  # fmt: skip
    if not count or meant != (os.getpid() if pid is None else pid):
        return ()
    for number in range(first, first + count):
        os.set_inheritable(number, False)
    return tuple(socket.socket(fileno=number) for number in range(first, first + count))


def _remove(path: Path, inode: int) -> None:
    """Remove the socket, if it is still ours."""
    with contextlib.suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


def address(one: socket.socket) -> str:
    """Where a listening socket can be reached, as ``Planner.connect`` takes it."""
    if one.family == socket.AF_UNIX:
        return f"unix:{one.getsockname()}"
    host, port = one.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_config(service: Service, keys: Keys) -> uvicorn.Config:
    """How uvicorn is to serve a service."""
    limits, timeouts = service.config.limits, service.config.timeouts
    return uvicorn.Config(
        make_app(service, keys),
        http=bounded_connection(limits.connections, timeouts.header, timeouts.write),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_ACCEPTED,
        timeout_keep_alive=max(1, round(timeouts.idle)),
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=limits.header_bytes,
    )


class AcceptingServer(uvicorn.Server):
    """uvicorn's server, on sockets whose backlog is not how many are accepted at a time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(_BACKLOG)


async def _main(
    service: Service, keys: Keys, sockets: Sequence[socket.socket], put_away: Callable[[], None], showing: Showing
) -> None:
    """Listen, load, serve, drain. ``put_away`` closes the sockets, before the process is left without ceremony."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        reloads.add(task := loop.create_task(service.reload()))
        task.add_done_callback(reloads.discard)

    closed = sys.stderr.isatty()  # then SIGHUP says that the terminal was closed
    loop.add_signal_handler(signal.SIGHUP, stop.set if closed else reload)
    loop.set_default_executor(service.threads)
    server = AcceptingServer(uvicorn_config(service, keys))

    def drain(sig: int, frame: object) -> None:  # in the main thread, between any two instructions
        loop.call_soon_threadsafe(stop.set)

    server.handle_exit = drain  # type: ignore[method-assign]  # in place of closing the door at once
    serving = asyncio.create_task(server.serve(list(sockets)))
    watching = asyncio.create_task(service.watch())
    stopping = asyncio.create_task(stop.wait())
    try:
        await _load(service, stopping, put_away, showing)
        if not stop.is_set():
            gc.collect()
            gc.freeze()  # the collector need not walk the model's objects whenever a body makes many
            service.open_doors()
            log.info("serving %s on %s", service.config.model, ", ".join(map(address, sockets)))
            await asyncio.wait({serving, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            failure = watching.result()
            raise ServiceError(f"the engine failed ({type(failure).__name__}: {failure}); start the service again")
        log.info("stopping: what runs has %g s to end", service.config.timeouts.drain)
        await service.drain()
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=10)
        if stopping.done() and service.stalled_seconds() > 0:
            log.error("the engine hangs; leaving it")
            _leave(put_away, ServiceError.exit_code)
        watching.cancel()
        stopping.cancel()
        await asyncio.to_thread(service.close)


def _leave(put_away: Callable[[], None], code: int) -> NoReturn:
    """End the process without ceremony, but for its last lines of the log."""
    put_away()
    logging.shutdown()
    os._exit(code)


async def _load(service: Service, stopping: asyncio.Task[bool], put_away: Callable[[], None], showing: Showing) -> None:
    service.notifier.status(f"loading {service.config.model}")
    with showing(f"opening {service.config.service.bundle}") as show:
        loading = asyncio.create_task(asyncio.to_thread(service.load, show))
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.warning("stopped while loading")
        _leave(put_away, 0)  # a load cannot be interrupted; nothing was begun that would have to be ended
    try:
        loading.result()
    except EdgeDflashError as error:
        service.notifier.status(f"not started: {error}")
        raise
