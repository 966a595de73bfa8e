"""A target's checkpoint of a published size: random BF16 in its first layers and head, holes (zeros) elsewhere.

``python -m tests.scripts.large_checkpoint tests/configs/qwen3.6-27b/target OUT --real 8``. What reads it, converts it
or multiplies with it takes as long as on a real one, but for the disk, which holes spare. Each layer is a shard.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair

BLOCK = 1 << 25  # random values that are written over and over


def shapes_of(config: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a text target, by their names in a checkpoint."""
    weights = pair_programs(read_pair(config, None).text_only).weights
    found = {}
    for name, spec in weights.items():
        module = name.removeprefix("target.")
        bare = module.endswith(("A_log", "dt_bias"))
        prefix = "" if module.startswith("lm_head") else "model.language_model."
        shape = spec.shape if spec.kind != "conv" or len(spec.shape) == 3 else (spec.shape[0], 1, spec.shape[1])
        found[f"{prefix}{module}{'' if bare else '.weight'}"] = shape
    return found


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], block: np.ndarray | None) -> None:
    """A safetensors file; without a block its matrices are holes."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            if len(shape) > 1 and block is not None:
                scaled = block - np.uint16(round(math.log2(shape[-1]) / 2) << 7)  # of exponents
                scaled[block == 0] = 0  # what would become huge
                for first in range(0, math.prod(shape), BLOCK):
                    file.write(scaled[: min(BLOCK, math.prod(shape) - first)].tobytes())
            elif len(shape) > 1:
                file.seek(2 * math.prod(shape), 1)
            else:
                file.write(np.zeros(shape, np.uint16).tobytes())
        file.truncate(8 + len(text) + end)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="directory of a config.json")
    parser.add_argument("output", type=Path)
    parser.add_argument("--real", type=int, default=8, help="layers with random weights")
    given = parser.parse_args()
    given.output.mkdir(parents=True)
    values = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    block = (values.view(np.uint32) >> 16).astype(np.uint16)
    block[(block & 0x7F80) < (100 << 7)] = 0  # what the scale would make another sign
    shards = defaultdict(dict)
    for name, shape in shapes_of(given.config).items():
        layer = name.partition("layers.")[2].partition(".")[0]
        shards[layer or name.removesuffix(".weight").rpartition(".")[2]][name] = shape
    weight_map = {}
    for label, tensors in shards.items():
        file = f"model-{label}.safetensors"
        real = not label.isdigit() or int(label) < given.real
        write_shard(given.output / file, tensors, block if real else None)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (given.output / "model.safetensors.index.json").write_text(json.dumps(index))
    (given.output / "config.json").write_bytes((given.config / "config.json").read_bytes())


if __name__ == "__main__":
    main()
