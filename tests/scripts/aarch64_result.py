"""What a run of aarch64.sh found, as JSON: sizes, versions, steps, tests.

Arguments: its folder, the folder of the emulated system, the commit, and a file for the result.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

OWN = ("pip", "setuptools", "pkg_resources")  # python3 -m venv puts them there


def tests(path):
    """Counts of a JUnit report, and the names of what failed."""
    if not path.exists():
        return None
    cases = list(ElementTree.parse(path).iter("testcase"))
    of = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    bad = of["failure"] + of["error"]
    return {
        "rule": "all but those that need torch or NVRTC, which skip themselves",
        "passed": len(cases) - len(bad) - len(of["skipped"]),
        "failed": len(bad),
        "skipped": len(of["skipped"]),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
    }


def main(work, root, commit, result=None):
    sizes = {}  # MiB
    for line in (work / "sizes").read_text().splitlines():
        size, path = line.split("\t")
        sizes[Path(path).name] = int(size)
    environment = sizes.pop("robot")
    own = sum(sizes.get(name, 0) for name in OWN)
    largest = sorted(((size, name) for name, size in sizes.items() if name not in OWN), reverse=True)[:10]
    steps = [line.split("\t") for line in (work / "steps.tsv").read_text().splitlines()]
    said = (work / "packages.out").read_text().splitlines()
    packages = json.loads(next(line for line in said if line.startswith("[")))
    plan = (work / "plan.out").read_text().splitlines() if (work / "plan.out").exists() else []
    if plan and plan[-1].startswith("{"):
        plan = json.loads(plan[-1])
    found = {
        "what": "The extra robot on Debian 12 for arm64 under qemu-user, by tests/scripts/aarch64.sh.",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit,
        "emulator": subprocess.run(
            ["qemu-aarch64-static", "--version"], capture_output=True, text=True, check=False
        ).stdout.partition("\n")[0],
        "installed_mib": environment - own,
        "with_pip_and_setuptools_mib": environment,
        "largest_mib": {name: size for size, name in largest},
        "downloaded_mb": round(sum(path.stat().st_size for path in (root / "wheels").iterdir()) / 1e6),
        "packages": {package["name"]: package["version"] for package in packages},
        "steps": {name: {"exit_code": int(code), "seconds": int(seconds)} for name, code, seconds in steps},
        "tests": tests(root / "tests.xml"),
        "reference_plan": plan or None,  # its JSON, or what it said instead
    }
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if result:
        Path(result).write_text(text)


if __name__ == "__main__":
    main(*(Path(part) for part in sys.argv[1:3]), *sys.argv[3:])
