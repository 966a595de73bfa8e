"""What every odd file of tests/support/odd_files.py costs: exit code, seconds and memory of the command that meets it.

    python tests/scripts/odd_files.py [WORDS...]

Cases whose name has one of the words; all without. Each runs as a user would run it, may take 60 s, and
must end with one line. The last line is one JSON object.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from odd_files import BUNDLES, CONFIGS, RECIPES, TENSORS
from paths import GOLDEN

MOST_SECONDS = 60


def pair(root):
    return [shutil.copytree(GOLDEN / name, root / name) for name in ("qwen3_5-tiny", "qwen3_5-tiny-dflash")]


def measured(*argv):
    """Exit code, seconds, MB of the largest process, last line."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "edge_dflash", *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output = process.communicate(timeout=MOST_SECONDS)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0].decode(errors="replace") + f"killed after {MOST_SECONDS} s"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in output.splitlines() if not line.startswith(("building", "warning:"))]
    return process.returncode, time.monotonic() - began, after.ru_maxrss / 1024, lines


def cases():
    for name, spoil in {**CONFIGS, **TENSORS}.items():
        for command in ("build", "inspect") if name in CONFIGS else ("build",):

            def run(root, spoil=spoil, command=command):
                target, drafter = pair(root)
                spoil(target, drafter)
                words = ["--target", target, "--drafter", drafter]
                return [command, *words, *(["--output", root / "out"] if command == "build" else [])]

            yield f"{command}: {name}", run
    for name, body in RECIPES.items():

        def run(root, body=body):
            recipe = root / "r.yaml"
            recipe.write_bytes(body if isinstance(body, bytes) else body.encode())
            target, drafter = pair(root)
            return ["build", "--target", target, "--drafter", drafter, "--recipe", recipe, "--output", root / "out"]

        yield f"build: recipe of {name}", run
    for name, spoil in BUNDLES.items():

        def run(root, spoil=spoil):
            target, drafter = pair(root)
            words = ["--target", target, "--drafter", drafter, "--output", root / "bundle", "--no-calibrate"]
            subprocess.run([sys.executable, "-m", "edge_dflash", "build", *map(str, words)], check=True, stderr=-3)
            spoil(root / "bundle")
            return ["generate", root / "bundle", "--ids", "1"]

        yield f"generate: {name}", run


def one(name, run):
    """In a child of its own, so that its memory is nobody else's."""
    with tempfile.TemporaryDirectory() as root:
        argv = run(Path(root))
        code, seconds, megabytes, lines = json.loads(
            subprocess.run(
                [sys.executable, __file__, "--child", *map(str, argv)], stdout=subprocess.PIPE, check=True
            ).stdout
        )
        good = code not in (0, None) and code > 0 and len(lines) == 1 and lines[0].startswith("error: ")
        line = (lines or [""])[-1].replace(root + os.sep, "")
        print(
            f"{'' if good else 'BAD '}{name}: exit {code}, {seconds:.1f} s, {megabytes:.0f} MB: {line[:170]}",
            flush=True,
        )
        return {"name": name, "exit": code, "seconds": round(seconds, 1), "megabytes": round(megabytes), "good": good}


def main():
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measured(*sys.argv[2:])))
        return
    words = sys.argv[1:]
    found = [one(name, run) for name, run in cases() if not words or any(word in name for word in words)]
    bad = [case["name"] for case in found if not case["good"]]
    most = {key: max((case[key] for case in found), default=0) for key in ("seconds", "megabytes")}
    print(json.dumps({"cases": len(found), "bad": bad, **most}))


if __name__ == "__main__":
    main()
