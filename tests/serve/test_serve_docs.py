"""docs/service.md names what there is, and its programs run."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest
from service_support import fake_service, live

from edge_dflash.result import PlanTimings
from edge_dflash.serve.app import make_app
from edge_dflash.serve.calls import chat_call, completion_call
from edge_dflash.serve.config import ServeConfig
from edge_dflash.serve.errors import Refusal
from edge_dflash.serve.replies import extension

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "service.md").read_text()
HELLO = [{"role": "user", "content": "hello"}]


def named(text):
    return set(re.findall(r"`([a-z_]+)`", text))


def known(read, body):
    """The parameters that a refusal of an unknown one lists."""
    with pytest.raises(Refusal) as caught:
        read(body, ServeConfig())
    return set(str(caught.value).partition("known are ")[2].split(", "))


def test_every_endpoint_is_named(tmp_path):
    service = fake_service(tmp_path)
    there = set()
    for route in make_app(service).routes:
        path = re.sub(r"\{\w+(:path)?\}", "NAME", route.path)
        there |= {f"{method} {path}" for method in route.methods - {"HEAD"}}
    service.close()
    assert there == set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", PAGE))


def test_every_parameter_is_named():
    table = PAGE.partition("| parameter |")[2].partition("Under `edge_dflash` in a request")[0]
    chat = known(chat_call, {"messages": HELLO, "x": 1})
    completion = known(completion_call, {"prompt": "x", "x": 1})
    deprecated = {"functions", "function_call", "edge_dflash"}
    assert (chat | completion) - deprecated <= named(table)
    extras = known(chat_call, {"messages": HELLO, "edge_dflash": {"x": 1}})
    table = PAGE.partition("Under `edge_dflash` in a request")[2].partition("Under `edge_dflash` in an answer")[0]
    assert (
        set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
        == extras
    )


def test_every_key_of_an_answer_is_named(tmp_path):
    service = fake_service(tmp_path)
    call = chat_call({"messages": HELLO, "max_tokens": 2, "edge_dflash": {"tokens": True}}, ServeConfig())
    keys = set(extension(call, service.planner.plan(HELLO, max_new_tokens=2), {"board": {}, "session_error": ""}))
    timings = set(asdict(PlanTimings(0, 0, 0, 0, 0)))
    service.close()
    text = PAGE.partition("Under `edge_dflash` in an answer")[2].partition("## Sessions")[0]
    assert keys | timings <= named(text)
    assert named(text) - keys - timings <= {"edge_dflash", "stop", "length", "context", "deadline", "cancelled",
                                             "reasoning_content", "n", "usage", "candidates"}  # fmt: skip


def test_its_programs_run(tmp_path, capsys):
    service = fake_service(tmp_path)
    with live(service, tmp_path) as url:
        for body in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            program = body.replace("/run/edge-dflash/edge-dflash.sock", url.removeprefix("unix:"))
            names = {}
            exec(compile(program, "service.md", "exec"), names)
            if "http" in names:
                names["client"].close()
    service.close()
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert (tmp_path / "state" / "sessions" / "hall.session").is_file()
