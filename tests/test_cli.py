"""The command line as users meet it: what it prints, where, and how it fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import edge_dflash
import edge_dflash.bundle.parts
import edge_dflash.cli.build
from edge_dflash.cli import run
from edge_dflash.cli.demo import default_bundle

PAIR = ("qwen3_5-tiny", "qwen3_5-tiny-dflash")


@pytest.fixture
def cli(capsys):
    """Run a command; return exit code, stdout and stderr."""

    def call(*argv):
        code = run([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def refused(cli):
    """Run a command that must fail: nothing on stdout, one ``error:`` line on stderr. Returns code and line."""

    def call(*argv):
        code, out, err = cli(*argv)
        lines = [line for line in err.splitlines() if not line.startswith(("warning:", "task:", "building"))]
        assert code != 0
        assert out == ""
        assert len(lines) == 1, err
        assert lines[0].startswith("error: ")
        return code, lines[0]

    return call


@pytest.fixture
def pair(golden, tmp_path):
    """Copies of a target and a drafter checkpoint, to be spoiled."""
    return [shutil.copytree(golden / name, tmp_path / name) for name in PAIR]


@pytest.fixture
def build_pair(pair, tmp_path):
    """The arguments that build the pair."""
    target, drafter = pair
    return ["build", "--target", target, "--drafter", drafter, "--no-calibrate", "--output", tmp_path / "out"]


@pytest.fixture(scope="session")
def ids_bundle(golden, tmp_path_factory):
    """A bundle without tokenizer."""
    output = tmp_path_factory.mktemp("ids") / "bundle"
    target, drafter = (golden / name for name in PAIR)
    argv = ["build", "--target", target, "--drafter", drafter, "--no-calibrate", "--output", output]
    assert run([str(word) for word in argv]) == 0
    return output


def last_json(out):
    """The object of the last line; with --json it is the only line."""
    assert len(out.splitlines()) == 1
    return json.loads(out)


# what the commands print ---------------------------------------------------------------------------------------------


def test_version(cli):
    assert cli("--version") == (0, f"edge-dflash {edge_dflash.__version__}\n", "")


def test_help_lists_the_commands_that_exist_and_no_other(cli):
    code, out, _ = cli("--help")
    assert code == 0
    commands = [line.split()[0] for line in out.split("Commands:")[1].splitlines() if line.strip()]
    assert [c for c in commands if c in ("build", "demo", "generate", "inspect", "verify")] == [
        "demo",
        "build",
        "generate",
        "verify",
        "inspect",
    ]
    assert not {"serve", "bench", "doctor"} & set(commands)
    assert cli() == (0, out, "")


def test_build_reports_the_bundle(cli, build_pair, tmp_path):
    code, out, err = cli(*build_pair, "--json")
    found = last_json(out)
    assert code == 0
    assert set(found) == {"bundle", "bytes", "seconds", "plans", "deferred", "warnings"}
    assert found["bundle"] == str(tmp_path / "out")
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert (found["plans"], found["deferred"]) == ([], [])
    assert "warning: " in err
    assert "token ids" in err


def test_generate_from_ids(cli, ids_bundle):
    code, out, _ = cli("generate", ids_bundle, "--ids", "1,2,3", "--max-new-tokens", 9, "--json")
    found = last_json(out)
    assert code == 0
    assert (found["text"], found["json"], found["finish_reason"], found["prompt_tokens"]) == (None, None, "length", 3)
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
    assert json.loads(found["text"]) == found["plan"]
    assert found["plan"]["steps"]
    assert found["plain_seconds"] > 0
    assert found["ratio"] == pytest.approx(found["speculative_seconds"] / found["plain_seconds"])
    assert err.startswith("task: ")
    code, human, _ = cli("demo", "--bundle", demo_bundle)
    assert code == 0
    assert human.startswith(found["text"])
    assert "the same tokens" in human
    assert human.endswith("valid plan\n")


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
    monkeypatch.setattr(edge_dflash, "__version__", "999")
    assert default_bundle() != first


def test_demo_builds_again_what_was_damaged_in_its_cache(cli, demo_bundle, tmp_path, monkeypatch):
    cached = shutil.copytree(demo_bundle, tmp_path / "cached")
    flip_byte(cached)
    monkeypatch.setattr("edge_dflash.cli.demo.default_bundle", lambda: cached)
    code, out, err = cli("demo", "--json")
    assert code == 0
    assert last_json(out)["identical"] is True
    assert "building the demo again" in err


def test_verify_a_bundle(cli, ids_bundle):
    code, out, _ = cli("verify", ids_bundle, "--count", 1, "--max-new-tokens", 8, "--json")
    found = last_json(out)
    assert code == 0
    assert (found["ok"], found["differences"], found["prompts"]) == (True, [], 1)
    assert found["accept_length"] >= 1


def test_verify_takes_a_prompt_set(cli, ids_bundle, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"ids": [1, 2]}\n\n{"ids": [3], "note": "ignored"}\n')
    code, out, _ = cli("verify", ids_bundle, "--prompts", prompts, "--max-new-tokens", 4)
    assert code == 0
    assert "2 prompts" in out


def test_verify_a_golden_file(cli, golden):
    target, drafter = (golden / name for name in PAIR)
    file = golden / "golden_qwen3_5.safetensors"
    code, out, _ = cli("verify", "--checkpoint", target, "--drafter", drafter, "--golden", file, "--json")
    found = last_json(out)
    assert code == 0
    assert (found["ok"], found["tokens_equal"]) == (True, True)
    assert found["logits_difference"] <= 1e-3


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


# wrong usage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve"], "No such command 'serve'"),
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
    assert "edge-dflash --help" in line


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["generate", "B"], 8, "exactly one of --prompt, --prompt-file and --ids"),
        (["generate", "B", "--ids", "1", "--prompt", "x"], 8, "exactly one of"),
        (["generate", "B", "--ids", "1,x"], 8, "'x' in --ids is no token id"),
        (["generate", "B", "--ids", ""], 8, "the prompt has no tokens"),
        (["generate", "B", "--ids", "99999999"], 8, "token id 99999999 is outside the vocabulary"),
        (["generate", "B", "--prompt", "go"], 8, "no tokenizer: give token ids"),
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
        (["inspect", "B", "--target", "t"], 8, "either BUNDLE or"),
        (["inspect", "B", "--board", "toaster"], 4, "agx-thor"),
        (["inspect", "--target", "/nowhere", "--drafter", "/nowhere"], 3, "/nowhere"),
    ],
)
def test_bad_requests_are_one_line_with_the_class_of_the_error(refused, ids_bundle, argv, code, message):
    found, line = refused(*[ids_bundle if word == "B" else word for word in argv])
    assert found == code
    assert message in line


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(refused, ids_bundle):
    code, line = refused("generate", ids_bundle, "--ids", "1 " * 5000)
    assert code == 8
    assert "5000" in line
    assert "usable context" in line


def test_a_held_out_task_that_is_none(refused, demo_bundle):
    code, line = refused("demo", "--bundle", demo_bundle, "--index", 9999)
    assert code == 8
    assert "held-out tasks are 0 to" in line


@pytest.mark.parametrize("body", ["", "{", '{"ids": [1], "text": "x"}', '{"ids": "1"}', '{"text": 1}', "[1]", "\udcff"])
def test_bad_prompt_files_are_refused(refused, ids_bundle, tmp_path, body):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(body.encode("utf-8", "surrogateescape"))
    code, line = refused("verify", ids_bundle, "--prompts", file)
    assert code == 8
    assert str(file) in line


# damaged input to a build --------------------------------------------------------------------------------------------


def rewrite(checkpoint, change):
    """Change the header or the bytes of a checkpoint's tensors."""
    file = checkpoint / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    change(header, data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


def corrupt_header(target, drafter):
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:8] + b"!" + file.read_bytes()[9:])


