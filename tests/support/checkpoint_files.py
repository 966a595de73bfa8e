"""Checkpoints from tensors in memory."""

import json

import numpy as np


def header_of(tensors):
    """The first bytes of a file of tensors, name -> (safetensors dtype, shape, bytes), and how many bytes follow."""
    header, offset = {}, 0
    for name, (kind, shape, nbytes) in tensors.items():
        end = offset + nbytes
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset


def write(directory, tensors, config, shard_bytes=2 << 30):
    """config.json and shards of tensors, each (safetensors dtype, array), in a new directory; returns it.

    More than one shard has an index.
    """
    directory.mkdir(parents=True)
    shards, size = [{}], 0
    for name, (kind, array) in tensors.items():
        if shards[-1] and size + array.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = kind, np.ascontiguousarray(array)
        size += array.nbytes
    index = {}
    for i, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        head, _ = header_of({name: (kind, array.shape, array.nbytes) for name, (kind, array) in shard.items()})
        (directory / file).write_bytes(head + b"".join(array.tobytes() for _, array in shard.values()))
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config))
    return directory
