"""Rooms import only lower ones, large files say why, functions fit a screen, names are unique, prose says the noun."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from floors import FLOORS
from paths import ROOT

PACKAGE = ROOT / "edge_dflash"
FILES = sorted(PACKAGE.rglob("*.py"))
RANK = {room: i for i, room in enumerate(FLOORS)}
LINES, FUNCTION = 500, 60  # a file above LINES says why in its docstring: "... lines: ..."
SAME_IDEA = {"KvMemory": "the rows of K and V of one layer, in each backend"}  # public classes that two modules hold
TICS = re.compile(  # each stands where a noun or a fact should
    r"(?:^(?:# )?|[.;,(:] )knows\b|\b(?:when|where) there is one\b|\bthere is none\b|\bof (?:its|their) own\b", re.I
)


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules of the package that a file imports at any time; those for type checkers alone are left out."""
    typing = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.dump(test.test)
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "edge_dflash")
        elif isinstance(node, ast.ImportFrom) and node.module == "edge_dflash":
            yield from (f"edge_dflash.{name.name}" if name.name in RANK else "edge_dflash" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("edge_dflash."):
            yield node.module


def test_every_room_has_its_floor():
    found = {path.name if path.is_dir() else path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert found - {"__pycache__"} == set(FLOORS)


def test_rooms_import_only_lower_ones():
    me = {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert not [
        f"{path} imports {module}"
        for path, tree in trees().items()
        for module in imports(tree)
        if room(module) != me[path] and RANK[room(module)] >= RANK[me[path]]
    ]


def test_large_files_say_why():
    large = [path for path in FILES if len(path.read_text().splitlines()) > LINES]
    assert not [path for path in large if "lines:" not in (ast.get_docstring(trees()[path]) or "")]


def test_functions_fit_a_screen():
    assert not [
        f"{path}: {node.name}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= FUNCTION
    ]


def test_an_import_that_goes_up_is_found():
    tree = ast.parse("def late():\n    from edge_dflash.cli import run\n    from edge_dflash import planner, Planner\n")
    assert list(imports(tree)) == ["edge_dflash.cli", "edge_dflash.planner", "edge_dflash"]


def test_no_public_class_has_the_name_of_another():
    found = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert twice.keys() == SAME_IDEA.keys(), twice


def prose(text: str) -> Iterator[str]:
    """Docstrings and comments; what users read in errors and help is left out."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_docstrings_and_comments_have_no_tics():
    assert not [
        f"{path}: {found}" for path in FILES for text in prose(path.read_text()) for found in TICS.findall(text)
    ]


@pytest.mark.parametrize(
    "text",
    [
        '"""Reads files. Knows nothing of models."""',
        "rows = 0  # of the block, where there is one",
        "def f():\n    '''The place, or None when there is none.'''",
        "class A:\n    '''Has memory of its own.'''",
    ],
)
def test_a_tic_is_found(text: str):
    assert any(TICS.search(words) for words in prose(text))
