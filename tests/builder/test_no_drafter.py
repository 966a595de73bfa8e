"""A target without a drafter: built, opened, run, inspected and checked like a pair, one token a pass."""

from dataclasses import replace

import pytest
from builder_support import BF16, config_of, recipe
from cli_support import last_json
from typer.testing import CliRunner

from edge_dflash.bench.subjects import Prompts, bench_bundle
from edge_dflash.bench.workload import Workload
from edge_dflash.builder.write import build
from edge_dflash.bundle.manifest import dump_manifest, parse_manifest
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.checks.lossless import verify_lossless
from edge_dflash.cli import app
from edge_dflash.decode.backend import Asked
from edge_dflash.errors import BackendError, BundleError, RequestError
from edge_dflash.model import pair_programs
from edge_dflash.planner import Planner

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """The pair's bundle and the target's alone, of the same weights."""
    root = tmp_path_factory.mktemp("bundles")
    wide = recipe(root, BF16)
    build(config_of("qwen3_5", root / "pair", recipe=wide, max_context=256))
    build(config_of("qwen3_5", root / "alone", recipe=wide, max_context=256, drafter=None))
    return root


def plans(path, **options):
    with Planner.open(path, **options) as planner:
        return [
            planner.plan(PROMPT, max_new_tokens=24, **how) for how in ({}, {"temperature": 1.0, "seed": 3})
        ], planner


def test_a_target_alone_answers_as_the_pair_does_one_token_a_pass(bundles):
    wanted, _ = plans(bundles / "pair")
    for path, options in ((bundles / "alone", {}), (bundles / "pair", {"drafter": False})):
        found, planner = plans(path, **options)
        assert [plan.tokens for plan in found] == [plan.tokens for plan in wanted]
        assert all(set(plan.accept_lengths) == {1} and not plan.speculative for plan in found)
        assert (planner.shape.drafts, planner.shape.block_size, planner.shape.mask_token_id) == (0, 1, None)
        assert not planner.drafting
        assert planner.self_test.ok
        assert planner.self_test.drafts == 0


def test_nothing_of_a_drafter_is_in_the_bundle_or_the_passes(bundles):
    manifest, pair = read_manifest(bundles / "alone"), read_manifest(bundles / "pair")
    assert manifest.pair == replace(pair.pair, drafter=None)
    assert manifest.weights == {name: form for name, form in pair.weights.items() if name.startswith("target.")}
    assert not any("drafter" in name for name in (*manifest.files, *manifest.kv_scales))
    programs = pair_programs(manifest.pair)
    assert not programs.propose.ops
    assert "taps" not in programs.verify.outputs
    assert "taps" not in programs.verify.columns
    assert not any("drafter" in name for name in programs.states)


def test_older_versions_are_told_that_the_manifest_is_newer(bundles):
    manifest = read_manifest(bundles / "alone")
    text = dump_manifest(manifest)
    assert b'"schema": 3' in text
    assert parse_manifest(text) == manifest
    assert b'"schema": 1' in dump_manifest(read_manifest(bundles / "pair"))
    with pytest.raises(BundleError, match="block_size is 2, wanted 1"):
        parse_manifest(text.replace(b'"block_size": 1', b'"block_size": 2'))


def test_a_session_of_a_pair_is_not_that_of_its_target_alone(bundles, tmp_path):
    with Planner.open(bundles / "pair") as planner:
        session = planner.session()
        session.plan(PROMPT, max_new_tokens=4)
        session.save(tmp_path / "saved")
    with Planner.open(bundles / "pair", drafter=False) as planner, pytest.raises(BundleError, match="fingerprint is"):
        planner.load_session(tmp_path / "saved")


