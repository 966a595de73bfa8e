"""What a fixed set of prompts gives, bit for bit, through the public API: tokens, texts, log-probabilities, state.

    python tests/scripts/same_bits.py BUNDLES --build reference native   # makes BUNDLES/<name>; needs no GPU
    python tests/scripts/same_bits.py BUNDLES --run reference --output A.json
    python tests/scripts/same_bits.py --compare A.json B.json            # exit code 1 if anything differs

Only names of ``edge_dflash`` itself and its command line are used, so that two trees of different modules can be
compared: set PYTHONPATH to each in turn. The logits are held by the float bits of 20 alternatives a token, keys,
values and recurrent states by the SHA-256 of each array of a saved session. ``--run native`` needs the GPU.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from bits_cases import demo_cases, tiny_cases
from paths import GOLDEN

TREE = Path(importlib.util.find_spec("edge_dflash").origin).resolve().parents[1]  # PYTHONPATH decides which
DEMO = TREE / "edge_dflash" / "demo" / "models"
MIXED = """schema: 1
name: mixed
description: Every format of weights in one pair, keys and values in BF16.
target: {attention: fp8, gated_delta: bf16, mlp: nvfp4, lm_head: fp8}
drafter: {attention: bf16, mlp: fp8, fc: nvfp4}
kv: bf16
context: {max_context: 1024}
"""
CHUNK = 64  # rows of a prefill: long prompts take several
TINY = ("--no-calibrate", "--max-context", "256", "--prefill-chunk", "32")
CPU, GPU = ("--arch", "cpu"), ("--arch", "sm90", "--backend", "native")
BUNDLES = {  # name: (kind, target, drafter, options of the build)
    "demo": ("reference", DEMO / "target", DEMO / "drafter", (*CPU, "--recipe", "demo-cpu")),
    "demo-mixed": ("reference", DEMO / "target", DEMO / "drafter", (*CPU, "--recipe", "MIXED")),
    "qwen3": ("reference", GOLDEN / "qwen3-tiny", GOLDEN / "qwen3-tiny-dflash", TINY),
    "qwen3_5": ("reference", GOLDEN / "qwen3_5-tiny", GOLDEN / "qwen3_5-tiny-dflash", TINY),
    "compressed-tensors": ("reference", GOLDEN / "qwen3_5-tiny-nvfp4-ct", GOLDEN / "qwen3_5-tiny-dflash", TINY),
    "modelopt": ("reference", GOLDEN / "qwen3_5-tiny-nvfp4-modelopt", GOLDEN / "qwen3_5-tiny-dflash", TINY),
    "native": ("native", DEMO / "target", DEMO / "drafter", (*GPU, "--recipe", "demo-cpu")),
    "native-mixed": ("native", DEMO / "target", DEMO / "drafter", (*GPU, "--recipe", "MIXED")),
}
VERSIONED = ("schema", "created_by", "checksum", "tools", "files")  # of a manifest: what may change with the version


def build(folder, name):
    """Make a bundle through the command line; kernels that were compiled before come from ``folder``/cubins."""
    _, target, drafter, options = BUNDLES[name]
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "mixed.yaml"
    recipe.write_text(MIXED, encoding="utf-8")
    words = [str(recipe) if word == "MIXED" else word for word in options]
    if "--prefill-chunk" not in words:
        words += ["--prefill-chunk", str(CHUNK)]
    command = ["build", "--target", target, "--drafter", drafter, "--output", folder / name, "--force", *words]
    child = [sys.executable, Path(__file__).with_name("kept_cubins.py"), folder / "cubins", *command]
    began = time.perf_counter()
    subprocess.run(list(map(str, child)), check=True, stdout=subprocess.DEVNULL)
    say(f"built {name} in {time.perf_counter() - began:.1f} s")


def record(path, scratch):
    """What the bundle at ``path`` gives for every case: speculative in a session, plain without one, and in turns."""
    from edge_dflash import Planner

    found = {}
    with Planner.open(path, fallback=False) as planner:  # fallback depends on measured times
        if planner.tokenizer is None:
            cases = tiny_cases(planner.shape.vocab_size)
        else:
            cases = demo_cases(TREE, planner.encode("</think>", raw=True))
        for name, (task, options) in cases.items():
            with planner.session() as session:
                found[f"{name}: speculative"] = case = caught(turn, session, task, options)
            if "tokens" in case:
                found[f"{name}: plain"] = plan_of(planner.plan(task, speculative=False, logprobs=20, **options))
        found |= conversation(planner, cases, scratch / "session")
        found["self-test"] = {"verdict": planner.self_test and planner.self_test.verdict}
    return found


def caught(function, *arguments):
    """What a call gives, or its error."""
    try:
        return function(*arguments)
    except Exception as error:  # equal errors are equal behaviour
        return {"error": f"{type(error).__name__}: {error}"}


def turn(session, task, options, file=None):
    """The next turn of a session: its plan, its increments and the state behind it."""
    stream = session.stream(task, logprobs=20, **options)
    increments = [[one.text, list(one.tokens), one.thinking] for one in stream]
    with tempfile.TemporaryDirectory() as folder:
        saved = file or Path(folder) / "session"
        session.save(saved)
        return {**plan_of(stream.plan), "increments": increments, "state": state(saved)}


def conversation(planner, cases, file):
    """Turns, a fork that goes another way, and a session that was saved and loaded."""
    tasks = list(cases.values())
    first, second, third = (tasks[index][0] for index in ((0, 3, 4) if planner.tokenizer else (1, 2, 3)))
    some, drawn = {"max_new_tokens": 24}, {"max_new_tokens": 24, "temperature": 1.0, "seed": 5}
    found = {}
    with planner.session("You are a careful household robot." if planner.tokenizer else None) as session:
        found["turn 1"] = turn(session, first, some)
        found["turn 2"] = turn(session, last(second), some)
        with session.fork() as fork:
            found["turn 3"] = turn(session, last(third), some, file)
            found["turn 3 of the fork, drawn"] = turn(fork, last(third), drawn)
        with planner.load_session(file) as loaded:
            found["turn 4 of the loaded"] = turn(loaded, last(first), {**some, "speculative": False})
            said = json.dumps(loaded.messages, default=str)
        found["conversation"] = {"messages": said, "tokens": list(session.tokens)}
    return found


def last(task):
    """A task as a later turn: of messages the last, of ids the first eleven."""
    if isinstance(task, str):
        return task
    return task[-1:] if isinstance(task[0], dict) else task[:11]


def plan_of(plan):
    """A plan without its times."""
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    del values["timings"], values["logprobs"]
    calls = {name: repr(values.pop(name)) for name in ("tool_calls", "malformed")}
    rows = [
        f"{one.token} {one.logprob.hex()} | " + " ".join(f"{top.token}:{top.logprob.hex()}" for top in one.top)
        for one in plan.logprobs
    ]
    return {**values, **calls, "logprobs": rows}


def state(file):
    """SHA-256 of every array of a saved session (safetensors), with dtype and shape."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in sorted(header.items()):
        begin, end = entry["data_offsets"]
        digest = hashlib.sha256(data[start + begin : start + end]).hexdigest()
        found[name] = f"{entry['dtype']} {entry['shape']} {digest}"
    return found


