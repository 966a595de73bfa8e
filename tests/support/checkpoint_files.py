"""Checkpoints from tensors in memory."""

import json
import re
import shutil

import numpy as np
from paths import GOLDEN

from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.safetensors import TensorFiles


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
    directory.mkdir(parents=True, exist_ok=True)
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


def opened(target, drafter=None):
    """The store of a checkpoint or pair, and the weights that its models have."""
    weights = pair_programs(read_pair(target, drafter)).weights
    return PairCheckpoint.open(target, drafter, weights), weights


class Edited:
    """A copy of a golden target whose ``tensors`` (name -> dtype, array) and ``config`` a test may change."""

    def __init__(self, directory, name, drafter=None):
        self.target, self.drafter = shutil.copytree(GOLDEN / name, directory / "target"), drafter
        stored = TensorFiles.open(self.target)
        self.tensors = {n: (k, a.copy()) for n in stored.names() for k, a in [stored.array(n)]}
        self.config = json.loads((self.target / "config.json").read_text())

    def open(self):
        """Write the files and open them: :func:`opened`."""
        return opened(write(self.target, self.tensors, self.config), self.drafter)

    def renamed(self, pattern, words):
        """Change names; ``words`` is what :func:`re.sub` takes."""
        found = {re.sub(pattern, words, name): value for name, value in self.tensors.items()}
        assert len(found) == len(self.tensors)
        assert found.keys() != self.tensors.keys()
        self.tensors = found
