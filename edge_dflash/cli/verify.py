"""``edge-dflash verify``: is a bundle lossless here, and is the reference right for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edge_dflash.backends.selftest import AcceptanceCheck, SelfTestResult, check_acceptance, replay
from edge_dflash.bench.golden import GoldenComparison, verify_golden
from edge_dflash.bench.provenance import write_report
from edge_dflash.bench.subjects import bench_bundle
from edge_dflash.bench.workload import Workload
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import SelfTest, load_selftest
from edge_dflash.checks.doctor import examine, gather
from edge_dflash.checks.doctor import report as doctor_report
from edge_dflash.checks.lossless import SAMPLED, Verification, verify_lossless
from edge_dflash.checks.mixes import MixCheck, Watching, verify_mixes
from edge_dflash.cli.build import given_drafter
from edge_dflash.cli.output import Columns, Json, emit_json, named_table, say, show, stages, tabled
from edge_dflash.cli.prompts import bench_prompts, default_prompts, read_prompts
from edge_dflash.cli.quality import measuring, quality_table
from edge_dflash.cli.usage import opt
from edge_dflash.common.files import check_writable
from edge_dflash.common.tables import encode
from edge_dflash.decode.shape import MOST_LANES
from edge_dflash.errors import BackendError, RequestError, VerificationError
from edge_dflash.planner import Planner
from edge_dflash.quality.report import Quality
from edge_dflash.runner.settings import OpenOptions

REPORT_CONTEXT, REPORT_TOKENS = 128, 64  # of the benchmark in a report

Prompts = Annotated[
    Path | None, opt("FILE", "JSONL of prompts; default: the demo pair's tasks for it, else some of calib/.")
]
Report = Annotated[
    Path | None, opt("FILE", "Write all that was found, a benchmark and the doctor's checks to this file.")
]
QualitySource = Annotated[Path | None, opt("DIR", "Measure BUNDLE's quality against this checkpoint of its target.")]


def verify(
    bundle: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="Directory that a build made.")] = None,
    prompts: Prompts = None,
    count: Annotated[int, opt("N", "Most prompts to take.", min=1)] = 2,
    max_new_tokens: Annotated[int, opt("N", "Tokens to generate for each prompt.", min=1)] = 48,
    checkpoint: Annotated[Path | None, opt("DIR", "Target checkpoint to compare with --golden.")] = None,
    drafter: Annotated[Path | None, opt("DIR", "Drafter checkpoint to compare with --golden, or none.")] = None,
    golden: Annotated[Path | None, opt("FILE", "Golden file (safetensors) for the two checkpoints.")] = None,
    lanes: Annotated[int | None, opt("N", "Requests at once; default: BUNDLE's lanes.", min=1, max=MOST_LANES)] = None,
    report: Report = None,
    quality: QualitySource = None,
    plot: Annotated[Path | None, opt("FILE", "Draw that as an SVG; with --report also beside it.")] = None,
    json: Json = False,
) -> None:
    """Check that speculative output equals plain output, or that the reference equals a golden file.

    With BUNDLE: each prompt is decoded plainly, with the bundle's drafter and with drafters made to break the loop,
    greedily and sampled; tokens and the state of both models must be equal bit for bit. What the build recorded as the
    bundle's self-test is replayed, and its prompt is decoded: the drafter must accept 0.7 of what it accepted at build,
    in all and at each position. A line of --prompts holds {"ids": [...]}, {"text": "..."} or {"messages": [...]}.
    With several lanes, random mixes of requests are compared with each request alone.

    --report FILE makes one JSON file to attach to a report: these checks, a short benchmark, what the doctor finds, the
    bundle's versions and the machine. It is written also when something differs, then without the benchmark.

    --quality DIR measures the distribution of the next token against the target's checkpoint, over --prompts and their
    answers, as far as time and memory allow; docs/quality.md explains the figures, which stay in BUNDLE. A bundle that
    cannot run here is measured without the other checks. A killed measurement goes on with the same command.

    With --checkpoint, --drafter and --golden: the unquantized models run in float32 and are compared with arrays that
    another implementation wrote.

    The last line says it: "lossless: yes", or "lossless: no" and why. The exit code is 9 when something differs; the
    JSON object is printed all the same.

    JSON keys: ok, differences (of a bundle: a list; of a golden file: largest difference per key). Bundle also:
    lossless (no speculative output differs; null: not known), summary (the last line), accept_length, acceptance (share
    of the own drafts accepted, by position), acceptance_at_build (null without a self-test), prompts, runs, tokens,
    block_size, accept_histogram, untried_accept_lengths, self_test (what the build recorded, replayed here: an object
    with ok, verdict (identical, rounding or fault), exact, accept_length, accept_length_at_build, floor, tokens,
    tokens_equal, first_difference, drafts, drafts_equal, tower (rows of a picture: ok, moved, bound; null without one),
    diagnosis, seconds; null without one), drafter (its acceptance on the self-test's prompt: an object with ok, unknown
    (why nothing is judged, or null), accept_length, accept_length_at_build, floor, acceptance, acceptance_at_build,
    positions_below), mixes (of several lanes: ok, lanes, mixes, requests, tokens, joint_cycles, differences; else
    null), quality (docs/quality.md; null without --quality). Golden file also: largest_difference, logits_difference,
    tokens_equal, failures, missing, skipped, unknown.
    """
    given = (checkpoint, drafter, golden)
    if (bundle is None) == (golden is None) or (bundle is not None and any(given)):
        raise RequestError("give BUNDLE, or --checkpoint, --drafter and --golden")
    drawn = _drawn(bundle, report, quality, plot)
    if bundle is not None:
        _verify_bundle(bundle, report, prompts, count, max_new_tokens, lanes, json, quality, drawn)
    elif checkpoint is None or drafter is None or golden is None:
        raise RequestError("--golden needs --checkpoint and --drafter, the directories of the two checkpoints")
    else:
        _verify_golden(verify_golden(checkpoint, given_drafter(drafter), golden), json)


def _drawn(bundle: Path | None, report: Path | None, quality: Path | None, plot: Path | None) -> Path | None:
    """The file of the plot. Raises RequestError for one, or a report, that cannot be written or has no bundle."""
    asked = {"--report": report, "--quality": quality, "--plot": plot}
    if bundle is None and (odd := next((option for option, given in asked.items() if given), None)):
        raise RequestError(f"{odd} belongs to BUNDLE; leave it out with --golden")
    if plot is not None and quality is None:
        raise RequestError("--plot draws what --quality measures; give that too")
    drawn = plot or (report.with_suffix(".svg") if report and quality else None)
    for path, option in ((report, "--report"), (drawn, "--plot")):
        if path is not None:
            check_writable(path, option)
    return drawn


@dataclass(frozen=True)
class _Outcome:
    """What was found of a bundle."""

    result: Verification
    recorded: SelfTest | None
    self_test: SelfTestResult | None
    drafting: AcceptanceCheck
    mixes: MixCheck | None
    quality: Quality | None

    @property
    def faults(self) -> list[str]:
        """What is not as it was at build."""
        faults = [] if self.drafting.ok else [f"the drafter accepts too little: {self.drafting.summary}"]
        if self.self_test is not None and not self.self_test.ok:
            faults.append(f"the self-test failed: {self.self_test.diagnosis} ({self.self_test.summary})")
        return faults

    @property
    def verdict(self) -> tuple[bool | None, str]:
        """Whether nothing differs (None: no requests shared passes as they were to), and the outcome in words."""
        result, mixes = self.result, self.mixes
        if result.differences:
            return False, f"no, speculative output differs from plain output in {len(result.differences)} places"
        if mixes is not None and mixes.differences:
            return False, f"no, requests together differ from requests alone in {len(mixes.differences)} places"
        if mixes is not None and not mixes.joint_cycles:
            return None, "not known, no two requests shared a pass; give more --prompts"
        return True, f"yes, but {'; '.join(self.faults)}" if self.faults else "yes"

    @property
    def summary(self) -> str:
        """The last line."""
        return f"lossless: {self.verdict[1]}"

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a bundle."""
        parts = (self.result, self.self_test, self.drafting, self.mixes)
        return {
            "lossless": self.verdict[0],
            "summary": self.summary,
            **self.result.to_json(),
            "ok": all(part is None or part.ok for part in parts),
            "acceptance_at_build": None if self.recorded is None else list(self.recorded.acceptance),
            "self_test": None if self.self_test is None else self.self_test.to_json(),
            "drafter": self.drafting.to_json(),
            "mixes": None if self.mixes is None else self.mixes.to_json(),
            "quality": encode(self.quality),
        }

    def show(self) -> None:
        """Print the outcome for people."""
        at_build = () if self.recorded is None else self.recorded.acceptance
        show(_lossless_table(self.result), _acceptance_table(self.result.acceptance, at_build))
        if self.quality is not None:
            show(quality_table(self.quality))
        if self.mixes is not None:
            print(f"lanes: {self.mixes.summary}")
        print(f"self-test: {'the build recorded none' if self.self_test is None else self.self_test.summary}")
        print(f"drafter: {self.drafting.summary}\n{self.summary}", flush=True)

    def check(self) -> None:
        """Raise VerificationError unless all is good."""
        self.result.check()
        if self.mixes is not None:
            self.mixes.check()
        if self.faults:
            raise VerificationError(f"{'; '.join(self.faults)}; build or copy the bundle again")


