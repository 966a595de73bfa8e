"""Many random mixes on the reference: python -m tests.scripts.lanes --mixes 500 (about two seconds each)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from golden_pairs import NAMES
from lane_mixes import Mix, differences


def main() -> int:
    """Run them; 1 where a request differs from what it is alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, default=500, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    asked = parser.parse_args()
    requests, wrong, full = 0, 0, 0
    for number in range(asked.mixes):
        mix = Mix(NAMES[number % len(NAMES)], asked.first + number).run()
        requests, wrong, full = requests + len(mix.ended), wrong + len(differences(mix)), full + (mix.most == 4)
        print(f"\r{number + 1} mixes, {requests} requests, {wrong} differ", end="", file=sys.stderr, flush=True)
    print(f"{asked.mixes} mixes, {full} of them with four lanes in one pass, {requests} requests: {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
