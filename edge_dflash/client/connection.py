"""A connection to a server: one loop on its thread, requests as tickets that any thread waits for."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from edge_dflash.client.api import Reading, Server, ask, error_of
from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.options import Options, Task
from edge_dflash.errors import EdgeDflashError, RequestError, ServiceError
from edge_dflash.result import Increment, Plan
from edge_dflash.runner.ticket import Ticket
from edge_dflash.text.template import Message

T = TypeVar("T")
_CONNECT_SECONDS = 10.0
GRACE = 1.0  # seconds past its deadline after which a service that keeps deadlines itself is left


def parse_url(url: str) -> tuple[str | None, str]:
    """The path of the Unix socket, or None, and the base URL without ``/v1``.

    Taken are ``unix:/path``, ``http+unix://%2Fpath`` and addresses of http and https. Raises ServiceError.
    """
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        path = "/" + path.lstrip("/") if path.startswith("//") else path
        if path.strip("/"):
            return path, "http://edge-dflash"
    parts = urlsplit(url)
    if parts.scheme == "http+unix" and parts.netloc:
        return unquote(parts.netloc), "http://edge-dflash" + parts.path.rstrip("/").removesuffix("/v1")
    if parts.scheme in ("http", "https") and parts.netloc and not parts.query and not parts.fragment:
        return None, url.rstrip("/").removesuffix("/v1")
    raise ServiceError(f"{url!r} is no address of a service; give unix:/PATH, http://HOST:PORT or https://HOST")


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
        transport = httpx2.AsyncHTTPTransport(uds=uds) if uds is not None else httpx2.AsyncHTTPTransport()
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
            raise ServiceError(f"{self.url} answered {path} with no JSON object; give the address of an OpenAI API")
        return value

    def session(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """:meth:`call` of a session of a service of this package; ``path`` begins with its name."""
        return self.call(method, f"/v1/edge_dflash/sessions/{path}", body)

    def ask(
        self,
        server: Server,
        task: Task,
        options: Options,
        began: float,
        *,
        before: Sequence[Message] = (),
        session: str | None = None,
        ended: Callable[[Plan], None] = lambda plan: None,
    ) -> Asking:
        """Send a request of ``began`` (time.perf_counter()); returns when the server took it. ``ended`` gets the plan.

        ``session`` is the server's; ``before``: messages of a conversation kept here. Raises what refuses it.
        """
        path, body = ask(server, task, options, before, session=session)
        self._check_open()
        deadline = None if options.deadline is None else began + options.deadline
        if server.own and deadline is not None:
            body["edge_dflash"]["deadline_s"] = max(0.0, deadline - time.perf_counter())
            deadline += GRACE
        asking = Asking(self._loop, Reading(options, began, server.own), ended)
        future = asyncio.run_coroutine_threadsafe(self._ask(asking, path, body, deadline), self._loop)
        try:
            asking.admitted.result()
        except BaseException:
            asking.cancelled = True
            future.cancel()
            raise
        return asking

    async def _ask(self, asking: Asking, path: str, body: dict[str, Any], deadline: float | None) -> None:
        asking.task = asyncio.current_task()
        timer = None
        if deadline is not None:
            timer = self._loop.call_later(max(0.0, deadline - time.perf_counter()), asking.cut, "deadline")
        try:
            if asking.reason is None:
                await self._read(asking, path, body)
            elif (task := asyncio.current_task()) is not None:
                task.cancel()
                await asyncio.sleep(0)
            if not asking.reading.finished:
                raise ServiceError("the connection ended before the answer did; ask again")
            asking.settle(asking.reading.plan())
        except asyncio.CancelledError:
            asking.give_up()
        except EdgeDflashError as error:
            asking.fail(error)
        except self._errors as error:
            asking.fail(self._lost(error))
        except Exception as error:
            asking.fail(_unreadable(error))
        finally:
            if timer is not None:
                timer.cancel()

    async def _read(self, asking: Asking, path: str, body: dict[str, Any]) -> None:
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise error_of(response.status_code, _json(await response.aread()))
            asking.admit()
            rest = b""
            async for piece in response.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")  # and nowhere else: an answer may hold U+2028
                for line in lines:
                    if _take(asking, line):
                        return

    def _lost(self, error: Exception) -> ServiceError:
        what = " ".join(str(error).split()) or type(error).__name__
        return ServiceError(f"{self.url} cannot be reached ({what}); start the service there, or correct the address")

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the planner is closed and takes no more requests; connect again")


class Asking:
    """One request on its way: what a stream asks of it (``cancelled``, ``unstarted``)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reading: Reading, ended: Callable[[Plan], None]) -> None:
        self.reading = reading
        self.admitted: Future[None] = Future()
        self.ticket: Ticket[Increment, Plan] = Ticket(asked=lambda ticket: self._cancel())
        self.task: asyncio.Task[None] | None = None
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

    def unstarted(self) -> Plan:
        """The plan of a request of which nothing came."""
        return self.reading.plan(self.reason or "cancelled")

    def cut(self, reason: FinishReason) -> None:
        """Stop reading; what came is the plan. Called on the loop."""
        if self.reason is None and not self.ticket.done:
            self.reason = reason
            if self.task is not None:
                self.task.cancel()

    def _cancel(self) -> bool:
        if self.ticket.done:
            return False
        try:
            self._loop.call_soon_threadsafe(self.cut, "cancelled")
        except RuntimeError:  # the loop is closed, and so is the request
            return False
        return True

    def admit(self) -> None:
        """The server took it."""
        self.ticket._start()
        self.admitted.set_result(None)

    def settle(self, plan: Plan) -> None:
        """It has ended."""
        self._ended(plan)
        self.ticket._succeed(plan)
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
            plan = Reading(self.reading.options, self.reading.began, self.reading.own).plan("cancelled")
        self._ended(plan)
        self.ticket._fail(error)
        if not self.admitted.done():
            self.admitted.set_exception(error)


def _unreadable(error: Exception) -> ServiceError:
    return ServiceError(f"the server's answer cannot be read ({type(error).__name__}: {error})")


def _take(asking: Asking, line: bytes) -> bool:
    """Take a line of an event stream; returns whether it is the last one."""
    if not line.startswith(b"data:"):
        return False
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return True
    if (increment := asking.reading.add(data.decode("utf-8", "replace"))) is not None:
        asking.ticket._add(increment)
    return False


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