def _verify_bundle(
    bundle: Path,
    report: Path | None,
    prompts: Path | None,
    count: int,
    max_new_tokens: int,
    lanes: int | None,
    json: bool,
    source: Path | None,
    plot: Path | None,
) -> None:
    """Verify a bundle, say and write what was found, then raise VerificationError unless it is good."""
    opened = Bundle.open(bundle, check_hashes=False)
    measured = None if source is None else measuring(opened, source, prompts, plot)
    recorded = load_selftest(opened)
    watching, given = Watching(), read_prompts(prompts) if prompts is not None else None
    try:
        with stages("opening the bundle") as told:
            settings: OpenOptions = {"self_test": "off", "fallback": False, "lanes": lanes}
            planner = Planner.open(bundle, progress=told, observer=watching, **settings)
    except BackendError as error:
        if measured is None:
            raise
        say(f"only the quality is measured: {error}")
        return _tell_quality(bundle, measured(None), report, json)
    with planner:
        tasks = given if given is not None else default_prompts(planner, max_new_tokens, bundle)
        ids = [planner.encode(task) for task in tasks[:count]]
        backend, stop = planner.backend, planner.stop_token_ids
        with stages("self-test"):
            self_test, drafting = replay(opened, backend), check_acceptance(backend, recorded)
        result = verify_lossless(backend, ids, max_new_tokens=max_new_tokens, stop_token_ids=stop, progress=say)
        mixes = verify_mixes(planner, watching, ids, max_new_tokens, say) if planner.shape.lanes > 1 else None
        quality = None if measured is None else measured(planner.backend)
    outcome = _Outcome(result, recorded, self_test, drafting, mixes, quality)
    found = outcome.to_json()
    if json:
        emit_json(found)
    else:
        outcome.show()
    if report is not None:
        write_report(report, bundle, found, _bench(bundle) if found["ok"] else None, _doctor(bundle))
        say(f"wrote {report}")
    outcome.check()


