"""The command line as users meet it: what it prints and where."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from functools import partial

import numpy as np
import pytest
from cli_support import PAIR, flip_byte, last_json
from rich.console import Console
from rich.progress import Progress
from safetensors.numpy import load_file, save_file

import edge_dflash
from edge_dflash.cli import output
from edge_dflash.cli.demo import default_bundle

pytestmark = pytest.mark.usefixtures("opened_once")


def test_version(cli):
    assert cli("--version") == (0, f"edge-dflash {edge_dflash.__version__}\n", "")


def test_help_lists_the_commands_that_exist_and_no_other(cli):
    code, out, _ = cli("--help")
    assert code == 0
    commands = [line.split()[0] for line in out.split("Commands:")[1].splitlines() if line.strip()]
    known = ["demo", "build", "generate", "verify", "bench", "inspect", "serve", "doctor", "service"]
    assert [word for word in commands if word in known] == known
    assert cli() == (0, out, "")


def test_build_reports_the_bundle(cli, build_pair, tmp_path):
    code, out, err = cli(*build_pair, "--json")
    found = last_json(out)
    assert code == 0
    assert set(found) == {
        *("bundle", "bytes", "seconds", "backends", "active", "recipe", "plans", "deferred", "trial"),
        *("nothing_to_do", "warnings", "mix", "quality"),
    }
    assert found["mix"] is found["quality"] is None  # nobody asked for them
    assert found["bundle"] == str(tmp_path / "out")
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert (found["plans"], found["deferred"]) == ([], [])
    assert "warning: " in err
    assert "token ids" in err


def test_generate_from_ids(cli, ids_bundle):
    code, out, _ = cli("generate", ids_bundle, "--ids", "1,2,3", "--max-new-tokens", 9, "--json")
    found = last_json(out)
    assert code == 0
    assert (found["text"], found["object"], found["finish_reason"], found["prompt_tokens"]) == (None, None, "length", 3)
    assert len(found["tokens"]) == 9 == 1 + sum(found["accept_lengths"])
    assert found["speculative"] is True
    plain = last_json(cli("generate", ids_bundle, "--ids", "1 2 3", "--max-new-tokens", 9, "--plain", "--json")[1])
    assert plain["tokens"] == found["tokens"]
    assert (plain["speculative"], plain["accept_length"]) == (False, 1.0)
    code, out, err = cli("generate", ids_bundle, "--ids", "1,2,3", "--max-new-tokens", 9)
    assert [int(word) for word in out.split()] == found["tokens"]
    assert "9 tokens (length) after 3 of prompt" in err


def test_generate_text(cli, demo_bundle, tmp_path):
    task = tmp_path / "task.txt"
    task.write_text("Close the fridge.")
    code, out, _ = cli("generate", demo_bundle, "--prompt-file", task, "--max-new-tokens", 12)
    found = last_json(
        cli("generate", demo_bundle, "--prompt", "Close the fridge.", "--max-new-tokens", 12, "--json")[1]
    )
    raw = last_json(
        cli("generate", demo_bundle, "--prompt", "Close the fridge.", "--raw", "--max-new-tokens", 2, "--json")[1]
    )
    assert code == 0
    assert out == found["text"] + "\n"
    assert raw["prompt_tokens"] < found["prompt_tokens"]


def test_demo_compares_both_decodings(cli, demo_bundle):
    code, out, err = cli("demo", "--bundle", demo_bundle, "--json")
    found = last_json(out)
    assert code == 0
    assert found["identical"] is True
    assert found["valid"] is True
    assert found["problems"] == []
    assert found["accept_length"] == pytest.approx(sum(found["accept_lengths"]) / len(found["accept_lengths"]))
    assert found["done"] is True
    assert json.loads(found["text"]) == found["object"]
    assert found["object"]["steps"]
    assert found["plain_seconds"] > 0
    assert found["ratio"] == pytest.approx(found["speculative_seconds"] / found["plain_seconds"])
    assert err.startswith("task: ")


def test_demo_takes_a_task_of_ones_own(cli, demo_bundle):
    code, out, _ = cli("demo", "--bundle", demo_bundle, "--task", "Close the fridge.", "--json")
    found = last_json(out)
    assert code == 0
    assert found["task"] == "Close the fridge."
    assert found["identical"] is True


def test_demo_keeps_its_bundle_apart_for_every_version(monkeypatch):
    first = default_bundle()
    assert first.parent.name == "edge-dflash"
    assert first == default_bundle()
    monkeypatch.setattr("edge_dflash.cli.demo.__version__", "999")
    assert default_bundle() != first


def test_demo_builds_again_what_was_damaged_in_its_cache(cli, demo_bundle, tmp_path, monkeypatch):
    cached = shutil.copytree(demo_bundle, tmp_path / "cached")
    flip_byte(cached)
    monkeypatch.setattr("edge_dflash.cli.demo.default_bundle", lambda **which: cached)
    monkeypatch.setattr("edge_dflash.builder.record.NEW_TOKENS", 4)
    code, out, err = cli("demo", "--index", 36)  # for people; a short plan
    assert code == 0
    assert json.JSONDecoder().raw_decode(out)[0]["steps"]
    assert "the same tokens" in out
    assert out.endswith("\nvalid plan\n")
    assert "building the demo again" in err
    told = err[err.index("task: ") :].splitlines()
    assert told[1].startswith("scene: the robot is in ")
    assert any(line.startswith("rules: ") for line in told)
    assert told[-5].startswith("valid means: ")
    assert told[-3].startswith("drafts follow this machine's speed")
    assert told[-4] == "the simulator ran the steps of the plan: they do the task"
    assert [shlex.split(line.partition(": ")[2])[:2] for line in told[-2:]] == [
        ["edge-dflash", "verify"],
        ["edge-dflash", "build"],
    ]


def test_verify_a_bundle(cli, ids_bundle):
    code, out, _ = cli("verify", ids_bundle, "--count", 1, "--max-new-tokens", 8, "--json")
    found = last_json(out)
    assert code == 0
    assert (found["ok"], found["differences"], found["prompts"]) == (True, [], 1)
    assert found["accept_length"] >= 1
    assert found["self_test"]["ok"]
    assert found["self_test"]["tokens_equal"]
    assert (found["lossless"], found["summary"]) == (True, "lossless: yes")


def test_verify_asks_the_demo_pair_what_it_was_trained_for(cli, demo_bundle):
    """Prompts of other kinds say little of a drafter: accept length 1.4 in place of 12."""
    code, out, _ = cli("verify", demo_bundle, "--count", 1, "--max-new-tokens", 32, "--json")
    found = last_json(out)
    assert (code, found["lossless"], found["summary"]) == (0, True, "lossless: yes")
    assert found["accept_length"] > 6


def test_verify_takes_a_prompt_set(cli, ids_bundle, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"ids": [1, 2]}\n\n{"ids": [3], "note": "ignored"}\n')
    code, out, _ = cli("verify", ids_bundle, "--prompts", prompts, "--max-new-tokens", 4)
    assert code == 0
    assert "2 prompts" in out
    assert out.splitlines()[-1] == "lossless: yes"


def test_verify_a_golden_file(cli, golden, tmp_path):
    target, drafter = (golden / name for name in PAIR)
    file = golden / "golden_qwen3_5.safetensors"
    code, out, _ = cli("verify", "--checkpoint", target, "--drafter", drafter, "--golden", file, "--json")
    found = last_json(out)
    assert code == 0
    assert (found["ok"], found["tokens_equal"]) == (True, True)
    assert found["logits_difference"] <= 1e-3
    save_file({key: array for key, array in load_file(file).items() if key.startswith("p0.")}, tmp_path / "first")
    code, out, _ = cli("verify", "--checkpoint", target, "--drafter", drafter, "--golden", tmp_path / "first")
    assert code == 0
    assert "arrays, 0 beyond their bounds; logits differ by at most" in out
    assert out.strip().endswith("tokens are equal")
    assert "Largest difference per key" in out
    assert "p0.prefill_logits" in out
    assert "differs" not in out


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_file(monkeypatch, capsys):
    monkeypatch.setattr(output, "PLAIN_LINE_SECONDS", 0.0)
    with output.stages() as report:
        report("weights", 1_500_000, 2_000_000)
        report("self-test", 1_000_000, 4_000_000)
        report("loading", 0, 0)
    assert capsys.readouterr() == ("", "weights: 1.5 of 2.0 MB\nself-test: 25 %\nloading\n")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.stages("opening the bundle") as report:
        assert "opening the bundle" in capsys.readouterr().err  # at once
        report("weights", 1_500_000, 2_000_000)
        report("weights", 2_000_000, 2_000_000)
        report("loading", 0, 0)
        report("self-test", 1_000_000, 4_000_000)  # a share of its tokens
    out, err = capsys.readouterr()
    assert out == ""
    assert "2.0/2.0 MB" in err
    assert re.search(r"self-test .* 25 %", err)
    assert not re.search(r"(self-test|loading)[^\r\n]*MB", err)


def test_a_difference_is_printed_and_fails(cli, golden, tmp_path):
    target, drafter = (golden / name for name in PAIR)
    arrays = load_file(golden / "golden_qwen3_5.safetensors")
    key = next(key for key in arrays if key.endswith("prefill_logits"))
    arrays[key] = arrays[key] + np.float32(1)
    save_file(arrays, tmp_path / "wrong.safetensors")
    argv = (
        "verify",
        "--checkpoint",
        target,
        "--drafter",
        drafter,
        "--golden",
        tmp_path / "wrong.safetensors",
        "--json",
    )
    code, out, err = cli(*argv)
    assert code == 9
    assert last_json(out)["ok"] is False
    assert err.startswith("error: ")
    assert key in err


def test_inspect_a_bundle_and_a_pair_yet_to_be_built(cli, ids_bundle, golden, tmp_path):
    target, drafter = (shutil.copytree(golden / name, tmp_path / name) for name in PAIR)
    for directory in (target, drafter):
        (directory / "model.safetensors").unlink()
    code, out, _ = cli("inspect", ids_bundle, "--board", "orin-nx-16", "--json")
    built = last_json(out)
    assert code == 0
    assert {"verify_bytes", "draft_bytes", "kv_bytes_per_token", "tape_bytes_per_row", "state_bytes"} <= set(built)
    assert {"total_bytes", "floor_ms"} <= set(built)
    size = str(built["max_context"])
    argv = ("inspect", "--target", target, "--drafter", drafter, "--board", "orin-nx-16", "--max-context", size)
    planned = last_json(cli(*argv, "--json")[1])
    assert planned["verify_bytes"] == built["verify_bytes"]
    code, out, _ = cli(*argv)
    assert code == 0
    assert "Jetson Orin NX" in out


class Clock:
    """Time that passes when told to."""

    now = 1000.0

    def __call__(self):
        return self.now

    monotonic = __call__


def test_lines_say_the_time_left_of_a_stage(monkeypatch, capsys):
    monkeypatch.setattr(output, "time", clock := Clock())
    with output.stages() as report:
        for later, *heard in (
            (0, "training", 1000, 5000),  # taken up where it stood: nothing is known
            (10, "training", 1400, 5000),
            (5, "training", 1500, 5000),  # no line yet
            (5, "loading", 7, 0),
            (10, "weights", 0, 10_000_000),
            (10, "weights", 100_000, 10_000_000),
            (1000, "training", 5000, 5000),
            (500, "weights", 0, 10_000_000),  # another build
            (50, "weights", 5_000_000, 10_000_000),
        ):
            clock.now += later
            report(*heard)
    assert capsys.readouterr().err.splitlines() == [
        "training: 28 %, 1:30 left",
        "loading",
        "weights: 0.0 of 10.0 MB",
        "weights: 0.1 of 10.0 MB, 16:30 left",
        "training: 100 %",
        "weights: 0.0 of 10.0 MB",
        "weights: 5.0 of 10.0 MB, 0:50 left",
    ]
    assert [output.left(seconds) for seconds in (0, 0.2, 59.5, 3600, 86399)] == [
        *("0:00 left", "0:01 left", "1:00 left"),
        *("1:00:00 left", "23:59:59 left"),
    ]


def test_bars_say_the_time_left_of_a_stage(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock = Clock()
    monkeypatch.setattr(output, "Console", partial(Console, get_time=clock, width=100))
    monkeypatch.setattr(output, "Bars", partial(Progress, auto_refresh=False))
    with output.stages() as report:

        def shown(later, *heard):
            clock.now += later
            report(*heard)
            capsys.readouterr()
            report.bars.refresh()
            return re.findall(r"(?:\d+:)+\d+ left", capsys.readouterr().err)

        assert shown(0, "training", 100, 1000) == []
        assert shown(40, "training", 200, 1000) == ["5:20 left"]
        assert shown(40, "training", 1000, 1000) == []
        assert shown(3600, "training", 0, 1000) == []  # begun again
        assert shown(10, "training", 200, 1000) == []
        assert shown(10, "training", 400, 1000) == ["0:30 left"]
        assert shown(0, "loading", 0, 0) == ["0:30 left"]
