"""Writes figures that are arithmetic into the pages; ``python docs/figures.py --check`` fails when some are old.

Each stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``, is what ``edge-dflash inspect`` counts of
Qwen3.6-27B with the recipe qwen3.6-27b-sm110, and is written by the function of its name below.
"""

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from edge_dflash.board.archs import find_arch
from edge_dflash.board.profiles import load_board
from edge_dflash.checks.inspect import LANES, Inspection, inspect_recipe
from edge_dflash.cli.build import find_recipe
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PAIR = ROOT / "tests" / "configs" / "qwen3.6-27b-sees"
RECIPE = "qwen3.6-27b-sm110"
PAGES = ("thor.md", "results.md", "backends.md", "lab/tower.md", "lab/prefill.md")
MARKED = re.compile(r"(<!-- figures: (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)
BOARDS = ("agx-thor", "t4000", "orin-agx-64")
PROMPTS = (512, 2048)  # tokens


@cache
def inspected(board: str, lanes: int = 1) -> Inspection:
    """The pair on a board."""
    pair, recipe = read_pair(PAIR / "target", PAIR / "drafter"), load_recipe(find_recipe(Path(RECIPE)))
    return inspect_recipe(pair, recipe, board=load_board(board), lanes=lanes)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown between empty lines."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n\n" + "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n\n"


def span(milliseconds: float) -> str:
    """Milliseconds, or seconds where they are many."""
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1e3:.2f} s"


def lanes() -> str:
    """Joint cycles of a T5000."""
    found = inspected("agx-thor").by_lanes
    drafts = sorted({one.drafts for one in found.cycles})
    rows = []
    for count in LANES:
        held = sum(part.all for part in inspected("agx-thor", count).by_lanes.parts)
        cells = [
            f"{one.floor_ms:.1f}, {one.tokens_per_second:.0f}{'' if one.memory_ms >= (one.product_ms or 0) else ' *'}"
            for one in found.cycles
            if one.lanes == count
        ]
        rows.append([str(count), f"{held / 1e9:.2f} GB", *cells])
    head = [f"{count} drafts" if count else "plain" for count in drafts]
    return table(["lanes", "memory of the lanes, 32,768 tokens each", *head], rows)


def prompts() -> str:
    """Prompts and pictures of boards of Thor and Orin."""
    every = [inspected(name) for name in BOARDS]
    rows = [["a pass of a prompt", *(f"{one.prefill_chunk} tokens, {span(chunk(one))}" for one in every)]]
    for tokens in PROMPTS:
        rows.append([f"first token after {tokens:,} tokens", *(span(first_token(one, tokens)) for one in every)])
    rows.append(["a frame of 800 x 600, its tower alone", *(span(frame(one)) for one in every)])
    rows.append(["and the prompt's 475 rows of it", *(span(frame(one) + first_token(one, 475)) for one in every)])
    return table(["", *(one.board.title for one in every)], rows)


def chunk(found: Inspection) -> float:
    """Milliseconds of a pass of a prompt."""
    assert found.prefill_chunk_ms is not None
    return found.prefill_chunk_ms


def first_token(found: Inspection, tokens: int) -> float:
    """Milliseconds of a prompt."""
    return chunk(found) * tokens / found.prefill_chunk


def frame(found: Inspection) -> float:
    """Milliseconds of a picture."""
    assert found.tower is not None
    assert found.tower.milliseconds is not None
    return found.tower.milliseconds


def rates() -> str:
    """What the figures of a T5000 stand on."""
    board, rows = load_board("agx-thor"), []
    for use, rate in find_arch(str(board.sm)).rates.items():
        flops = ", ".join((f"{n} rows: " if n else "") + f"{f / 1e12:.3g}" for n, f in rate.by_rows(board.chip))
        rows.append([use, f"`{rate.kernel}`", flops, rate.how, rate.where])
    return table(["of", "kernel", "TFLOP/s", "known", "from, on an H200"], rows)


def free() -> str:
    """Rows that memory hides, and those that it nearly does."""
    found, joint = inspected("agx-thor").by_lanes, find_arch("sm110").joint
    two, four = (next(one for one in found.cycles if (one.lanes, one.drafts) == (n, 15)) for n in (2, 4))
    assert two.product_ms
    assert four.product_ms
    return (
        f"Reading the weights hides the products of {found.free_rows} rows of a verify; {two.rows} take "
        f"{two.product_ms:.1f} ms where memory takes {two.memory_ms:.1f}, and {four.rows} rows {four.product_ms:.0f} "
        f"(`{joint.kernel}`, {joint.how})."
    )


def floors() -> str:
    """Bytes of a cycle on a T5000."""
    found = inspected("agx-thor")
    verify, draft = (found.board.milliseconds(size) for size in (found.verify_bytes, found.draft_bytes))
    kv = f"{found.kv_bytes_per_token:,} and {found.drafter_kv_bytes_per_token:,} bytes"
    state = f"{found.state_bytes / 1e6:.1f} MB; {found.tape_bytes_per_row / 1e6:.1f} MB"
    return table(
        ["Qwen3.6-27B with its DFlash drafter (block 16)", ""],
        [
            ["target weights read by a verify", f"{found.verify_bytes / 1e9:.2f} GB, {verify:.1f} ms"],
            [
                "drafter weights and the head again, read by a draft",
                f"{found.draft_bytes / 1e9:.2f} GB, {draft:.1f} ms",
            ],
            ["keys and values per token (FP8), target and drafter", kv],
            ["recurrent state; what a row adds until it is committed", state],
            [
                "whole cycle, at least",
                f"{found.floor_ms:.1f} ms; a token without drafter: {found.plain_floor_ms:.1f} ms",
            ],
        ],
    )


def passes() -> str:
    """The default chunk of a T5000."""
    return f"27B on Thor: {inspected('agx-thor').prefill_chunk}"


def linears() -> str:
    """A prompt's linears on a T5000."""
    return f"{span(first_token(inspected('agx-thor'), PROMPTS[-1]))}"


def tower() -> str:
    """A frame's tower on a T5000."""
    found = inspected("agx-thor")
    assert found.tower is not None
    return f"{found.tower.operations / 1e12:.2f} TFLOP) of the 27B's tower takes {frame(found):.0f} ms on a Thor"


FIGURES: dict[str, Callable[[], str]] = {
    each.__name__: each for each in (lanes, prompts, rates, free, floors, linears, passes, tower)
}


def written(text: str) -> str:
    """A page with its figures."""
    return MARKED.sub(lambda found: found[1] + FIGURES[found[2]]() + found[4], text)


def main() -> int:
    """Write the pages, or with ``--check`` say which are old."""
    old = []
    for name in PAGES:
        path = ROOT / "docs" / name
        text = path.read_text()
        if (new := written(text)) != text:
            old.append(name)
            if "--check" not in sys.argv:
                path.write_text(new)
    if old and "--check" in sys.argv:
        print(f"{', '.join(old)}: figures are not those of the program; run python docs/figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
