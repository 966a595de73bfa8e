"""``edge-dflash verify``: is a bundle lossless here, and is the reference right for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edge_dflash.backends.selftest import replay
from edge_dflash.backends.selftest_result import SelfTestResult
from edge_dflash.bench.provenance import check_report, write_report
from edge_dflash.bench.subjects import bench_bundle
from edge_dflash.bench.workload import Workload
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import SelfTest, load_selftest
from edge_dflash.checks.acceptance import AcceptanceCheck, check_acceptance
from edge_dflash.checks.doctor import examine, gather
from edge_dflash.checks.doctor import report as doctor_report
from edge_dflash.checks.golden import GoldenComparison, verify_golden
from edge_dflash.checks.lossless import SAMPLED, SpeculativeRun, Verification, verify_lossless
from edge_dflash.checks.mixes import MixCheck, Watching, verify_mixes
from edge_dflash.cli.build import given_drafter
from edge_dflash.cli.output import Json, emit_json, named_table, say, show, stages
from edge_dflash.cli.prompts import bench_prompts, default_prompts, read_prompts
from edge_dflash.errors import RequestError, VerificationError
from edge_dflash.planner import Planner

REPORT_CONTEXT, REPORT_TOKENS = 128, 64  # of the benchmark in a report

Given = Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="Directory that a build made.")]
Prompts = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSONL of prompts; default: the demo pair's tasks for it, else some of calib/."),
]
Count = Annotated[int, typer.Option(metavar="N", min=1, help="Most prompts to take.")]
NewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to generate for each prompt.")]
Checkpoint = Annotated[Path | None, typer.Option(metavar="DIR", help="Target checkpoint to compare with --golden.")]
Drafter = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Drafter checkpoint to compare with --golden, or none.")
]
Golden = Annotated[Path | None, typer.Option(metavar="FILE", help="Golden file (safetensors) for the two checkpoints.")]
Lanes = Annotated[
    int | None, typer.Option(metavar="N", min=1, max=8, help="Requests at once; default: BUNDLE's lanes.")
]
Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write all that was found, a benchmark and the doctor's checks to this file."),
]


def verify(
    bundle: Given = None,
    prompts: Prompts = None,
    count: Count = 2,
    max_new_tokens: NewTokens = 48,
    checkpoint: Checkpoint = None,
    drafter: Drafter = None,
    golden: Golden = None,
    lanes: Lanes = None,
    report: Report = None,
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
    null). Golden file also: largest_difference, logits_difference, tokens_equal, failures, missing, skipped, unknown.
    """
    given = (checkpoint, drafter, golden)
    if (bundle is None) == (golden is None) or (bundle is not None and any(given)):
        raise RequestError("give BUNDLE, or --checkpoint, --drafter and --golden")
    if bundle is None and report is not None:
        raise RequestError("--report belongs to BUNDLE; leave it out with --golden")
    if bundle is not None:
        if report is not None:
            check_report(report)
        _judge_bundle(bundle, report, prompts, count, max_new_tokens, lanes, json)
    elif checkpoint is None or drafter is None or golden is None:
        raise RequestError("--golden needs --checkpoint and --drafter, the directories of the two checkpoints")
    else:
        _judge_golden(verify_golden(checkpoint, given_drafter(drafter), golden), json)


def _judge_bundle(
    bundle: Path,
    report: Path | None,
    prompts: Path | None,
    count: int,
    max_new_tokens: int,
    lanes: int | None,
    json: bool,
) -> None:
    """Verify a bundle, say and write what was found, then raise VerificationError unless it is good."""
    recorded = load_selftest(Bundle.open(bundle, check_hashes=False))
    result, self_test, drafting, mixes = _verify_bundle(bundle, recorded, prompts, count, max_new_tokens, lanes)
    faults = _faults(self_test, drafting)
    found = _found(result, self_test, drafting, recorded, mixes)
    found = {"lossless": _lossless(result, mixes), "summary": _summary(result, mixes, faults), **found}
    if json:
        emit_json(found)
    else:
        _show(result, self_test, drafting, mixes, found)
    if report is not None:
        _report(report, bundle, found)
    result.check()
    if mixes is not None:
        mixes.check()
    if faults:
        raise VerificationError(f"{'; '.join(faults)}; build or copy the bundle again")


def _verify_bundle(
    bundle: Path, recorded: SelfTest | None, prompts: Path | None, count: int, max_new_tokens: int, lanes: int | None
) -> tuple[Verification, SelfTestResult | None, AcceptanceCheck, MixCheck | None]:
    watching, given = Watching(), read_prompts(prompts) if prompts is not None else None
    with stages("opening the bundle") as report:
        planner = Planner.open(bundle, self_test="off", fallback=False, lanes=lanes, progress=report, observer=watching)
    with planner:
        tasks = given if given is not None else default_prompts(planner, max_new_tokens, bundle)
        ids = [planner.encode(task) for task in tasks[:count]]
        with stages("self-test"):
            self_test = replay(Bundle.open(bundle, check_hashes=False), planner.backend)
            drafting = check_acceptance(planner.backend, recorded)
        verification = verify_lossless(
            planner.backend,
            ids,
            max_new_tokens=max_new_tokens,
            stop_token_ids=planner.stop_token_ids,
            progress=say,
        )
        mixes = verify_mixes(planner, watching, ids, max_new_tokens, say) if planner.shape.lanes > 1 else None
        return verification, self_test, drafting, mixes


