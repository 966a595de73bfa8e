"""A connection to a service: one loop on its thread, requests whose answers any thread waits for."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from edge_dflash.client.choice import RemoteChoice, error_of, json_of, open_of, unreadable
from edge_dflash.decode.options import Options
from edge_dflash.errors import EdgeDflashError, RequestError, ServiceError
from edge_dflash.result import Plan

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

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A short exchange of JSON. Raises the error that the server answers with; ServiceError: no answer."""
        self._check_open()
        return asyncio.run_coroutine_threadsafe(self._call(method, path, body), self._loop).result()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            response = await self._client.request(method, path, json=body)
        except self._errors as error:
            raise self._lost(error) from None
        value = json_of(response.content)
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
        path: str,
        body: dict[str, Any],
        options: Options,
        began: float,
        *,
        ended: Callable[[Plan], None] = lambda plan: None,
        count: int = 1,
    ) -> tuple[RemoteChoice, ...]:
        """Send a request of ``began`` (time.perf_counter()); returns when the server took it. ``ended`` gets the plan.

        Raises what refuses the request.
        """
        self._check_open()
        deadline = None
        if options.deadline is not None:
            body["edge_dflash"]["deadline_s"] = max(0.0, began + options.deadline - time.perf_counter())
            deadline = began + options.deadline + GRACE
        choices = tuple(RemoteChoice(self._loop, options, began, index, ended) for index in range(count))
        future = asyncio.run_coroutine_threadsafe(self._ask(choices, path, body, deadline), self._loop)
        try:
            for choice in choices:
                choice.admitted.result()
        except BaseException:
            for choice in choices:
                choice.cancelled = True
            future.cancel()
            raise
        return choices

    async def _ask(
        self, choices: Sequence[RemoteChoice], path: str, body: dict[str, Any], deadline: float | None
    ) -> None:
        timers = []
        for choice in choices:
            choice.task, choice.together = asyncio.current_task(), choices
            if deadline is not None:
                left = max(0.0, deadline - time.perf_counter())
                timers.append(self._loop.call_later(left, choice.cut, "deadline"))
        failure: EdgeDflashError | None = None
        try:
            if all(choice.cancelled for choice in choices):
                raise asyncio.CancelledError
            await self._read(choices, path, body)
            for choice in open_of(choices):
                choice.settle()
        except asyncio.CancelledError:
            for choice in open_of(choices):
                choice.give_up()
        except EdgeDflashError as error:
            failure = error
        except self._errors as error:
            failure = self._lost(error)
        except Exception as error:
            failure = unreadable(error)
        finally:
            for timer in timers:
                timer.cancel()
        if failure is not None:
            for choice in open_of(choices):
                choice.fail(copy.copy(failure))  # each with another error object

    async def _read(self, choices: Sequence[RemoteChoice], path: str, body: dict[str, Any]) -> None:
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise error_of(response.status_code, json_of(await response.aread()))
            for choice in open_of(choices):
                choice.admit()
            rest = b""
            async for piece in response.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")  # and nowhere else: an answer may hold U+2028
                for data in (line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")):
                    if data == b"[DONE]":
                        return
                    if not isinstance(chunk := json_of(data), Mapping):
                        text = data.decode("utf-8", "replace")
                        raise ServiceError(f"the server sent {text[:60]!r}, which is no chunk of an answer")
                    for choice in open_of(choices):
                        choice.take(chunk)

    def _lost(self, error: Exception) -> ServiceError:
        what = " ".join(str(error).split()) or type(error).__name__
        return ServiceError(f"{self.url} cannot be reached ({what}); start the service there, or correct the address")

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the planner is closed and takes no more requests; connect again")
