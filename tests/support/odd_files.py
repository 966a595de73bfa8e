"""Model directories, recipes and bundles that hold what no model has: each a function that spoils good ones."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path


def change(checkpoint, name="config.json", **fields):
    """Other values of a JSON file; None removes a key."""
    file = checkpoint / name
    value = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def special(name, kind, model="target"):
    """The file is something that is none, or more than anyone reads."""

    def spoil(target, drafter):
        file = (target if model == "target" else drafter) / name
        file.unlink(missing_ok=True)
        put(file, kind)

    return spoil


def put(file, kind):
    match kind:
        case "FIFO":
            os.mkfifo(file)
        case "link to a FIFO":
            os.mkfifo(file.with_name("pipe"))
            file.symlink_to(file.with_name("pipe"))
        case "directory":
            file.mkdir()
        case "socket":
            here = Path.cwd()
            os.chdir(file.parent)  # an address has at most 107 bytes
            try:
                with socket.socket(socket.AF_UNIX) as one:
                    one.bind(file.name)
            finally:
                os.chdir(here)
        case "/dev/zero":
            file.symlink_to("/dev/zero")
        case "loop":
            file.symlink_to(file.name)
        case "link to nothing":
            file.symlink_to("nowhere")
        case "hole":
            with file.open("wb") as stream:
                stream.truncate(80 << 30)
        case "not UTF-8":
            file.write_bytes(b'{"a": "\xff\xfe"}')
        case "nested":
            file.write_text("[" * 200_000)


def config(model="target", **fields):
    return lambda target, drafter: change(target if model == "target" else drafter, **fields)


def index(weight_map):
    def spoil(target, drafter):
        (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map()}))

    return spoil


def shard(name):
    return index(lambda: {"model.norm.weight": name})


def header(make, size=8):
    def spoil(target, drafter):
        text = make()
        (target / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))

    return spoil


def entry(name="a", shape="[8]"):
    return f'{{{json.dumps(name)}: {{"dtype": "U8", "shape": {shape}, "data_offsets": [0, 8]}}}}'.encode()


KINDS = ("FIFO", "link to a FIFO", "directory", "socket", "/dev/zero", "loop", "link to nothing", "hole", "not UTF-8")

CONFIGS = {
    **{f"config.json: {kind}": special("config.json", kind) for kind in (*KINDS, "nested")},
    "drafter's config.json: FIFO": special("config.json", "FIFO", "drafter"),
    "generation_config.json: FIFO": special("generation_config.json", "FIFO"),
    "generation_config.json: loop": special("generation_config.json", "loop"),
    "generation_config.json: /dev/zero": special("generation_config.json", "/dev/zero"),
    "num_hidden_layers 10^9": config(num_hidden_layers=10**9, layer_types=None),
    "drafter's num_hidden_layers 10^9": config("drafter", num_hidden_layers=10**9, layer_types=None),
    "drafter's num_target_layers 10^9": config("drafter", num_target_layers=10**9),
    "layer_types of 10^6": config(num_hidden_layers=10**6, layer_types=["full_attention"] * 10**6),
    "vocab_size 10^12": config(vocab_size=10**12),
    "num_attention_heads 10^12": config(num_attention_heads=10**12),
    "head_dim 10^12": config(head_dim=10**12),
    "num_hidden_layers of 4,000 digits": config(num_hidden_layers=10**4000),
    "block_size 10^9": config("drafter", block_size=10**9),
    "sliding_window 10^12": config("drafter", sliding_window=10**12),
    "target_layer_ids of 10^5": config("drafter", dflash_config={"mask_token_id": 5, "target_layer_ids": [1] * 10**5}),
}
"""What every command that is given the directories refuses."""

LONG = "x" * 5000
TENSORS = {
    **{f"model.safetensors: {kind}": special("model.safetensors", kind) for kind in (*KINDS[:7], "nested")},
    **{
        f"{name}: {kind}": special(name, kind)
        for name in ("model.safetensors.index.json", "hf_quant_config.json", "tokenizer.json")
        for kind in ("FIFO", "/dev/zero", "loop", "hole")
    },
    "other.safetensors: FIFO": special("other.safetensors", "FIFO"),
    "shard name of 5,000 characters": shard(f"{LONG}.safetensors"),
    "shard name of 250 umlauts": shard("ä" * 250),
    "shard name with a NUL": shard("a\0.safetensors"),
    "shard name with a line and a colour": shard("a\n\x1b[31m.safetensors"),
    "shard name with a lone surrogate": shard("\ud800"),
    "shard name ..": shard(".."),
    "shard name /etc/passwd": shard("/etc/passwd"),
    "shard name, empty": shard(""),
    "index of 300,000 tensors": index(lambda: {f"t{i}": f"s{i % 90000}.safetensors" for i in range(300_000)}),
    "index of 2,000,000 tensors": index(lambda: {f"tensor{i}": "s" for i in range(2_000_000)}),
    "header of 40 MB": header(lambda: b" " * (40 << 20)),
    "header of 20 MB of brackets": header(lambda: b'{"a": [' + b"[]," * (7 << 20) + b"[]]}"),
    "header, nested": header(lambda: b"[" * 1_000_000),
    "header with a shape of 3,000 numbers of 4,000 digits": header(
        lambda: entry(shape="[" + ",".join(["9" * 4000] * 3000) + "]")
    ),
    "header with a tensor's name of 1 MB": header(lambda: entry("n" * (1 << 20))),
    "header with a tensor's name of two lines": header(lambda: entry("a\nerror: b\x1b[2J")),
}
"""What a build refuses besides."""

RECIPES = {
    "3,000 brackets": "[" * 3000,
    "60,000 brackets": "schema: " + "[" * 60_000,
    "aliases": "a: &a [x, x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24)),
    "100 KB": "schema: 1\nname: " + "x" * 100_000,
    "no date": "schema: 1\nname: 2024-13-45",
    "a number of 5,000 digits": "schema: 1\nname: " + "9" * 5000,
    "a tag": "schema: 1\nname: !!timestamp x",
    "an object": "schema: 1\nname: !!python/object/apply:os.system [id]",
    "5,000 keys": "".join(f"k{i}: 1\n" for i in range(5000)),
    "a name of 60 KB that is no text": "schema: 1\nname: [" + "x, " * 20_000 + "]",
    "not UTF-8": b"schema: 1\nname: \xff\xfe",
}


def manifest_keys(bundle):
    text = "{" + ", ".join(f'"k{i}": 1' for i in range(200_000)) + ', "z": 1, "z": 2}'
    (bundle / "manifest.json").write_text(text)


def manifest_layers(bundle):
    """A checksum that fits, and a model of 200,000 layers."""
    from hashlib import sha256

    from edge_dflash.bundle.manifest import _text  # the one form that is accepted

    file = bundle / "manifest.json"
    body = json.loads(file.read_text())
    body["pair"]["target"]["layer_types"] = ["full_attention"] * 200_000
    del body["checksum"]
    body["checksum"] = sha256(_text(body)).hexdigest()
    file.write_bytes(_text(body))


def of_bundle(name, kind):
    def spoil(bundle):
        file = bundle / name
        file.unlink(missing_ok=True)
        put(file, kind)

    return spoil


BUNDLES = {
    **{f"manifest.json: {kind}": of_bundle("manifest.json", kind) for kind in (*KINDS, "nested")},
    "manifest.json of 200,000 keys and one twice": manifest_keys,
    "manifest.json of 200,000 layers": manifest_layers,
    "selftest.json: FIFO": of_bundle("selftest.json", "FIFO"),
    "stray: FIFO": of_bundle("stray", "FIFO"),
    "unfinished, its journal a FIFO": lambda bundle: (
        shutil.rmtree(bundle),
        bundle.mkdir(),
        os.mkfifo(bundle / "journal.jsonl"),
    ),
}
