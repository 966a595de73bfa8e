"""Requests that nobody should send, by the thousand: none may give a 500 or touch a file outside the state directory.

Bodies are drawn near what the API's document calls valid (every field with right, nearly right and absurd values), as
any JSON, and as bytes.
They go to the ASGI application of a service with a fake model. ``python tests/support/fuzz_service.py 100000`` runs
many and prints a line of JSON; the tests run a few hundred.
"""

from __future__ import annotations

import asyncio
import collections
import json
import re
import resource
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from json_schema import faults
from service_support import fake_service

from edge_dflash.serve import openapi
from edge_dflash.serve.app import OPERATIONS, SCHEMAS, make_app
from edge_dflash.serve.config import ServeConfig

TRICKS = [
    *(
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        ".",
        "a/b",
        "a\\b",
        "\x00",
        "a\x00b",
        "%2e%2e%2f",
        "~",
        "x" * 300,
        "CON",
    ),
    *("x" * 300, "\ud800", "\u202e", "a\nb", "<think>", "<|end|>", "{{ 7*7 }}", "{% for x in range(9**9) %}", "$ref"),
]
NUMBERS = [0, -1, 1, 2**31, 2**63, -(2**63), 2**64 - 1, 0.5, 1e308, -0.0, 1e-320]
texts = st.one_of(st.text(max_size=40), st.sampled_from(TRICKS))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**64), 2**64), st.floats(), texts, st.sampled_from(NUMBERS)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)


def often(good, junk=values, times=30):
    """Mostly what is right, for else nothing gets past the first check."""
    return st.integers(0, times).flatmap(lambda draw: junk if draw == times else good)


plain = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=40)})
KEYWORDS = [
    *("type", "properties", "items", "enum", "required"),
    *("$ref", "anyOf", "pattern", "minimum", "additionalProperties"),
]
schemas = st.recursive(
    st.one_of(values, st.sampled_from([{"type": "object"}, {"type": "integer"}, {"enum": [1, "a"]}, {"$ref": "#"}])),
    lambda inner: st.dictionaries(st.sampled_from(KEYWORDS), st.one_of(inner, st.lists(inner, max_size=3)), max_size=4),
    max_leaves=6,
)
names = often(st.sampled_from(["a", "b", "hall", "x.y"]), texts)
HINTS = {  # values of a field that go further than its type
    "model": st.just("fake"),
    "max_tokens": st.integers(1, 8),
    "regex": st.sampled_from(["[ab]+", "(", "a{1,9}", ""]),
    "grammar": st.sampled_from(['start: "a"', "start: start", "", "%import x"]),
    "schema": schemas,
    "parameters": schemas,
    "session": st.sampled_from(["a", "b", "hall", "x.y"]),
    "to": st.sampled_from(["a", "b", "hall", "x.y"]),
    "url": st.builds("data:image/png;base64,{}".format, texts),
}


def near(schema, name=""):
    """Values near what a schema of the API's document takes; ``name`` is the field's."""
    if name in HINTS:
        return HINTS[name]
    if options := [one for one in schema.get("anyOf", schema.get("oneOf", ())) if one.get("type") != "null"]:
        return st.one_of(*(near(one, name) for one in options))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "string":
            return texts
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(low, min(high or 300, 300)) | st.integers(low, high)
        case "number":
            return st.sampled_from([low, high, (low + high) / 2]) | st.floats(low, high)
        case "array":
            item = near(schema["items"])
            if name == "messages":
                item = often(plain, item, 4)
            return st.lists(often(item), min_size=schema.get("minItems", 0), max_size=schema.get("maxItems", 3))
        case "object" if "properties" in schema:
            return objects(schema)
        case _:
            return values


def objects(schema):
    """Objects with a few of the fields that may be left out."""
    fields = {key: often(near(one, key)) for key, one in schema["properties"].items()}
    needed, free = schema.get("required", ()), [key for key in fields if key != "unknown"]

    def made(keys):
        return st.fixed_dictionaries({key: fields.get(key, values) for key in dict.fromkeys((*needed, *keys))})

    return st.lists(often(st.sampled_from(free), st.just("unknown")), max_size=4).flatmap(made)


SESSIONS = "/v1/edge_dflash/sessions"
DOCUMENT = openapi.document(OPERATIONS, SCHEMAS, ServeConfig(), key=False)
PATHS = DOCUMENT["paths"]
BODIES = {
    path: often(near(methods["post"]["requestBody"]["content"]["application/json"]["schema"]))
    for path, methods in PATHS.items()
    if "post" in methods
}


def as_bytes(value) -> bytes:
    return json.dumps(value).encode()


