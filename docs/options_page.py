"""Writes the table of options in docs/python.md; ``python docs/options_page.py --check`` fails when it is out of date.

Options are declared in edge_dflash/decode/options.py: here are their names, defaults, flags, places over HTTP, meaning.
"""

import sys
from dataclasses import fields
from pathlib import Path

from edge_dflash.decode.options import DECLARED, Options

PAGE = Path(__file__).resolve().parent / "python.md"
BEGIN, END = "<!-- options: made by docs/options_page.py -->\n", "<!-- end of options -->\n"


def table() -> str:
    """One row an option."""
    rows = ["| option | default | `edge-dflash generate` | over HTTP | |", "|---|---|---|---|---|"]
    for one in fields(Options):
        said = DECLARED[one.name]
        dashed = one.name.replace("_", "-")
        flag = "" if said.flag is None else f"`--{dashed} {said.flag}`".replace(" `", "`").replace("|", "\\|")
        place = f"`edge_dflash.{one.name}`" if said.http else ""
        rows.append(f"| `{one.name}` | `{one.default!r}` | {flag} | {place} | {said.doc} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Write the table, or compare it."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    made = f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"
    if "--check" not in sys.argv:
        PAGE.write_text(made)
    elif made != text:
        print("docs/python.md is out of date; run python docs/options_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
