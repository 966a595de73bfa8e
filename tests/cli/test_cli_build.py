"""``build`` with a budget: sizes as people write them, the curve on stderr, and JSON."""

import json

import pytest
from builder_support import DRAFTERS, TARGETS
from cli_support import last_json

from edge_dflash.cli.build import read_size
from edge_dflash.errors import RequestError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("15500000000", 15_500_000_000),
        ("15.5GB", 15_500_000_000),
        ("2 MB", 2_000_000),
        ("7KB", 7000),
        ("9b", 9),
        ("15.5gb", 15_500_000_000),
    ],
)
def test_sizes(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "1e9", "-1GB", "nan", "inf", "12TB", "GB", "1.GB", "٣GB", "9" * 5000, "1GB\n"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(RequestError, match=r"--bytes-budget is .*; give bytes, or a number with kB, MB or GB"):
        read_size(text)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--quality-target", "nan"), "--quality-target is nan; give a KLD above 0"),
        (("--quality-target", "0.1", "--bytes-budget", "1GB"), "give one of them"),
        (("--bytes-budget", "much"), "--bytes-budget is 'much'"),
        (("--prompts", "x"), "--prompts are measured on with --quality, --quality-target or --bytes-budget"),
    ],
)
def test_a_budget_that_means_nothing_is_one_line(refused, tmp_path, more, message):
    code, line = refused("build", "--target", TARGETS["qwen3"], "--output", tmp_path / "out", *more)
    assert code == 8
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "more",
    [
        ("--quality-target", "0"),
        ("--bytes-budget", "1GB"),
        ("--prompts", "x"),
        ("--quality",),
        ("--rounding", "search"),
        ("--recipe", "x"),
        ("--arch", "sm110"),
        ("--no-calibrate",),
        ("--force",),
        ("--lanes", "2"),
    ],
)
def test_finish_takes_no_other_option(refused, tmp_path, more):
    code, line = refused("build", "--finish", tmp_path, *more)
    assert code == 8
    assert "--finish BUNDLE goes alone" in line


def test_the_mix_is_shown_and_in_json(cli, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"ids": list(range(24))}))
    argv = ("--target", TARGETS["qwen3"], "--drafter", DRAFTERS["qwen3"], "--prompts", prompts, "--json")
    code, out, err = cli("build", *argv, "--output", tmp_path / "out", "--bytes-budget", "1GB")
    assert code == 0
    mix = last_json(out)["mix"]
    assert mix["recipe"] == str(tmp_path / "out.recipe.yaml")
    assert (mix["kld"], mix["tokens"]) == (0.0, 24)
    assert mix["curve"][0]["measured"] > mix["curve"][1]["predicted"]
    assert "predicted  measured  wider than above" in err
    assert f"{mix['bytes']:,} bytes a cycle, KLD 0.00000 on 24 tokens" in err
    code, out, err = cli("build", *argv[:4], "--output", tmp_path / "again", "--recipe", mix["recipe"], "--json")
    assert (code, last_json(out)["recipe"], last_json(out)["mix"]) == (0, "default-mixed", None)
