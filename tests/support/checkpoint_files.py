"""Checkpoints from tensors in memory."""

import json

import numpy as np


def write(directory, tensors, config):
    """config.json and one file of tensors, each (safetensors dtype, array), in a new directory; returns it."""
    directory.mkdir()
    header, data = {}, b""
    for name, (kind, array) in tensors.items():
        array = np.ascontiguousarray(array)
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
