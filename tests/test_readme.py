"""What the README and the pages behind it say can be done, is done."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import typer
from paths import DEMO, ROOT

import edge_dflash.cli
import edge_dflash.cli.bench as bench_module
import edge_dflash.cli.verify as verify_module
from edge_dflash.board.profiles import board_profiles
from edge_dflash.demo.tasks import check_success, task_from_json

README = (ROOT / "README.md").read_text()
CLI = (ROOT / "docs" / "cli.md").read_text()
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("backends.md", "cli.md", "python.md", "results.md"))]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
]
FIRST = BLOCKS[0][1].splitlines()
PYTHON = [body for language, body in BLOCKS if language == "python"]
LINES = [
    line.strip()
    for language, body in BLOCKS
    if language == "sh"
    for line in body.splitlines()
    if line.strip().startswith("edge-dflash ")
]
COMMANDS = [shlex.split(line, comments=True)[1:] for line in dict.fromkeys(LINES)]
RUNNABLE = [argv for argv in COMMANDS if "demo-bundle" in argv and argv[0] != "build" and "task.txt" not in argv]


@pytest.fixture
def beside_demo_bundle(demo_bundle, tmp_path, monkeypatch):
    """A working directory with a bundle and a checkout's demo models in it, as in the README."""
    (tmp_path / "demo-bundle").symlink_to(demo_bundle)
    (tmp_path / "edge_dflash").symlink_to(ROOT / "edge_dflash")
    monkeypatch.chdir(tmp_path)


def test_the_first_block_is_the_two_commands():
    assert BLOCKS[0][0] == "sh"
    assert len(FIRST) == 2
    run, test = FIRST
    assert run.endswith("edge-dflash demo")
    assert test.endswith(".venv/bin/pytest -n auto --dist loadfile")
    for line in FIRST:
        assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -e ")


def test_continuous_integration_runs_both_commands():
    run = (ROOT / ".ci" / "run").read_text()
    assert FIRST[0] in run
    assert f"\n({FIRST[1]})\n" in run  # on a line of its own: what fails there ends the run
    assert "\nset -euo pipefail\n" in run


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_commands_parse(argv):
    """Parsed as when they run, and not run; words in capitals stand for paths."""
    group = typer.main.get_command(edge_dflash.cli.app)
    command = group.commands[argv[0]]
    command.make_context(argv[0], list(argv[1:]))


def test_every_command_is_shown():
    group = typer.main.get_command(edge_dflash.cli.app)
    assert {argv[0] for argv in COMMANDS} | {"demo"} == set(group.commands)


@pytest.mark.usefixtures("beside_demo_bundle", "opened_once")
@pytest.mark.parametrize("argv", RUNNABLE, ids=" ".join)
def test_commands_on_the_demo_bundle_run(argv, capsys, monkeypatch):
    """With one short prompt in the place of the shipped ones: each is prefilled for every drafter that is tried."""
    prompts, asked = verify_module.default_prompts, bench_module.bench_prompts

    def one_task(*given, **options):
        found = asked(*given, **options)
        return replace(found, tasks=found.tasks[:1])

    monkeypatch.setattr(verify_module, "default_prompts", lambda *given: [*prompts(*given), "Go."][-1:])
    monkeypatch.setattr(bench_module, "bench_prompts", one_task)
    assert edge_dflash.cli.run(argv) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.usefixtures("beside_demo_bundle", "opened_once")
def test_the_first_plan_does_its_task(capsys):
    """The example's task is a held-out one; its plan meets every precondition and rule, in few passes."""
    argv = next(argv for argv in RUNNABLE if argv[0] == "generate")
    assert edge_dflash.cli.run([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tasks = map(task_from_json, map(json.loads, (ROOT / "edge_dflash/demo/heldout.jsonl").read_text().splitlines()))
    text = (DEMO / "task.txt").read_text()
    task = next(task for task in tasks if [message["content"] for message in task.messages] == [text.rstrip("\n")])
    assert check_success(task, found["text"]) == []
    assert found["object"]["steps"]
    assert found["accept_length"] > 8


@pytest.mark.usefixtures("beside_demo_bundle", "opened_once")
@pytest.mark.parametrize("body", PYTHON, ids=lambda body: body.splitlines()[0])
def test_python_runs(body, capsys):
    exec(compile(body, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert out.strip()
    if "SCENE" in body:
        assert out.startswith("navigate storage_rack\nwait 60\npick black_vial storage_rack gentle\n")


def test_the_boards_that_are_listed_have_a_profile():
    rows = re.findall(
        r"^\| .+ \| (\d+) \| (\d+) GB \| ([\d.]+) GB/s \| `([\w-]+)` \| `sm(\d+)` \|$", README, re.MULTILINE
    )
    profiles = {board.name: board for board in board_profiles()}
    assert len(rows) == 5
    for sm, memory, bandwidth, name, arch in rows:
        board = profiles[name]
        assert (board.sm, board.memory_bytes / 1e9) == (int(sm), int(memory)) == (int(arch), int(memory))
        assert board.memory_bandwidth_bytes_per_s / 1e9 == float(bandwidth)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_links_exist(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_is_short_and_its_pictures_are_those_of_the_code():
    assert len(README.splitlines()) <= 180
    drawn = subprocess.run([sys.executable, ROOT / "docs" / "draw.py", "--check"], capture_output=True, text=True)
    assert drawn.returncode == 0, drawn.stderr


def test_json_keys_of_the_readme_are_those_of_the_help(capsys):
    """The table's row of a command names every key that the help names, and no other (inspect refers to its help)."""
    for name in ("demo", "build", "generate", "verify"):
        row = re.search(rf"^\| `{name}` \| (.*) \|$", CLI, flags=re.MULTILINE).group(1)
        listed = set(re.findall(r"`(\w+)`", row))
        assert edge_dflash.cli.run([name, "--help"]) == 0
        text = re.split(r"JSON keys:|\n(?:Arguments|Options):", capsys.readouterr().out)[1]
        assert listed == {word for word in listed if re.search(rf"\b{word}\b", text)}
        if name in ("demo", "build", "generate"):
            keys = re.sub(r"\([^)]*\)", "", " ".join(text.split())).strip(". ").split(", ")
            assert listed == {key.strip().split()[0] for key in keys}


RESULT = re.compile(
    r"^\| (Qwen\S+), (\w+) \| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) \| ([\d,]+) \((\d+)\) \|(?: (\d+) ms, (\d+) %)?",
    re.MULTILINE,
)


def test_the_measured_results_are_those_of_the_last_runs_of_record():
    runs = json.loads((ROOT / "docs" / "results" / "bench-h200.json").read_text())["runs"]
    last = {(run["pair"].partition(",")[0], run["weights"]): run for run in runs}
    rows = RESULT.findall(README)
    assert len(rows) == 4
    for pair, weights, cycle, floor, ratio, rate, plain, prompt, share in rows:
        run = last[pair.lower(), weights.lower()]
        measured = run["cycle"]
        assert (cycle, floor) == (f"{measured['whole']['ms']:.2f}", f"{measured['whole']['floor_ms']:.2f}")
        assert ratio == f"{measured['over_floor']:.2f}"
        assert rate == f"{run['speculative']['tokens_per_second']:,.0f}"
        assert plain == f"{run['plain']['tokens_per_second']:.0f}"
        assert run["forced_accept_length"] == 5
        if prompt:
            (row,) = (row for row in run["prefill"] if row["tokens"] == 2048)
            assert (prompt, share) == (f"{row['ms']:.0f}", f"{100 * row['share']:.0f}")