@st.composite
def mangled(draw, bodies):
    """Valid JSON with some bytes changed."""
    body = bytearray(draw(bodies))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        body[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
    return bytes(body)


def posts(path, value):
    good = st.builds(as_bytes, value)
    return st.tuples(st.just("POST"), st.just(path), st.one_of(good, good, good, good, good, mangled(good)))


def escaped(name: str) -> str:
    return name.encode("utf-8", "replace").decode("latin-1")


on_sessions = st.builds(
    lambda name, method, end, body: (method, f"{SESSIONS}/{escaped(name)}{end}", as_bytes(body)),
    names, st.sampled_from(["GET", "DELETE", "POST", "POST"]), st.sampled_from(["", "/save", "/fork", "/x"]),
    st.one_of(*(body for path, body in BODIES.items() if path.startswith(SESSIONS))),
)  # fmt: skip
odd = st.tuples(
    st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "X"]),
    st.one_of(
        st.sampled_from(["/", "/health", "/ready", "/metrics", "/v1/models", SESSIONS, "/v1/chat/completions"]),
        st.builds(lambda text: "/" + escaped(text), texts),
        st.builds(lambda text: "/v1/models/" + escaped(text), texts),
    ),
    st.one_of(st.binary(max_size=60), st.builds(as_bytes, values)),
)
CHAT = "/v1/chat/completions"
asked = [posts(path, body) for path, body in BODIES.items() if not path.startswith(SESSIONS)]
requests = often(posts(CHAT, BODIES[CHAT]), st.one_of(*asked, on_sessions, odd), 1)


def undocumented(method: str, path: str, status: int, body: bytes) -> list[str]:
    """What of an answer is not as the document says; of paths and methods that it does not have, nothing."""
    known = (one for one in PATHS if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(one)), path))
    operation = PATHS.get(next(known, ""), {}).get(method.lower())
    if operation is None:
        return []
    if str(status) not in operation["responses"]:
        return [f"status {status}"]
    content = operation["responses"][str(status)].get("content", {})
    if "application/json" not in content or body.startswith(b"data: "):
        return []
    return faults(content["application/json"]["schema"], json.loads(body), DOCUMENT)


async def send(app, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """One request to an ASGI application."""
    status, received, sent = 0, bytearray(), False

    async def receive():
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def reply(message):
        nonlocal status
        status = message.get("status", status)
        received.extend(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"host", b"x"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http"}
    scope |= {"method": method, "path": path, "raw_path": path.encode("utf-8"), "query_string": b"", "root_path": ""}
    scope |= {"headers": headers, "server": ("/run/api.sock", None), "client": None}
    await app(scope, receive, reply)
    return status, bytes(received)


class Fuzz:
    """A service to be fuzzed, and what came of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.statuses: collections.Counter[int] = collections.Counter()
        limits = {"new_tokens": 8, "sessions": 4, "saved_sessions": 8}
        self.service = fake_service(directory, limits=limits, timeouts={"deadline": 5.0})
        self.app = make_app(self.service)
        self.before = self.outside()
        self.runner = asyncio.Runner()

    def outside(self) -> list[str]:
        """Files that are not of the state directory, there or beside it."""
        state = self.directory / "state"
        found = [path for path in self.directory.rglob("*") if path.is_file() and state not in path.parents]
        return sorted(map(str, [*found, *(path for path in state.rglob("*") if odd_file(path))]))

    def one(self, request: tuple[str, str, bytes]) -> None:
        status, body = self.runner.run(send(self.app, *request))
        self.statuses[status] += 1
        assert 200 <= status < 600, request
        assert status != 500, (request, body)
        if status >= 400:
            assert request[0] == "HEAD" or json.loads(body)["error"]["message"], request
        assert b"internal_error" not in body, request
        assert not (wrong := undocumented(*request[:2], status, body)), (request, status, wrong)

    def run(self, examples: int, number: int) -> None:
        """Send ``examples`` requests drawn with a seed."""

        @seed(number)
        @settings(
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(requests)
        def each(request):
            self.one(request)

        each()
        assert self.outside() == self.before
        assert self.service.health()["status"] == "ok"

    def close(self) -> None:
        self.runner.close()
        self.service.close()


def odd_file(path: Path) -> bool:
    """Whether a file of the state directory is none that a session makes."""
    return path.is_file() and (path.parent.name != "sessions" or path.suffix != ".session")


def main() -> None:
    wanted, chunk, began = int(sys.argv[1]), 2000, time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        fuzz = Fuzz(Path(directory))
        for number in range(-(-wanted // chunk)):
            fuzz.run(chunk, int(sys.argv[2]) + number if len(sys.argv) > 2 else number)
            print(f"{fuzz.statuses.total()} requests, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        fuzz.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    statuses = {str(status): count for status, count in sorted(fuzz.statuses.items())}
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"requests": fuzz.statuses.total(), "statuses": statuses, "seconds": seconds, "peak_rss": peak}))


if __name__ == "__main__":
    main()
