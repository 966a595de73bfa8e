"""``edge-dflash bench``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from benchmark_support import Clock, TimedBackend, device, subject
from cli_support import last_json

import edge_dflash.cli.bench as bench_module
from edge_dflash.bench import subjects
from edge_dflash.bench.run import run
from edge_dflash.errors import BackendError


@pytest.fixture
def timed(monkeypatch):
    """A synthetic benchmark on a device that only keeps time; returns what it was called with."""
    calls, clock = [], Clock().install(monkeypatch)

    def fake(name, kind, work, folder, say):
        calls.append((name, kind, work, folder))
        say("measuring the device")
        return run(subject(TimedBackend(clock)), device(), work, say)

    monkeypatch.setattr(bench_module, "bench_synthetic", fake)
    return calls


def test_tables_and_no_json_with_progress_on_stderr(cli, timed):
    code, out, err = cli("bench", "--synthetic", "qwen3.6-27b", "--tokens", 40, "--accept-length", 3, "--prefill", "64")
    assert code == 0
    assert "One steady cycle at" in out
    assert "host time a cycle: " in out
    assert "{" not in out
    assert "measuring the device" in err
    assert "measuring" not in out
    ((name, kind, work, folder),) = timed
    assert (name, kind, work.tokens, work.accept_length) == ("qwen3.6-27b", "nvfp4", 40, 3)
    assert folder == subjects.CUBINS


def test_json_alone_is_one_line_and_files_are_written(cli, timed, tmp_path):
    files = ("--plot", tmp_path / "plot.svg", "--record", tmp_path / "runs.json")
    for _ in range(2):
        code, out, err = cli(
            "bench", "--synthetic", "qwen3-8b", "--weights", "bf16", "--json", "--commit", "abc123", *files
        )
        assert code == 0
    found = last_json(out)
    assert found["machine"]["commit"] == "abc123"
    assert f"drawing: {tmp_path / 'plot.svg'}\n" in err
    assert f"recorded: {tmp_path / 'runs.json'}\n" in err
    assert json.loads((tmp_path / "runs.json").read_text())["runs"][1] == found
    assert len(json.loads((tmp_path / "runs.json").read_text())["runs"]) == 2
    ElementTree.parse(tmp_path / "plot.svg")


def test_the_help_names_the_keys_of_the_json(cli, timed):
    found = last_json(cli("bench", "--synthetic", "qwen3-8b", "--json")[1])
    text = cli("bench", "--help")[1]
    for key in found:
        assert key in text


def test_a_reference_bundle_is_timed_without_floors(cli, ids_bundle):
    code, out, err = cli("bench", ids_bundle, "--tokens", 12, "--prefill", "8,99999", "--json")
    assert code == 0
    found = last_json(out)
    assert (found["backend"], found["read_bandwidth"], found["memory"]) == ("reference", None, None)
    assert found["plain"]["tokens_per_second"] > 0
    assert found["cycle"]["whole"]["floor_ms"] is None
    assert "no read bandwidth, no floors" in err
    assert "99999 tokens do not fit" in err


def test_the_demo_pair_is_asked_what_it_was_trained_for(cli, demo_bundle):
    code, out, _ = cli("bench", demo_bundle, "--tokens", 32, "--prefill", "8", "--json")
    assert code == 0
    found = last_json(out)
    assert found["prompts"] == "4 of the demo pair's held-out tasks"
    assert found["speculative"]["accept_length"] > 8  # with prompts that it does not know: 1.7
    assert found["schema"]["accept_length"] > 8
    assert found["schema"]["schema"] == "plans of the demo's actions"
    assert found["schema"]["replaced"] < 0.05
    assert found["raw"]["cycles"] == found["speculative"]["cycles"]


def test_prompts_of_a_file_are_named(cli, demo_bundle, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "Close the fridge."}\n')
    code, out, _ = cli("bench", demo_bundle, "--tokens", 8, "--prefill", "8", "--prompts", file, "--json")
    assert code == 0
    assert last_json(out)["prompts"] == f"1 of {file}"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "give BUNDLE or --synthetic NAME"),
        (("BUNDLE", "--synthetic", "qwen3-8b"), "give BUNDLE or --synthetic NAME"),
        (("--synthetic", "qwen4"), "no synthetic pair is called 'qwen4'; there are qwen3.6-27b, qwen3.5-9b"),
        (("--synthetic", "qwen3-8b", "--weights", "int4"), "--weights is 'int4'; give one of nvfp4, fp8, bf16"),
        (("--synthetic", "qwen3-8b", "--accept-length", "17"), "accept length 17 is outside 1..16"),
        (("--synthetic", "qwen3-8b", "--acceptance", "good"), "--acceptance is 'good'; give one of published"),
        (
            ("--synthetic", "qwen3-8b", "--acceptance", "published", "--accept-length", "3"),
            "both force what is accepted",
        ),
        (("--synthetic", "qwen3-8b", "--routing-correlation", "0"), "qwen3-8b has no experts"),
        (("BUNDLE", "--routing-correlation", "0"), "a bundle's own router is timed"),
        (("--synthetic", "qwen3-8b", "--accept-length", "0.5"), "accept length 0.5 is outside 1..16"),
        (("--synthetic", "qwen3-8b", "--prefill", "128,many"), "'many' in --prefill is no number of tokens"),
        (("--synthetic", "qwen3-8b", "--contexts", "0"), "'0' in --contexts is no number of tokens"),
        (("--synthetic", "qwen3-8b", "--prompts", "x.jsonl"), "--prompts belongs to BUNDLE"),
        (("BUNDLE", "--weights", "fp8"), "a bundle has its own weights"),
        (
            ("BUNDLE", "--accept-length", "2"),
            "for the 'reference' backend; --accept-length and --profile need a GPU: leave them out",
        ),
        (
            ("BUNDLE", "--profile"),
            "for the 'reference' backend; --accept-length and --profile need a GPU: leave them out",
        ),
        (("BUNDLE", "--record", "/proc/none/x.json"), "is no directory"),
        (("BUNDLE", "--plot", "/proc/none/x.svg"), "/proc/none is no directory; make it first or give another --plot"),
    ],
)
def test_bad_requests_are_refused(refused, ids_bundle, argv, words):
    code, line = refused("bench", *(ids_bundle if word == "BUNDLE" else word for word in argv))
    assert code == 8
    assert words in line


def test_without_a_gpu_synthetic_pairs_cannot_be_timed(refused, monkeypatch):
    def no_driver(*args):
        raise BackendError("no NVIDIA driver was found (DynamicLibNotFoundError); install the driver")

    monkeypatch.setattr(subjects, "probe_device", no_driver)
    code, line = refused("bench", "--synthetic", "qwen3.5-4b")
    assert code == 7
    assert "edge-dflash bench --synthetic needs an NVIDIA GPU: no NVIDIA driver was found" in line