def truncate(target, drafter):
    file = target / "model.safetensors"
    os.truncate(file, file.stat().st_size - 64)


def norm_of(header):
    return next(entry for name, entry in header.items() if name.endswith("input_layernorm.weight"))


def insert_nan(target, drafter):
    def change(header, data):
        begin = norm_of(header)["data_offsets"][0]
        data[begin : begin + 4] = b"\xff\xff\xff\xff"  # NaN as BF16 and as FP32

    rewrite(target, change)


def wrong_dtype(target, drafter):
    def change(header, data):
        entry = norm_of(header)
        begin, end = entry["data_offsets"]
        size = (end - begin) // entry["shape"][0]
        entry["dtype"] = {2: "I16", 4: "I32"}[size]

    rewrite(target, change)


def no_weights(target, drafter):
    (drafter / "model.safetensors").unlink()


def other_drafter(target, drafter):
    config = json.loads((drafter / "config.json").read_text())
    config["vocab_size"] += 64
    (drafter / "config.json").write_text(json.dumps(config))


def moe(target, drafter):
    config = json.loads((target / "config.json").read_text())
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    config["model_type"] = "qwen3_5_moe"
    (target / "config.json").write_text(json.dumps(config))


def no_mask_token(target, drafter):
    from text_support import write_tokenizer

    write_tokenizer(target)


@pytest.mark.parametrize(
    "spoil",
    [corrupt_header, truncate, insert_nan, wrong_dtype, no_weights, other_drafter, moe, no_mask_token],
    ids=lambda spoil: spoil.__name__,
)
def test_a_bad_checkpoint_makes_no_bundle(refused, build_pair, pair, tmp_path, spoil):
    spoil(*pair)
    code, _ = refused(*build_pair)
    assert code == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("body", ["schema: 1\nname: x\nspeed: 9\n", "schema: 99\nname: x\n", "{"])
