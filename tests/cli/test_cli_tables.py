"""Tables at 80 and 120 columns: no word is cut, no name breaks over three lines, no byte is counted out."""

import re
from itertools import pairwise

import pytest
from benchmark_support import Clock, TimedBackend, device, subject
from rich.console import Console

from edge_dflash.bench.run import run
from edge_dflash.bench.workload import Workload
from edge_dflash.cli import output
from edge_dflash.cli.bench import render
from edge_dflash.cli.plans import logprob_table
from edge_dflash.decode.logprobs import TokenLogprob


@pytest.fixture(params=[80, 120])
def columns(request, monkeypatch):
    """Tables are made for a terminal of so many columns."""
    monkeypatch.setattr(output, "Console", lambda **options: Console(**{**options, "width": request.param}))
    return request.param


def check(text, columns):
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    assert not re.search(r"\d{1,3}(,\d{3}){3}", text)
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if line.startswith("│")]
    for one, two in pairwise(rows):  # a line without a figure goes on with the name before
        assert any(one[2:]) or any(two[2:]), (one, two)


@pytest.mark.parametrize("model", ["qwen3.6-35b-a3b", "qwen3.6-27b-sees", "qwen3-8b"])
def test_inspect(cli, columns, model):
    pair = f"tests/configs/{model}"
    code, out, _ = cli(
        "inspect", "--target", f"{pair}/target", "--drafter", f"{pair}/drafter", "--board", "thor", "--lanes", 4
    )
    assert code == 0
    check(out, columns)
    joint = out.partition("Joint cycles")[2].partition("Memory for")[0]
    assert {"products", "memory", "tokens/s", "drafts"} <= set(re.findall(r"[\w/]+", joint))
    assert re.search(r"target weights +│ +\d+\.\d\d GB", out)
    assert "│ 0 " not in out.partition("Memory")[2]
    assert re.search(r"^ *8 +15 +128 ", out.replace("│", " "), re.MULTILINE)  # figures of ten columns are whole


def test_bench(capsys, columns, monkeypatch):
    clock = Clock().install(monkeypatch)
    result = run(subject(TimedBackend(clock)), device(), Workload(64, 24, (8,), (128,)), lambda line: None)
    output.show(render(result))
    check(capsys.readouterr().out, columns)


def test_nothing_is_minus_zero(capsys, columns):
    output.show(logprob_table([TokenLogprob(1, -1e-6, (TokenLogprob(1, -1e-6),))]))
    out = capsys.readouterr().out
    assert "-0.000" not in out
    assert "0.000" in out


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (8_000, "8.0 kB"), (4_391_004, "4.4 MB"), (14_451_556_932, "14.45 GB")],
)
def test_bytes_are_said_in_units(nbytes, text):
    assert output.size(nbytes) == text
