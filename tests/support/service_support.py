"""A service of its own for a test: in this process behind an ASGI client, or as a process on a socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import uvicorn
from fakes import SHAPE, FakeBackend
from starlette.testclient import TestClient
from text_support import thinking_tokenizer, write_tokenizer

from edge_dflash.planner import Planner
from edge_dflash.serve.app import make_app
from edge_dflash.serve.config import ServeConfig, from_table
from edge_dflash.serve.server import AcceptingServer, uvicorn_config
from edge_dflash.serve.service import Service
from edge_dflash.text.tokenizer import Tokenizer

TEXT_SHAPE = replace(SHAPE, vocab_size=258, max_context=512, mask_token_id=257)


def config_for(directory: Path, **sections) -> ServeConfig:
    table = {**sections, "service": {"bundle": "fake", "model": "fake", "state_dir": str(directory / "state")}}
    table["service"] |= sections.get("service", {})
    return from_table(table)


def fake_service(directory: Path, backend=None, tokenizer="text", queue=4, **sections) -> Service:
    """A service whose model is a few lines of hashing, ready."""
    words = Tokenizer.open(write_tokenizer(directory / "tokenizer")) if tokenizer == "text" else tokenizer
    service = Service(config_for(directory, **sections))
    backend = backend or FakeBackend(TEXT_SHAPE, right=lambda position: position % 3)
    eos = [words.eos_token_id] if words is not None else []
    service.take(Planner(backend, words, eos, bundle="f" * 64, queue=queue, fallback=False, observer=service.observer))
    service.open_doors()
    return service


TOOL = {
    "type": "function",
    "function": {"name": "grasp", "parameters": {"type": "object", "properties": {"object": {"type": "string"}}}},
}
TOOL_TASK = [{"role": "user", "content": "Take the mug."}]
_TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}\n{% endfor %}"


def tool_service(directory: Path) -> Service:
    """A service whose model answers TOOL_TASK with a call of TOOL."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Words

    path = write_tokenizer(directory / "tokenizer", template=_TOOL_TEMPLATE)
    words = Words.from_file(str(path / "tokenizer.json"))
    words.add_tokens([AddedToken(name) for name in ("<tool_call>", "</tool_call>")])
    words.save(str(path / "tokenizer.json"))
    tokenizer = Tokenizer.open(path)
    shape = replace(TEXT_SHAPE, vocab_size=262)
    call = '<tool_call>\n{"name": "grasp", "arguments": {"object": "mug"}}\n</tool_call>'
    script = [*tokenizer.encode(call), tokenizer.eos_token_id]
    prompt = tokenizer.encode_chat(TOOL_TASK, tools=[TOOL])
    return fake_service(directory, FakeBackend(shape, script=script, script_at=len(prompt)), tokenizer)


def client_of(service: Service, key: str = "") -> TestClient:
    """A client of a service, in this process, as if over TCP from this machine."""
    return TestClient(
        make_app(service, {key: "key"} if key else {}), base_url="http://localhost", raise_server_exceptions=False
    )


def until(condition, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def services(directory: Path):
    """What begins services on one state directory, one after another, and gives each with its client."""
    with ExitStack() as begun:

        def begin(*given, kind=fake_service, **sections):
            service = kind(directory, *given, **sections)
            begun.callback(service.close)
            return service, begun.enter_context(client_of(service))

        yield begin


def thinking_service(directory: Path, answer: str, **sections) -> Service:
    """A service whose model, asked to think about TOOL_TASK, answers this."""
    tokenizer = thinking_tokenizer(directory / "tokenizer")
    prompt = tokenizer.encode_chat(TOOL_TASK, enable_thinking=True)
    script = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    backend = FakeBackend(replace(TEXT_SHAPE, vocab_size=262), script=script, script_at=len(prompt))
    return fake_service(directory, backend, tokenizer, **sections)


class Process:
    """``edge-dflash serve`` as a process."""

    def __init__(self, bundle: Path, directory: Path, *, tcp: bool = False, key: str = "", settings: str = ""):
        self.bundle, self.directory = bundle, directory
        self.socket = directory / "api.sock"
        self.state = directory / "state"
        lines = [f'[service]\nbundle = "{bundle}"\nmodel = "demo"\nsocket = "{self.socket}"']
        lines.append(f'state_dir = "{self.state}"')
        if tcp:
            lines.append(f'tcp = "127.0.0.1:{free_port()}"')
        if key:
            (directory / "key").write_text(key)
            (directory / "key").chmod(0o600)
            lines.append(f'api_key_file = "{directory / "key"}"')
        self.config = directory / "config.toml"
        self.config.write_text("\n".join(lines) + "\n" + settings)
        self.tcp = next((f"http://{line.split(chr(34))[1]}" for line in lines if line.startswith("tcp")), None)
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> Process:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, seconds: float = 60.0, state: int = 200) -> Process:
        """Start it and wait until ``/ready`` answers with this status."""
        command = [sys.executable, "-m", "edge_dflash", "serve", "--config", str(self.config)]
        log = (self.directory / "log").open("ab")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
        log.close()
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            time.sleep(0.05)
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self.socket)) != 0:
                    continue
            with self.client() as client:
                if client.get("/ready").status_code == state:
                    return self
        raise RuntimeError((self.directory / "log").read_text())

    def stop(self, sig: int = signal.SIGTERM) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(sig)
        code = self.process.wait(60)
        self.process = None
        return code

    def client(self, **options) -> httpx2.Client:
        transport = httpx2.HTTPTransport(uds=str(self.socket), verify=False)
        return httpx2.Client(transport=transport, base_url="http://edge-dflash", timeout=60, **options)

    def rss(self) -> int:
        """Resident bytes of the process."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def live(app_or_service, directory: Path, key: str = "", tcp: bool = False):
    """A service, or any ASGI application, on a socket of this process; gives its address."""
    if isinstance(app_or_service, Service):
        config = uvicorn_config(app_or_service, {key: "key"} if key else {})
    else:
        config = uvicorn.Config(app_or_service, log_config=None, lifespan="off", ws="none")
    path = directory / "live.sock"
    one = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
    one.bind(("127.0.0.1", 0) if tcp else str(path))
    one.listen()
    server = AcceptingServer(config)
    thread = threading.Thread(target=server.run, args=([one],))
    address = f"http://127.0.0.1:{one.getsockname()[1]}" if tcp else f"unix:{path}"
    thread.start()
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join()
        path.unlink(missing_ok=True)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def events(response) -> list:
    """The data of server-sent events."""
    lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]
