"""A byte-level tokenizer without merges, with two special tokens, and files for it as a checkpoint has them."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edge_dflash.text.tokenizer import Tokenizer as Words

TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}\n"
    "{%- if enable_thinking %}{{ '<think>' }}{% endif %}\n"
)


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    return tokenizer


def thinking_tokenizer(directory):
    """The tokenizer with tokens that open and close thinking."""
    path = write_tokenizer(directory)
    words = Tokenizer.from_file(str(path / "tokenizer.json"))
    words.add_tokens([AddedToken(name) for name in ("<think>", "</think>")])
    words.save(str(path / "tokenizer.json"))
    return Words.open(path)


def write_tokenizer(directory, template=TEMPLATE, config=None):
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    body = {"eos_token": "<|end|>"} if config is None else config
    if template is not None:
        body = {**body, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(body))
    return directory
