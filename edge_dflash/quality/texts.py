"""What is measured on: prompts, each with an answer, as token ids; and for each token what it is a part of.

An answer's text is read character by character: prose, a JSON text's names, values and punctuation, tool calls and
thinking between their tags. A token is what most of its bytes are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from edge_dflash.decode.options import Options
from edge_dflash.errors import RequestError
from edge_dflash.text.prompt import Prompter, Task, as_messages
from edge_dflash.text.tokenizer import Tokenizer

KEYS = ("ids", "messages", "text")
PLACES = ("prompt", "prose", "json_keys", "json_values", "json_structure", "tool_calls", "thinking")
MOST_LINE = 1 << 20  # bytes: a text of them has more tokens than any figure needs
Answer = Callable[[Sequence[int]], Sequence[int]]  # ids of a prompt -> ids of its answer
_TAGGED = re.compile(rb"<(think|tool_call)>.*?(?:</\1>|\Z)", re.DOTALL)
_TAGS = {b"think": "thinking", b"tool_call": "tool_calls"}


@dataclass(frozen=True)
class Text:
    """A prompt and its answer."""

    ids: tuple[int, ...]
    places: tuple[str, ...]  # of each id, one of PLACES

    @property
    def answer(self) -> int:
        """Index of the answer's first id; without an answer the number of ids."""
        return self.places.count("prompt")


def fingerprint(texts: Iterable[Text]) -> str:
    """SHA-256 of their ids."""
    return hashlib.sha256(json.dumps([text.ids for text in texts]).encode()).hexdigest()


def parse_tasks(words: str, where: object, most: int | None = None) -> list[Task]:
    """Tasks of JSONL; each line has one of ``KEYS``, other keys are ignored.

    Raises RequestError naming file and line; also for a line of more than ``most`` bytes.
    """
    lines = enumerate(words.splitlines(), 1)
    tasks = [_task(line, f"{where}:{number}", most) for number, line in lines if line.strip()]
    if not tasks:
        raise RequestError(f"{where} holds no prompts; give one JSON object a line")
    return tasks


def _task(line: str, where: str, most: int | None) -> Task:
    if most is not None and len(line) > most:
        raise RequestError(f"{where} has {len(line)} characters, at most {most} are taken; give shorter prompts")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise RequestError(f"{where} is not JSON; give one object a line") from None
    given = [key for key in KEYS if isinstance(value, dict) and key in value]
    if len(given) != 1:
        raise RequestError(f"{where} needs exactly one of the keys {', '.join(KEYS)}")
    task: Task = value[given[0]]
    if not task or not isinstance(task, str if given[0] == "text" else list):
        what = "of the wrong type" if task else "empty"
        raise RequestError(f"{where}: {given[0]} is {what}; give a string as text, a list as messages or ids")
    return task


def make_texts(
    tasks: Iterable[Task], tokenizer: Tokenizer | None, vocabulary: int, most: int, answer: Answer | None
) -> list[Text]:
    """Texts of tasks in their order, of at most ``most`` tokens together; the last one may be cut.

    An answer is the assistant message at a task's end, else what ``answer`` gives. A text of one token predicts
    nothing, and is left out. Raises RequestError.
    """
    prompter, texts, left = Prompter(tokenizer), list[Text](), most
    for task in tasks:
        if left < 2:
            break
        prompt, given = _read(task, tokenizer, prompter)
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise RequestError(f"a prompt has no ids, or one outside 0 to {vocabulary - 1}; give ids of this model")
        if given is None:
            given = () if answer is None or len(prompt) >= left else tuple(answer(prompt))
        found = ["prompt"] * len(prompt) + places(tokenizer, prompt, given)
        text = Text((*prompt, *given)[:left], tuple(found[:left]))
        if len(text.ids) > 1:  # else nothing of it is predicted
            left -= len(text.ids)
            texts.append(text)
    if not texts:
        raise RequestError("the prompts have no two tokens in a row, so nothing is predicted; give longer ones")
    return texts


def _read(
    task: Task, tokenizer: Tokenizer | None, prompter: Prompter
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Ids of a task's prompt, and of the answer that it ends with; None: it ends with none.

    Parsed tool calls are spelled by the template; where it writes no such answer behind the prompt, all is prompt.
    """
    messages = as_messages(task) or ()
    last = messages[-1] if len(messages) > 1 else None
    if tokenizer is not None and isinstance(last, dict) and last.get("role") == "assistant":
        end = tokenizer.eos_token_id
        if last.get("tool_calls"):
            prompts = [prompter.prompt(task[:-1], Options(thinking=thinking)).ids for thinking in (False, True)]
            whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
            for prompt in prompts:
                answer = whole[len(prompt) :]
                if whole[: len(prompt)] == prompt and end in answer:
                    return prompt, answer[: len(answer) - answer[::-1].index(end)]
        elif isinstance(last.get("content"), str):
            answer = (*tokenizer.encode_text(last["content"]), *(() if end is None else (end,)))
            return prompter.prompt(task[:-1], Options()).ids, answer
    return prompter.prompt(task, Options()).ids, None


def places(tokenizer: Tokenizer | None, prompt: Sequence[int], answer: Sequence[int]) -> list[str]:
    """What each id of an answer is a part of; without a tokenizer all are prose."""
    if tokenizer is None:
        return ["prose"] * len(answer)
    before, *spelled = (
        b"".join(tokenizer.token_bytes(one) or b"" for one in ids) for ids in (prompt[-64:], *([one] for one in answer))
    )
    inside = b"<think>" if before.rfind(b"<think>") > before.rfind(b"</think>") else b""
    labels = iter(label_bytes(inside + b"".join(spelled))[len(inside) :])
    return [Counter(islice(labels, len(one))).most_common(1)[0][0] if one else "prose" for one in spelled]


def label_bytes(text: bytes) -> list[str]:
    """The place of each byte of an answer."""
    labels, at = list[str](), 0
    for found in _TAGGED.finditer(text):
        labels += _label_json(text[at : found.start()]) + [_TAGS[found[1]]] * len(found[0])
        at = found.end()
    return labels + _label_json(text[at:])


def _label_json(text: bytes) -> list[str]:
    """Places of bytes that are in no tag: JSON begins with a brace, or a bracket with a brace behind it."""
    labels, open_, key, string, escaped = list[str](), bytearray(), False, "", False
    for at, byte in enumerate(text):
        char = chr(byte)
        if string:
            labels.append(string if char != '"' or escaped else "json_structure")
            string, escaped = "" if char == '"' and not escaped else string, char == "\\" and not escaped
        elif not open_ and not (char == "{" or (char == "[" and text[at + 1 : at + 9].lstrip()[:1] == b"{")):
            labels.append("prose")
        else:
            if char in "{[":
                open_.append(byte)
            elif char in "}]":
                del open_[-1:]
            elif char == '"':
                string = "json_keys" if key else "json_values"
            key = char in "{," or (key and (char.isspace())) if open_[-1:] == b"{" else False
            labels.append("json_structure" if char in '{}[]:,"' or char.isspace() else "json_values")
    return labels
