"""``edge-dflash generate``: forms, deadlines, both ways of decoding beside each other, energy."""

from __future__ import annotations

import json
import re

import pytest
from cli_support import last_json

from edge_dflash.board.state import EnergyMeter, Rail
from edge_dflash.cli import generate as module
from edge_dflash.cli import plans as comparison
from edge_dflash.errors import VerificationError
from edge_dflash.result import Plan, PlanTimings

pytestmark = pytest.mark.usefixtures("opened_once")

SCHEMA = {"type": "object", "properties": {"go": {"enum": ["left", "right"]}}, "required": ["go"]}
SCHEMA["additionalProperties"] = False


def test_an_answer_of_a_form(cli, demo_bundle, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for schema in (file, json.dumps(SCHEMA)):
        found = last_json(cli("generate", demo_bundle, "--prompt", "Which way?", "--schema", schema, "--json")[1])
        assert (found["finish_reason"], found["object"]["go"] in ("left", "right")) == ("stop", True)
    assert cli("generate", demo_bundle, "--prompt", "Open?", "--regex", "yes|no")[1] in ("yes\n", "no\n")
    file = tmp_path / "day.lark"
    file.write_text('start: "day" | "night"')
    for grammar in (file, file.read_text()):
        assert cli("generate", demo_bundle, "--prompt", "Now?", "--grammar", grammar)[1] in ("day\n", "night\n")


def test_a_deadline_ends_it(cli, demo_bundle):
    argv = ("generate", demo_bundle, "--prompt", "Count.", "--regex", "[0-9]{400}", "--plain", "--deadline", 1.5)
    found = last_json(cli(*argv, "--json")[1])
    assert found["finish_reason"] == "deadline"
    assert found["object"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schema", "nofile.json"), "'nofile.json', neither a file nor a JSON object"),
        (("--schema", "{bad"), "the schema is no JSON"),
        (("--schema", '{"uniqueItems": true}'), "uniqueItems"),
        (("--schema", '{"title": "' + "x" * 300 + '"'), "the schema is no JSON"),
        (("--grammar", "nofile.lark"), "'nofile.lark', neither a file nor rules"),
        (("--deadline", "0"), "--deadline is 0; give seconds above 0"),
        (("--deadline", "nan"), "--deadline is nan"),
        (("--plain", "--compare"), "leave --plain out"),
        (("--candidates", "2", "--compare"), "--candidates and --compare are given"),
        (("--top-p", "7"), "top_p is 7.0; give a value above 0 and at most 1"),
        (("--max-new-tokens", "0"), "max_new_tokens is 0; give a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(refused, options, message):
    code, line = refused("generate", "no-such-bundle", "--prompt", "x", *options)
    assert code == 8
    assert message in line


def test_the_line_end_of_a_file_is_no_part_of_the_task(tmp_path):
    file = tmp_path / "task.txt"
    file.write_text("Close the fridge.\n\n")
    assert module.read_task(None, file, None) == "Close the fridge.\n"
    assert module.read_task(None, file, None, raw=True) == "Close the fridge.\n\n"


def test_how_likely_each_token_was(cli, demo_bundle):
    options = ("generate", demo_bundle, "--prompt", "Say hello.", "--max-new-tokens", 6)
    code, out, _ = cli(*options, "--logprobs", 2, "--json")
    made = last_json(out)
    assert code == 0
    assert [one["token"] for one in made["logprobs"]] == made["tokens"]
    assert "".join(one["text"] for one in made["logprobs"]) == made["text"]
    assert all(one["top"][0]["logprob"] == one["logprob"] <= 0 for one in made["logprobs"])  # greedy
    assert {len(one["top"]) for one in made["logprobs"]} == {2}
    code, out, _ = cli(*options, "--logprobs", 1)
    first = made["logprobs"][0]
    shown = f"{first['logprob']:.3f}".replace("-0.000", "0.000")
    assert re.search(rf"{re.escape(repr(first['text']))} +│ +{shown} +│ ", out)
    assert last_json(cli(*options, "--json")[1])["logprobs"] is None


def test_the_likeliest_of_several_candidates(cli, demo_bundle):
    argv = ("generate", demo_bundle, "--prompt", "Say hello.", "--max-new-tokens", 6, "--temperature", 1.2)
    alone = [last_json(cli(*argv, "--seed", seed, "--json")[1]) for seed in (3, 4, 5)]
    found = last_json(cli(*argv, "--seed", 3, "--candidates", 3, "--json")[1])
    several = [found, *found["alternatives"]]
    assert sorted((one["seed"], one["tokens"]) for one in several) == [(one["seed"], one["tokens"]) for one in alone]
    assert [one["score"] for one in several] == sorted((one["score"] for one in several), reverse=True)
    assert (alone[0]["score"], alone[0]["alternatives"], found["logprobs"]) == (None, [], None)
    code, out, _ = cli(*argv, "--seed", 3, "--candidates", 3)
    assert code == 0
    assert out.startswith(found["text"])
    for one in several:
        assert re.search(rf"{one['seed']} +│ +{one['score']:.4f} +│ +{len(one['tokens'])} ", out)


def test_compare_shows_both_ways(cli, demo_bundle):
    argv = ("generate", demo_bundle, "--prompt-file", "edge_dflash/demo/task.txt", "--max-new-tokens", 20, "--compare")
    code, out, _ = cli(*argv, "--json")
    found = last_json(out)
    assert (code, found["identical"], found["speculative"], found["plain"]["speculative"]) == (0, True, True, False)
    assert found["plain"]["tokens"] == found["tokens"]
    assert found["plain"]["accept_length"] == 1.0 < found["accept_length"]
    code, out, _ = cli(*argv)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line[0] == "│"]
    assert [row[0] for row in rows] == ["plain", "speculative"]
    assert rows[0][4] == "19"
    assert int(rows[1][4]) == len(found["accept_lengths"])
    assert "the same tokens" in out
    alone = last_json(cli(*argv[:-1], "--json")[1])
    assert (alone["plain"], alone["identical"]) == (None, None)


def plan_of(tokens, finish="stop"):
    times = PlanTimings(0.0, 0.1, 0.1, 0.9, 1.0)
    return Plan(None, "", "", (), (), tokens, finish, 1, 0, (1,), 1.0, times, True, False, 0)


def test_tokens_that_differ_are_said_and_fail(capsys):
    with pytest.raises(VerificationError, match="differ from token 1 on"):
        module._report(plan_of((1, 2)), None, (plan_of((1, 3)), None), json=False)
    assert "DIFFERENT TOKENS" in capsys.readouterr().out
    assert comparison.identical(plan_of((1, 2)), plan_of((1,))) is False
    assert comparison.identical(plan_of((1, 2)), plan_of((1,), "deadline")) is None
    assert comparison.identical(plan_of((1, 2)), plan_of((3,), "deadline")) is False


def test_joules_of_a_plan_are_watts_over_its_time(cli, ids_bundle, monkeypatch):
    argv = ("generate", ids_bundle, "--ids", "1,2,3", "--max-new-tokens", 9)
    monkeypatch.setattr(comparison, "EnergyMeter", lambda: EnergyMeter(lambda: None))
    assert last_json(cli(*argv, "--json")[1])["board"]["joules"] is None
    assert not cli(*argv)[2].endswith(" J\n")
    monkeypatch.setattr(
        comparison, "EnergyMeter", lambda: EnergyMeter(lambda: Rail("VIN", "ina238", 40.0, None, None, None))
    )
    found = last_json(cli(*argv, "--json")[1])
    assert found["board"]["joules"] == pytest.approx(40.0 * found["total_seconds"], rel=0.05)
    assert cli(*argv)[2].endswith(" J\n")
