"""The demo pair's own byte-level BPE tokenizer and chat template, and tasks as token ids.

Files are those of Hugging Face: tokenizer.json, tokenizer_config.json, generation_config.json. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from calib.demo.corpus import tasks
from edge_dflash.demo.tasks import Message, Task

VOCABULARY = 1024
END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, END_OF_THINKING, MASK = "<think>", "</think>", "<|mask|>"
SPECIAL = (END_OF_TEXT, TURN, END_OF_TURN, THINK, END_OF_THINKING, MASK)  # ids 0..5
END_OF_TEXT_ID, END_OF_TURN_ID, MASK_ID = 0, 2, 5
TRAINING_TASKS = 4000  # tasks whose texts the merges are learned from

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is not defined or enable_thinking is false %}
{{- '\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""

# A letter run takes one leading character that is no letter (a space, a quote, an underscore); digits stand alone.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


@dataclass(frozen=True)
class Sample:
    """A task as ids: the model is asked ``prompt`` and answers ``answer``, which ends with the end of turn."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def train_tokenizer(seed_tasks: int = TRAINING_TASKS) -> Tokenizer:
    """BPE merges from the first training tasks; the same input gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(tasks("train", 0, seed_tasks)), trainer)
    return _with_visible_thinking(tokenizer)


def _with_visible_thinking(tokenizer: Tokenizer) -> Tokenizer:
    """The marks of thinking are tokens of their own, but stay in decoded text, so that a reader finds the answer."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] not in (THINK, END_OF_THINKING)
    return Tokenizer.from_str(json.dumps(state))


def _texts(source: Iterable[Task]) -> Iterable[str]:
    for task in source:
        yield render(task.messages, thinking=bool(task.thinking))
        yield reply_text(task)


@cache
def _template() -> jinja2.Template:
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)


def render(messages: Sequence[Message], *, thinking: bool = False) -> str:
    """The prompt text up to where the answer begins."""
    return _template().render(messages=messages, add_generation_prompt=True, enable_thinking=thinking)


def reply_text(task: Task) -> str:
    """What the model is to say: the thinking span when it is on, the answer, the end of turn."""
    thinking = f"{task.thinking}\n{END_OF_THINKING}\n\n" if task.thinking else ""
    return f"{thinking}{task.answer}{END_OF_TURN}"


def encode_tasks(tokenizer: Tokenizer, batch: Sequence[Task], longest: int) -> list[Sample]:
    """Tasks as ids, without those of more than ``longest`` ids in all."""
    prompts = tokenizer.encode_batch([render(t.messages, thinking=bool(t.thinking)) for t in batch])
    answers = tokenizer.encode_batch([reply_text(t) for t in batch])
    samples = (Sample(tuple(p.ids), tuple(a.ids)) for p, a in zip(prompts, answers, strict=True))
    return [s for s in samples if len(s.prompt) + len(s.answer) <= longest]


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write the three files into ``directory``. OSError when that fails."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN, END_OF_TURN, MASK],
        "model_max_length": max_length,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    generation = {"eos_token_id": [END_OF_TURN_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n", encoding="utf-8")
