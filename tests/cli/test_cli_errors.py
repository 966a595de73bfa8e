"""The command line given wrong words, bad requests, signals and pipes: one line each, and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("opened_once")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fly"], "No such command 'fly'"),
        (["generate", "b", "--speed", "9"], "No such option: --speed"),
        (["generate"], "Missing argument 'BUNDLE'"),
        (["generate", "b", "--seed", "x"], "Invalid value for '--seed'"),
        (["build", "--target", "t"], "Missing option"),
        (["verify", "b", "--count", "0"], "Invalid value for '--count'"),
    ],
)
def test_wrong_usage_is_one_line(refused, argv, message):
    code, line = refused(*argv)
    assert code == 2
    assert message in line
    command = "edge-dflash" if argv[0] == "fly" else f"edge-dflash {argv[0]}"
    assert line.endswith(f"(see {command} --help)")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["generate", "B"], 8, "exactly one of --prompt, --prompt-file and --ids"),
        (["generate", "B", "--ids", "1", "--prompt", "x"], 8, "exactly one of"),
        (["generate", "B", "--ids", "1,x"], 8, "'x' in --ids is no token id"),
        (["generate", "B", "--ids", ""], 8, "the prompt has no tokens"),
        (["generate", "B", "--ids", "99999999"], 8, "token id 99999999 is outside the vocabulary"),
        (["generate", "B", "--ids", "1 " * 5000], 8, "usable context"),
        (["generate", "B", "--prompt", "go"], 8, "no tokenizer, a text cannot be read; give --ids"),
        (["generate", "B", "--prompt", "go", "--raw"], 8, "give --ids"),
        (["generate", "B", "--prompt-file", "/nowhere/x"], 8, "cannot read /nowhere/x"),
        (["generate", "B", "--ids", "1", "--temperature", "-1"], 8, "temperature is -1"),
        (["generate", "B", "--ids", "1", "--max-new-tokens", "0"], 8, "max_new_tokens is 0"),
        (["generate", "/nowhere", "--ids", "1"], 6, "/nowhere"),
        (["verify"], 8, "give BUNDLE, or --checkpoint, --drafter and --golden"),
        (["verify", "B", "--golden", "g"], 8, "give BUNDLE, or --checkpoint"),
        (["verify", "--golden", "g"], 8, "--golden needs --checkpoint and --drafter"),
        (["verify", "B", "--prompts", "/nowhere/x"], 8, "cannot read /nowhere/x"),
        (["inspect"], 8, "give BUNDLE, or --target and --drafter"),
        (["inspect", "B", "--max-context", "100"], 8, "--max-context: a bundle has its own models and sizes"),
        (["inspect", "B", "--board", "toaster"], 4, "agx-thor"),
        (["inspect", "--target", "o/hub", "--drafter", "o/hub"], 3, "no directory o/hub; give one with a checkpoint"),
    ],
)
def test_bad_requests_are_one_line_with_the_class_of_the_error(refused, ids_bundle, argv, code, message):
    found, line = refused(*[ids_bundle if word == "B" else word for word in argv])
    assert found == code
    assert message in line


@pytest.mark.parametrize("body", ["", "{", '{"ids": [1], "text": "x"}', '{"ids": "1"}', '{"text": 1}', "[1]", "\udcff"])
def test_bad_prompt_files_are_refused(refused, ids_bundle, tmp_path, body):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(body.encode("utf-8", "surrogateescape"))
    code, line = refused("verify", ids_bundle, "--prompts", file)
    assert code == 8
    assert str(file) in line


def test_a_prompt_file_of_another_encoding_is_refused(refused, ids_bundle, tmp_path):
    file = tmp_path / "task.txt"
    file.write_bytes("Bring die grüne Tasse".encode("latin-1"))
    assert refused("generate", ids_bundle, "--prompt-file", file) == (
        8,
        f"error: {file} is not UTF-8 text (byte 12); convert it",
    )


def test_a_signal_ends_the_process_with_one_line(ids_bundle):
    """The real thing: a process at work is sent SIGINT."""
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a parent may ignore SIGINT
    argv = [sys.executable, "-c", f"{heed}; from edge_dflash.cli import main; main()"]
    process = subprocess.Popen(
        [*argv, "verify", str(ids_bundle), "--count", "4", "--max-new-tokens", "12"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    first = process.stderr.readline()  # progress: the work has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert first.startswith("prompt 1")
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "error: interrupted"


def test_an_error_of_the_system_is_one_line(refused, ids_bundle, monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", "/some/file")

    monkeypatch.setattr("edge_dflash.planner.Planner.open", fail)
    assert refused("generate", ids_bundle, "--ids", "1") == (1, "error: Permission denied: /some/file")


def test_a_missing_torch_names_the_extra(build_pair, ids_bundle, tmp_path):
    """In a process of its own, where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from edge_dflash.cli import main; main()"
    train = ["train-drafter", "--target", ids_bundle, "--data", "x", "--output", tmp_path / "out", "--steps", 1]
    for extra, argv in (("build", build_pair), ("build", ["generate", ids_bundle, "--ids", "1"]), ("train", train)):
        done = subprocess.run([sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True)
        assert done.returncode == 7
        assert done.stdout == ""
        assert done.stderr.splitlines()[-1].startswith("error: ")
        assert f"pip install 'edge-dflash[{extra}]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_closed_pipe_is_silent(ids_bundle):
    code = f"{sys.executable} -m edge_dflash generate {ids_bundle} --ids 1,2 --max-new-tokens 40 | head -c 1 >/dev/null"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, env=env)
    assert "Traceback" not in done.stderr
