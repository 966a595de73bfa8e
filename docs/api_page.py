"""Writes docs/api.md from the docstrings; ``python docs/api_page.py --check`` fails when the page is out of date.

Reads the sources with griffe and renders them with griffe2md (the extra ``dev``); nothing is imported.
"""

import re
import subprocess
import sys
from pathlib import Path

import griffe
from griffe2md import render_object_docs

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# API reference

Everything that `from edge_dflash import ...` gives, and `build`. Made from the docstrings by `python docs/api_page.py`.
"""
BUILD = ("edge_dflash.builder.write.BuildConfig", "edge_dflash.builder.write.build")
STYLE = {
    "heading_level": 2,
    "show_root_full_path": False,
    "show_object_full_path": False,
    "show_signature_annotations": True,
    "filters": ["!^_"],
    "inherited_members": True,
    "summary": False,
    "docstring_style": "google",
}


def take_comments(found: griffe.Class) -> None:
    """The comment behind a field is what is said of it; what is never commented on is left out."""
    for name, member in list(found.members.items()):
        if isinstance(member, griffe.Attribute) and member.docstring is None:
            _, marked, comment = (member.source or "").partition("  # ")
            if marked:
                member.docstring = griffe.Docstring(comment.strip()[:1].upper() + comment.strip()[1:] + ".")
            else:
                del found.members[name]


def described(package: griffe.Module, name: str) -> str:
    """One public name with its members, as Markdown. Roles of Sphinx become code, headings lose their module."""
    found = package[name]
    found = found.final_target if found.is_alias else found
    if isinstance(found, griffe.Class):
        take_comments(found)
    text = render_object_docs(found, STYLE)
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r"\[([\w.]+)\]\(#[\w.]+\)", r"\1", text)
    text = re.sub(r"(?<!`)``(?!`)", "`", re.sub(r"</?code>", "`", text))
    return re.sub(r"(?m)^(#+) `(?:\w+\.)+(\w+\.\w+)`$", r"\1 `\2`", text)


def page() -> str:
    """The whole page, names in the order of ``__all__``."""
    package = griffe.load("edge_dflash", search_paths=[str(ROOT)], allow_inspection=False)
    names = [str(name) for name in package.exports or () if str(name) != "__version__"]
    names += [name.removeprefix("edge_dflash.") for name in BUILD]
    text = HEAD + "".join("\n" + re.sub(r"\n{3,}", "\n\n", described(package, name)).strip() + "\n" for name in names)
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(PAGE), "-"]
    return subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    """Write the page, or compare it."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print("docs/api.md is out of date; run python docs/api_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
