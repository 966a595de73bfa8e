"""A connection to a service: one loop on its thread, requests as tickets that any thread waits for."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from edge_dflash.client.api import Served, ask
from edge_dflash.client.reading import Reading, chunk_of, error_of
from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.options import Options
from edge_dflash.errors import EdgeDflashError, RequestError, ServiceError
from edge_dflash.result import Increment, Plan
from edge_dflash.runner.stream import Ticket
from edge_dflash.text.prompt import Task

T = TypeVar("T")
_CONNECT_SECONDS = 10.0
GRACE = 1.0  # seconds past its deadline, which the service keeps, after which the connection is left


def parse_url(url: str) -> tuple[str | None, str]:
    """The path of the Unix socket, or None, and the base URL without ``/v1``.

    Taken are ``unix:/path``, ``http+unix://%2Fpath`` and addresses of http and https, whose scheme is then in lower
    case. Raises ServiceError.
    """
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        path = "/" + path.lstrip("/") if path.startswith("//") else path
        if path.strip("/") and "\0" not in path:
            return path, "http://edge-dflash"
    wrong = ServiceError(f"{url!r} is no address of a service; give unix:/PATH, http://HOST:PORT or https://HOST")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # brackets that are left open, a port that is no number
        raise wrong from None
    if parts.scheme == "http+unix" and parts.netloc and "\0" not in unquote(parts.netloc):
        return unquote(parts.netloc), "http://edge-dflash" + parts.path.rstrip("/").removesuffix("/v1")
    usable = parts.geturl().isprintable() and not parts.query and not parts.fragment
    if parts.scheme in ("http", "https") and parts.netloc and usable:
        return None, parts.geturl().rstrip("/").removesuffix("/v1")
    raise wrong


class Asking:
    """One request on its way: what a stream asks of it (``ticket``, ``cancelled``, ``reader``)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reading: Reading, ended: Callable[[Plan], None]) -> None:
        self.reading = reading
        self.admitted: Future[None] = Future()
        self.ticket: Ticket[Increment] = Ticket(cancel=self._cancel)
        self.task: asyncio.Task[None] | None = None
        self.together: Sequence[Asking] = (self,)  # what the same request asks for
        self.reason: FinishReason | None = None  # why it was cut
        self._loop = loop
        self._ended = ended

    @property
    def cancelled(self) -> bool:
        """Whether it was cut; setting it cuts it."""
        return self.reason is not None

    @cancelled.setter
    def cancelled(self, wanted: bool) -> None:
        if wanted:
            self._cancel()

    def reader(self) -> Callable[[Increment], Increment]:
        """The server made the increments."""
        return lambda increment: increment

    def cut(self, reason: FinishReason) -> None:
        """Stop reading; what came is the plan. Called on the loop."""
        if self.reason is None and not self.ticket.done:
            self.reason = reason
            if any(one.reason is None for one in _open_of(self.together)):
                self.give_up()  # the request goes on without it
            elif self.task is not None:
                self.task.cancel()

    def _cancel(self) -> None:
        if not self.ticket.done:
            with suppress(RuntimeError):  # the loop is closed, and so is the request
                self._loop.call_soon_threadsafe(self.cut, "cancelled")

    def admit(self) -> None:
        """The server took it."""
        self.ticket.start()
        self.admitted.set_result(None)

    def settle(self, plan: Plan) -> None:
        """It has ended."""
        self._ended(plan)
        self.ticket.succeed(plan)
        if not self.admitted.done():
            self.admitted.set_result(None)

    def give_up(self) -> None:
        """It was cut: what came is the plan."""
        try:
            plan = self.reading.plan(self.reason or "cancelled")
        except Exception as error:
            self.fail(_unreadable(error))
        else:
            self.settle(plan)

    def fail(self, error: EdgeDflashError) -> None:
        """It ended with an error: at the call if the server did not take it, else at the stream."""
        try:
            plan = self.reading.plan("cancelled")
        except Exception:  # what came is what cannot be read
            plan = Reading(self.reading.options, self.reading.began).plan("cancelled")
        self._ended(plan)
        self.ticket.fail(error)
        if not self.admitted.done():
            self.admitted.set_exception(error)


def _unreadable(error: Exception) -> ServiceError:
    """The error of an answer that no service writes."""
    return ServiceError(f"the server's answer cannot be read ({type(error).__name__}: {error})")


def _open_of(askings: Sequence[Asking]) -> list[Asking]:
    """Those that have not ended."""
    return [one for one in askings if not one.ticket.done]


def _fail(askings: Sequence[Asking], error: EdgeDflashError) -> None:
    """End all of them with an error, each with another error object."""
    for index, one in enumerate(_open_of(askings)):
        one.fail(error if index == 0 else copy.copy(error))


