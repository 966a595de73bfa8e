"""The shipped calibration set and its reader."""

import json
from collections import Counter

import pytest

from edge_dflash.builder.scales import read_prompts
from edge_dflash.common.files import directory
from edge_dflash.errors import BuildError

FILE = directory("calib") / "robot_planning.jsonl"
GOOD = {"id": "a", "source": "s", "licence": "l", "messages": [{"role": "user", "content": "x"}]}


def test_the_set_is_large_varied_and_ours():
    prompts = read_prompts(FILE)
    assert len({p.id for p in prompts}) == len(prompts) >= 96
    assert {(p.source, p.licence) for p in prompts} == {("written for edge-dflash", "Apache-2.0")}
    assert len({p.text for p in prompts}) == len(prompts)
    assert min(Counter(p.id.rsplit("-", 1)[0] for p in prompts[:16]).values()) == 1  # any beginning is mixed
    for prompt in prompts:
        roles = [m["role"] for m in prompt.messages if m["role"] != "system"]
        assert roles == [("user", "assistant")[i % 2] for i in range(len(roles))], prompt.id


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl:2: not JSON"),
        ("[" * 100_000, "p.jsonl:2: not JSON"),
        ("[]", r"p.jsonl:2: found \[\], wanted an object"),
        (json.dumps({**GOOD, "extra": 1}), "p.jsonl:2: unknown key 'extra'"),
        *(
            (json.dumps({**GOOD, **change}), "p.jsonl:2 lacks a text, or its messages are not")
            for change in (
                {"licence": ""},
                {"messages": []},
                {"messages": [{"role": "tool", "content": "x"}]},
                {"messages": [{"role": "user", "content": ""}]},
                {"messages": [{"role": "user"}]},
            )
        ),
    ],
)
def test_bad_lines_are_refused(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(BuildError, match=message):
        read_prompts(path)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(BuildError, match="not a readable text file"):
        read_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BuildError, match="holds no prompt"):
        read_prompts(tmp_path / "empty.jsonl")
