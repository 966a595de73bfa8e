"""The lines of the log: one for each request, and how all of them reach stderr or systemd's journal.

A line says who asked for what, what came of it and what it cost; never what was said: it holds no prompt, no answer,
no key and no query. What comes from a client (path, caller, a field's name) is percent-encoded and cut, so nobody can
write a line.

Where stderr is the journal, systemd says so in JOURNAL_STREAM, as device and inode of that stream (systemd.exec(5));
each line then begins with its priority (sd-daemon(3)), ``<6>`` for INFO, and ``journalctl -p warning`` finds what went
wrong. Nobody who logs waits for stderr: another thread writes. Where the stream takes nothing, lines are dropped, and
the next one that finds a place says how many.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_dflash.result import Plan
from edge_dflash.serve.errors import Refusal

log = logging.getLogger("edge_dflash.requests")
FORMAT = "%(levelname)s %(name)s: %(message)s"
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_WAITING = 4096  # lines that wait for the stream
_LAST_LINES = 2.0  # seconds that the end of the process waits for them
_WARNING = {"name": "edge_dflash.serve", "levelname": "WARNING", "levelno": logging.WARNING}
_POLLS = ("/health", "/ready", "/metrics")  # asked every few seconds: logged when they are refused
_NOT_NOW = ("loading", "draining")  # codes of a service that works, and takes no request now
_STRANGERS = 20  # lines a second of requests that nobody in particular made, or that ask for nothing that is there
_LONGEST = 100  # characters of what a client chose
_FIELD = re.compile(r"[A-Za-z0-9_.\[\]]{1,60}")


class RequestLog:
    """Gives each request an id, told as ``x-request-id``, and logs its end (ASGI).

    What others put into the request's ``state`` is told: account, caller, plans, outcome, refused.
    """

    def __init__(self, app: ASGIApp, which: str) -> None:
        """``which``: service.log of the configuration."""
        self._app = app
        self._which = which
        self._second = self._lines = self._left_out = 0  # of strangers' requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on, and log what came of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        scope["state"] = {**scope.get("state", {}), "id": (request_id := secrets.token_hex(12))}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            status = status or 500
            raise
        finally:
            self._log(scope, status, time.perf_counter() - began)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        state, refused = scope["state"], scope["state"].get("refused")
        worst = max(status, refused.status if refused is not None else 0)
        if self._which == "none" or (self._which == "errors" and worst < 400):
            return
        if scope["path"] in _POLLS and refused is None:
            return
        if self._is_left_out(stranger="account" not in state or status in (404, 405)):
            return
        failed = worst >= 500 and (refused is None or refused.code not in _NOT_NOW)
        level = logging.ERROR if failed else logging.WARNING if worst >= 400 else logging.INFO
        path = (scope.get("raw_path") or scope["path"].encode("utf-8", "replace")).decode("latin-1").partition("?")[0]
        words = {
            "id": state["id"],
            "caller": state.get("account", "-") + (f"/{_safe(caller)}" if (caller := state.get("caller")) else ""),
            **_figures(state.get("plans", ())),
            "seconds": f"{seconds:.3f}",
            **({"outcome": "disconnected"} if state.get("outcome") == "disconnected" else {}),
            **(_why(refused) if refused is not None else {}),
        }
        said = " ".join(f"{name}={value}" for name, value in words.items())
        log.log(level, "%s %s %s %s", _safe(scope["method"]), _safe(path, "/%"), status or "-", said)

    def _is_left_out(self, *, stranger: bool) -> bool:
        """Whether a request of a flood has no line; the first one of a later second says how many had none."""
        if (now := int(time.monotonic())) != self._second:
            if self._left_out:
                log.warning("%d more requests were refused, too many for a line each", self._left_out)
            self._second, self._lines, self._left_out = now, 0, 0
        self._lines += stranger
        left_out = stranger and self._lines > _STRANGERS
        self._left_out += left_out
        return left_out


def _figures(plans: Sequence[Plan]) -> dict[str, object]:
    """What the plans of a request cost."""
    if not plans:
        return {}
    first = plans[0]
    figures: dict[str, object] = {
        "prompt": first.prompt_tokens,
        "reused": first.reused_tokens,
        "generated": sum(len(plan.tokens) for plan in plans),
    }
    if first.timings.first_token_seconds:
        figures["first_ms"] = f"{1000 * first.timings.first_token_seconds:.0f}"
    if first.speculative and first.accept_lengths:
        figures["accept"] = f"{first.accept_length:.2f}"
    return {**figures, "finish": first.finish_reason}


def _why(refused: Refusal) -> dict[str, object]:
    """Why a request was refused, without what it held: a message may quote it."""
    kind = refused.body["error"]["type"]
    param = refused.param if refused.param and _FIELD.fullmatch(refused.param) else None
    return {"refused": refused.code or kind, **({"param": param} if param else {})}


def _safe(text: str, more: str = "") -> str:
    return quote(text[:_LONGEST].encode("utf-8", "replace"), safe="._-:@+[]" + more)[: 3 * _LONGEST]


# Streams --------------------------------------------------------------------------------------------------------------


class JournalFormatter(logging.Formatter):
    """A record as lines, each with its priority."""

    def format(self, record: logging.LogRecord) -> str:
        """Also of a traceback every line: the journal makes an entry of each."""
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines() or [""])


def is_journal(descriptor: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an open stream is the journal's own."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def log_to(descriptor: int, environ: Mapping[str, str] = os.environ) -> None:
    """Log to stderr, whose descriptor this is: INFO of edge-dflash, WARNING of everything else."""
    stream = _Stream(descriptor)
    stream.setFormatter((JournalFormatter if is_journal(descriptor, environ) else logging.Formatter)(FORMAT))
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_WAITING)
    QueueListener(lines, stream).start()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Lines(lines)])
    logging.getLogger("edge_dflash").setLevel(logging.INFO)


class _Stream(logging.Handler):
    """Writes to a descriptor, on one thread alone. It has no lock, so the process can end while the stream is stuck."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def createLock(self) -> None:
        """None; see above."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; one that the stream refuses is lost."""
        rest = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


class _Lines(QueueHandler):
    """Hands records to the thread that writes, and never waits for it but at the end."""

    queue: queue.Queue[logging.LogRecord]
    dropped = 0  # since the last that found a place

    def enqueue(self, record: logging.LogRecord) -> None:
        """Put a record where the other thread finds it, if there is room."""
        try:
            if self.dropped:
                why = f"{self.dropped} lines of the log were dropped: stderr took none"
                self.queue.put_nowait(logging.makeLogRecord({**_WARNING, "msg": why}))
                self.dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait a while until all is written. Called by :func:`logging.shutdown`."""
        with self.queue.all_tasks_done:
            self.queue.all_tasks_done.wait_for(lambda: not self.queue.unfinished_tasks, _LAST_LINES)
