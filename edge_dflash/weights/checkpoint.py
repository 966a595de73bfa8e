"""A pair of checkpoints as one WeightStore: names mapped, storage recognised, everything checked at open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from edge_dflash.common.tables import read_json
from edge_dflash.errors import CheckpointError
from edge_dflash.model.dflash import DRAFT_IDS, DRAFTED
from edge_dflash.model.program import WeightSpec
from edge_dflash.model.registry import DRAFTERS, TARGETS, read_drafter_spec, read_pair, read_target_spec
from edge_dflash.model.specs import PairSpec
from edge_dflash.model.vision import PATCH_EMBED, TOWER
from edge_dflash.weights.declared import check_quantization
from edge_dflash.weights.formats import Weight, WideWeight
from edge_dflash.weights.safetensors import TensorFiles
from edge_dflash.weights.stored import SUFFIXES, Int4Weight, ModuleReader, by_expert

_ROWS, _SHOWN = 4096, 3  # of a block; problems that a message lists


def checkpoint_pair(target: Path, drafter: Path | None) -> PairSpec:
    """Specs of two checkpoint directories, as :func:`~edge_dflash.model.registry.read_pair` reads them.

    A target whose files hold no tensor of the tower that its configuration describes is one of text alone.
    """
    pair = read_pair(target, drafter)
    prefixes = TARGETS[pair.target.architecture].names.tower
    seen = pair.target.vision and any(name.startswith(prefixes) for name in TensorFiles.open(target).names())
    return pair if seen else pair.text_only


class PairCheckpoint:
    """Weights of a target and a drafter checkpoint by canonical name.

    See :class:`edge_dflash.weights.formats.WeightStore`. Arrays are views of the mapped files.
    """

    def __init__(self, parts: Mapping[str, _Part], expected: Mapping[str, WeightSpec]) -> None:
        self._parts = parts
        self._expected = expected

    @classmethod
    def open(cls, target: Path, drafter: Path | None, expected: Mapping[str, WeightSpec]) -> PairCheckpoint:
        """Open the directories and compare their tensors with the weights that the pair's Programs need.

        Raises CheckpointError for missing, extra, misshaped or wrongly typed tensors, naming file, tensor, found and
        wanted. Values are not read but scales, and the head of a tied model whose files have one.
        """
        parts = {"target": _Part("target", target)}
        if drafter is not None:
            parts["drafter"] = _Part("drafter", drafter)
        for name, part in parts.items():
            part.check({n: spec for n, spec in expected.items() if n.startswith(f"{name}.")})
        if drafter is not None:
            parts["drafter"].check_copies(parts["target"], expected)
        return cls(parts, expected)

    @staticmethod
    def of_drafter(directory: Path, expected: Mapping[str, WeightSpec]) -> Mapping[str, _Part]:
        """A drafter alone, its tensors compared as :meth:`open` does, but for its copies of the target's."""
        (part := _Part("drafter", directory)).check(expected)
        return {"drafter": part}

    def get(self, name: str) -> Weight:
        """Return a weight; whether its codes are damaged is asked of it. Raises KeyError for an unknown name."""
        return self._parts[name.partition(".")[0]].read(name, self._expected[name])

    @property
    def has_tower(self) -> bool:
        """Whether the target's files hold a vision tower, read or not."""
        return bool(self._parts["target"].tower)

    def kv_scale(self, state: str) -> tuple[float, float]:
        """FP8 scales (k, v) that the checkpoint carries for a KV state; (1.0, 1.0) when it has none."""
        return self.stored_kv_scale(state) or (1.0, 1.0)

    def stored_kv_scale(self, state: str) -> tuple[float, float] | None:
        """FP8 scales (k, v) of a KV state, or None when the checkpoint carries none for it."""
        return self._parts[state.partition(".")[0]].kv_scale(state)

    def release(self) -> None:
        """Drop the files' pages from memory and the page cache; the next access reads them again."""
        for part in self._parts.values():
            part.tensors.release()


