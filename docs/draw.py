"""Draws the pictures of the documentation: ``python docs/draw.py`` writes them, ``--check`` fails when one is stale.

The rooms and their order are those of tests/test_house.py, and what each is for is the first sentence of its docstring.
The scene is the first held-out one of the demo that sees, in the size that its bundle reads.
"""

import ast
import json
import sys
import zlib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

from floors import FLOORS  # noqa: E402

from edge_dflash.demo.drawing import draw, png  # noqa: E402
from edge_dflash.demo.tasks import PICTURED, task_from_json  # noqa: E402

INK, GREY, BLUE, GREEN, RED, PAPER = "#1f2933", "#d9dee4", "#9ec5f4", "#9fdcb0", "#f3a6a0", "#ffffff"
SHOWN = ("qwen3.6-27b", "qwen3.5-9b", "qwen3-8b", "qwen3.5-4b")  # pairs of the README's table of results


class Picture:
    """An SVG of so many points, made of boxes, words and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'font-size="13" fill="{INK}" role="img"><title>{escape(title)}</title>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def words(self, x: float, y: float, text: str, *, anchor: str = "middle", bold: bool = False) -> None:
        """One line of text; ``y`` is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, text: str = "", fill: str = PAPER) -> None:
        """A rectangle with a word in the middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{INK}"/>'
        )
        self.words(x + width / 2, y + height / 2 + 5, text)

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through ``points`` with a tip at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}" marker-end="url(#tip)"/>')

    def svg(self) -> str:
        """The file."""
        return "\n".join([*self.parts, "</svg>\n"])


def cycle() -> str:
    """One cycle with a block of 6: three drafts are accepted, and four tokens are committed."""
    picture, step = Picture(800, 380, "One cycle: propose, verify, accept, commit"), 46
    column = [290 + step * i for i in range(6)]

    def row(y: int, name: str, cells: list[tuple[str, str]]) -> None:
        picture.words(274, y + 19, name, anchor="end")
        for x, (text, fill) in zip(column, cells, strict=False):
            picture.box(x, y, step - 6, 28, text, fill)

    def model(y: int, name: str, cost: str) -> None:
        picture.box(290, y, 6 * step - 6, 30, name)
        picture.words(582, y + 20, cost, anchor="start")
        for x in column:
            picture.arrow((x + 20, y - 12), (x + 20, y - 1))
            picture.arrow((x + 20, y + 30), (x + 20, y + 41))

    for y, name in ((76, "1 propose"), (206, "2 verify"), (283, "3 accept"), (347, "4 commit")):
        picture.words(16, y, name, anchor="start", bold=True)
    row(16, "anchor and masks", [("a", GREY), *[("mask", PAPER)] * 5])
    model(56, "drafter", "one read of its weights")
    row(98, "its row 0 is discarded", [("", PAPER), *[(f"d{i}", BLUE) for i in range(1, 6)]])
    row(146, "anchor and drafts", [("a", GREY), *[(f"d{i}", BLUE) for i in range(1, 6)]])
    model(186, "target", "one read of its weights")
    row(228, "its own choices", [(f"c{i}", GREY) for i in range(6)])
    marks = [("= d1", GREEN), ("= d2", GREEN), ("= d3", GREEN), ("≠ d4", RED)]
    row(264, "the longest agreeing prefix", marks)
    row(328, "accept length 4", [("d1", GREEN), ("d2", GREEN), ("d3", GREEN), ("c3", GREY)])
    picture.words(490, 347, "the last is the next anchor; length += 4,", anchor="start")
    picture.words(490, 365, "and what lies behind is overwritten: no copy", anchor="start")
    picture.arrow((column[3] + 20, 356), (column[3] + 20, 372), (790, 372), (790, 7), (310, 7), (310, 15))
    return picture.svg()


def speed() -> str:
    """Tokens a second, plain and speculative, of the newest run of each pair in docs/results/bench-h200.json."""
    runs = json.loads((ROOT / "docs" / "results" / "bench-h200.json").read_text(encoding="utf-8"))["runs"]
    newest = {name: run for run in runs if (name := run["pair"].partition(",")[0]) in SHOWN}
    shown = sorted(newest.items(), key=lambda each: each[1]["plain"]["tokens_per_second"])
    picture = Picture(800, 62 * len(shown) + 34, "Tokens a second, plain and speculative")
    scale = 400 / max(run["speculative"]["tokens_per_second"] for _, run in shown)
    for i, (pair, run) in enumerate(shown):
        picture.words(150, 36 + 62 * i, pair, anchor="end", bold=True)
        picture.words(150, 54 + 62 * i, run["weights"].upper(), anchor="end")
        for at, (way, fill) in enumerate((("plain", GREY), ("speculative", GREEN))):
            rate, y = run[way]["tokens_per_second"], 16 + 62 * i + 24 * at
            picture.box(160, y, max(2.0, round(scale * rate)), 20, fill=fill)
            more = f"  ({run['speed_up']:.1f} times)" if at else ""
            picture.words(168 + round(scale * rate), y + 15, f"{rate:,.0f} {way}{more}", anchor="start")
    accepted = shown[0][1]["forced_accept_length"]
    note = f"tokens a second on an H200, the same tokens; random weights, accept length {accepted:g} forced"
    picture.words(160, 62 * len(shown) + 24, note, anchor="start")
    return picture.svg()


def purpose(room: str) -> str:
    """The first sentence of a room's docstring."""
    path = ROOT / "edge_dflash" / room
    text = ast.get_docstring(
        ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    )
    sentence = (text or "").split("\n\n")[0].replace("\n", " ")
    return sentence.partition(". ")[0].rstrip(".").replace("``", "").replace(":class:", "").replace("`", "")


def rooms() -> str:
    """The rooms of the package, highest first: each imports only what lies below it."""
    shown = [room for room in reversed(FLOORS) if not room.startswith("__")]
    picture = Picture(800, 26 * len(shown) + 30, "The rooms of edge_dflash, each importing only lower ones")
    for i, room in enumerate(shown):
        is_folder = (ROOT / "edge_dflash" / room).is_dir()
        picture.box(34, 8 + 26 * i, 100, 22, room + ("/" if is_folder else ".py"), GREY if is_folder else PAPER)
        picture.words(146, 24 + 26 * i, purpose(room), anchor="start")
    picture.arrow((16, 10), (16, 26 * len(shown) + 4))
    picture.words(34, 26 * len(shown) + 22, "imports go down only", anchor="start")
    return picture.svg()


def world() -> bytes:
    """The scene that the README shows."""
    return png(draw(task_from_json(json.loads(PICTURED.read_text(encoding="utf-8").splitlines()[0])).scene))


def content(file: bytes) -> bytes:
    """What a file shows: of a PNG as the demo writes it the pixels, because libraries compress them differently."""
    head, idat = file[:33], file[41:-16]
    return head + zlib.decompress(idat) if file.startswith(b"\x89PNG") else file


def main() -> int:
    """Write the pictures, or compare them."""
    stale = []
    drawn = {"cycle.svg": cycle().encode(), "speed.svg": speed().encode(), "rooms.svg": rooms().encode()}
    for name, made in {**drawn, "world.png": world()}.items():
        path = ROOT / "docs" / "pictures" / name
        if "--check" not in sys.argv:
            path.write_bytes(made)
        elif not path.exists() or content(path.read_bytes()) != content(made):
            stale.append(name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python docs/draw.py", file=sys.stderr)
    return len(stale)


if __name__ == "__main__":
    sys.exit(main())
