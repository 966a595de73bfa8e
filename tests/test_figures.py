"""Figures of the pages that are arithmetic are those of the program."""

import re
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import figures

from edge_dflash.board.archs import arch_of_sm

DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", figures.PAGES)
def test_pages_have_the_figures_of_the_program(page):
    text = (DOCS / page).read_text()
    assert figures.MARKED.search(text)
    assert figures.written(text) == text, "run python docs/figures.py"


def test_every_figure_stands_in_a_page_and_no_mark_in_another():
    marks = {page: figures.MARKED.findall(page.read_text()) for page in (DOCS).rglob("*.md")}
    used = {name for found in marks.values() for _, name, _, _ in found}
    assert used == figures.FIGURES.keys()
    assert {str(page.relative_to(DOCS)) for page, found in marks.items() if found} == set(figures.PAGES)


def test_an_old_figure_is_found_and_written(tmp_path, monkeypatch, capsys):
    for page in figures.PAGES:
        (tmp_path / "docs" / page).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "docs" / page).write_text((DOCS / page).read_text())
    thor = tmp_path / "docs" / "thor.md"
    thor.write_text(thor.read_text().replace("first token after 512 tokens | ", "first token after 512 tokens | 9"))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "PAIR", ROOT / "tests" / "configs" / "qwen3.6-27b-sees")
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 1
    assert "thor.md: figures are not those of the program" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 0
    assert thor.read_text() == (DOCS / "thor.md").read_text()


def test_the_table_of_lanes_is_what_inspect_counts():
    rows = re.findall(r"^\| ([1248]) \| [\d.]+ GB \| (.+) \|$", (DOCS / "thor.md").read_text(), re.MULTILINE)
    cycles = figures.inspected("agx-thor").by_lanes.cycles
    assert [int(lanes) for lanes, _ in rows] == [1, 2, 4, 8]
    for lanes, cells in rows:
        for cell, one in zip(cells.split(" | "), [one for one in cycles if one.lanes == int(lanes)], strict=True):
            milliseconds, tokens, star = re.fullmatch(r"([\d.]+), (\d+)( \*)?", cell).groups()
            assert float(milliseconds) == pytest.approx(one.floor_ms, abs=0.06)
            assert int(tokens) == pytest.approx(one.tokens_per_second, abs=0.51)
            assert bool(star) == (one.product_ms > one.memory_ms)


def test_no_page_promises_more_than_mma_does_on_a_thor():
    thor = arch_of_sm(110)
    most = thor.mma * thor.chip.clocks / 1e12
    table = (DOCS / "thor.md").read_text().split("<!-- figures: rates -->")[1].split("<!-- end -->")[0]
    found = re.findall(r"(?<=[|:] )(\d+\.?\d*)(?=[, ])(?! rows)", table)
    assert len(found) >= 7
    assert all(float(rate) <= most for rate in found)
