"""Figures of quality for people: tables, a plot, and the prompts that they are measured on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from rich.table import Table

from edge_dflash.bundle.reader import Bundle
from edge_dflash.cli.output import Columns, say, stages, tabled
from edge_dflash.cli.prompts import is_demo
from edge_dflash.common.files import write_whole
from edge_dflash.decode.backend import Backend
from edge_dflash.demo.tasks import HELDOUT
from edge_dflash.quality.report import Figures, Quality

_COLUMNS: Columns = {
    "": ("0", ""),
    "KLD mean": (lambda row: row[1].kld.mean, ".5f"),
    "p50": (lambda row: row[1].kld.p50, ".5f"),
    "p99": (lambda row: row[1].kld.p99, ".4f"),
    "p99.9": (lambda row: row[1].kld.p999 if row[1].tokens >= 1000 else None, ".4f"),
    "max": (lambda row: row[1].kld.max, ".3f"),
    "top-1": (lambda row: 100 * row[1].top1, ".2f"),
    "top-5": (lambda row: 100 * row[1].top5, ".2f"),
    "perplexity": (lambda row: row[1].perplexity.bundle / row[1].perplexity.source, ".4f"),
    "tokens": (lambda row: row[1].tokens, ",d"),
}
_BAR, _LINE = 420, 20  # points of the longest bar, and of a line


def measuring(
    bundle: Bundle, source: Path, given: Path | None, plot: Path | None
) -> Callable[[Backend | None], Quality]:
    """What measures a bundle by its backend, if it runs here, keeps the figures in it, and draws them.

    ``given``: prompts; None: the demo pair's held-out tasks for it, else calibration prompts that were left over. All
    that is given is checked now.
    """
    from edge_dflash.quality.bundle import SourceModel, TaskSet, keep, measure  # needs torch

    file = HELDOUT if given is None and is_demo(bundle.manifest) else given
    checkpoint, tasks = SourceModel.open(source, bundle.pair), TaskSet.read(file) if file else TaskSet.held_out(bundle)
    whole = bundle.path.resolve()

    def measured(backend: Backend | None) -> Quality:
        with stages() as told:
            folder = whole.with_name(f"{whole.name}.quality")
            found = measure(bundle, checkpoint, tasks, folder=folder, backend=backend, progress=told, say=say)
        try:
            keep(bundle.path, found)
        except OSError as error:
            say(f"warning: the figures are not kept in {bundle.path}: {error.strerror or error}")
        if plot is not None:
            write_whole(plot, quality_plot(found).encode())
            say(f"wrote {plot}")
        return found

    return measured


def quality_table(quality: Quality, *, short: bool = False) -> Table:
    """What the bundle costs, parts, the worst layers, and where in the answer; ``short``: up to the parts."""
    rows: list[tuple[str, Figures]] = [("all", quality)]
    rows += [(name, one) for name, one in (("weights", quality.weights), ("KV cache", quality.kv)) if one is not None]
    if (own := quality.backend) is not None:
        rows += [(f"{own.name} backend", own), ("that alone", own.against_reference)]
    sections = list[int]()
    for some in (quality.parts, *(() if short else (quality.layers, quality.where))):
        sections.append(len(rows))
        rows += some.items()
    title = f"KLD to the source in nats: {quality.kld.mean:.4f}, {quality.band}"
    table, notes = tabled(title, rows, _COLUMNS, sections=sections), quality.protocol
    table.caption_justify, table.caption = (
        "left",
        f"perplexity is a multiple of the source's, which is {quality.perplexity.source:.4f} on all; prompts: "
        f"{notes.prompts}; answers: {notes.answers}; {notes.layers}, on {notes.unit_tokens} tokens",
    )
    return table


def quality_plot(quality: Quality) -> str:
    """An SVG of bars: mean KLD of parts, and of every unit in the order of layers."""
    groups: tuple[Mapping[str, Figures], ...] = (quality.parts, quality.units)
    bars = [(name, one.kld.mean) for group in groups for name, one in group.items()]
    largest = max([mean for _, mean in bars] or [0.0]) or 1.0
    title = f"mean KLD in nats, each part alone and each unit alone (all together: {quality.kld.mean:.5f})"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {_LINE * (len(bars) + 2)}" '
        f'font-family="sans-serif" font-size="13"><text x="8" y="{_LINE - 5}">{escape(title)}</text>'
    ]
    for at, (name, mean) in enumerate(bars, 1):
        y, width = at * _LINE, _BAR * mean / largest
        fill = "#9ec5f4" if at <= len(quality.parts) else "#9fdcb0"
        lines += [
            f'<text x="192" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="200" y="{y + 3}" width="{width:.1f}" height="{_LINE - 6}" fill="{fill}"/>',
            f'<text x="{206 + width:.1f}" y="{y + 15}">{mean:.2g}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])