def _tell_quality(bundle: Path, quality: Quality, report: Path | None, json: bool) -> None:
    """Say and write what was found of a bundle that does not run here."""
    summary = "lossless: not known, the bundle does not run here"
    found = {"lossless": None, "summary": summary, "ok": True, "differences": [], "quality": encode(quality)}
    if json:
        emit_json(found)
    else:
        show(quality_table(quality))
        print(summary, flush=True)
    if report is not None:
        write_report(report, bundle, found, None, _doctor(bundle))
        say(f"wrote {report}")


def _bench(bundle: Path) -> dict[str, Any]:
    """A short benchmark, with the bundle loaded anew."""
    work = Workload(context=REPORT_CONTEXT, tokens=REPORT_TOKENS, prefill=(REPORT_CONTEXT,))
    return bench_bundle(bundle, lambda planner: bench_prompts(bundle, planner, REPORT_TOKENS), work, say=say).to_json()


def _doctor(bundle: Path) -> dict[str, Any]:
    facts = gather(bundle)
    return doctor_report(examine(facts), facts)


def _verify_golden(result: GoldenComparison, json: bool) -> None:
    """Print the outcome, then raise VerificationError unless it is good."""
    if json:
        emit_json(result.to_json())
    else:
        show(_golden_table(result))
        tokens = "equal" if result.tokens_equal else "not equal"
        print(
            f"{len(result.results)} arrays, {len(result.failures)} beyond their bounds; logits differ by at most "
            f"{result.logits_difference:.1e}, tokens are {tokens}"
        )
    result.check()


def _lossless_table(result: Verification) -> Table:
    def mean_length(drafter: str, drawn: bool) -> float | None:
        runs = [run for run in result.runs if (run.drafter, bool(run.temperature)) == (drafter, drawn)]
        lengths = [n for run in runs for n in run.accept_lengths]
        return sum(lengths) / len(lengths) if lengths else None

    columns: Columns = {
        "drafter": (str, ""),
        "runs": (lambda name: sum(run.drafter == name for run in result.runs), "d"),
        "tokens": (lambda name: sum(run.tokens for run in result.runs if run.drafter == name), "d"),
        "accept length, greedy": (lambda name: mean_length(name, False), ".2f"),
        f"at temperature {SAMPLED.temperature:g}": (lambda name: mean_length(name, True), ".2f"),
        "differences": (lambda name: sum(one.drafter == name for one in result.differences), "d"),
    }
    prompts = f"{result.prompts} prompt{'s' if result.prompts != 1 else ''}"
    return tabled(f"Speculative against plain decoding, {prompts}", result.histogram, columns)


def _acceptance_table(here: Sequence[float], at_build: Sequence[float]) -> Table:
    title, right = "Share of the own drafts that were accepted", ("these prompts", "the self-test's, at build")
    table = named_table(title, "position", right=right)
    for position, shares in enumerate(zip_longest(here, at_build), 1):
        table.add_row(str(position), *("" if share is None else f"{share:.2f}" for share in shares))
    return table


def _golden_table(result: GoldenComparison) -> Table:
    table = Table("key", "difference", "accepted", "", title="Largest difference per key", title_justify="left")
    for row in result.results:
        accepted = "any" if row.tolerance is None else f"{row.tolerance:.3g}"
        table.add_row(row.key, f"{row.difference:.3g}", accepted, "" if row.ok else "differs")
    for key, what in (
        *((key, "not in the file") for key in result.missing),
        *((k, "not compared") for k in result.unknown),
    ):
        table.add_row(key, what, "", "")
    return table