def test_a_bad_recipe_makes_no_bundle(refused, build_pair, tmp_path, body):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(body)
    code, line = refused(*build_pair, "--recipe", recipe)
    assert code == 4
    assert str(recipe) in line
    assert not (tmp_path / "out").exists()


def test_an_unknown_recipe_lists_those_that_ship(refused, build_pair):
    code, line = refused(*build_pair, "--recipe", "fastest")
    assert code == 4
    assert "demo-cpu" in line


def test_a_shipped_recipe_goes_by_its_name(cli, build_pair):
    assert cli(*build_pair, "--recipe", "demo-cpu-drafter-bf16")[0] == 0


@pytest.mark.parametrize(("flag", "value"), [("--arch", "sm999"), ("--backend", "magic"), ("--backend", "tensorrt")])
def test_what_this_version_does_not_build_for_is_refused(refused, build_pair, flag, value, tmp_path):
    code, line = refused(*build_pair, flag, value)
    assert code == 7
    assert value in line
    assert not (tmp_path / "out").exists()


def test_what_is_at_the_output_is_not_overwritten(refused, build_pair, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    assert refused(*build_pair)[0] == 5
    assert refused(*build_pair, "--force")[0] == 5
    assert (tmp_path / "out" / "thesis.txt").read_text() == "x"


def test_a_full_disk_stops_a_build_and_is_survived(refused, cli, build_pair, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, data):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(edge_dflash.bundle.parts.DurableFile, "write", write)
        code, _ = refused(*build_pair)
    assert code == 5
    assert not (tmp_path / "out").exists()
    assert cli(*build_pair)[0] == 0
    assert not (tmp_path / "out.building").exists()


def test_control_c_during_a_build_is_one_line_and_the_build_resumes(refused, cli, build_pair, tmp_path, monkeypatch):
    @contextmanager
    def interrupted_after_the_first_report():
        def report(stage, done, total):
            if done:
                raise KeyboardInterrupt

        yield report

    with monkeypatch.context() as patch:
        patch.setattr(edge_dflash.cli.build, "stages", interrupted_after_the_first_report)
        code, line = refused(*build_pair)
    assert code == 130
    assert "interrupted" in line
    assert not (tmp_path / "out").exists()
    assert cli(*build_pair)[0] == 0


def test_control_c_elsewhere_is_one_line(refused, ids_bundle, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("edge_dflash.planner.Planner.open", interrupted)
    assert refused("generate", ids_bundle, "--ids", "1") == (130, "error: interrupted")


def test_a_signal_ends_the_process_with_one_line(ids_bundle):
    """The real thing: a process at work is sent SIGINT."""
    argv = [sys.executable, "-c", "from edge_dflash.cli import main; main()"]
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


# damaged bundles -----------------------------------------------------------------------------------------------------


def flip_byte(bundle):
    file = max((path for path in bundle.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def newer_schema(bundle):
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["schema"] = 999
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def lose_file(bundle):
    next((bundle / "weights").iterdir()).unlink()


def flip_byte_of_manifest(bundle):
    file = bundle / "manifest.json"
    file.write_text(file.read_text().replace('"cpu"', '"cpv"'))


@pytest.mark.parametrize(
    "spoil", [flip_byte, newer_schema, lose_file, flip_byte_of_manifest], ids=lambda spoil: spoil.__name__
)
def test_a_damaged_bundle_is_refused(refused, ids_bundle, tmp_path, spoil):
    bundle = shutil.copytree(ids_bundle, tmp_path / "bundle")
    spoil(bundle)
    for argv in (["generate", bundle, "--ids", "1"], ["verify", bundle]):
        code, line = refused(*argv)
        assert code == 6
        assert str(bundle) in line


# the shell -----------------------------------------------------------------------------------------------------------


def test_an_error_of_the_system_is_one_line(refused, ids_bundle, monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", "/some/file")

    monkeypatch.setattr("edge_dflash.planner.Planner.open", fail)
    assert refused("generate", ids_bundle, "--ids", "1") == (1, "error: Permission denied: /some/file")


def test_a_missing_torch_names_the_extra(build_pair, ids_bundle, tmp_path):
    """In a process of its own, where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from edge_dflash.cli import main; main()"
    for argv in (build_pair, ["generate", ids_bundle, "--ids", "1"]):
        done = subprocess.run([sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True)
        assert done.returncode == 7
        assert done.stdout == ""
        assert done.stderr.splitlines()[-1].startswith("error: ")
        assert "pip install 'edge-dflash[build]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_closed_pipe_is_silent(ids_bundle):
    code = f"{sys.executable} -m edge_dflash generate {ids_bundle} --ids 1,2 --max-new-tokens 40 | head -c 1 >/dev/null"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, env=env)
    assert "Traceback" not in done.stderr