class _Part:
    """One checkpoint directory."""

    def __init__(self, model: Literal["target", "drafter"], directory: Path) -> None:
        self._model = model
        self._directory = directory
        self.tensors = TensorFiles.open(directory)
        check_quantization(directory)
        if model == "target":
            spec = read_target_spec(directory)
            self._tied, self._names = spec.tied, TARGETS[spec.architecture].names
            self._vocabulary = spec.vocab_size
            if spec.experts is not None:
                skipped = (*self._names.skipped, *self._names.tower)
                self.tensors = by_expert(self.tensors, spec.experts.count, skipped)
        else:
            drafter = read_drafter_spec(directory)
            self._tied, self._names, self._vocabulary = False, DRAFTERS[drafter.kind].names, drafter.vocab_size
        self._untied = model == "target" and not self._tied and _says_untied(directory)
        self._reader = ModuleReader(self.tensors)
        names = self.tensors.names()
        self.tower = next((p for p in self._names.tower if any(n.startswith(p) for n in names)), "")
        self._sees = False  # whether the tower is wanted
        used = [name for name in names if not self._skipped(name)]
        self._prefix = next(p for p in self._names.prefixes if not p or any(n.startswith(p) for n in used))

    def check(self, expected: Mapping[str, WeightSpec]) -> None:
        """Compare the tensors with what is expected."""
        self._sees = any(name.startswith(TOWER) for name in expected)
        used = self._kv_scale_tensors(expected) | self._names.copies.keys()
        if "target.lm_head" in expected:
            used.add("lm_head.weight")
            if self._is_tied("target.lm_head"):
                self._check_tied_head(f"{self._prefix}embed_tokens.weight")
        missing: list[str] = []
        problems: list[str] = []
        for name, spec in expected.items():
            tensors = self._tensors_of(name, spec)
            used |= tensors
            if not tensors:
                missing.append(self._tensor(name))
                continue
            try:
                self._check_storage(name, spec)
            except CheckpointError as error:
                problems.append(str(error))
        if missing:
            raise CheckpointError(
                f"{self._directory} lacks {len(missing)} tensors of the {self._model}, the first is "
                f"{', then '.join(missing[:_SHOWN])}; the checkpoint is incomplete or of another model"
            )
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise CheckpointError("; ".join(problems[:_SHOWN]) + more)
        extra = [n for n in self.tensors.names() if n not in used and not self._skipped(n)]
        if extra:
            raise CheckpointError(
                f"{self.tensors.entry(extra[0]).file}: tensor {', '.join(extra[:_SHOWN])} ({len(extra)} such) is not "
                f"part of the {self._model} that config.json describes; the checkpoint is of another model"
            )

    def _check_tied_head(self, embedding: str, head: str = "lm_head.weight") -> None:
        """A head that config.json ties may be in the files too, as a copy of the embedding."""
        if head not in self.tensors or embedding not in self.tensors:
            return
        (one, matrix), (other, copy) = (self.tensors.array(name) for name in (embedding, head))
        equal = one == other and matrix.shape == copy.shape
        if not equal or not all(np.array_equal(matrix[part], copy[part]) for part in _blocks(len(matrix))):
            raise CheckpointError(
                f"{self._directory}: tie_word_embeddings is true, but {head} differs from {embedding}; "
                f"make it false in config.json, or remove {head}"
            )

    def check_copies(self, target: _Part, expected: Mapping[str, WeightSpec]) -> None:
        """A drafter's own embedding and head are left out, which must be the target's. Raises CheckpointError."""
        for tensor, name in self._names.copies.items():
            if tensor not in self.tensors or f"drafter.{tensor.removesuffix('.weight')}" in expected:
                continue
            spec = expected[name]
            one, other = self._reader.wide(tensor, spec.shape, half=False), target.read(name, spec)
            if not isinstance(other, WideWeight):
                found = f"is wide, {name} quantized"
            elif all(
                np.array_equal(one.rows(part).float32(), other.rows(part).float32()) for part in _blocks(spec.shape[0])
            ):
                continue
            else:
                found = "differs from the target's"
            raise CheckpointError(
                f"{self.tensors.entry(tensor).file}: {tensor} {found}, and drafts are made with the target's; "
                "use the target that the drafter was trained for, or remove the tensor"
            )

    def _check_storage(self, name: str, spec: WeightSpec) -> None:
        """Read a weight's headers and small scales."""
        if isinstance(self.read(name, spec), Int4Weight) and self._model == "target":
            raise CheckpointError(
                f"{self._directory}: module {self._module(name)} is stored as 4-bit integers, which are read of "
                "drafters alone: a target would be quantized twice; give one in BF16, FP8 or NVFP4"
            )

    def _kv_scale_tensors(self, expected: Mapping[str, WeightSpec]) -> set[str]:
        """Names that KV scales of the attention layers may have; those that are there are checked."""
        names: set[str] = set()
        for name in expected:
            layer, found, _ = name.partition(".self_attn.k_proj")
            if found:
                self.kv_scale(f"{layer}.kv")
                prefix = self._prefix + layer.partition(".")[2]
                names |= {f"{prefix}.{scale}" for scale in (*self._names.k_scales, *self._names.v_scales)}
        return names

    def read(self, name: str, spec: WeightSpec) -> Weight:
        """Read a weight that is present."""
        tensor = self._tensor(name)
        if name == PATCH_EMBED:
            return self._reader.patches(tensor, spec.shape)
        if spec.kind == "linear" and not self._is_tied(name):
            return self._reader.linear(self._module(name), spec.shape)
        if name == DRAFT_IDS:
            return self._reader.ids(tensor, f"{self._prefix}{DRAFTED}", spec.shape[0], self._vocabulary)
        return self._reader.wide(tensor, spec.shape, half=spec.kind in ("vector", "conv"))

    def kv_scale(self, state: str) -> tuple[float, float] | None:
        """FP8 scales (k, v) of ``<model>.layers.<i>.kv``, 1.0 for one that is missing."""
        prefix = self._prefix + state.removeprefix(f"{self._model}.").removesuffix(".kv")
        scales = (self._names.k_scales, self._names.v_scales)
        k, v = (next((t for n in names if (t := f"{prefix}.{n}") in self.tensors), None) for names in scales)
        if k is None and v is None:
            return None
        return (1.0 if k is None else self._reader.kv_scale(k), 1.0 if v is None else self._reader.kv_scale(v))

    def _module(self, name: str) -> str:
        """Path of a weight's module (or bare tensor) in this checkpoint."""
        if name.startswith(TOWER):
            return self.tower + name.removeprefix(TOWER)
        rest = name.partition(".")[2]
        if rest == "lm_head":
            return f"{self._prefix}embed_tokens" if self._is_tied(name) else "lm_head"
        return self._prefix + rest

    def _is_tied(self, name: str) -> bool:
        """Whether this is an lm_head that reads the embedding: it has no tensor, or a copy that config.json ties."""
        if name != "target.lm_head" or self._untied or "lm_head.weight_packed" in self.tensors:
            return False
        return "lm_head.weight" not in self.tensors or (
            self._tied and self.tensors.entry("lm_head.weight").dtype in ("BF16", "F32", "F16")
        )

    def _tensors_of(self, name: str, spec: WeightSpec) -> set[str]:
        module, tensor = self._module(name), self._tensor(name)
        if spec.kind != "linear" or self._is_tied(name):
            return {tensor} if tensor in self.tensors else set()
        present = {t for s in SUFFIXES if (t := f"{module}.{s}") in self.tensors}
        return present if present & {f"{module}.weight", f"{module}.weight_packed"} else set()

    def _tensor(self, name: str) -> str:
        """Name of a weight's tensor, or of the first of those that store a linear."""
        module = self._module(name)
        return module if name.endswith(self._names.bare) else f"{module}.weight"

    def _skipped(self, tensor: str) -> bool:
        if not self._sees and tensor.startswith(self._names.tower):
            return True
        return any(tensor.startswith(name) if name.endswith(".") else tensor == name for name in self._names.skipped)


def _blocks(rows: int) -> Iterator[slice]:
    """Rows of two matrices that are compared at a time."""
    return (slice(first, first + _ROWS) for first in range(0, max(rows, 1), _ROWS))


def _says_untied(directory: Path) -> bool:
    """Whether config.json says that the head is its own matrix; files that do not say it leave it to the tensors."""
    config = read_json(directory / "config.json")
    return any(one.get("tie_word_embeddings") is False for one in (config, config.get("text_config") or {}))
