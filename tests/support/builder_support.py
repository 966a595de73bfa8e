"""Checkpoints and recipes for the tests of the builder."""

import errno
import hashlib
import json
import shutil
import struct

from paths import GOLDEN
from text_support import byte_tokenizer, write_tokenizer
from tokenizers import AddedToken

from edge_dflash.builder.write import BuildConfig
from edge_dflash.weights.safetensors import TensorFiles

TARGETS = {
    "qwen3": GOLDEN / "qwen3-tiny",
    "qwen3_5": GOLDEN / "qwen3_5-tiny",
    "modelopt": GOLDEN / "qwen3_5-tiny-nvfp4-modelopt",
    "ct": GOLDEN / "qwen3_5-tiny-nvfp4-ct",
}
DRAFTERS = {name: GOLDEN / f"{'qwen3' if name == 'qwen3' else 'qwen3_5'}-tiny-dflash" for name in TARGETS}
BF16 = """
schema: 1
name: wide
target: {attention: bf16, gated_delta: bf16, mlp: bf16, lm_head: bf16}
drafter: {attention: bf16, mlp: bf16, fc: bf16}
kv: bf16
"""
KEEP = """
schema: 1
name: keep
target: {attention: keep, gated_delta: keep, mlp: keep, lm_head: keep}
drafter: {attention: keep, mlp: keep, fc: keep}
"""
SHORT = """
schema: 1
name: short
calibration: {tokens: 64, margin: 1.5}
"""


def config_of(name, output, **changes):
    return BuildConfig(**{"target": TARGETS[name], "drafter": DRAFTERS[name], "output": output, **changes})


def recipe(directory, text):
    path = directory / "recipe.yaml"
    path.write_text(text)
    return path


def digests(path):
    """SHA-256 of every file of a bundle."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def copy_target(name, directory):
    return shutil.copytree(TARGETS[name], directory)


def poison(checkpoint, tensor):
    """Make the third value of a BF16 tensor NaN."""
    entry = TensorFiles.open(checkpoint).entry(tensor)
    with entry.file.open("r+b") as file:
        file.seek(entry.offset + 4)
        file.write(b"\xc0\x7f")


def add_scalars(checkpoint, values):
    """Add float32 scalars to a checkpoint, behind its other tensors."""
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    for name, value in values.items():
        header[name] = {"dtype": "F32", "shape": [], "data_offsets": [len(data), len(data) + 4]}
        data += struct.pack("<f", value)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def add_tokenizer(directory, size):
    """Tokenizer files with ``size`` tokens: bytes, two special tokens and numbered ones."""
    write_tokenizer(directory)
    tokenizer = byte_tokenizer()
    known = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<|{i}|>", special=True) for i in range(known, size)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


class Failing:
    """write_bytes that fails at the given call, after half of the bytes."""

    def __init__(self, at):
        self.left = at

    def __call__(self, file, data):
        self.left -= 1
        if self.left == 0:
            file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(data)