def test_no_drafts_can_be_asked_of_it(bundles):
    with Planner.open(bundles / "alone") as planner:
        backend = planner.backend
        anchor = backend.prefill(PROMPT).argmax()[0]
        with pytest.raises(BackendError, match="no drafter"):
            backend.propose(anchor)
        with pytest.raises(BackendError, match="1 to 1 rows"):
            backend.verify([anchor, anchor])
        assert len(backend.cycle(Asked(anchor)).tokens) == 1


def test_it_is_verified_inspected_and_timed(bundles):
    with Planner.open(bundles / "alone") as planner:
        result = verify_lossless(planner.backend, [PROMPT], max_new_tokens=8)
    assert result.ok
    assert result.untried == ()
    assert {run.drafter for run in result.runs} == {"own"}
    work = Workload(context=16, tokens=8, prefill=(16,))
    for path, options in ((bundles / "alone", {}), (bundles / "pair", {"drafter": False})):
        timed = bench_bundle(path, lambda planner: Prompts("one", [PROMPT]), work, say=lambda line: None, **options)
        assert timed.speculative.accept_length == timed.raw.accept_length == 1
        assert timed.cycle.propose.ms == 0
    with pytest.raises(RequestError, match=r"outside 1\.\.1"):
        bench_bundle(bundles / "alone", lambda planner: Prompts("one", [PROMPT]), replace(work, accept_length=2.0))


def test_commands_take_none_for_a_drafter(bundles, tmp_path):
    target = str(config_of("qwen3_5", tmp_path).target)
    run = CliRunner().invoke
    found = run(app, ["build", "--target", target, "--drafter", "none", "--output", str(tmp_path / "made"), "--json"])
    assert found.exit_code == 0, found.output
    assert read_manifest(tmp_path / "made").pair.drafter is None
    for where in (["--target", target, "--drafter", "none"], ["--target", target], [str(bundles / "alone")]):
        table = run(app, ["inspect", *where])
        assert "no drafter" in table.stdout, table.output
        costs = last_json(run(app, ["inspect", *where, "--json"]).stdout)
        assert (costs["draft_bytes"], costs["drafter_kv_bytes_per_token"], costs["drafter_masks"]) == (0, 0, [])
        assert costs["floor_ms"] == pytest.approx(costs["plain_floor_ms"], rel=0.2)
    shown = last_json(run(app, ["verify", str(bundles / "alone"), "--max-new-tokens", "8", "--json"]).stdout)
    assert shown["drafter"]["unknown"] == "the bundle has no drafter"
    assert shown["ok"]
    assert shown["block_size"] == 1
    assert "BUNDLE has its own drafter" in str(run(app, ["bench", str(bundles / "alone"), "--drafter", "x"]).exception)


def test_a_bundle_says_how_it_was_rounded(bundles, tmp_path):
    made = str(build(config_of("modelopt", tmp_path / "made", drafter=None)).bundle)
    use = read_manifest(tmp_path / "made").rounding
    line = f"rounding: {use.rounded} weights by search, unweighted; {use.kept} as they came"
    shown = [CliRunner().invoke(app, ["inspect", *words]).stdout for words in ([made], [made, "--json"])]
    assert line in shown[0]
    assert last_json(shown[1])["rounding"] == {"by": "search", "rounded": use.rounded, "kept": use.kept, "tokens": 0}
    assert use.kept > 0 < use.rounded
    wide = [CliRunner().invoke(app, ["inspect", str(bundles / "alone"), *more]).stdout for more in ([], ["--json"])]
    assert "rounding" not in wide[0]
    assert last_json(wide[1])["rounding"] is None


def test_recipes_of_a_pair_build_its_target_alone(tmp_path):
    text = (
        BF16
        + 'overrides: [{match: "drafter.layers.0.*", format: bf16}]\nmasks: [{match: "drafter.layers.*", window: 4}]\n'
    )
    config = config_of("qwen3", tmp_path / "made", recipe=recipe(tmp_path, text), drafter=None, max_context=64)
    assert build(config).bundle.is_dir()
    assert "--drafter none" in config.command