def files(path):
    """SHA-256 of every file of a bundle but its manifest, of which the fields are compared."""
    found = {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "manifest.json"
    }
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    fields = {name: value for name, value in manifest.items() if name not in VERSIONED}
    return {"files": found, "manifest": fields}


def leaves(value, where=()):
    """(path, leaf) of a JSON value; a row of log-probabilities and a list of numbers is one leaf."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*where, name))
    elif isinstance(value, list) and value and isinstance(value[0], str):
        for index, inner in enumerate(value):
            yield (*where, str(index)), inner
    else:
        yield where, value


def kind_of(where):
    """What a leaf is counted as."""
    if where[1] == "files":
        return "kernels" if where[2].startswith("kernels") else "files"
    return where[1] if where[1] == "manifest" else where[3]


def compare(first, second, allowed):
    """Print how many leaves of two records are equal, and every one that is not; whether they are all equal."""
    one, other = (dict(leaves(json.loads(path.read_text(encoding="utf-8"))["bundles"])) for path in (first, second))
    equal, different, lines = Counter(), Counter(), []
    for where in dict.fromkeys([*one, *other]):
        values = [found.get(where, "missing") for found in (one, other)]
        if where in one and where in other and values[0] == values[1]:
            equal[kind_of(where)] += 1
        else:
            different[kind_of(where)] += 1
            texts = [str(value) for value in values]
            begin = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
            at = max(0, begin - 20)
            lines.append(
                f"{' / '.join(where)}, from character {at}:" + "".join(f"\n  {t[at : at + 200]}" for t in texts)
            )
    for kind in sorted({*equal, *different}):
        note = " (allowed)" if different[kind] and kind in allowed else ""
        print(f"{kind:16} equal {equal[kind]:6}  different {different[kind]:6}{note}")
    print(*lines, sep="\n")
    print(f"{equal.total()} equal, {different.total()} different")
    return not any(kind not in allowed for kind, count in different.items() if count)


def say(text):
    print(text, file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="?", help="directory of the bundles")
    kinds = {"nargs": "+", "choices": ["reference", "native", *BUNDLES], "default": [], "metavar": "KIND"}
    parser.add_argument("--build", **kinds, help="bundles to make: reference, native, or one by name")
    parser.add_argument("--run", **kinds, help="bundles to run; of the others that are there only files are recorded")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two such files")
    parser.add_argument("--allow", action="append", default=[], help="of --compare: a kind that may differ, as kernels")
    options = parser.parse_args()
    if options.compare:
        return 0 if compare(*options.compare, options.allow) else 1
    if options.bundles is None or not (options.build or options.output):
        parser.error("give BUNDLES with --build or --output, or --compare A B")
    say(f"edge_dflash of {TREE}")
    for name in chosen(options.build):
        build(options.bundles, name)
    if options.output:
        options.output.write_text(json.dumps(measured(options), indent=0, default=repr) + "\n", encoding="utf-8")
        say(f"written: {options.output}")
    return 0


def chosen(names):
    """Bundles by their names or kinds."""
    return [name for name, (kind, *_) in BUNDLES.items() if name in names or kind in names]


def measured(options):
    """The record of all bundles that are there; torch computes on one thread, so that cores do not count."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
    found = {}
    for name in BUNDLES:
        if not (options.bundles / name / "manifest.json").is_file():
            continue
        began = time.perf_counter()
        found[name] = files(options.bundles / name)
        if name in chosen(options.run):
            with tempfile.TemporaryDirectory() as scratch:
                found[name]["runs"] = record(options.bundles / name, Path(scratch))
        say(f"{name}: {time.perf_counter() - began:.1f} s")
    return {"about": {"tree": str(TREE), "python": sys.version.split()[0]}, "bundles": found}


if __name__ == "__main__":
    sys.exit(main())