def _found(
    result: Verification,
    self_test: SelfTestResult | None,
    drafting: AcceptanceCheck,
    recorded: SelfTest | None,
    mixes: MixCheck | None,
) -> dict[str, Any]:
    """The JSON object of a bundle."""
    return {
        **result.to_json(),
        "ok": result.ok and (self_test is None or self_test.ok) and drafting.ok and (mixes is None or mixes.ok),
        "acceptance_at_build": None if recorded is None else list(recorded.acceptance),
        "self_test": self_test.to_json() if self_test is not None else None,
        "drafter": drafting.to_json(),
        "mixes": None if mixes is None else mixes.to_json(),
    }


def _report(file: Path, bundle: Path, found: Mapping[str, Any]) -> None:
    """Write what was found, and what a benchmark and the doctor find."""
    bench = _bench(bundle) if found["ok"] else None
    facts = gather(bundle)
    write_report(file, bundle, found, bench, doctor_report(examine(facts), facts))


def _bench(bundle: Path) -> dict[str, Any]:
    """A short benchmark, with the bundle loaded anew."""
    work = Workload(context=REPORT_CONTEXT, tokens=REPORT_TOKENS, prefill=(REPORT_CONTEXT,))
    return bench_bundle(bundle, lambda planner: bench_prompts(bundle, planner, REPORT_TOKENS), work, say=say).to_json()


def _faults(self_test: SelfTestResult | None, drafting: AcceptanceCheck) -> list[str]:
    """What is not as it was at build."""
    faults = [] if drafting.ok else [f"the drafter accepts too little: {drafting.summary}"]
    if self_test is not None and not self_test.ok:
        faults.append(f"the self-test failed: {self_test.diagnosis} ({self_test.summary})")
    return faults


def _lossless(result: Verification, mixes: MixCheck | None) -> bool | None:
    """Whether nothing differs; None: requests were to share passes, and none did."""
    if result.differences or (mixes is not None and mixes.differences):
        return False
    return True if mixes is None or mixes.joint_cycles else None


def _summary(result: Verification, mixes: MixCheck | None, faults: Sequence[str]) -> str:
    """The outcome in one sentence."""
    if not result.ok:
        return f"lossless: no, speculative output differs from plain output in {len(result.differences)} places"
    if mixes is not None and not mixes.joint_cycles:
        return "lossless: not known, no two requests shared a pass; give more --prompts"
    if mixes is not None and mixes.differences:
        return f"lossless: no, requests together differ from requests alone in {len(mixes.differences)} places"
    return f"lossless: yes, but {'; '.join(faults)}" if faults else "lossless: yes"


def _show(
    result: Verification,
    self_test: SelfTestResult | None,
    drafting: AcceptanceCheck,
    mixes: MixCheck | None,
    found: Mapping[str, Any],
) -> None:
    """Print the outcome for people."""
    show(_lossless_table(result))
    show(_acceptance_table(found["acceptance"], found["acceptance_at_build"] or ()))
    if mixes is not None:
        print(f"lanes: {mixes.summary}")
    print(f"self-test: {self_test.summary if self_test is not None else 'the build recorded none'}")
    print(f"drafter: {drafting.summary}")
    print(found["summary"], flush=True)


def _judge_golden(result: GoldenComparison, json: bool) -> None:
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
    prompts = f"{result.prompts} prompt{'s' if result.prompts != 1 else ''}"
    table = Table(title=f"Speculative against plain decoding, {prompts}", title_justify="left")
    table.add_column("drafter")
    hot = f"at temperature {SAMPLED.temperature:g}"
    for name in ("runs", "tokens", "accept length, greedy", hot, "differences"):
        table.add_column(name, justify="right")
    for drafter in result.histogram:
        runs = [run for run in result.runs if run.drafter == drafter]
        means = (_mean_length([run for run in runs if bool(run.temperature) == drawn]) for drawn in (False, True))
        wrong = sum(1 for difference in result.differences if difference.drafter == drafter)
        table.add_row(drafter, str(len(runs)), str(sum(run.tokens for run in runs)), *means, str(wrong))
    return table


def _mean_length(runs: Sequence[SpeculativeRun]) -> str:
    lengths = [n for run in runs for n in run.accept_lengths]
    return f"{sum(lengths) / len(lengths):.2f}" if lengths else "-"


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
    for key in result.missing:
        table.add_row(key, "not in the file", "", "")
    for key in result.unknown:
        table.add_row(key, "not compared", "", "")
    return table
