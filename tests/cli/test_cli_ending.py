"""SIGINT, SIGTERM and SIGHUP: what is temporary goes, what is finished stays, and the last line says how to go on."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from edge_dflash.builder.decide import fingerprints
from edge_dflash.cli import ending
from edge_dflash.common.files import scratch
from edge_dflash.demo.tasks import MODELS, assemble

HEED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a parent may ignore SIGINT
MOST_SECONDS = 120


def started(*argv):
    code = f"{HEED}; from edge_dflash.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for(condition, process):
    end = time.monotonic() + MOST_SECONDS
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)


def leftovers(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_demo_that_is_ended_leaves_what_its_command_goes_on_with(tmp_path, number, code):
    bundle = tmp_path / "seeing bundle"
    process = started("demo", "--image", "--bundle", bundle)
    building = tmp_path / "seeing bundle.building"
    wait_for(lambda: any(building.glob("bundle/weights/*.safetensors")), process)
    process.send_signal(number)
    process.send_signal(number)  # as timeout(1) does
    out, err = process.communicate(timeout=MOST_SECONDS)
    assert (process.returncode, out) == (code, "")
    assert leftovers(tmp_path) == {building.name}
    command = f"edge-dflash demo --image --bundle {shlex.quote(str(bundle))}"
    assert err.splitlines()[-1] == f"error: interrupted; finished files are kept, resume with: {command}"


def test_the_command_of_an_ended_demo_goes_on_with_its_files(tmp_path):
    """The assembled checkpoint is another one by name, and the same by all that a build compares."""
    for name in ("one", "two"):
        assemble(tmp_path / name)
        time.sleep(0.02)
    one, two = (fingerprints(tmp_path / name, MODELS / "drafter", sees=True) for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    ("place", "kept"),
    [
        ("builder.write._fill", "finished files are kept, resume with: the same train-drafter command"),
        ("training.run.Training.answers", "what is finished is kept in {work}, resume with the same command"),
    ],
)
def test_a_training_names_its_own_command(cli, tmp_path, monkeypatch, place, kept):
    data, output = tmp_path / "plans.jsonl", tmp_path / "own"
    data.write_text("".join(json.dumps({"prompt": f"Goal: Check red_mug_{i}."}) + "\n" for i in range(40)))

    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"edge_dflash.{place}", interrupted)
    monkeypatch.setattr("edge_dflash.builder.record.NEW_TOKENS", 4)
    pair = ("--target", MODELS / "target", "--drafter", MODELS / "drafter", "--data", data)
    code, out, err = cli("train-drafter", *pair, "--output", output, "--steps", 1)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == f"error: interrupted; {kept.format(work=output / 'work')}"


def test_what_a_kill_left_goes_with_the_next_one(tmp_path):
    (left := tmp_path / "dry-1").mkdir()
    (left / "taps").write_bytes(b"0")
    with scratch(tmp_path, "dry-") as held:
        assert not left.exists()
        with scratch(tmp_path, "dry-") as other:
            assert held.is_dir()  # of a process at work
            assert other != held
    assert leftovers(tmp_path) == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_stop_the_clean_up(number):
    seen = []

    def work():
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), number)
            time.sleep(0.05)
            seen.append("cleaned")

    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored
    try:
        with ending() as ended, pytest.raises(KeyboardInterrupt):
            work()
        assert seen == ["cleaned"]
        assert ended.signal == number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_signals_that_are_ignored_stay_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with ending() as ended:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
        assert ended.signal is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
