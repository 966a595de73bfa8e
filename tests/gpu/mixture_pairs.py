"""Small random pairs whose targets have experts, for GPU tests: a dense or hybrid pair with mixtures for its MLPs."""

import zlib
from dataclasses import replace

import torch

from edge_dflash.model import pair_programs
from edge_dflash.model.specs import ExpertsSpec
from edge_dflash.weights.formats import WideWeight

PAIRS = {  # name: base, architecture, experts
    "experts": ("hybrid", "qwen3_5_moe", ExpertsSpec(40, 4, 64, 192, True)),  # a shared expert of three members
    "few": ("dense", "qwen3_moe", ExpertsSpec(12, 2, 128, None, False)),
}


class Mixed:
    """The store of a base pair, and random values for what its MLPs are replaced by."""

    def __init__(self, base, weights):
        self._base, self._weights, self._kept = base, weights, {}

    def get(self, name):
        if ".mlp." not in name or name.startswith("drafter."):
            return self._base.get(name)
        if name not in self._kept:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            shape = self._weights[name].shape
            gain = 2.0 if name.endswith(("mlp.gate", "shared_expert_gate")) else 1.0
            x = torch.randn(shape, generator=generator) * gain * shape[1] ** -0.5
            self._kept[name] = WideWeight(x.bfloat16().view(torch.uint16).numpy())
        return self._kept[name]

    def kv_scale(self, state):
        return self._base.kv_scale(state)


def made(name, base):
    """(pair, programs, store) of one of PAIRS; ``base`` is its base's."""
    _, architecture, experts = PAIRS[name]
    pair, _, store = base
    target = replace(pair.target, architecture=architecture, experts=experts, intermediate_size=0)
    pair = replace(pair, target=target)
    programs = pair_programs(pair)
    return pair, programs, Mixed(store, programs.weights)


def kind_key(name):
    """What a weight's format hangs on, where formats differ: of a layer's experts gate and up have one."""
    head, mlp, tail = name.partition(".mlp.")
    return f"{head}.{'down' if tail.endswith('down_proj') else 'up'}" if "expert" in tail and mlp else name
