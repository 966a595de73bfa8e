"""Bundles of pairs whose drafts are chosen by a walk: built, opened, run and checked like any other."""

import pytest
from builder_support import BF16, recipe
from cli_support import last_json
from golden_pairs import WALKS, directories, golden, pair

from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.errors import RecipeError
from edge_dflash.planner import Planner

NAMES = (WALKS[2], WALKS[3])  # rnn with confidence, selector


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """A wide bundle of each pair, by name."""
    root, made = tmp_path_factory.mktemp("bundles"), {}
    for name in NAMES:
        target, drafter = directories(name)
        made[name] = root / name
        build(BuildConfig(target, drafter, made[name], recipe=recipe(root, BF16), max_context=256))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_keeps_what_the_drafter_is(bundles, name):
    manifest = read_manifest(bundles[name])
    assert manifest.pair == pair(name)
    own = {weight: form for weight, form in manifest.weights.items() if weight.startswith("drafter.")}
    assert set(own.values()) == {"bf16"}
    assert any("markov_head" in weight or "candidate_selector" in weight for weight in own)


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_plans_with_its_own_drafts_what_it_plans_without(bundles, name):
    prompt = golden(name)["p0.prompt"].tolist()
    with Planner.open(bundles[name], fallback=False) as planner:
        assert planner.self_test.ok
        assert planner.shape.drafts == 7
        for options in ({}, {"temperature": 1.5, "seed": 4}):
            plain = planner.plan(prompt, max_new_tokens=48, speculative=False, **options)
            found = planner.plan(prompt, max_new_tokens=48, **options)
            assert found.tokens == plain.tokens
        greedy = planner.plan(prompt, max_new_tokens=64)
    accepted = golden(name)["p0.cycle_accepted"]
    assert greedy.accept_length == pytest.approx(1 + accepted.mean(), abs=1)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_cuts_blocks_by_confidence(bundles, cli, name):
    ids = ",".join(map(str, golden(name)["p0.prompt"].tolist()))
    found = []
    for confidence in (0, 1):
        argv = ("generate", bundles[name], "--ids", ids, "--max-new-tokens", 12, "--drafts", 7)
        code, out, _ = cli(*argv, "--draft-confidence", confidence, "--json")
        assert code == 0
        found.append(last_json(out))
    assert found[0]["tokens"] == found[1]["tokens"]
    assert (set(found[0]["drafts"]), set(found[1]["drafts"])) == ({7}, {0} if name == WALKS[2] else {7})


@pytest.mark.parametrize("module", ["conv", "walk"])
def test_what_a_walk_and_a_convolution_read_stays_wide(tmp_path, module):
    target, drafter = directories(WALKS[3])
    wish = recipe(tmp_path, BF16.replace("fc: bf16}", f"fc: bf16, {module}: nvfp4}}"))
    with pytest.raises(RecipeError, match=f"drafter.{module} is 'nvfp4'; give one of bf16, keep"):
        build(BuildConfig(target, drafter, tmp_path / "bundle", recipe=wish, max_context=256))
