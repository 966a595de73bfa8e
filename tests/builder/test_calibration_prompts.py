"""The shipped calibration set and its reader."""

import json
import re

import pytest

from edge_dflash.builder.scales import calibration_ids, read_prompts
from edge_dflash.common.files import directory
from edge_dflash.errors import BuildError

FILE = directory("calib") / "robot_planning.jsonl"
PROMPTS = read_prompts(FILE)


def words(text):
    return re.findall(r"\w+", text.lower())


def text(prompt):
    return "\n".join(m["content"] for m in prompt.messages)


def test_the_set_is_large_enough_and_ours():
    assert len(PROMPTS) >= 96
    assert len({p.id for p in PROMPTS}) == len(PROMPTS)
    assert {(p.source, p.licence) for p in PROMPTS} == {("written for edge-dflash", "Apache-2.0")}
    readme = (FILE.parent / "README.md").read_text()
    assert "Apache-2.0" in readme
    assert FILE.name in readme


def test_no_prompt_is_a_copy_of_another():
    """No two prompts share a fifth of their four-word sequences."""
    grams = []
    for prompt in PROMPTS:
        w = words(text(prompt))
        grams.append({tuple(w[i : i + 4]) for i in range(len(w) - 3)})
    for i, a in enumerate(grams):
        for j, b in enumerate(grams[:i]):
            shared = len(a & b) / max(1, min(len(a), len(b)))
            assert shared < 0.2, (PROMPTS[i].id, PROMPTS[j].id)


def test_the_set_is_varied():
    assert sum(p.messages[0]["role"] == "system" for p in PROMPTS) >= 20
    assert sum(len([m for m in p.messages if m["role"] == "user"]) > 1 for p in PROMPTS) >= 8
    assert sum("json" in text(p).lower() for p in PROMPTS) >= 15
    assert sum(p.id.startswith("lang-") for p in PROMPTS) >= 10
    assert sum(not text(p).isascii() for p in PROMPTS) >= 8
    areas = ("kitchen", "warehouse", "inspection", "lab", "navigation", "manipulation", "safety", "multi", "recovery")
    for area in areas:
        assert any(p.id.startswith(area) for p in PROMPTS), area
    sizes = sorted(len(words(text(p))) for p in PROMPTS)
    assert sizes[0] < 45
    assert sizes[-1] > 110


def test_conversations_alternate_and_json_answers_parse():
    parsed = 0
    for prompt in PROMPTS:
        roles = [m["role"] for m in prompt.messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"] * (len(turns) % 2), prompt.id
        for message in prompt.messages:
            if message["role"] == "assistant" and message["content"][0] in "[{":
                json.loads(message["content"])
                parsed += 1
    assert parsed >= 6


def test_any_beginning_is_mixed():
    assert len({p.id.rsplit("-", 1)[0] for p in PROMPTS[:16]}) >= 12


def test_ids_are_joined_up_to_the_budget():
    seen = []

    def encode(messages):
        seen.append(messages)
        return [len(seen)] * 3

    assert calibration_ids(PROMPTS, encode, 7) == (1, 1, 1, 2, 2, 2, 3)
    assert seen == [p.messages for p in PROMPTS[:3]]
    assert len(calibration_ids(PROMPTS[:2], encode, 100)) == 6


GOOD = {"id": "a", "source": "s", "licence": "l", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl:2: not JSON"),
        ("[]", "p.jsonl:2: found list; wanted an object with exactly id, source"),
        (json.dumps({**GOOD, "extra": 1}), "found id, source, licence, messages, extra; wanted"),
        (json.dumps({**GOOD, "licence": ""}), r"licence are \['a', 's', ''\]; wanted text"),
        (json.dumps({**GOOD, "messages": []}), "messages are not a list"),
        (json.dumps({**GOOD, "messages": [{"role": "tool", "content": "x"}]}), "messages are not a list"),
        (json.dumps({**GOOD, "messages": [{"role": "user", "content": ""}]}), "messages are not a list"),
        (json.dumps({**GOOD, "messages": [{"role": "user"}]}), "messages are not a list"),
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
