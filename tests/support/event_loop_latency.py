"""How long the service's event loop stands still beside bodies of 1 MB: ``python tests/support/event_loop_latency.py``.

A process serves; this one sends each kind of body and asks ``/health`` meanwhile. Two latencies are told for each kind:
of the loop (a task that sleeps 1 ms at a time) and of ``/health``. The last line is JSON, in milliseconds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAT, COMPLETIONS, ENCODE = "/v1/chat/completions", "/v1/completions", "/v1/edge_dflash/encode"
SIZE = 1_000_000
TICK = 0.001


# The service ----------------------------------------------------------------------------------------------------------


def serve(directory: Path) -> None:
    """Serve on ``directory``/live.sock; for each line of stdin, print the loop's latencies (s) since the last one."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    import uvicorn
    from fakes import SHAPE, FakeBackend
    from service_support import fake_service

    from edge_dflash.serve.server import uvicorn_config
    from edge_dflash.text.tokenizer import Tokenizer

    words = Tokenizer.open(ROOT / "edge_dflash/demo/models/target")
    shape = replace(SHAPE, vocab_size=words.size + 1, max_context=512, mask_token_id=words.size)
    service = fake_service(directory, FakeBackend(shape), words, queue=32)
    late: list[float] = []

    async def tick() -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            late.append(now - before - TICK)
            before = now

    def answer() -> None:
        for _ in sys.stdin:
            seen = late[:]
            late.clear()
            print(json.dumps(seen), flush=True)

    async def main() -> None:
        gc.collect()
        gc.freeze()  # as the server does
        ticking = asyncio.create_task(tick())
        one = socket.socket(socket.AF_UNIX)
        one.bind(str(directory / "live.sock"))
        one.listen(128)
        threading.Thread(target=answer, daemon=True).start()
        await uvicorn.Server(uvicorn_config(service, "")).serve([one])
        ticking.cancel()

    asyncio.run(main())


class Served:
    """The process that serves."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "live.sock"
        command = [sys.executable, __file__, "--serve", str(directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self.path)) == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError("the service does not start")

    def late(self) -> list[float]:
        """Latencies of the loop since the last call, seconds."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def connect(self) -> socket.socket:
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(60)
        one.connect(str(self.path))
        return one


@contextmanager
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as directory:
        service = Served(Path(directory))
        try:
            yield service
        finally:
            service.process.terminate()
            service.process.wait(60)
            service.process.stdin.close()
            service.process.stdout.close()


# What is sent ---------------------------------------------------------------------------------------------------------


def head(path: str, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", "connection: close", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def body(path: str, data: bytes) -> bytes:
    return head(path, f"content-length: {len(data)}") + data


def chat(**fields: object) -> bytes:
    return body(CHAT, json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}).encode())


def filled(before: bytes, part: bytes, after: bytes, path: str = CHAT) -> bytes:
    """A body of SIZE bytes: a list of as many parts as fit."""
    count = (SIZE - len(before) - len(after)) // (len(part) + 1)
    return body(path, before + b",".join([part] * count) + after)


def schema(levels: int, each: int) -> dict[str, object]:
    """A deep schema, wide at each level."""
    made: dict[str, object] = {"type": "string"}
    for level in range(levels):
        wide = {f"p{level}_{index}": {"type": "integer"} for index in range(each)}
        made = {"type": "object", "properties": {**wide, "inner": made}}
    return made


