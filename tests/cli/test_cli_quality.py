"""``verify --quality``, ``build --quality`` and what ``inspect`` shows of them."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from cli_support import PAIR, last_json

from edge_dflash.bundle.manifest import fingerprint
from edge_dflash.bundle.reader import Bundle, read_manifest
from edge_dflash.cli import verify as command
from edge_dflash.errors import BackendError
from edge_dflash.planner import Planner
from edge_dflash.quality import bundle as module

QUICK = ("--count", 1, "--max-new-tokens", 4)
FORM = {"kld", "top1", "top5", "perplexity", "tokens"}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(module, "TOKENS", 120)
    monkeypatch.setattr(module, "ANSWER", 8)
    monkeypatch.setattr(command, "REPORT_TOKENS", 8)
    monkeypatch.setattr(command, "REPORT_CONTEXT", 32)


@pytest.fixture
def bundle(ids_bundle, tmp_path):
    """A bundle of the golden pair that a test may write to, and its source."""
    return shutil.copytree(ids_bundle, tmp_path / "bundle")


@pytest.fixture
def source(golden):
    return golden / PAIR[0]


def test_verify_measures_keeps_reports_and_draws(cli, bundle, source, tmp_path):
    before = fingerprint(read_manifest(bundle))
    report, prompts = tmp_path / "report.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"ids": [1, 2, 3, 4, 5]}\n{"ids": [7, 8, 9]}\n')
    more = ("--prompts", prompts, "--report", report)
    code, out, err = cli("verify", bundle, "--quality", source, *QUICK, *more, "--json")
    assert code == 0, err
    found = last_json(out)
    assert found["lossless"] is True
    quality = found["quality"]
    assert quality.keys() == FORM | {"weights", "kv", "layers", "parts", "where", "units", "protocol", "backend"}
    assert quality["kld"].keys() == {"mean", "p50", "p99", "p999", "max"}
    assert quality["perplexity"].keys() == {"source", "bundle"}
    parts = [quality["weights"], quality["kv"], quality["backend"]["against_reference"]]
    parts += [one for name in ("layers", "parts", "where", "units") for one in quality[name].values()]
    assert all(one.keys() == FORM for one in parts)
    assert quality["protocol"]["prompts"].startswith("prompts.jsonl, 2 of ")
    assert json.loads(report.read_text())["verify"]["quality"] == quality
    drawn = report.with_suffix(".svg").read_text()
    assert drawn.count("<rect") == len(quality["parts"]) + len(quality["units"])
    assert fingerprint(Bundle.open(bundle).manifest) == before

    code, out, _ = cli("inspect", bundle, "--json")
    assert (code, last_json(out)["quality"]) == (0, quality)
    code, out, _ = cli("inspect", bundle)
    assert "KLD to the source in nats: " in out
    assert " mlp " in out
    assert not list(tmp_path.glob("*.quality"))


def test_people_see_where_it_is_worst(cli, bundle, source, monkeypatch):
    def full(bundle, quality):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module, "keep", full)
    code, out, err = cli("verify", bundle, "--quality", source, *QUICK)
    assert code == 0
    assert all(f" {word} " in out for word in ("all", "weights", "KV cache", "layers.0", "prompt", "reference backend"))
    cells = [cell.strip() for cell in next(line for line in out.splitlines() if " layers.0 " in line).split("│")]
    assert cells[5] == "-"  # p99.9 of fewer than 1,000 tokens is their largest
    assert 0.5 < float(cells[-3]) < 2
    assert re.search(r"prompts: .+?, \d+ of \d+, \d+ tokens of the last", " ".join(out.split()))
    assert out.splitlines()[-1] == "lossless: yes"
    assert f"warning: the figures are not kept in {bundle}: Read-only file system" in err


def test_a_bundle_that_does_not_run_here_is_measured_alone(cli, bundle, source, monkeypatch):
    def absent(*arguments, **options):
        raise BackendError("no GPU here; build for cpu")

    monkeypatch.setattr(Planner, "open", absent)
    code, out, err = cli("verify", bundle, "--quality", source, "--json")
    assert code == 0
    found = last_json(out)
    assert (found["lossless"], found["ok"], found["quality"]["backend"]) == (None, True, None)
    assert "only the quality is measured: no GPU here" in err
    code, out, _ = cli("verify", bundle, "--quality", source)
    assert (code, out.splitlines()[-1]) == (0, "lossless: not known, the bundle does not run here")
    assert cli("verify", bundle)[0] == 7


def test_a_bundle_too_large_for_the_reference_is_measured_alone(cli, bundle, source, monkeypatch):
    monkeypatch.setattr("edge_dflash.backends.os", SimpleNamespace(sysconf=lambda name: 1000))  # pages of 1000 bytes
    code, out, err = cli("verify", bundle, "--quality", source, "--json")
    assert (code, last_json(out)["lossless"]) == (0, None)
    assert "holds weights as float32, 0.0 GB, this machine has 0.0 GB" in err


def test_a_build_measures_and_repeats_its_bytes(cli, golden, tmp_path):
    target, drafter = (golden / name for name in PAIR)
    argv = ["build", "--target", target, "--drafter", drafter, "--no-calibrate", "--quality", "--json"]
    code, out, err = cli(*argv, "--output", tmp_path / "one")
    assert code == 0, err
    found = last_json(out)["quality"]
    assert found["kld"]["mean"] > 0
    assert found["protocol"]["prompts"] == "random ids (no tokenizer), 2 of 4, 48 tokens of the last"

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge_dflash.quality.measure.compare", killed)
        code, _, err = cli(*argv, "--output", tmp_path / "two")
    assert code == 130
    assert "--quality" in err.partition("resume with:")[2]
    assert list((tmp_path / "two.building" / "quality").glob("*.safetensors"))
    assert cli(*argv, "--output", tmp_path / "two")[0] == 0
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("verify", "BUNDLE", "--plot", "x.svg"), "--plot draws what --quality measures"),
        (("verify", "BUNDLE", "--quality", "SOURCE", "--plot", "nowhere/x.svg"), "is no file in a directory"),
        (("verify", "BUNDLE", "--quality", "nowhere"), "nowhere"),
        (("verify", "--golden", "x", "--quality", "SOURCE"), "--quality belongs to BUNDLE"),
        (("build", "--target", "BUNDLE", "--output", "x", "--quality"), "--target is a bundle"),
        (
            ("build", "--target", "SOURCE", "--output", "x", "--prompts", "y"),
            "are measured on with --quality",
        ),
        (("build", "--target", "SOURCE", "--output", "x", "--quality", "--prompts", "y"), "cannot read y"),
    ],
)
def test_what_does_not_go_together_is_refused(cli, bundle, source, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    names = {"BUNDLE": bundle, "SOURCE": source}
    monkeypatch.setattr(Planner, "open", None)  # nothing is loaded for it
    code, out, err = cli(*(names.get(word, word) for word in argv), *(QUICK if "BUNDLE" in argv[1] else ()))
    assert code != 0
    assert out == ""
    assert words in err
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "x.building").exists()
