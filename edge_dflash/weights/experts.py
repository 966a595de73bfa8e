"""How checkpoints spell the experts of a mixture: each of them, whatever it is stored in, as separate tensors.

Canonical is ``experts.17.gate_proj.weight`` with the scales beside it. Two other spellings become that, with no byte
read: the index behind the projection (``experts.gate_proj.17.weight``), and all experts in one tensor, [E, ...] without
``.weight`` and with its scales beside it (``experts.gate_up_proj``, ``experts.gate_up_proj_weight_scale``), whose gate
rows come before its up rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from edge_dflash.errors import CheckpointError
from edge_dflash.weights.safetensors import DTYPES, Entry, TensorFiles
from edge_dflash.weights.stored import SUFFIXES

_FUSED: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SUFFIX = "|".join(sorted(SUFFIXES, key=len, reverse=True))
_STACKED = re.compile(rf"(.+\.experts)\.({'|'.join(_FUSED)})(?:[._]({_SUFFIX}))?")
_TURNED = re.compile(rf"(.+\.experts)\.(gate_proj|up_proj|down_proj)\.(0|[1-9][0-9]*)\.({_SUFFIX})")


@dataclass(frozen=True)
class ByExpert:
    """A checkpoint's tensors with experts in canonical spelling."""

    tensors: TensorFiles
    modules: Mapping[str, str]  # of experts that were spelled otherwise: canonical module -> the checkpoint's own

    def module(self, name: str) -> str:
        """What the checkpoint calls a module."""
        return self.modules.get(name, name)


def by_expert(tensors: TensorFiles, count: int, skipped: tuple[str, ...] = ()) -> ByExpert:
    """Spell the experts canonically, ``count`` in a layer. Names that begin with ``skipped`` are left alone.

    Raises CheckpointError for a tensor that is not of ``count`` experts, and for an expert that is there twice.
    """
    entries: dict[str, Entry] = {}
    modules: dict[str, str] = {}

    def add(name: str, entry: Entry, source: str) -> None:
        if name in entries:
            raise CheckpointError(f"{entry.file}: tensor {source} holds {name}, which is there too; remove one")
        entries[name] = entry

    for source in tensors.names():
        entry = tensors.entry(source)
        if ".experts." not in source or source.startswith(skipped):
            add(source, entry, source)
        elif turned := _TURNED.fullmatch(source):
            block, kind, index, suffix = turned.groups()
            modules[f"{block}.{index}.{kind}"] = f"{block}.{kind}.{index}"
            add(f"{block}.{index}.{kind}.{suffix}", entry, source)
        elif stacked := _STACKED.fullmatch(source):
            block, fused, suffix = stacked.groups()
            kinds = _FUSED[fused]
            for number, part in enumerate(_split(source, entry, count, kinds, number=bool(suffix))):
                module = f"{block}.{number // len(kinds)}.{kinds[number % len(kinds)]}"
                modules[module] = f"{block}.{fused}"
                add(f"{module}.{suffix or 'weight'}", part, source)
        else:
            add(source, entry, source)
    return ByExpert(TensorFiles(entries), modules) if modules else ByExpert(tensors, {})


def _split(name: str, entry: Entry, count: int, kinds: Collection[str], *, number: bool) -> Iterator[Entry]:
    """Parts of a tensor of all experts: expert by expert, and within each as ``kinds`` says.

    The kinds have equal shares of the second dimension. Where it may be a ``number``, one is of all of them, and one an
    expert of all its kinds.
    """
    shape, parts = entry.shape, len(kinds)
    size, item = prod(shape), np.dtype(DTYPES[entry.dtype]).itemsize
    inner: tuple[int, ...] = ()
    if number and size == 1 and shape[:1] in ((), (1,)):
        steps = 0, 0
    elif number and size == count and shape[:1] == (count,):
        steps = item, 0
    elif len(shape) > 1 + (not number) and shape[0] == count and shape[1] % parts == 0 and size:
        share = size // count // parts
        steps, inner = (share * parts * item, share * item), (shape[1] // parts, *shape[2:]) if share > 1 else ()
    else:
        wanted = f"[{count} experts, {'gate and up rows' if parts > 1 else 'rows'}, ...], or a number for each or all"
        raise CheckpointError(f"{entry.file}: tensor {name} is {list(shape)}, wanted {wanted}")
    for expert in range(count):
        for part in range(parts):
            offset = entry.offset + expert * steps[0] + part * steps[1]
            yield Entry(entry.file, entry.dtype, inner, offset)