def _take(askings: Sequence[Asking], line: bytes) -> bool:
    """Take a line of an event stream; returns whether it is the last one."""
    if not line.startswith(b"data:"):
        return False
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return True
    chunk = chunk_of(data.decode("utf-8", "replace"))
    for one in _open_of(askings):
        if (increment := one.reading.add(chunk)) is not None:
            one.ticket.add(increment)
    return False


class Connection:
    """HTTP to one server. Used from any thread but its own."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        try:
            import httpx2
        except ModuleNotFoundError:
            raise ServiceError("httpx2 is missing; install it with: pip install 'edge-dflash[client]'") from None
        uds, base = parse_url(url)
        self.url = url
        self._errors = (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError)
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        plain = urlsplit(base).scheme == "http"  # it alone has no certificates to verify, and none are read
        transport = httpx2.AsyncHTTPTransport(uds=uds, verify=not plain)
        self._client = httpx2.AsyncClient(
            transport=transport,
            base_url=base,
            headers=headers,
            timeout=httpx2.Timeout(timeout, connect=_CONNECT_SECONDS),
            trust_env=False,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="edge-dflash remote", daemon=True)
        self._thread.start()
        self._closed = False

    def _work(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def close(self) -> None:
        """Cancel everything and wait for it. Closing twice does no harm."""
        self.abandon()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self) -> None:
        """Cancel everything, for an owner that is gone."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        try:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()
        finally:
            self._loop.stop()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A short exchange of JSON. Raises the error that the server answers with; ServiceError: no answer."""
        self._check_open()
        return self._run(self._call(method, path, body))

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            response = await self._client.request(method, path, json=body)
        except self._errors as error:
            raise self._lost(error) from None
        value = _json(response.content)
        if not response.is_success:
            raise error_of(response.status_code, value)
        if not isinstance(value, dict):
            raise ServiceError(
                f"{self.url} answered {path} with no JSON object; give the address of a service of edge-dflash"
            )
        return value

    def session(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """:meth:`call` of a session there; ``path`` begins with its name."""
        return self.call(method, f"/v1/edge_dflash/sessions/{path}", body)

    def ask(
        self,
        served: Served,
        task: Task,
        options: Options,
        began: float,
        *,
        session: str | None = None,
        ended: Callable[[Plan], None] = lambda plan: None,
        count: int = 1,
    ) -> tuple[Asking, ...]:
        """Send a request of ``began`` (time.perf_counter()); returns when the server took it. ``ended`` gets the plan.

        ``session``: its name there. Raises what refuses the request.
        """
        path, body = ask(served, task, options, session=session, count=count)
        self._check_open()
        deadline = None
        if options.deadline is not None:
            body["edge_dflash"]["deadline_s"] = max(0.0, began + options.deadline - time.perf_counter())
            deadline = began + options.deadline + GRACE
        readings = (Reading(options, began, index) for index in range(count))
        askings = tuple(Asking(self._loop, reading, ended) for reading in readings)
        future = asyncio.run_coroutine_threadsafe(self._ask(askings, path, body, deadline), self._loop)
        try:
            for asking in askings:
                asking.admitted.result()
        except BaseException:
            for asking in askings:
                asking.cancelled = True
            future.cancel()
            raise
        return askings

    async def _ask(self, askings: Sequence[Asking], path: str, body: dict[str, Any], deadline: float | None) -> None:
        timers = []
        for asking in askings:
            asking.task, asking.together = asyncio.current_task(), askings
            if deadline is not None:
                left = max(0.0, deadline - time.perf_counter())
                timers.append(self._loop.call_later(left, asking.cut, "deadline"))
        try:
            if any(asking.reason is None for asking in askings):
                await self._read(askings, path, body)
            elif (task := asyncio.current_task()) is not None:
                task.cancel()
                await asyncio.sleep(0)
            for asking in _open_of(askings):
                if not asking.reading.finished:
                    raise ServiceError("the connection ended before the answer did; ask again")
                asking.settle(asking.reading.plan())
        except asyncio.CancelledError:
            for asking in _open_of(askings):
                asking.give_up()
        except EdgeDflashError as error:
            _fail(askings, error)
        except self._errors as error:
            _fail(askings, self._lost(error))
        except Exception as error:
            _fail(askings, _unreadable(error))
        finally:
            for timer in timers:
                timer.cancel()

    async def _read(self, askings: Sequence[Asking], path: str, body: dict[str, Any]) -> None:
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise error_of(response.status_code, _json(await response.aread()))
            for asking in _open_of(askings):
                asking.admit()
            rest = b""
            async for piece in response.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")  # and nowhere else: an answer may hold U+2028
                for line in lines:
                    if _take(askings, line):
                        return

    def _lost(self, error: Exception) -> ServiceError:
        what = " ".join(str(error).split()) or type(error).__name__
        return ServiceError(f"{self.url} cannot be reached ({what}); start the service there, or correct the address")

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the planner is closed and takes no more requests; connect again")


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