def kinds() -> dict[str, list[bytes]]:
    """The requests, by name; each is the pieces that are written one after another."""
    text = ("Take the red mug to the kitchen. " * (SIZE // 33 + 1))[: SIZE - 200]
    hello = b'{"messages": [{"role": "user", "content": "x"}], '
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(20, 1600)}}
    one_byte = json.dumps({"prompt": text[: SIZE - 300], "max_tokens": 2}).encode()
    tiny = body(COMPLETIONS, json.dumps({"prompt": "x" * 4_000, "max_tokens": 2}).encode())
    line = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    return {
        "nothing": [line + b"\r\n"],
        "long prompt": [body(COMPLETIONS, json.dumps({"prompt": text, "max_tokens": 2}).encode())],
        "long message": [chat(messages=[{"role": "user", "content": text}])],
        "encode": [body(ENCODE, json.dumps({"text": text}).encode())],
        "many messages": [filled(b'{"messages": [', b'{"role":"user","content":"x"}', b"]}")],
        "nested lists": [filled(hello + b'"metadata": {"a": [', b"[" * 50 + b"]" * 50, b"]}}")],
        "empty lists": [filled(hello + b'"metadata": {"a": [', b"[]", b"]}}")],
        "token ids": [filled(b'{"max_tokens": 2, "prompt": [', b"1", b"]}", COMPLETIONS)],
        "many tools": [filled(hello + b'"tools": [', b'{"type":"function","function":{"name":"a"}}', b"]}")],
        "escapes": [filled(b'{"max_tokens": 2, "prompt": ["', b'\\u00e9\\n\\"', b'"]}', COMPLETIONS)],
        "unknown keys": [body(CHAT, hello[:-2] + b"".join(b',"%x":1' % i for i in range(SIZE // 10)) + b"}")],
        "wrong type": [filled(b'{"messages": "x", "stop": [', b'{"a":[1]}', b"]}")],
        "deep schema": [chat(response_format=form)],
        "one-byte chunks": [
            head(COMPLETIONS, "transfer-encoding: chunked"),
            b"".join(b"1\r\n%c\r\n" % byte for byte in one_byte) + b"0\r\n\r\n",
        ],
        "tiny segments": [tiny[at : at + 1] for at in range(len(tiny))],
        "long header line": [line + b"x: " + b"a" * SIZE + b"\r\n\r\n"],
        "many headers": [line + b"x: y\r\n" * (SIZE // 6) + b"\r\n"],
        "short headers": [line + b"x:\r\n" * 4000 + b"\r\n"],
    }


def send(service: Served, pieces: list[bytes]) -> str:
    """Send a request and return the answer's status; the service may close before it is all there."""
    with service.connect() as one:
        try:
            for piece in pieces:
                one.sendall(piece)
        except OSError:
            pass
        said = b""
        try:
            while part := one.recv(65536):
                said += part
        except OSError:
            pass
    return said[9:12].decode() or "closed"


class Health:
    """Asks ``/health`` all the time, on a thread."""

    def __init__(self, service: Served) -> None:
        self._service, self._stop = service, threading.Event()
        self.seconds: list[float] = []
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stop.is_set():
            begin = time.perf_counter()
            status = send(self._service, [b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"])
            self.seconds.append(time.perf_counter() - begin)
            assert status == "200", status
            time.sleep(0.002)


# What is measured -----------------------------------------------------------------------------------------------------


def spread(seconds: list[float]) -> list[float]:
    """Median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    return [round(1e3 * one, 1) for one in (statistics.median(ordered), ordered[len(ordered) * 99 // 100], ordered[-1])]


def measure(service: Served, pieces: list[bytes], times: int = 2) -> dict[str, object]:
    """Latencies while one kind of request is sent."""
    service.late()
    begin = time.perf_counter()
    with Health(service) as health:
        time.sleep(0.02)
        statuses = {send(service, pieces) for _ in range(times)}
        time.sleep(0.02)
    seconds = round(time.perf_counter() - begin, 2)
    loop = spread(service.late())
    return {"status": " ".join(statuses), "seconds": seconds, "loop": loop, "health": spread(health.seconds)}


def main() -> None:
    """Measure and tell."""
    known, found = kinds(), {}
    with served() as service:
        print(f"{'':18}{'status':>12}{'s':>8}   loop ms: p50, p99, max     /health ms: p50, p99, max")
        for name, pieces in known.items():
            one = found[name] = measure(service, pieces)
            print(f"{name:18}{one['status']:>12}{one['seconds']:>8}   {one['loop']!s:27}{one['health']}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    serve(Path(sys.argv[2])) if sys.argv[1:2] == ["--serve"] else main()
